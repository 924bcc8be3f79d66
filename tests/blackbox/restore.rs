//! A restored rule rests until what keeps its rows is there again, however the restore is divided.

use harness::{Database, Server, Session, run};
use std::path::PathBuf;
use std::sync::Arc;

fn server(settings: &[&str]) -> Arc<Server> {
    let base = ["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1s"];
    Arc::new(Server::start(&[&base[..], settings].concat()))
}

/// 200 expired rows that a foreign key keeps, 200 that a trigger keeps, and one in each table that nothing keeps.
fn source(server: &Arc<Server>) -> Database {
    let mut db = Database::on(server);
    db.run(
        "CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker();
         CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); CREATE TABLE child (parent int);
         INSERT INTO parent SELECT n, now() - interval '1 day' FROM generate_series(0, 200) n;
         INSERT INTO child SELECT generate_series(1, 200); ALTER TABLE child ADD FOREIGN KEY (parent) REFERENCES parent;
         CREATE TABLE kept (id int, at timestamptz); INSERT INTO kept SELECT * FROM parent;
         CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN CASE WHEN OLD.id = 0 THEN OLD END; END';
         CREATE TRIGGER keep BEFORE DELETE ON kept FOR EACH ROW EXECUTE FUNCTION keep();
         CREATE TABLE plain (at timestamptz);
         SELECT ttl_create_index('parent', 'at', 60), ttl_create_index('kept', 'at', 60), ttl_create_index('plain', 'at', 60);
         DELETE FROM ttl_worker_off",
    );
    // Whatever the worker does here, the dump has every row.
    db.run("SELECT ttl_stop_worker()");
    db
}

fn dump(db: &Database, options: &[&str]) -> PathBuf {
    let file = std::env::temp_dir().join(format!("{}-{}-{}.dump", std::process::id(), db.name, options.concat().len()));
    run(db.server.client_program("pg_dump").args(options).arg("-f").arg(&file).arg(&db.name));
    file
}

fn restore(db: &Database, options: &[&str], file: &PathBuf) {
    run(db.server.client_program("pg_restore").args(options).arg("-d").arg(&db.name).arg(file));
}

/// Waits until the worker has swept a rule that came after everything else: all others had their turn.
fn see_a_pass(db: &mut Database) {
    db.run("DROP TABLE IF EXISTS canary; CREATE TABLE canary (at timestamptz); INSERT INTO canary VALUES (now() - interval '1 day')");
    db.run("SELECT ttl_create_index('canary', 'at', 60)");
    db.wait_for("SELECT count(*) FROM canary", "0");
    db.run("DROP TABLE canary");
}

const COUNTS: &str = "SELECT (SELECT count(*) FROM parent), (SELECT count(*) FROM kept)";
const STATES: &str = "SELECT table_name, state, hold FROM ttl_summary ORDER BY 1";

#[test]
fn a_restore_by_sections_keeps_what_triggers_and_foreign_keys_keep() {
    let server = server(&[]);
    let source = source(&server);
    let file = dump(&source, &["-Fc"]);
    let mut target = Database::on(&server);
    restore(&target, &["--section=pre-data"], &file);
    restore(&target, &["--section=data"], &file);
    target.run("DELETE FROM ttl_worker_off; SELECT ttl_wake()");
    see_a_pass(&mut target);
    assert_eq!(
        target.get(STATES),
        "kept|restoring|restore: 0 of 1 triggers and rules are there\n\
         parent|restoring|restore: 0 of 2 triggers and rules are there\nplain|active|"
    );
    target.notices();
    assert_eq!(target.get("SELECT ttl_runner()"), "0");
    assert!(target.notices().iter().any(|notice| notice.contains("rests")));
    assert_eq!(target.get(COUNTS), "201|201");
    restore(&target, &["--section=post-data"], &file);
    target.wait_for(COUNTS, "200|200");
    see_a_pass(&mut target);
    assert_eq!(target.get(COUNTS), "200|200");
    // From now on a trigger that is dropped is not one that is still to come.
    target.run("DROP TRIGGER keep ON kept");
    target.wait_for(COUNTS, "200|0");
    std::fs::remove_file(file).expect("removing the dump");
}

