//! Rules travel with a dump; the extension lives in any schema and leaves without a trace on user tables.

use harness::{Database, Server, run};
use std::sync::Arc;

/// Dumps one database and restores it into another, which must be empty; returns what the restore complained of.
pub fn copy(from: &Database, to: &Database, dump_options: &[&str]) -> String {
    let dump = run(from.server.client_program("pg_dump").args(dump_options).arg(&from.name));
    let file = std::env::temp_dir().join(format!("{}.sql", from.name));
    std::fs::write(&file, dump).expect("writing the dump");
    let output =
        from.server.client_program("psql").args(["-q", "-d", &to.name, "-f"]).arg(&file).output().expect("psql");
    std::fs::remove_file(&file).expect("removing the dump");
    String::from_utf8(output.stderr).expect("UTF-8")
}

fn catalog(db: &mut Database) -> String {
    db.get(
        "SELECT to_jsonb(t) - 'id', b.relid = to_regclass(format('%I.%I', schema_name, table_name)), a.attname = column_name,
                archive_relid = to_regclass(archive_to), on_expire_oid = to_regprocedure(on_expire || '(regclass, jsonb)'),
                f.names, index_relid IS NOT NULL
         FROM ttl_index_table t JOIN ttl_binding b ON b.rule_id = t.id
         JOIN pg_attribute a ON a.attrelid = b.relid AND a.attnum = b.attnum
         CROSS JOIN LATERAL (SELECT array_agg(attname) AS names FROM pg_attribute
                             WHERE attrelid = b.relid AND attnum = ANY (filter_attnums)) f
         ORDER BY t.id",
    )
}

fn populated() -> Database {
    let mut db = Database::new();
    db.run(
        "CREATE SCHEMA \"My App\";
         CREATE TABLE \"My App\".\"T\" (dropped int, \"At\" timestamp, n int, deleted timestamptz);
         ALTER TABLE \"My App\".\"T\" DROP COLUMN dropped;
         CREATE TABLE plain (at timestamptz); CREATE INDEX own ON plain (at);
         CREATE TABLE parts (at date) PARTITION BY RANGE (at);
         CREATE TABLE parts_1 PARTITION OF parts DEFAULT;
         CREATE TABLE soft (at timestamptz, gone timestamptz); CREATE TABLE \"My App\".archive (LIKE soft);
         CREATE FUNCTION \"My App\".hook(regclass, jsonb) RETURNS void LANGUAGE sql AS ''",
    );
    db.run(
        "SELECT ttl_create_index('soft', 'at', 60, soft_delete_column => 'gone', purge_after => interval '1 mon 2 days',
             archive_to => '\"My App\".archive', on_expire => '\"My App\".hook(regclass, jsonb)', notify_channel => 'x',
             run_every => interval '1 hour', run_window => 'Mon 01:00-02:00', max_rows_per_second => 5, max_rows_per_run => 6)",
    );
    db.run(
        "SELECT ttl_create_index('\"My App\".\"T\"', 'At', interval '1 month', 77, 'deleted', 'n > 1', 'Asia/Tokyo');
         SELECT ttl_create_index('plain', 'at', 60); SELECT ttl_create_index('parts', 'at', 60, index_method => 'brin');
         SELECT ttl_pause('plain'); UPDATE ttl_index_table SET total_rows_deleted = 5 WHERE table_name = 'plain'",
    );
    db
}

#[test]
fn a_dump_carries_every_rule_and_its_index() {
    let (mut source, mut target) = (populated(), Database::empty());
    assert_eq!(copy(&source, &target, &[]), "");
    let before = catalog(&mut source);
    assert_eq!(before.lines().count(), 5);
    // The index came after the rule: the next DDL, or the next registration, binds it by name.
    target.run("ALTER TABLE plain SET (fillfactor = 90)");
    let bound =
        |catalog: String| catalog.replace("|f\n", "|t\n").trim_end_matches("|f").trim_end_matches("|t").to_owned();
    assert_eq!(bound(catalog(&mut target)), bound(before));
    target.run("SELECT ttl_alter_index('\"My App\".\"T\"', 'At', batch_size => 5)");
    assert_eq!(
        target.get("SELECT index_name, index_created_by_extension FROM ttl_index_table WHERE table_name = 'T'"),
        "idx_ttl_T_At|t"
    );
    target.run("SELECT ttl_drop_index('\"My App\".\"T\"', 'At'); SELECT ttl_drop_index('plain', 'at')");
    assert_eq!(target.get("SELECT indexname FROM pg_indexes WHERE tablename IN ('T', 'plain')"), "own");
    target.run("SELECT ttl_create_index('plain', 'at', 60)");
}

