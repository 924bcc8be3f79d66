//! Several rules on one column, told apart by their names.

use crate::dump;
use crate::sweep::with;
use harness::Database;

const LOGS: &str = "CREATE TABLE logs (id int PRIMARY KEY, at timestamptz, level text);
    INSERT INTO logs SELECT i, now() - i * interval '1 day', (ARRAY['debug', 'error', 'audit'])[1 + i % 3] FROM generate_series(1, 120) i";

/// Logs with a rule for debug lines and one for errors; others stay.
fn by_class() -> Database {
    let mut db = with(LOGS);
    db.run("SELECT ttl_create_index('logs', 'at', '7 days', filter => $$level = 'debug'$$, rule_name => 'debug')");
    db.run("SELECT ttl_create_index('logs', 'at', '90 days', filter => $$level = 'error'$$, rule_name => 'errors')");
    db
}

#[test]
fn every_class_of_rows_has_its_own_time() {
    let mut db = by_class();
    assert_eq!(
        db.get("SELECT rule_name, relation, expired_rows, plan FROM ttl_preview('logs')"),
        "debug|public.logs|38|rows by index\nerrors|public.logs|10|rows by index"
    );
    assert_eq!(db.get("SELECT expired_rows FROM ttl_preview('logs', 'at', 'errors')"), "10");
    assert_eq!(db.get("SELECT ttl_runner('logs')"), "48");
    assert_eq!(
        db.get("SELECT level, count(*), max(now()::date - at::date) FROM logs GROUP BY 1 ORDER BY 1"),
        "audit|40|119\ndebug|2|6\nerror|30|88"
    );
    assert_eq!(
        db.get("SELECT rule_name, total_rows_deleted, filter, state FROM ttl_summary"),
        "debug|38|(level = 'debug'::text)|active\nerrors|10|(level = 'error'::text)|active"
    );
    assert_eq!(db.get("SELECT rule_name, rows_removed FROM ttl_history ORDER BY id"), "debug|38\nerrors|10");
    // Registered again, a rule is the same rule.
    db.run("SELECT ttl_create_index('logs', 'at', '8 days', filter => $$level = 'debug'$$, rule_name => 'debug')");
    assert_eq!(
        db.get("SELECT rule_name, expire_after, total_rows_deleted FROM ttl_summary"),
        "debug|8 days|38\nerrors|90 days|10"
    );
}

#[test]
fn what_changes_one_of_several_rules_has_to_name_it() {
    let mut db = by_class();
    db.run("SELECT ttl_create_index('logs', 'at', '1 year')");
    for call in [
        "ttl_alter_index('logs', 'at', batch_size => 5)",
        "ttl_drop_index('logs', 'at')",
        "ttl_enable_touch('logs')",
        "ttl_disable_touch('logs', 'at')",
    ] {
        let error = db.error(&format!("SELECT {call}"));
        assert_eq!(error.code, "42725", "{call}");
        assert!(
            error.hint.contains("'debug', 'errors', ''") || error.hint.contains("'', 'debug', 'errors'"),
            "{}",
            error.hint
        );
    }
    assert_eq!(db.error("SELECT ttl_alter_index('logs', 'at', batch_size => 5, rule_name => 'none')").code, "42704");
    assert_eq!(db.error("SELECT relation FROM ttl_preview('logs', rule_name => 'none')").code, "42704");
    let long = "x".repeat(64);
    assert_eq!(db.error(&format!("SELECT ttl_create_index('logs', 'at', 60, rule_name => '{long}')")).code, "22023");
    // An empty name is that of the rule without one.
    db.run("SELECT ttl_alter_index('logs', 'at', batch_size => 5, rule_name => ''); SELECT ttl_alter_index('logs', 'at', batch_size => 6, rule_name => 'errors')");
    assert_eq!(db.get("SELECT rule_name, batch_size FROM ttl_summary"), "|5\ndebug|10000\nerrors|6");
    assert_eq!(
        db.get("SELECT ttl_pause('logs', rule_name => 'debug'), ttl_pause('logs', 'at'), ttl_resume('logs')"),
        "1|2|3"
    );
    assert_eq!(db.get("SELECT ttl_pause('logs', 'at', ''), ttl_pause('logs', 'at', 'none')"), "1|0");
    assert_eq!(db.get("SELECT rule_name FROM ttl_summary WHERE state = 'paused'"), "");
    assert_eq!(db.get("SELECT ttl_drop_index('logs', 'at', 'none'), ttl_drop_index('logs', 'at', '')"), "f|t");
    assert_eq!(
        db.get("SELECT ttl_drop_index('logs', 'at', 'debug'), ttl_drop_index('logs', 'at')"),
        "t|t",
        "the last needs no name"
    );
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 'logs'"), "1");
}

