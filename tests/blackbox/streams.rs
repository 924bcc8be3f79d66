//! Deletes that a stream of changes can tell apart, with real slots and a real subscriber.

use crate::worker::{database, server};
use harness::{Database, Server};
use std::sync::Arc;

const LOGICAL: [&str; 3] = ["wal_level=logical", "max_replication_slots=10", "max_worker_processes=20"];

fn publisher(settings: &[&str]) -> Arc<Server> {
    let all: Vec<_> = LOGICAL.iter().chain(settings).copied().collect();
    server(&all)
}

/// A database whose worker does nothing, with a slot.
fn with_slot(server: &Arc<Server>, setup: &str) -> Database {
    let mut db = database(server);
    db.run("SELECT ttl_stop_worker()");
    db.run(setup);
    let slot = format!("slot_of_{}", db.name);
    db.run(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')"));
    db
}

/// The changes that a slot has: all, or those without an origin.
fn changes(db: &mut Database, only_local: bool) -> String {
    let sql = format!(
        "SELECT string_agg(data, E'\\n') FROM pg_logical_slot_peek_changes('slot_of_{}', NULL, NULL, 'only-local', '{only_local}')
         WHERE data LIKE 'table public.t:%' OR data LIKE 'message%'",
        db.name
    );
    db.get(&sql)
}

/// Kinds of sweeps: from the heap, by SQL with triggers that fail for some rows, marks, clears.
const KINDS: [(&str, &str); 4] = [
    ("", ""),
    (
        "CREATE FUNCTION partly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.id = 7 THEN RAISE 'no'; END IF; RETURN OLD; END $$;
         CREATE TRIGGER partly BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION partly();",
        "",
    ),
    ("", ", soft_delete_column => 'gone'"),
    ("", ", clear_columns => '{kind}'"),
];

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz, kind text);
    INSERT INTO t SELECT i, '2020-01-01', NULL, 'x' FROM generate_series(1, 300) i;";

#[test]
fn batches_are_committed_under_an_origin_that_streams_can_leave_out() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry"]);
    for (setup, options) in KINDS {
        for is_worker in [false, true] {
            let mut db = with_slot(&server, &format!("{TABLE}{setup}"));
            db.run(&format!("SELECT ttl_create_index('t', 'at', 60, batch_size => 50, emit_message => true{options})"));
            if is_worker {
                db.run("SELECT ttl_start_worker()");
            } else {
                db.run("CALL ttl_sweep('t')");
            }
            db.wait_for("SELECT total_rows_deleted >= 299 FROM ttl_summary", "t");
            db.run("SELECT ttl_stop_worker(); INSERT INTO t VALUES (1001, 'infinity'); DELETE FROM t WHERE id = 1001");
            let (all, local) = (changes(&mut db, false), changes(&mut db, true));
            let swept = |changes: &str| {
                changes.lines().filter(|line| line.contains("id[integer]:") && !line.contains("]:1001")).count()
            };
            assert!(swept(&all) >= 299, "{setup}{options} {is_worker}: {}", swept(&all));
            assert!(all.contains("prefix: pg_ttl_index"), "{setup}{options} {is_worker}");
            assert_eq!(local.lines().count(), 2, "{setup}{options} {is_worker}: {local}");
            assert!(
                local.contains("INSERT: id[integer]:1001") && local.contains("DELETE: id[integer]:1001"),
                "{local}"
            );
        }
    }
    let mut db = database(&server);
    assert_eq!(db.get("SELECT roname FROM pg_replication_origin"), "expiry");
    assert!(!server.log().contains("terminated by signal"));
}

#[test]
fn a_sweep_in_the_callers_transaction_belongs_to_the_caller() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry"]);
    let mut db = with_slot(&server, TABLE);
    db.run("SELECT ttl_create_index('t', 'at', 60); SELECT ttl_runner('t')");
    assert_eq!(changes(&mut db, true).lines().count(), 300);
    db.run("INSERT INTO t VALUES (1, '2020-01-01'); SELECT pg_replication_origin_create('mine'), pg_replication_origin_session_setup('mine')");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*) FROM t"), "0", "the session's own origin stays");
    assert_eq!(db.get("SELECT pg_replication_origin_session_is_setup()"), "t");
    assert_eq!(db.get("SELECT count(*) FROM pg_replication_origin"), "1");
}