#[test]
fn a_dump_by_inserts_carries_every_rule_too() {
    let (mut source, mut target) = (populated(), Database::empty());
    // The row of the rule comes behind that of its purge then.
    source.run("UPDATE ttl_index_table SET total_rows_deleted = 1 WHERE soft_delete_column IS NOT NULL");
    assert_eq!(copy(&source, &target, &["--inserts"]), "");
    assert_eq!(target.get("SELECT count(*), count(purges) FROM ttl_index_table"), "5|1");
    target.run("SELECT ttl_drop_index('soft', 'at')");
    assert_eq!(target.get("SELECT count(*), count(purges) FROM ttl_index_table"), "3|0");
}

#[test]
fn a_dump_without_one_of_the_tables_brings_back_the_other_rules() {
    let (source, mut target) = (populated(), Database::empty());
    let complaints = copy(&source, &target, &["--exclude-table=plain"]);
    assert!(complaints.contains("left out") && !complaints.contains("ERROR"), "{complaints}");
    assert_eq!(target.get("SELECT table_name FROM ttl_index_table ORDER BY id"), "soft\nsoft\nT\nparts");
}

#[test]
fn a_rule_restored_past_the_triggers_is_bound_to_nothing() {
    let (source, mut target) = (populated(), Database::empty());
    copy(&source, &target, &["--schema-only"]);
    copy(&source, &target, &["--data-only", "--disable-triggers"]);
    assert_eq!(target.get("SELECT count(*) FROM ttl_index_table"), "5");
    assert_eq!(target.get("SELECT count(*) FROM ttl_binding"), "0");
}

#[test]
fn a_user_without_superuser_rights_can_dump_what_they_see() {
    let mut db = Database::new();
    let owner = db.role("owner");
    db.session(&owner).run("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    let dump = run(db.server.client_program("pg_dump").args(["--enable-row-security", "-U", &owner]).arg(&db.name));
    assert!(dump.contains("\tt\tat\t"), "{dump}");
}

#[test]
fn the_extension_lives_in_any_schema() {
    let mut db = Database::empty();
    db.run("CREATE SCHEMA \"Other One\"; CREATE EXTENSION pg_ttl_index SCHEMA \"Other One\"; CREATE TABLE t (at timestamptz, n int)");
    db.run("SELECT \"Other One\".ttl_create_index('t', 'at', 60, filter => 'n > 1')");
    db.run("ALTER TABLE t RENAME TO u; ALTER TABLE u RENAME COLUMN n TO m");
    assert_eq!(db.get("SELECT table_name, filter, state FROM \"Other One\".ttl_summary"), "u|(m > 1)|active");
    let mut target = Database::empty();
    assert_eq!(copy(&db, &target, &[]), "");
    assert_eq!(target.get("SELECT table_name, filter FROM \"Other One\".ttl_summary"), "u|(m > 1)");
    assert_eq!(db.get("SELECT \"Other One\".ttl_drop_index('u', 'at')"), "t");
}

#[test]
fn dropping_the_extension_leaves_user_tables_and_indexes() {
    let mut db = populated();
    let before = db.get("SELECT indexname FROM pg_indexes WHERE tablename IN ('T', 'plain', 'parts') ORDER BY 1");
    db.run("DROP EXTENSION pg_ttl_index");
    assert_eq!(
        db.get("SELECT indexname FROM pg_indexes WHERE tablename IN ('T', 'plain', 'parts') ORDER BY 1"),
        before
    );
    assert_eq!(db.get("SELECT count(*) FROM pg_event_trigger"), "0");
    db.run("DROP TABLE plain; CREATE EXTENSION pg_ttl_index; SELECT ttl_create_index('parts', 'at', 60)");
}

#[test]
fn everything_works_where_the_library_is_not_preloaded() {
    let server = Arc::new(Server::start(&[]));
    let mut db = Database::on(&server);
    db.run("CREATE EXTENSION pg_ttl_index; CREATE TABLE t (at timestamptz, n int)");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 1')");
    let mut other = db.session("postgres");
    other.run("ALTER TABLE t RENAME TO u; ALTER TABLE u RENAME COLUMN n TO m");
    assert_eq!(db.get("SELECT table_name, filter, batch_size FROM ttl_summary"), "u|(m > 1)|10000");
    other.run("DROP TABLE u");
    assert_eq!(db.get("SELECT count(*) FROM ttl_summary"), "0");
}

#[test]
fn a_database_of_another_encoding_is_refused() {
    let mut db = Database::empty();
    let name = format!("{}_latin", db.name);
    db.run(&format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'"));
    let error = harness::Session::connect(&db.server, &name, "postgres").error("CREATE EXTENSION pg_ttl_index");
    assert_eq!(error.code, "0A000");
    db.run(&format!("DROP DATABASE {name}"));
}

#[test]
fn a_dump_carries_expressions_units_and_sliding_expiry() {
    let (mut source, mut target) = (Database::new(), Database::empty());
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, n bigint, made timestamp, days int, seen timestamptz);
         INSERT INTO t VALUES (1, 2000000000000, '2020-01-01', 1, now() - interval '50 minutes');
         SELECT ttl_stop_worker(), ttl_create_index('t', 'n', 60, unit => 'ms'),
                ttl_create_index('t', 'made + days * interval ''1 day''', 0, filter => 'days > 1'),
                ttl_create_index('t', 'seen', interval '1 hour'), ttl_enable_touch('t', 'seen')",
    );
    assert_eq!(copy(&source, &target, &[]), "");
    let rules = "SELECT column_name, unit, filter, expression_columns, expression_attnums, filter_attnums, attnum
                 FROM ttl_index_table JOIN ttl_binding ON rule_id = id ORDER BY id";
    assert_eq!(target.get(rules), source.get(rules));
    assert_eq!(source.get(rules).lines().count(), 3);
    target.run("ALTER TABLE t RENAME days TO d; UPDATE t SET d = 2");
    assert_eq!(target.get("SELECT ttl_get('t', '1', 'seen') > 3500, ttl_get('t', '1', 'n') > 0"), "t|t");
    assert_eq!(
        target.get("SELECT column_name, filter, index_name FROM ttl_summary WHERE filter IS NOT NULL"),
        "(made + ((d)::double precision * '1 day'::interval))|(d > 1)|idx_ttl_t_expr"
    );
    assert_eq!(target.get("SELECT ttl_runner('t')"), "1");
}