#[test]
fn a_restore_in_one_go_sweeps_by_itself_when_it_is_over() {
    let server = server(&[]);
    let mut source = source(&server);
    source.run("DELETE FROM ttl_worker_off WHERE false");
    for (format, options) in [("-Fc", &[][..]), ("-Fc", &["-j2"][..]), ("-Fc", &["--single-transaction"][..])] {
        let file = dump(&source, &[format]);
        let mut target = Database::on(&server);
        restore(&target, options, &file);
        target.run("DELETE FROM ttl_worker_off; SELECT ttl_wake()");
        target.wait_for(COUNTS, "200|200");
        see_a_pass(&mut target);
        assert_eq!(target.get(COUNTS), "200|200", "{options:?}");
        assert_eq!(target.get("SELECT DISTINCT state FROM ttl_summary WHERE table_name = 'plain'"), "active");
        std::fs::remove_file(file).expect("removing the dump");
    }
    for options in [&["-Fp"][..], &["-Fp", "--inserts"][..]] {
        let file = dump(&source, options);
        let mut target = Database::on(&server);
        run(server.client_program("psql").args(["-q", "-v", "ON_ERROR_STOP=1", "-d", &target.name, "-f"]).arg(&file));
        target.run("DELETE FROM ttl_worker_off; SELECT ttl_wake()");
        target.wait_for(COUNTS, "200|200");
        see_a_pass(&mut target);
        assert_eq!(target.get(COUNTS), "200|200", "{options:?}");
        std::fs::remove_file(file).expect("removing the dump");
    }
}

#[test]
fn a_schema_first_and_then_its_data_is_a_restore_too() {
    let server = server(&[]);
    let source = source(&server);
    let (schema, data) = (dump(&source, &["-Fc", "--schema-only"]), dump(&source, &["-Fc", "--data-only"]));
    let mut target = Database::on(&server);
    restore(&target, &[], &schema);
    assert_eq!(target.get("SELECT count(*) FROM ttl_index_table"), "0");
    // A foreign key that is there already may not have its parent yet; pg_restore warns of that, and puts tables in order.
    restore(&target, &["--single-transaction"], &data);
    target.run("DELETE FROM ttl_worker_off; SELECT ttl_wake()");
    target.wait_for(COUNTS, "200|200");
    see_a_pass(&mut target);
    assert_eq!(target.get(COUNTS), "200|200");
    for file in [schema, data] {
        std::fs::remove_file(file).expect("removing the dump");
    }
}

#[test]
fn who_says_that_a_restore_is_over_is_believed() {
    let server = server(&[]);
    let source = source(&server);
    let file = dump(&source, &["-Fc"]);
    for (word, state) in [
        ("SELECT ttl_resume('kept')", "active"),
        ("SELECT ttl_alter_index('kept', 'at', batch_size => 50)", "active"),
        ("SELECT ttl_create_index('kept', 'at', 60)", "active"),
        ("SELECT ttl_start_worker()", "active"),
        ("SELECT ttl_pause('kept')", "paused"),
    ] {
        let mut target = Database::on(&server);
        restore(&target, &["--section=pre-data"], &file);
        restore(&target, &["--section=data"], &file);
        assert_eq!(target.get("SELECT state FROM ttl_summary WHERE table_name = 'kept'"), "restoring");
        target.run(word);
        assert_eq!(target.get("SELECT state FROM ttl_summary WHERE table_name = 'kept'"), state, "{word}");
        if state == "active" {
            assert_eq!(target.get("SELECT guards FROM ttl_index_table WHERE table_name = 'kept'"), "0", "{word}");
        }
    }
    std::fs::remove_file(file).expect("removing the dump");
}

#[test]
fn the_number_of_guards_follows_the_table() {
    let mut db = Database::new();
    db.run(
        "SELECT ttl_stop_worker(); CREATE TABLE t (id int PRIMARY KEY, at timestamptz) PARTITION BY RANGE (id);
         CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (1) TO (10); SELECT ttl_create_index('t', 'at', 60);
         CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'",
    );
    let guards = "SELECT guards, guards_found FROM ttl_index_table JOIN ttl_binding ON rule_id = id";
    let mut expected = 0;
    for (ddl, difference) in [
        ("CREATE TRIGGER a BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION f()", 1),
        ("CREATE TRIGGER b BEFORE DELETE ON t1 FOR EACH ROW EXECUTE FUNCTION f()", 1),
        ("CREATE RULE c AS ON DELETE TO t1 DO ALSO NOTHING", 1),
        ("CREATE TABLE child (t int REFERENCES t)", 2),
        ("CREATE TABLE other (t int); ALTER TABLE other ADD CONSTRAINT k FOREIGN KEY (t) REFERENCES t", 2),
        ("ALTER TABLE other DROP CONSTRAINT k", -2),
        ("DROP TABLE child", -2),
        ("DROP RULE c ON t1", -1),
        ("CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)", 0),
        ("CREATE TRIGGER d BEFORE DELETE ON t2 FOR EACH ROW EXECUTE FUNCTION f()", 1),
        ("DROP TABLE t2", -1),
        ("ALTER TABLE t DETACH PARTITION t1", -1),
        ("DROP FUNCTION f() CASCADE", -1),
    ] {
        db.run(ddl);
        expected += difference;
        assert_eq!(db.get(guards), format!("{expected}|{expected}"), "{ddl}");
    }
}