#[test]
fn many_processes_share_an_origin_and_one_in_use_stops_the_batch_alone() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry", "pg_ttl_index.max_workers=4"]);
    let mut databases: Vec<_> = (0..3)
        .map(|_| {
            let mut db = database(&server);
            db.run("CREATE FUNCTION quiet() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN OLD; END $$");
            for table in 0..3 {
                db.run(&format!(
                    "CREATE TABLE t{table} (id int, at timestamptz); INSERT INTO t{table} SELECT i, '2020-01-01' FROM generate_series(1, 2000) i;
                     CREATE TRIGGER quiet BEFORE DELETE ON t{table} FOR EACH ROW WHEN (OLD.id > 100) EXECUTE FUNCTION quiet();
                     SELECT ttl_create_index('t{table}', 'at', 60, batch_size => 20)"
                ));
            }
            db
        })
        .collect();
    for db in &mut databases {
        db.wait_for("SELECT (SELECT count(*) FROM t0) + (SELECT count(*) FROM t1) + (SELECT count(*) FROM t2)", "0");
        assert_eq!(db.get("SELECT bool_and(last_error IS NULL) FROM ttl_summary"), "t");
    }
    let db = &mut databases[0];
    let mut user = db.session("postgres");
    user.run("SELECT pg_replication_origin_session_setup('expiry'); ");
    db.run("INSERT INTO t0 VALUES (1, '2020-01-01')");
    db.wait_for("SELECT left(last_error, 5) FROM ttl_summary WHERE table_name = 't0'", "55006");
    user.run("SELECT pg_replication_origin_session_reset()");
    db.wait_for("SELECT count(*) FROM t0", "0");
    assert!(!server.log().contains("terminated by signal"));
}

#[test]
fn a_message_says_what_a_batch_did() {
    let server = publisher(&[]);
    let mut db = with_slot(&server, TABLE);
    db.run("SELECT ttl_create_index('t', 'at', '1 day', batch_size => 200, emit_message => true, rule_name => 'old')");
    db.run("CALL ttl_sweep('t')");
    let all = changes(&mut db, true);
    assert_eq!(
        all.lines().filter(|line| line.starts_with("table ")).count(),
        300,
        "without an origin, streams have them"
    );
    let messages: Vec<_> =
        all.lines().filter(|line| line.starts_with("message: transactional: 1 prefix: pg_ttl_index")).collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    let content = messages[0].split_once("content:").expect("content").1.to_owned();
    let facts = format!(
        "SELECT m->>'table', m->>'rule', m->>'rule_name', m->>'action', m->>'count', (m->>'cutoff')::timestamptz BETWEEN now() - interval '25 h' AND now() - interval '1 day' FROM (SELECT '{content}'::jsonb AS m) AS it"
    );
    assert_eq!(db.get(&facts), "public.t|at|old|delete|200|t");
    // In the caller's transaction, it comes and goes with that.
    db.run("INSERT INTO t VALUES (1, '2020-01-01')");
    db.run("BEGIN; SELECT ttl_runner('t'); ROLLBACK");
    assert_eq!(changes(&mut db, true).lines().filter(|line| line.starts_with("message")).count(), 2);
    db.run("SELECT ttl_runner('t')");
    assert_eq!(changes(&mut db, true).lines().filter(|line| line.starts_with("message")).count(), 3);
}

#[test]
fn a_subscriber_keeps_what_the_publisher_lets_expire_if_it_wants_no_origin() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry"]);
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    db.run(TABLE);
    db.run("CREATE PUBLICATION all_of_it FOR TABLE t");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    let subscriber = Arc::new(Server::start(&[]));
    let knows_origins = db.get("SELECT current_setting('server_version_num')::int >= 160000") == "t";
    let connection = format!("host={} dbname={} user=postgres", server.host().display(), db.name);
    let mut copies: Vec<_> = [("any", true), ("none", knows_origins)]
        .into_iter()
        .filter(|(_, is_possible)| *is_possible)
        .map(|(origin, _)| {
            let mut copy = Database::on(&subscriber);
            let option = if knows_origins { format!(", origin = {origin}") } else { String::new() };
            copy.run("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz, kind text)");
            copy.run(&format!("CREATE SUBSCRIPTION of_{origin} CONNECTION '{connection}' PUBLICATION all_of_it WITH (slot_name = of_{origin}{option})"));
            copy.wait_for("SELECT count(*) FROM t", "300");
            copy.wait_for("SELECT srsubstate FROM pg_subscription_rel", "r");
            (origin, copy)
        })
        .collect();
    db.run("CALL ttl_sweep('t')");
    db.run("INSERT INTO t VALUES (1001, now())");
    for (origin, copy) in &mut copies {
        copy.wait_for("SELECT count(*) FROM t WHERE id = 1001", "1");
        let kept = if *origin == "none" { "301" } else { "1" };
        assert_eq!(copy.get("SELECT count(*) FROM t"), kept, "{origin}");
        copy.run(&format!("DROP SUBSCRIPTION of_{origin}"));
    }
}

