//! How fast sweeps go: rates, caps, and standbys that cannot follow.

use crate::bad_input::refuses;
use crate::sweep::with;
use crate::worker::{EXPIRED, ROWS, database, server};
use harness::Session;
use std::time::{Duration, Instant};

#[test]
fn a_rule_keeps_its_rate_and_shows_that_it_waits() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let started = Instant::now();
    db.run("SELECT ttl_create_index('t', 'at', 60, max_rows_per_second => 250)");
    db.wait_for(
        "SELECT p.hold, p.phase, s.hold FROM ttl_progress p JOIN ttl_summary s USING (table_name)",
        "max_rows_per_second|waiting|max_rows_per_second",
    );
    db.wait_for(ROWS, "0");
    // The last batch need not be paid for any more.
    assert!(started.elapsed() >= Duration::from_secs(3), "{:?}", started.elapsed());
    db.wait_for("SELECT rows_removed, batches >= 4, status FROM ttl_history", "1000|t|done");
}

#[test]
fn a_rule_that_waits_holds_up_no_other() {
    let server = server(&["pg_ttl_index.max_workers=1"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("CREATE TABLE u AS SELECT * FROM t; SELECT ttl_create_index('t', 'at', 60, max_rows_per_second => 1)");
    db.wait_for("SELECT phase FROM ttl_progress", "waiting");
    db.run("SELECT ttl_create_index('u', 'at', 60)");
    db.wait_for("SELECT count(*) FROM u", "0");
    assert_ne!(db.get(ROWS), "0");
}

#[test]
fn all_sweeps_of_the_server_share_a_rate() {
    let server = server(&["pg_ttl_index.max_rows_per_second=250"]);
    let (mut one, mut two) = (database(&server), database(&server));
    let started = Instant::now();
    for db in [&mut one, &mut two] {
        db.run("CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 500) i");
        db.run("SELECT ttl_create_index('t', 'at', 60)");
    }
    one.wait_for("SELECT hold FROM ttl_progress", "pg_ttl_index.max_rows_per_second");
    for db in [&mut one, &mut two] {
        db.wait_for(ROWS, "0");
    }
    assert!(started.elapsed() >= Duration::from_secs(3), "{:?}", started.elapsed());
}

#[test]
fn a_sweep_in_a_transaction_is_not_for_others_to_wait_for() {
    let server = server(&["pg_ttl_index.max_rows_per_second=100"]);
    let mut db = database(&server);
    db.run("CREATE TABLE u AS SELECT '2020-01-01'::timestamptz AS at FROM generate_series(1, 20000)");
    db.run("BEGIN; SELECT ttl_create_index('u', 'at', 60); SELECT ttl_runner('u'); ROLLBACK");
    let started = Instant::now();
    db.run("CREATE TABLE t AS SELECT '2020-01-01'::timestamptz AS at; SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for(ROWS, "0");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
}

#[test]
fn log_is_written_no_faster_than_it_may_be() {
    let server = server(&[
        "pg_ttl_index.max_wal_per_second=20kB",
        "full_page_writes=off",
        "wal_level=minimal",
        "max_wal_senders=0",
    ]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("VACUUM t");
    let started = Instant::now();
    db.run("SELECT ttl_create_index('t', 'at', 60, 100)");
    db.wait_for("SELECT hold FROM ttl_progress", "pg_ttl_index.max_wal_per_second");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT count(*) FROM ttl_history", "1");
    let bytes: u64 = db.get("SELECT wal_bytes FROM ttl_history").parse().expect("a number");
    // The last batch of ten need not be paid for.
    let least = Duration::from_millis(bytes * 8 / 10 * 1000 / 20_480);
    assert!(least > Duration::from_secs(1) && started.elapsed() >= least, "{:?} for {bytes} bytes", started.elapsed());
}

#[test]
fn workers_leave_the_log_to_others_and_manual_sweeps_do_not_unless_told_so() {
    let server = server(&["wal_level=logical", "max_wal_size=4GB"]);
    let mut db = database(&server);
    db.run(
        "CREATE TABLE t (at timestamptz, pad text) WITH (autovacuum_enabled = off); ALTER TABLE t REPLICA IDENTITY FULL;
         INSERT INTO t SELECT '2020-01-01', repeat('x', 1500) FROM generate_series(1, 100000)",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, index_method => 'none')");
    db.wait_for_often("SELECT hold FROM ttl_progress", "pg_ttl_index.max_wal_per_second");
    db.run("SELECT ttl_stop_worker()");
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    let mut other = db.session("postgres");
    let sweeping = std::thread::spawn(move || other.run("CALL ttl_sweep('t')"));
    while !sweeping.is_finished() {
        assert_eq!(db.get("SELECT count(*) FROM ttl_progress WHERE hold IS NOT NULL"), "0");
    }
    sweeping.join().expect("the sweep");
    assert_eq!(db.get(ROWS), "0");
}

#[test]
fn who_writes_much_log_waits_for_it_alone() {
    for settings in [&[][..], &["pg_ttl_index.max_wal_per_second=16MB"]] {
        let server = server(settings);
        let (mut db, mut other) = (database(&server), database(&server));
        let greedy = db.role("greedy");
        db.run(&format!("CREATE SCHEMA greedy AUTHORIZATION {greedy}"));
        db.session(&greedy).run(
            "CREATE FUNCTION greedy.write() RETURNS trigger LANGUAGE plpgsql AS
                 'BEGIN PERFORM pg_logical_emit_message(false, ''x'', repeat(''x'', 40000000)); RETURN NULL; END';
             CREATE TABLE greedy.t (at timestamptz); INSERT INTO greedy.t SELECT '2020-01-01' FROM generate_series(1, 2000);
             CREATE TRIGGER write AFTER DELETE ON greedy.t FOR EACH STATEMENT EXECUTE FUNCTION greedy.write();
             SELECT ttl_create_index('greedy.t', 'at', 60, batch_size => 1)",
        );
        db.wait_for("SELECT hold FROM ttl_progress", "pg_ttl_index.max_wal_per_second");
        for db in [&mut db, &mut other] {
            db.run(
                "CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 300000)",
            );
            db.run("SELECT ttl_create_index('t', 'at', 60)");
        }
        db.wait_for(ROWS, "0");
        other.wait_for(ROWS, "0");
        assert_ne!(db.get("SELECT count(*) FROM greedy.t"), "0");
    }
}

#[test]
fn a_sweep_ends_at_its_cap_and_the_next_ones_go_on() {
    let mut db = with(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60, 40, max_rows_per_run => 100)");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "100");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get(ROWS), "800");
    assert_eq!(
        db.get("SELECT rows_removed, batches, status FROM ttl_history ORDER BY id"),
        "100|3|stopped\n100|3|stopped"
    );
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60, max_rows_per_run => 300, run_every => interval '1 second')");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT string_agg(rows_removed::text, ',' ORDER BY id) FROM ttl_history", "300,300,300,100");
}

#[test]
fn sweeps_wait_for_a_standby_that_lags() {
    for limit in ["1MB", "1s"] {
        let primary = server(&[&format!("pg_ttl_index.max_replica_lag={limit}"), "pg_ttl_index.batch_delay=20ms"]);
        let mut db = Session::connect(&primary, "postgres", "postgres");
        db.run("CREATE EXTENSION pg_ttl_index");
        let standby = primary.start_standby();
        db.wait_for("SELECT state FROM pg_stat_replication", "streaming");
        let mut replica = Session::connect(&standby, "postgres", "postgres");
        replica.run("SELECT pg_wal_replay_pause()");
        replica.wait_for("SELECT pg_get_wal_replay_pause_state()", "paused");
        db.run("CREATE TABLE t AS SELECT i AS id, '2020-01-01'::timestamptz AS at, repeat('x', 200) AS pad FROM generate_series(1, 20000) i");
        db.run("SELECT ttl_create_index('t', 'at', 60, 100)");
        db.wait_for(
            "SELECT s.hold FROM ttl_progress p JOIN ttl_summary s USING (table_name)",
            "pg_ttl_index.max_replica_lag",
        );
        let left = db.get(ROWS);
        assert_ne!(left, "0", "{limit}");
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(db.get(ROWS), left, "{limit}");
        replica.run("SELECT pg_wal_replay_resume()");
        db.wait_for(ROWS, "0");
    }
}

#[test]
fn sweeps_wait_for_a_slot_that_nobody_reads() {
    let server = server(&[]);
    server.configure("pg_ttl_index.max_replica_lag", "'100kB'");
    let mut db = database(&server);
    db.run("SELECT pg_create_physical_replication_slot('forgotten', true)");
    db.run("CREATE TABLE t AS SELECT i AS id, '2020-01-01'::timestamptz AS at FROM generate_series(1, 20000) i");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for("SELECT hold FROM ttl_progress", "pg_ttl_index.max_replica_lag");
    assert_eq!(db.get(ROWS), "20000");
    server.configure("pg_ttl_index.max_replica_lag", "''");
    db.wait_for(ROWS, "0");
    db.run("SELECT pg_drop_replication_slot('forgotten')");
}

#[test]
fn a_limit_that_is_none_is_refused() {
    refuses(
        "CREATE TABLE t (at timestamptz)",
        &[
            ("ttl_create_index('t', 'at', 60, max_rows_per_second => 0)", "22023"),
            ("ttl_create_index('t', 'at', 60, max_rows_per_second => -1)", "22023"),
            ("ttl_create_index('t', 'at', 60, max_rows_per_run => 0)", "22023"),
        ],
    );
    let server = server(&[]);
    let mut session = Session::connect(&server, "postgres", "postgres");
    for value in ["'100'", "'many'", "'-1MB'", "'5 apples'"] {
        let error = session.error(&format!("ALTER SYSTEM SET pg_ttl_index.max_replica_lag = {value}"));
        assert_eq!(error.code, "22023", "{value}");
    }
    for value in ["'16MB'", "'30s'", "'2 min'", "''"] {
        session.run(&format!("ALTER SYSTEM SET pg_ttl_index.max_replica_lag = {value}"));
    }
}
