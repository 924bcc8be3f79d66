//! Registering, registering again, altering, pausing and dropping rules.

use harness::Database;

const RULE: &str =
    "SELECT table_name, column_name, expire_after, batch_size, soft_delete_column, active FROM ttl_index_table";

fn sessions() -> Database {
    let mut db = Database::new();
    db.run(
        "CREATE TABLE sessions (id bigint PRIMARY KEY, last_seen timestamptz, deleted_at timestamptz, gone boolean)",
    );
    db
}

#[test]
fn positional_calls_of_the_c_extension_work() {
    let mut db = sessions();
    assert_eq!(db.get("SELECT ttl_create_index('sessions', 'last_seen', 1800, 500, 'deleted_at')"), "t");
    assert_eq!(db.get(RULE), "sessions|last_seen|00:30:00|500|deleted_at|t");
}

#[test]
fn an_interval_with_months_is_kept_as_one() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', interval '1 year 2 months 3 days 4.5 seconds')");
    assert_eq!(db.get("SELECT expire_after FROM ttl_index_table"), "1 year 2 mons 3 days 00:00:04.5");
}

#[test]
fn an_interval_of_mixed_signs_is_kept_whatever_the_interval_style() {
    let mut db = sessions();
    db.run("SET IntervalStyle = 'sql_standard'");
    db.run(
        "SELECT ttl_create_index('sessions', 'last_seen', make_interval(months => 2, days => -1, secs => -0.000001))",
    );
    db.run("SET IntervalStyle = 'postgres'");
    assert_eq!(db.get("SELECT expire_after FROM ttl_index_table"), "2 mons -1 days -00:00:00.000001");
}

#[test]
fn seconds_are_shown_rounded_up_so_that_only_zero_shows_as_zero() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', interval '0.2 seconds')");
    assert_eq!(db.get("SELECT expire_after_seconds FROM ttl_index_table"), "1");
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 0)");
    assert_eq!(db.get("SELECT expire_after_seconds FROM ttl_index_table"), "0");
}

#[test]
fn the_columns_users_of_the_c_extension_know_are_there() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60)");
    let row = db.get(
        "SELECT schema_name, table_name, column_name, expire_after_seconds, active, batch_size, created_at <= now(),
                updated_at <= now(), last_run, rows_deleted_last_run, total_rows_deleted, index_name, soft_delete_column,
                index_created_by_extension
         FROM ttl_index_table",
    );
    assert_eq!(row, "public|sessions|last_seen|60|t||t|t||0|0|idx_ttl_sessions_last_seen||t");
}

#[test]
fn every_kind_of_column_that_can_expire_is_accepted() {
    let mut db = Database::new();
    db.run("CREATE DOMAIN instant AS timestamptz; CREATE DOMAIN moment AS instant CHECK (VALUE > '2000-01-01')");
    db.run("CREATE TABLE t (a timestamptz, b timestamp, c date, d instant, e moment, f timestamp(0))");
    for column in ["a", "b", "c", "d", "e", "f"] {
        db.run(&format!("SELECT ttl_create_index('t', '{column}', 60)"));
    }
    assert_eq!(db.get("SELECT count(*), count(DISTINCT index_name) FROM ttl_index_table"), "6|6");
}

#[test]
fn the_time_zone_in_force_is_stored_with_the_rule() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (a timestamp, b date); SET TimeZone = 'Europe/Paris'");
    db.run("SELECT ttl_create_index('t', 'a', 60)");
    db.run("SELECT ttl_create_index('t', 'b', 60, time_zone => 'Asia/Kolkata')");
    db.run("SET TimeZone = 'UTC'");
    assert_eq!(db.get("SELECT time_zone FROM ttl_index_table ORDER BY column_name"), "Europe/Paris\nAsia/Kolkata");
}

#[test]
fn registering_again_keeps_statistics_and_the_pause() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60)");
    db.run("UPDATE ttl_index_table SET total_rows_deleted = 42, last_run = '2026-01-01Z', active = false");
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 90)");
    assert_eq!(
        db.get("SELECT expire_after_seconds, total_rows_deleted, last_run IS NOT NULL, active FROM ttl_index_table"),
        "90|42|t|f"
    );
}

#[test]
fn registering_again_says_what_it_changed_and_cleared() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60, 500, 'deleted_at')");
    assert_eq!(db.notices(), [""; 0], "a first registration has nothing to say");
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 90)");
    let rule = "NOTICE: TTL rule on column \"last_seen\" of table \"sessions\":";
    assert_eq!(
        db.notices(),
        [
            format!("{rule} batch_size cleared, was 500"),
            format!("{rule} expire_after changed from \"1 minute\" to \"1 minute 30 seconds\""),
            format!("{rule} soft_delete_column cleared, was \"deleted_at\""),
        ]
    );
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 90)");
    assert_eq!(db.notices(), [""; 0], "nothing changed, nothing said");
}

#[test]
fn alter_changes_only_what_is_given() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60, 500, 'deleted_at', filter => 'id > 7')");
    db.run("SELECT ttl_pause('sessions')");
    assert_eq!(db.get("SELECT ttl_alter_index('sessions', 'last_seen', expire_after => interval '1 month')"), "t");
    assert_eq!(db.get(RULE), "sessions|last_seen|1 mon|500|deleted_at|f");
    assert_eq!(db.get("SELECT filter FROM ttl_index_table"), "(id > 7)");
    db.run("SELECT ttl_alter_index('sessions', 'last_seen', expire_after_seconds => 5, batch_size => 9)");
    assert_eq!(db.get(RULE), "sessions|last_seen|00:00:05|9|deleted_at|f");
}