#[test]
fn an_index_that_serves_several_rules_stays_until_the_last_is_gone() {
    let mut db = with(LOGS);
    let ours = "SELECT indexname FROM pg_indexes WHERE tablename = 'logs' AND indexname LIKE 'idx%'";
    for (rule, filter) in
        [("all", ""), ("debug", ", filter => $$level = 'debug'$$"), ("errors", ", filter => $$level = 'error'$$")]
    {
        db.run(&format!("SELECT ttl_create_index('logs', 'at', '1 year', rule_name => '{rule}'{filter})"));
    }
    assert_eq!(db.get(ours), "idx_ttl_logs_at", "one index serves all");
    db.run("SELECT ttl_drop_index('logs', 'at', 'all')");
    assert_eq!(db.get(ours), "idx_ttl_logs_at");
    assert_eq!(
        db.get("SELECT rule_name, index_name, index_state, state FROM ttl_summary"),
        "debug|idx_ttl_logs_at|valid|active\nerrors|idx_ttl_logs_at|valid|active"
    );
    // A rule that needs the index no longer leaves it to the other one.
    db.run("SELECT ttl_alter_index('logs', 'at', index_method => 'none', rule_name => 'debug')");
    assert_eq!(db.get(ours), "idx_ttl_logs_at");
    db.run("SELECT ttl_drop_index('logs', 'at', 'errors')");
    assert_eq!(db.get(ours), "");
}

#[test]
fn one_rows_calls_answer_for_the_rule_that_removes_it_first() {
    let mut db = by_class();
    db.run("INSERT INTO logs VALUES (1001, now(), 'debug'), (1002, now(), 'error'), (1003, now(), 'audit')");
    let days = |db: &mut Database, id: u32| db.get(&format!("SELECT round(ttl_get('logs', {id}) / 86400)"));
    assert_eq!([1001, 1002].map(|id| days(&mut db, id)), ["7", "90"]);
    assert_eq!(db.get("SELECT ttl_get('logs', 1003), ttl_get('logs', 1004)"), "-1|-2");
    // Each would be removed in an hour by its own rule.
    db.run("SELECT ttl_set('logs', id, '1 hour') FROM logs WHERE id > 1000");
    assert_eq!(db.get("SELECT round(ttl_get('logs', 1001)), round(ttl_get('logs', 1002))"), "3600|3600");
    assert_eq!(
        db.get("SELECT level, round(extract(epoch FROM now() - at) / 86400) FROM logs WHERE id > 1000 ORDER BY 1"),
        "audit|7\ndebug|7\nerror|90"
    );
    assert_eq!(db.get("SELECT ttl_runner('logs'), count(*) FILTER (WHERE id > 1000) FROM logs"), "48|3");
    assert_eq!(db.get("SELECT ttl_expire_at('logs', 1002, now() + interval '2 days', mode => 'gt')"), "t");
    assert_eq!(days(&mut db, 1002), "2");
    assert_eq!(db.get("SELECT ttl_touch('logs', 1001), ttl_persist('logs', 1002)"), "t|t");
    assert_eq!(days(&mut db, 1001), "7");
    assert_eq!(db.get("SELECT ttl_get('logs', 1002)"), "-1");
    // A row that never expires is set by the rule that would remove it.
    assert_eq!(db.get("SELECT ttl_set('logs', 1002, '5 days')"), "t");
    assert_eq!(db.get("SELECT round(extract(epoch FROM now() - at) / 86400) FROM logs WHERE id = 1002"), "85");
    // The rule that is named counts, whether it applies to the row or not.
    assert_eq!(db.get("SELECT ttl_get('logs', 1002, rule_name => 'debug')"), "-1");
    assert_eq!(db.get("SELECT ttl_set('logs', 1002, '0 seconds'), ttl_get('logs', 1002)"), "t|-2");
}