/// Runs a client program as a role; returns what it complained of.
fn run_as(db: &Database, role: &str, program: &str, arguments: &[&str]) -> String {
    let output = db.server.client_program(program).env("PGUSER", role).args(arguments).output().expect("a program");
    let complaint = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.success(), "{program}: {complaint}");
    complaint
}

#[test]
fn an_owner_who_is_no_superuser_dumps_his_rules() {
    let mut source = Database::new();
    let owner = source.role("owner");
    source.run("CREATE SCHEMA private; CREATE TABLE private.secret (at timestamptz); SELECT ttl_create_index('private.secret', 'at', 60)");
    source.session(&owner).run(
        "CREATE TABLE mine (id int PRIMARY KEY, at timestamptz, n int); CREATE TABLE child (id int REFERENCES mine);
         INSERT INTO mine VALUES (1, now(), 2); SELECT ttl_create_index('mine', 'at', 60, 5, filter => 'n > 1'), ttl_enable_touch('mine')",
    );
    let file = std::env::temp_dir().join(format!("{}.dump", source.name));
    let path = file.to_str().expect("a path");
    let mut target = Database::empty();
    run_as(&source, &owner, "pg_dump", &["-Fc", "-N", "private", "-f", path, &source.name]);
    let complaint =
        run_as(&source, "postgres", "pg_restore", &["--verbose", "--exit-on-error", "-d", &target.name, path]);
    assert!(complaint.contains("\"private.secret\" left out"), "{complaint}");
    std::fs::remove_file(&file).expect("removing the dump");
    assert_eq!(target.get("SELECT table_name, batch_size, filter FROM ttl_summary"), "mine|5|(n > 1)");
    assert_eq!(target.get("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'ttl_touch%'"), "1");
    // Numbers go on behind those that were restored.
    target.run("CREATE TABLE other (at timestamptz); SELECT ttl_create_index('other', 'at', 60)");
    assert_eq!(target.get("SELECT max(id) FROM ttl_index_table"), "3");
}