#[test]
fn a_rule_rests_during_the_initial_copy_of_a_subscription() {
    // Two servers: a transaction that holds a lock would keep the copy of one that is on its own server from beginning.
    let (there, server) =
        (Arc::new(Server::start(&["wal_level=logical"])), server(&["wal_retrieve_retry_interval=100ms"]));
    let (mut publisher, mut subscriber) = (Database::on(&there), Database::on(&server));
    let tables = "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)";
    publisher.run(tables);
    publisher.run(
        "INSERT INTO parent SELECT n, now() - interval '1 day' FROM generate_series(0, 10) n;
         INSERT INTO child SELECT n, n FROM generate_series(1, 10) n; CREATE PUBLICATION p FOR TABLE parent, child",
    );
    publisher.run("SELECT pg_create_logical_replication_slot('copied', 'pgoutput')");
    subscriber.run("CREATE EXTENSION pg_ttl_index");
    subscriber.run(tables);
    subscriber.run("SELECT ttl_create_index('parent', 'at', 60)");
    subscriber.run(&format!(
        "CREATE SUBSCRIPTION s CONNECTION 'host={} dbname={} user=postgres' PUBLICATION p
         WITH (enabled = false, create_slot = false, slot_name = 'copied')",
        there.host().display(),
        publisher.name
    ));
    // Whatever references the rows comes only when this one goes.
    let mut blocker = Session::connect(&server, &subscriber.name, "postgres");
    blocker.run("BEGIN; LOCK TABLE child IN ACCESS EXCLUSIVE MODE");
    subscriber.run("ALTER SUBSCRIPTION s ENABLE");
    subscriber.wait_for("SELECT count(*) FROM parent", "11");
    assert_eq!(subscriber.get("SELECT state, hold FROM ttl_summary"), "restoring|subscription: initial copy");
    see_a_pass_of(&mut subscriber, "other");
    assert_eq!(subscriber.get("SELECT count(*) FROM parent"), "11");
    blocker.run("COMMIT");
    subscriber.wait_for("SELECT count(*) FROM child", "10");
    subscriber.wait_for("SELECT count(*) FROM parent", "10");
    subscriber.run("ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE)");
    subscriber.run("DROP SUBSCRIPTION s");
    publisher.wait_for("SELECT count(*) FROM pg_replication_slots WHERE active", "0");
    publisher.run("SELECT pg_drop_replication_slot('copied')");
}

/// As [`see_a_pass`], in a database where a table of its name cannot be waited for.
fn see_a_pass_of(db: &mut Database, table: &str) {
    db.run(&format!("CREATE TABLE {table} (at timestamptz); INSERT INTO {table} VALUES (now() - interval '1 day')"));
    db.run(&format!("SELECT ttl_create_index('{table}', 'at', 60)"));
    db.wait_for(&format!("SELECT count(*) FROM {table}"), "0");
}

#[test]
fn a_row_of_the_catalog_with_a_type_that_does_not_exist_stops_no_other_rule() {
    let mut db = Database::new();
    let user = db.role("user");
    db.run(&format!("GRANT CREATE ON SCHEMA public TO {user}"));
    db.session(&user).run(
        "CREATE TABLE theirs (id int, at timestamptz);
         INSERT INTO ttl_index_table (schema_name, table_name, column_name, expire_after, time_zone, column_types)
         VALUES ('public', 'theirs', 'at', '1 day', 'UTC', '{x}')",
    );
    db.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60)",
    );
    db.wait_for("SELECT count(*) FROM t", "0");
    db.run("INSERT INTO t VALUES ('2020-01-01')");
    assert_eq!(db.get("SELECT ttl_runner()"), "1");
}