#[test]
fn one_rows_calls_run_the_owners_filters_as_the_owner() {
    let mut db = with(LOGS);
    let (owner, user) = (db.role("owner"), db.role("user"));
    db.run(&format!(
        "ALTER TABLE logs OWNER TO {owner}; GRANT SELECT, UPDATE ON logs TO {user};
         CREATE TABLE seen (who text); GRANT INSERT, SELECT ON seen TO PUBLIC; GRANT CREATE ON SCHEMA public TO {owner}"
    ));
    let mut as_owner = db.session(&owner);
    as_owner.run("CREATE FUNCTION is_debug(level text) RETURNS boolean LANGUAGE plpgsql STABLE AS
        $$ BEGIN IF current_user <> 'postgres' THEN RETURN level = 'debug'; END IF; RAISE 'run as somebody else'; END $$");
    as_owner.run("SELECT ttl_create_index('logs', 'at', '7 days', filter => 'is_debug(level)', rule_name => 'debug', index_method => 'none')");
    as_owner.run("SELECT ttl_create_index('logs', 'at', '90 days', rule_name => 'rest')");
    as_owner.run("INSERT INTO logs VALUES (1001, now(), 'debug'), (1002, now(), 'error')");
    for session in [&mut as_owner, &mut *db] {
        assert_eq!(
            session.get("SELECT round(ttl_get('logs', 1001) / 86400), round(ttl_get('logs', 1002) / 86400)"),
            "7|90"
        );
        assert_eq!(session.get("SELECT ttl_set('logs', 1001, '1 day'), ttl_set('logs', 1002, '1 day')"), "t|t");
        assert_eq!(session.get("SELECT round(ttl_get('logs', 1001)), round(ttl_get('logs', 1002))"), "86400|86400");
        session.run("UPDATE logs SET at = now() WHERE id > 1000");
    }
    let mut as_user = db.session(&user);
    assert_eq!(as_user.error("SELECT ttl_get('logs', 1001)").code, "42501");
    assert_eq!(as_user.error("SELECT ttl_set('logs', 1001, '1 day')").code, "42501");
}

#[test]
fn a_row_whose_class_changes_meanwhile_is_set_by_its_new_class() {
    let mut db = by_class();
    db.run("INSERT INTO logs VALUES (1001, now(), 'error')");
    let mut other = db.session("postgres");
    other.run("BEGIN; UPDATE logs SET level = 'debug' WHERE id = 1001");
    let name = db.name.clone();
    let server = db.server.clone();
    let setting = std::thread::spawn(move || {
        let mut session = harness::Session::connect(&server, &name, "postgres");
        session.get("SELECT ttl_set('logs', 1001, '1 hour')")
    });
    db.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%ttl_set%' AND datname = current_database() AND pid <> pg_backend_pid()", "1");
    other.run("COMMIT");
    assert_eq!(setting.join().expect("a session"), "t");
    // As an error, it would have to begin 90 days ago, and be gone at once.
    assert_eq!(db.get("SELECT round(ttl_get('logs', 1001) / 60)"), "60");
}

#[test]
fn names_go_with_dumps_renames_hiding_and_purges() {
    let mut db = by_class();
    db.run("SELECT ttl_alter_index('logs', 'at', hide_expired => true, rule_name => 'debug'), ttl_alter_index('logs', 'at', hide_expired => true, rule_name => 'errors')");
    assert_eq!(db.get("SELECT count(*) FROM logs"), "72");
    // The key of a hidden row of either class is free.
    db.run("INSERT INTO logs SELECT id, now(), 'audit' FROM generate_series(100, 120) AS id WHERE id % 3 < 2");
    assert_eq!(db.get("SELECT count(*) FROM logs"), "86");
    db.run("ALTER TABLE logs RENAME COLUMN at TO logged_at");
    assert_eq!(db.get("SELECT column_name, rule_name FROM ttl_summary"), "logged_at|debug\nlogged_at|errors");
    let mut copy = Database::empty();
    assert_eq!(dump::copy(&db, &copy, &[]), "");
    assert_eq!(
        copy.get("SELECT rule_name, expire_after, hide_expired FROM ttl_summary"),
        "debug|7 days|t\nerrors|90 days|t"
    );
    db.run("ALTER TABLE logs DROP COLUMN logged_at");
    assert_eq!(db.get("SELECT count(*) FROM ttl_summary"), "0");
}

#[test]
fn every_rule_purges_its_own() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz, kind text, gone timestamptz);
        INSERT INTO t SELECT i, now() - interval '1 day', (ARRAY['a', 'b'])[1 + i % 2] FROM generate_series(1, 10) i",
    );
    for (kind, keep) in [("a", "1 day"), ("b", "2 days")] {
        db.run(&format!(
            "SELECT ttl_create_index('t', 'at', 60, filter => $$kind = '{kind}'$$, soft_delete_column => 'gone',
                                     purge_after => interval '{keep}', rule_name => '{kind}')"
        ));
    }
    assert_eq!(db.get("SELECT ttl_runner('t'), count(gone) FROM t"), "10|0");
    db.run("UPDATE t SET gone = gone - interval '36 hours'");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "5");
    assert_eq!(db.get("SELECT kind, count(*) FROM t GROUP BY 1"), "b|5");
    assert_eq!(db.get("SELECT column_name, rule_name FROM ttl_summary"), "at|a\nat|b\ngone|a\ngone|b");
    assert_eq!(db.error("SELECT ttl_drop_index('t', 'gone', 'a')").code, "55000");
    db.run("SELECT ttl_drop_index('t', 'at', 'a')");
    assert_eq!(db.get("SELECT column_name, rule_name FROM ttl_summary"), "at|b\ngone|b");
}