#[test]
fn a_row_that_a_superuser_writes_cannot_make_the_reading_of_all_rules_fail() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60, hide_expired => true)");
    for change in [
        "retry_at = 'infinity'",
        "swept_at = '-infinity'",
        "last_run = 'infinity'",
        "index_retry_at = 'infinity'",
        "run_every = '100000 years'",
        "version = 9223372036854775807",
    ] {
        assert_eq!(db.error(&format!("UPDATE ttl_index_table SET {change}")).code, "23514", "{change}");
    }
    assert_eq!(db.get("SELECT count(*) FROM t; SELECT state FROM ttl_summary"), "0\nactive");
}

#[test]
fn triggers_whose_rule_is_gone_do_nothing_and_go_with_the_next_registration() {
    let mut source = Database::new();
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, n int);
                SELECT ttl_create_index('t', 'at', interval '1 hour', hide_expired => true), ttl_enable_touch('t')",
    );
    let mut target = Database::empty();
    target.run("CREATE EXTENSION pg_ttl_index");
    assert_eq!(copy(&source, &target, &["--schema-only"]), "");
    let triggers = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass AND NOT tgisinternal";
    assert_eq!(target.get(triggers), "2");
    target.run("INSERT INTO t VALUES (1, '2020-01-01', 0); UPDATE t SET n = 1; INSERT INTO t VALUES (2, now(), 0) ON CONFLICT DO NOTHING");
    assert_eq!(target.get("SELECT at = '2020-01-01' FROM t WHERE id = 1"), "t");
    target.run("SELECT ttl_create_index('t', 'at', interval '10 years')");
    assert_eq!(target.get(triggers), "0");
}

/// A database with rules of a role that is no superuser, and an empty one that this role may restore it into.
fn to_restore() -> (Database, Database, String) {
    let (mut source, mut target) = (Database::new(), Database::new());
    let owner = source.role("owner");
    source.session(&owner).run(
        "CREATE TABLE mine (id int PRIMARY KEY, at timestamptz, n int); CREATE TABLE child (id int REFERENCES mine);
         CREATE TABLE soft (at timestamptz, gone timestamptz); CREATE TABLE hidden (id int PRIMARY KEY, at timestamptz);
         CREATE TABLE log (made timestamp, days int);
         INSERT INTO mine SELECT n, now() - interval '2 hours', 2 FROM generate_series(1, 3) n; INSERT INTO child VALUES (1);
         INSERT INTO hidden VALUES (1, now() - interval '2 hours'), (2, now());
         SELECT ttl_create_index('mine', 'at', interval '1 hour', 5, filter => 'n > 1', active => false), ttl_enable_touch('mine'),
                ttl_create_index('soft', 'at', 60, soft_delete_column => 'gone', purge_after => interval '1 day'),
                ttl_create_index('hidden', 'at', interval '1 hour', hide_expired => true, active => false, max_rows_per_run => 1),
                ttl_create_index('log', 'made + days * interval ''1 day''', 0)",
    );
    target.run(&format!("GRANT ALL ON SCHEMA public TO {owner}"));
    (source, target, owner)
}

#[test]
fn an_owner_who_is_no_superuser_restores_his_rules() {
    for options in [vec![], vec!["-j", "4"], vec!["-1"]] {
        let (mut source, mut target, owner) = to_restore();
        let file = std::env::temp_dir().join(format!("{}.dump", source.name));
        let path = file.to_str().expect("a path");
        // The comment on an extension is its owner's.
        run_as(&source, &owner, "pg_dump", &["-Fc", "--no-comments", "-f", path, &source.name]);
        let arguments = [&options[..], &["--exit-on-error", "-d", &target.name, path]].concat();
        assert_eq!(run_as(&source, &owner, "pg_restore", &arguments), "", "{options:?}");
        std::fs::remove_file(&file).expect("removing the dump");
        let rules =
            "SELECT id, table_name, column_name, active, batch_size, filter, soft_delete_column, purge_after, purges,
                            hide_expired, max_rows_per_run, index_name, index_created_by_extension, guards, column_types
                     FROM ttl_index_table ORDER BY id";
        assert_eq!(target.get(rules), source.get(rules));
        assert_eq!(source.get(rules).lines().count(), 5);
        // They work: sliding expiry, hiding, room for a hidden key, and a sweep that a foreign key blocks.
        target.wait_for("SELECT count(*) FROM ttl_summary WHERE state = 'restoring'", "0");
        let mut own = target.session(&owner);
        assert_eq!(own.get("SELECT id FROM hidden"), "2");
        own.run("INSERT INTO hidden VALUES (1, now()); UPDATE mine SET n = 3 WHERE id = 3");
        assert_eq!(own.get("SELECT ttl_resume('mine'), ttl_runner('mine')"), "1|1");
        assert_eq!(own.get("SELECT id FROM mine ORDER BY 1"), "1\n3");
        assert_eq!(own.get("SELECT index_state FROM ttl_summary GROUP BY 1"), "valid");
        own.run("SELECT ttl_drop_index('soft', 'at'), ttl_drop_index('mine', 'at')");
        assert_eq!(own.get("SELECT indexname FROM pg_indexes WHERE tablename IN ('mine', 'soft')"), "mine_pkey");
        assert_eq!(own.get("SELECT count(*) FROM ttl_index_table"), "2");
    }
}