#[test]
fn names_that_postgres_keeps_for_itself_are_refused() {
    let server = publisher(&[]);
    let mut db = database(&server);
    for name in ["none", "ANY", "pg_1"] {
        assert_eq!(
            db.error(&format!("ALTER SYSTEM SET pg_ttl_index.replication_origin = '{name}'")).code,
            "22023",
            "{name}"
        );
    }
}

#[test]
fn what_a_session_does_beside_sweeps_stays_its_own() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry"]);
    let mut db = with_slot(
        &server,
        "CREATE TABLE slow (id int, at timestamptz); INSERT INTO slow VALUES (1, '2020-01-01');
         CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(30); RETURN OLD; END $$;
         CREATE TRIGGER wait BEFORE DELETE ON slow FOR EACH ROW EXECUTE FUNCTION wait();
         CREATE TABLE failing (id int, at timestamptz); INSERT INTO failing VALUES (2, '2020-01-01');
         CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
         CREATE TRIGGER fail BEFORE DELETE ON failing FOR EACH ROW EXECUTE FUNCTION fail();
         CREATE TABLE t (id int PRIMARY KEY, at timestamptz); CREATE TABLE quick (id int, at timestamptz);
         SELECT ttl_create_index('slow', 'at', 60), ttl_create_index('failing', 'at', 60), ttl_create_index('quick', 'at', 60), ttl_create_index('t', 'at', 60)",
    );
    // A sweep that is cancelled.
    db.run("SET statement_timeout = '500ms'");
    assert_eq!(db.error("CALL ttl_sweep('slow')").code, "57014");
    db.run("RESET statement_timeout");
    db.run("DO $$ BEGIN INSERT INTO t VALUES (4); CALL ttl_sweep('quick'); INSERT INTO t VALUES (5); END $$");
    db.run("INSERT INTO t VALUES (6, '2020-01-01')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    let local = changes(&mut db, true);
    assert_eq!(local.lines().filter(|line| line.starts_with("table public.t:")).count(), 4, "{local}");
    // A batch that fails in a session with an origin of its own.
    db.run("SELECT pg_replication_origin_create('mine'), pg_replication_origin_session_setup('mine')");
    db.run("CALL ttl_sweep('failing')");
    assert_eq!(db.get("SELECT pg_replication_origin_session_is_setup()"), "t");
    db.run("INSERT INTO t VALUES (7)");
    assert_eq!(changes(&mut db, true), local);
    db.run("SELECT pg_replication_origin_session_reset(); INSERT INTO t VALUES (8)");
    assert_eq!(changes(&mut db, true).lines().count(), local.lines().count() + 1);
}

#[test]
fn a_batch_has_the_time_of_its_commit() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry"]);
    let mut db = with_slot(&server, TABLE);
    db.run("SELECT ttl_create_index('t', 'at', 60), ttl_start_worker()");
    db.wait_for("SELECT count(*) FROM t", "0");
    let slot = format!("slot_of_{}", db.name);
    let commits = format!(
        "SELECT count(*) > 1, count(*) FILTER (WHERE substring(data FROM '\\(at (.*)\\)')::timestamptz < now() - interval '1 hour')
         FROM pg_logical_slot_peek_changes('{slot}', NULL, NULL, 'include-timestamp', '1') WHERE data LIKE 'COMMIT%'"
    );
    assert_eq!(db.get(&commits), "t|0");
}

#[test]
fn nobody_waits_for_a_batch_that_waits_for_a_standby() {
    let server = publisher(&["pg_ttl_index.replication_origin=expiry"]);
    let mut databases: Vec<_> = (0..2).map(|_| with_slot(&server, TABLE)).collect();
    for db in &mut databases {
        db.run("SELECT ttl_create_index('t', 'at', 60)");
    }
    let mut quick = databases.pop().expect("two databases");
    let mut admin = quick.session("postgres");
    admin.run("SET synchronous_commit = local");
    admin.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    admin.run("SELECT pg_reload_conf()");
    admin.wait_for("SHOW synchronous_standby_names", "nobody");
    let mut slow = databases.pop().expect("two databases");
    let waiting = std::thread::spawn(move || slow.run("CALL ttl_sweep('t')"));
    admin.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query LIKE 'CALL%'", "1");
    quick.run("SET synchronous_commit = local; SET statement_timeout = '20s'");
    quick.run("CALL ttl_sweep('t')");
    assert_eq!(quick.get("SELECT count(*) FROM t"), "0");
    admin.run("ALTER SYSTEM RESET synchronous_standby_names");
    admin.run("SELECT pg_reload_conf()");
    waiting.join().expect("a sweep that has ended");
}