#[test]
fn a_rule_without_a_clock_keeps_no_other_rules_rows_from_being_touched() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, kind text); INSERT INTO t VALUES (1, now(), 'a'), (2, now() + interval '1 h', 'b')",
    );
    db.run("SELECT ttl_create_index('t', 'at', '2 hours', rule_name => 'usual'), ttl_create_index('t', 'at', 0, filter => $$kind = 'b'$$, rule_name => 'exact')");
    assert_eq!(db.get("SELECT ttl_touch('t', 1)"), "t");
    // Restarted by the other rule's clock, this row would be gone at once.
    assert_eq!(db.error("SELECT ttl_touch('t', 2)").code, "55000");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE at > now() + interval '59 min'"), "1");
}

#[test]
fn a_row_is_set_for_the_rule_that_will_remove_it_first() {
    let mut db = with("CREATE TABLE t (id int PRIMARY KEY, at timestamptz)");
    db.run("SELECT ttl_create_index('t', 'at', '1 month', rule_name => 'month', time_zone => 'UTC'), ttl_create_index('t', 'at', '30 days', rule_name => 'days', time_zone => 'UTC')");
    // As it is, the month of February ends first; in July, the thirty days do.
    db.run("INSERT INTO t VALUES (1, '2127-02-01 00:00+00')");
    assert_eq!(db.get("SELECT ttl_expire_at('t', 1, '2127-08-15 00:00+00')"), "t");
    assert_eq!(db.get("SELECT at AT TIME ZONE 'UTC' FROM t"), "2127-07-16 00:00:00");
}