/// A row for the catalog, as somebody may write one by hand.
fn row(id: i64, table: &str, more: &str) -> String {
    let (names, values) = more
        .split_once('=')
        .map_or((String::new(), String::new()), |(name, value)| (format!(", {name}"), format!(", {value}")));
    format!(
        "INSERT INTO ttl_index_table (id, schema_name, table_name, column_name, expire_after, time_zone, index_method{names})
         VALUES ({id}, 'public', '{table}', 'at', interval '1 hour', 'UTC', 'none'{values})"
    )
}

#[test]
fn what_anybody_writes_into_the_catalog_passes_the_checks_of_a_registration() {
    let mut db = Database::new();
    let (owner, stranger) = (db.role("owner"), db.role("stranger"));
    db.session(&owner).run(
        "CREATE TABLE theirs (id int, at timestamptz, n int); CREATE TABLE ruled (at timestamptz); SELECT ttl_create_index('ruled', 'at', 60)",
    );
    let mut stranger = db.session(&stranger);
    stranger
        .run("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int); CREATE TEMP TABLE passing (at timestamptz)");
    let rules = "SELECT count(*) FROM ttl_index_table";
    for hostile in [
        row(10, "theirs", ""),
        row(10, "nowhere", ""),
        row(10, "passing", ""),
        row(10, "ttl_index_table", ""),
        row(1, "t", ""),
        row(0, "t", ""),
        row(i64::MAX, "t", ""),
        row(10, "t", "filter='n >'"),
        row(10, "t", "filter='random() > n'"),
        row(10, "t", "filter='EXISTS (SELECT)'"),
        row(10, "t", "hide_expired, filter=true, 'n > extract(day FROM now())'"),
        row(10, "t", "archive_to='public.theirs'"),
        row(10, "t", "archive_to='\"'"),
        row(10, "t", "on_expire='pg_catalog.pg_reload_conf'"),
        row(10, "t", "soft_delete_column='nothing'"),
        row(10, "t", "partition_action='drop'"),
        row(10, "t", "unit='ms'"),
        row(10, "t", "run_window='whenever'"),
        row(10, "t", "run_every=interval '1 microsecond'"),
        row(10, "t", "run_every=interval '100000 years'"),
        row(10, "t", "batch_size=0"),
        row(10, "t", "guards=-1"),
        row(10, "t", "column_types='{\"int[\"}'"),
        row(10, "t", "index_name=repeat('x', 1000)"),
        row(10, "t", "").replace("'at'", "'at + interval'"),
        row(10, "t", "").replace("'UTC'", "'Nowhere/City'"),
        row(10, "t", "").replace("interval '1 hour'", "interval '-1 hour'"),
    ] {
        stranger.run(&hostile);
        assert_eq!(db.get(rules), "1", "{hostile}");
    }
    // So is what is no row of a rule at all.
    stranger.run(&row(10, "t", "active=NULL"));
    assert_eq!(db.get(rules), "1");
    // Neither statistics nor times of failures are believed.
    stranger.run(&row(10, "t", "total_rows_deleted, version, retry_at, last_error_code=9223372036854775807, 8999999999999999999, 'infinity', 'x'"));
    assert_eq!(
        db.get("SELECT id, total_rows_deleted, version, retry_at, last_error_code FROM ttl_index_table WHERE table_name = 't'"),
        "10|0|0||"
    );
    // And written, it can neither be changed nor written again.
    assert_eq!(stranger.error("UPDATE ttl_index_table SET active = false").code, "42501");
    stranger.run(&row(11, "t", ""));
    assert_eq!(db.get(rules), "2");
    assert_eq!(stranger.error(&(row(10, "t", "") + " ON CONFLICT (id) DO UPDATE SET active = false")).code, "42501");
    stranger.run("INSERT INTO ttl_worker_off VALUES (now())");
    assert_eq!(db.get("SELECT count(*) FROM ttl_worker_off"), "0");
    // Numbers go on.
    stranger.run("CREATE TABLE u (at timestamptz); SELECT ttl_create_index('u', 'at', 60)");
    assert_eq!(db.get("SELECT max(id) FROM ttl_index_table"), "11");
}