#[test]
fn alter_resets_options_by_name() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60, 500, 'deleted_at', filter => 'id > 7', index_method => 'brin')");
    db.run("SELECT ttl_alter_index('sessions', 'last_seen', reset => '{batch_size,soft_delete_column,filter,index_method}')");
    assert_eq!(db.get(RULE), "sessions|last_seen|00:01:00|||t");
    assert_eq!(db.get("SELECT filter IS NULL, index_method FROM ttl_index_table"), "t|btree");
    let error = db.error("SELECT ttl_alter_index('sessions', 'last_seen', reset => '{time_zone}')");
    assert_eq!((error.code.as_str(), error.hint.is_empty()), ("22023", false));
    let error = db.error("SELECT ttl_alter_index('sessions', 'last_seen', batch_size => 1, reset => '{batch_size}')");
    assert_eq!(error.code, "22023");
}

#[test]
fn alter_needs_a_rule_and_one_expiry() {
    let mut db = sessions();
    assert_eq!(db.error("SELECT ttl_alter_index('sessions', 'last_seen', batch_size => 1)").code, "42704");
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60)");
    let both = "SELECT ttl_alter_index('sessions', 'last_seen', interval '1 day', expire_after_seconds => 5)";
    assert_eq!(db.error(both).code, "22023");
}

#[test]
fn drop_tells_whether_there_was_a_rule() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60)");
    assert_eq!(db.get("SELECT ttl_drop_index('sessions', 'last_seen')"), "t");
    assert_eq!(db.get("SELECT ttl_drop_index('sessions', 'last_seen')"), "f");
    assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
}

#[test]
fn pause_and_resume_count_the_rules_they_change() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60), ttl_create_index('sessions', 'deleted_at', 60)");
    assert_eq!(db.get("SELECT ttl_pause('sessions', 'last_seen')"), "1");
    assert_eq!(db.get("SELECT ttl_pause('sessions')"), "1");
    assert_eq!(db.get("SELECT ttl_pause('sessions')"), "0");
    assert_eq!(db.get("SELECT state FROM ttl_summary"), "paused\npaused");
    assert_eq!(db.get("SELECT ttl_resume('sessions', 'deleted_at'), ttl_resume('sessions')"), "1|1");
    assert_eq!(db.get("SELECT ttl_pause('sessions', 'gone')"), "0", "a column without a rule");
}

#[test]
fn a_superuser_may_pause_a_rule_in_the_catalog() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60)");
    db.run("UPDATE ttl_index_table SET active = false WHERE table_name = 'sessions' AND column_name = 'last_seen'");
    assert_eq!(db.get("SELECT active, state FROM ttl_summary"), "f|paused");
}

#[test]
fn the_catalog_refuses_nonsense() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60)");
    let before = db.get("SELECT * FROM ttl_index_table");
    for (change, code) in [
        ("batch_size = 0", "23514"),
        ("expire_after = interval '-1 day'", "23514"),
        ("expire_after = NULL", "23502"),
        ("expire_after_seconds = 1", "428C9"),
        ("active = NULL", "23502"),
        ("index_method = 'hash'", "23514"),
        ("total_rows_deleted = -1", "23514"),
        ("soft_delete_column = 'last_seen'", "23514"),
        ("soft_delete_column = 'nowhere'", "42703"),
        ("table_name = 'other'", "0A000"),
        ("column_name = 'deleted_at'", "0A000"),
    ] {
        assert_eq!(db.error(&format!("UPDATE ttl_index_table SET {change}")).code, code, "{change}");
    }
    assert_eq!(db.get("SELECT * FROM ttl_index_table"), before);
}

#[test]
fn the_summary_is_a_view_and_a_function_with_the_contracts_columns_first() {
    let mut db = sessions();
    db.run("SELECT ttl_create_index('sessions', 'last_seen', 60, soft_delete_column => 'gone')");
    let columns = db.get(
        "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = 'ttl_summary'::regclass AND attnum BETWEEN 1 AND 21",
    );
    assert_eq!(
        columns,
        "schema_name table_name column_name expire_after_seconds batch_size active last_run time_since_last_run \
         rows_deleted_last_run total_rows_deleted index_name soft_delete_column cleanup_mode state \
         next_run last_error last_error_at consecutive_failures last_duration blocked_rows lag"
    );
    let view = db.get("SELECT * FROM ttl_summary");
    assert!(
        view.starts_with(
            "public|sessions|last_seen|60|10000|t|||0|0|idx_ttl_sessions_last_seen|gone|soft_delete|active|"
        )
    );
    // But for what the clock and the worker move.
    let row = "to_jsonb(s) - '{next_run,time_since_last_run,lag}'::text[]";
    let both = format!("SELECT (SELECT {row} FROM ttl_summary s) = (SELECT {row} FROM ttl_summary() s)");
    assert_eq!(db.get(&both), "t");
}

#[test]
fn registration_is_transactional() {
    let mut db = sessions();
    db.run("BEGIN; SELECT ttl_create_index('sessions', 'last_seen', 60); ROLLBACK");
    assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
    assert_eq!(db.get("SELECT to_regclass('idx_ttl_sessions_last_seen')"), "");
}

#[test]
fn registrations_of_one_rule_at_the_same_time_leave_one_rule() {
    let mut db = sessions();
    let mut other = db.session("postgres");
    db.run("BEGIN; SELECT ttl_create_index('sessions', 'last_seen', 60)");
    let waiting = std::thread::spawn(move || {
        other.run("SELECT ttl_create_index('sessions', 'last_seen', 90)");
        other
    });
    db.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sessions'::regclass", "1");
    db.run("COMMIT");
    waiting.join().expect("the second registration");
    assert_eq!(db.get("SELECT count(*), max(expire_after_seconds) FROM ttl_index_table"), "1|90");
}