#[test]
fn rules_whose_indexes_are_still_to_be_built_have_indexes_of_their_own() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (id int, at timestamptz, kind text, z int); INSERT INTO t SELECT i, now(), (ARRAY['a', 'b'])[1 + i % 2] FROM generate_series(1, 1000) i; SELECT ttl_stop_worker()");
    for kind in ["a", "b"] {
        db.run(&format!("SELECT ttl_create_index('t', 'at', '1 day', filter => $$kind = '{kind}'$$, concurrently => true, rule_name => '{kind}')"));
    }
    assert_eq!(db.get("SELECT index_name FROM ttl_summary"), "idx_ttl_t_at\nidx_ttl_t_at_1");
    // Somebody takes a name meanwhile.
    db.run("CREATE INDEX idx_ttl_t_at_1 ON t (z); SELECT ttl_start_worker()");
    db.wait_for("SELECT index_state FROM ttl_summary WHERE rule_name = 'a'", "valid");
    db.run("SELECT ttl_drop_index('t', 'at', 'a'), ttl_drop_index('t', 'at', 'b')");
    assert_eq!(db.get("SELECT indexname FROM pg_indexes WHERE tablename = 't'"), "idx_ttl_t_at_1");
}

#[test]
fn a_row_lives_as_long_as_was_asked_in_every_time_zone() {
    for [first, second] in [["Pacific/Pago_Pago", "Pacific/Kiritimati"], ["Pacific/Kiritimati", "Pacific/Pago_Pago"]] {
        for kind in ["timestamp", "date", "timestamptz", "text"] {
            let mut db = with(&format!("CREATE TABLE t (id int PRIMARY KEY, at {kind})"));
            let value =
                if kind == "text" { "ttl_rfc3339(now() + interval '2 days')" } else { "now() + interval '2 days'" };
            for (name, zone) in [("a", first), ("b", second)] {
                db.run(&format!(
                    "SELECT ttl_create_index('t', 'at', '1 day', rule_name => '{name}', time_zone => '{zone}')"
                ));
            }
            db.run(&format!("INSERT INTO t VALUES (1, {value})"));
            for hours in [1, 12, 30] {
                assert_eq!(
                    db.get(&format!("SELECT ttl_set('t', 1, interval '{hours} hours')")),
                    "t",
                    "{kind} {first} {hours}"
                );
                assert_eq!(
                    db.get(&format!("SELECT ttl_get('t', 1) >= {hours} * 3600 - 60")),
                    "t",
                    "{kind} {first} {hours}"
                );
            }
            assert_eq!(db.get("SELECT ttl_runner('t')"), "0", "{kind} {first}");
        }
    }
}

#[test]
fn a_row_that_has_gone_under_one_rule_is_not_revived_by_another() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); INSERT INTO t VALUES (1, now() - interval '30 days 1 hour')",
    );
    db.run("SELECT ttl_create_index('t', 'at', '30 days', rule_name => 'days'), ttl_create_index('t', 'at', '1 month 5 days', rule_name => 'month')");
    assert_eq!(db.get("SELECT count(*) FILTER (WHERE ttl_set('t', 1, make_interval(days => i))), ttl_get('t', 1) FROM generate_series(1, 120) i"), "0|-2");
    assert_eq!(db.get("SELECT ttl_persist('t', 1), ttl_touch('t', 1)"), "f|f");
}

#[test]
fn no_call_sets_a_value_that_decides_which_rule_a_row_falls_under() {
    let mut db = with(
        "SET TimeZone = 'UTC'; CREATE TABLE t (id int PRIMARY KEY, at timestamptz); INSERT INTO t VALUES (1, '2025-06-01');
         SELECT ttl_create_index('t', 'at', '1000 days', filter => $$at < '2026-01-01'$$, rule_name => 'a'),
                ttl_create_index('t', 'at', '1 day', filter => $$at >= '2026-01-01'$$, rule_name => 'b')",
    );
    for call in ["ttl_set('t', 1, '900 days')", "ttl_expire_at('t', 1, 'tomorrow')", "ttl_touch('t', 1)"] {
        assert_eq!(db.error(&format!("SELECT {call}")).code, "0A000", "{call}");
    }
    assert_eq!(db.get("SELECT ttl_get('t', 1) > 0, at FROM t"), "t|2025-06-01 00:00:00+00");
}