#[test]
fn a_rule_that_says_to_purge_for_another_table_does_nothing_to_it() {
    let mut db = Database::new();
    let (owner, stranger) = (db.role("owner"), db.role("stranger"));
    let mut owner = db.session(&owner);
    let mut stranger = db.session(&stranger);
    owner.run("CREATE TABLE theirs (at timestamptz); SELECT ttl_create_index('theirs', 'at', 60)");
    stranger.run("CREATE TABLE t (at timestamptz, gone timestamptz)");
    let rules = "SELECT count(*) FROM ttl_index_table";
    // Neither for itself, nor for a rule of another table.
    for purges in [10, 1] {
        stranger.run(&row(10, "t", &format!("purges={purges}")));
        assert_eq!(db.get(rules), "1");
    }
    // One that is not there may be still to come; when it comes, it is somebody else's.
    stranger.run(&row(10, "t", "purges=11"));
    stranger.run(&row(9, "t", "purges=10").replace("'at'", "'gone'"));
    owner.run("CREATE TABLE mine (at timestamptz); SELECT ttl_create_index('mine', 'at', 60)");
    assert_eq!(db.get("SELECT id, purges FROM ttl_index_table ORDER BY 1"), "1|\n10|11\n11|");
    stranger.run("BEGIN; SELECT ttl_pause('t')");
    owner.run("SET lock_timeout = '5s'; SELECT ttl_pause('mine'), ttl_resume('mine'), ttl_drop_index('mine', 'at'); DROP TABLE mine");
    stranger.run("COMMIT");
    assert_eq!(db.get("SELECT id, purges, active FROM ttl_index_table ORDER BY 1"), "1||t\n10|11|f");
    stranger.run("DROP TABLE t");
    assert_eq!(db.get(rules), "1");
    assert_eq!(db.error("UPDATE ttl_index_table SET purges = id").code, "23514");
}

#[test]
fn a_second_rule_on_a_column_is_left_out_of_a_restore() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    db.notices();
    db.run(&row(7, "t", ""));
    assert!(db.notices().concat().contains("left out: another rule is on the column"));
    assert_eq!(db.get("SELECT id FROM ttl_index_table"), "1");
}

#[test]
fn rules_with_numbers_that_are_alike_do_not_lock_each_other() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker(); CREATE TABLE t (at timestamptz); CREATE TABLE u (at timestamptz)");
    db.run("INSERT INTO t VALUES ('2020-01-01'); INSERT INTO u TABLE t; SELECT ttl_create_index('t', 'at', 60)");
    db.run(&row((1 << 32) + 1, "u", ""));
    db.run("SELECT ttl_resume('u')");
    let mut other = db.session("postgres");
    other.run("BEGIN");
    assert_eq!(other.get("SELECT ttl_runner('u')"), "1");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn a_rule_that_its_table_has_left_behind_goes_before_another_table_takes_its_name() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    db.run(
        "ALTER EVENT TRIGGER ttl_follow_drop DISABLE; DROP TABLE t; ALTER EVENT TRIGGER ttl_follow_drop ENABLE ALWAYS",
    );
    db.run("CREATE TABLE other (at timestamptz); SELECT ttl_create_index('other', 'at', 60)");
    db.wait_for("SELECT table_name FROM ttl_index_table", "other");
}

#[test]
fn one_bad_row_in_a_dump_does_not_lose_the_other_rules() {
    let mut db = Database::new();
    let stranger = db.role("stranger");
    let mut stranger = db.session(&stranger);
    stranger.run(
        "CREATE TABLE t (at timestamptz); CREATE TABLE arch (LIKE t);
         CREATE FUNCTION told(regclass, jsonb) RETURNS void LANGUAGE sql AS ''",
    );
    let place = format!("{}.public", db.name);
    // Names are stored as a registration writes them.
    stranger.run(&row(10, "t", &format!("archive_to, on_expire='{place}.arch', '\"public\" . told'")));
    assert_eq!(db.get("SELECT archive_to, on_expire FROM ttl_index_table"), "public.arch|public.told");
    stranger.run("SELECT ttl_drop_index('t', 'at')");
    for bad in [
        format!("on_expire='{place}.told'"),
        format!("column_types='{{{place}.arch}}'"),
        "column_types='{NULL}'".into(),
        "column_types='{{a,b},{c,d}}'".into(),
    ] {
        stranger.run(&row(11, "t", &bad));
        stranger.run("SELECT ttl_drop_index('t', 'at')");
    }
    // Should such a row be there all the same, a superuser's restore leaves it out.
    db.notices();
    for bad in [format!("archive_to='x.{place}.arch'"), format!("column_types='{{x.{place}.arch}}'")] {
        db.run(&row(12, "t", &bad));
        assert!(db.notices().concat().contains("left out"), "{bad}");
        assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
    }
}

#[test]
fn the_first_number_is_taken_once() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); CREATE TABLE u (at timestamptz)");
    db.run(&row(1, "t", ""));
    db.run("SELECT ttl_create_index('u', 'at', 60)");
    assert_eq!(db.get("SELECT id FROM ttl_index_table ORDER BY 1"), "1\n2");
}

#[test]
fn a_rule_that_had_stopped_in_doubt_does_not_go_on_after_a_restore() {
    let (mut source, mut target) = (Database::new(), Database::empty());
    let (owner, next) = (source.role("owner"), source.role("next"));
    source.session(&owner).run(
        "CREATE FUNCTION stale(n int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT n > 1';
         CREATE TABLE t (at timestamptz, n int); CREATE TABLE u (at timestamptz, n int);
         SELECT ttl_create_index('t', 'at', 60, filter => 'stale(n)', index_method => 'none'), ttl_create_index('u', 'at', 60);
         CREATE OR REPLACE FUNCTION stale(n int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true';
         INSERT INTO t VALUES ('2020-01-01', 0)",
    );
    source.run(&format!("ALTER TABLE u OWNER TO {next}; INSERT INTO u VALUES ('2020-01-01', 0)"));
    source.wait_for("SELECT count(*) FROM ttl_summary WHERE state = 'error' AND last_error LIKE '55000%'", "2");
    assert_eq!(copy(&source, &target, &[]), "");
    for table in ["t", "u"] {
        assert_eq!(target.error(&format!("SELECT ttl_runner('{table}')")).code, "55000");
        assert_eq!(target.get(&format!("SELECT count(*) FROM {table}")), "1");
    }
    // In one transaction, before a worker can.
    assert_eq!(target.get("SELECT ttl_alter_index('u', 'at'), ttl_runner('u')"), "t|1");
}

#[test]
fn a_dump_says_that_a_table_has_changed_hands_even_if_no_sweep_has_noticed() {
    let (mut source, mut target) = (Database::new(), Database::empty());
    let (owner, next) = (source.role("owner"), source.role("next"));
    source.run("SELECT ttl_stop_worker()");
    for table in ["given", "reassigned"] {
        source.session(&owner).run(&format!(
            "CREATE TABLE {table} (at timestamptz); SELECT ttl_create_index('{table}', 'at', 60), ttl_pause('{table}');
             INSERT INTO {table} VALUES ('2020-01-01')"
        ));
    }
    source.run(&format!("ALTER TABLE given OWNER TO {next}"));
    source.run(&format!("REASSIGN OWNED BY {owner} TO {next}"));
    assert_eq!(source.get("SELECT count(*) FROM ttl_summary WHERE last_error LIKE '55000%'"), "2");
    assert_eq!(copy(&source, &target, &[]), "");
    for table in ["given", "reassigned"] {
        target.run(&format!("SELECT ttl_resume('{table}')"));
        assert_eq!(target.error(&format!("SELECT ttl_runner('{table}')")).code, "55000", "{table}");
        assert_eq!(target.get(&format!("SELECT count(*) FROM {table}")), "1");
    }
}
