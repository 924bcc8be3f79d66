//! One large table, swept by several processes.

use crate::worker::{self, database};
use harness::{Database, Server};
use std::sync::Arc;

/// A server whose workers may write as much as they can: a sweep that waits gives nothing away.
fn server(settings: &[&str]) -> Arc<Server> {
    worker::server(&[settings, &["pg_ttl_index.max_wal_per_second=0"]].concat())
}

/// 400,000 rows in 9,000 blocks, all but 1,000 of them expired, in batches that take a while.
const LARGE: &str = "CREATE TABLE t (id int, at timestamptz, pad text DEFAULT repeat('x', 120)) WITH (autovacuum_enabled = off);
     INSERT INTO t SELECT i, CASE WHEN i % 400 = 0 THEN timestamptz 'infinity' ELSE '2020-01-01' END FROM generate_series(1, 400000) i";
const SHARED: &str = "SELECT workers > 1 FROM ttl_progress";

fn large(server: &Arc<Server>, options: &str) -> Database {
    let mut db = database(server);
    db.run(LARGE);
    db.run(&format!("SELECT ttl_create_index('t', 'at', 60, 50, index_method => 'none'{options})"));
    db
}

/// Waits until the sweep is over, and checks that all expired rows are gone, each counted once, and no other.
fn check_end(db: &mut Database, sweeps: &str) {
    db.wait_for("SELECT count(*) FROM t WHERE at < now()", "0");
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1000");
    assert_eq!(db.get("SELECT total_rows_deleted, state, last_error FROM ttl_summary"), "399000|active|");
    db.wait_for("SELECT count(*) > 0 FROM ttl_history", "t");
    let history = db.get("SELECT * FROM ttl_history");
    assert_eq!(db.get(&format!("SELECT {sweeps} FROM ttl_history")), "t", "{history}");
    db.run("CREATE EXTENSION amcheck");
    assert_eq!(db.get("SELECT count(*) FROM verify_heapam('t')"), "0");
}

#[test]
fn a_large_table_is_swept_by_several_processes_as_one_sweep() {
    let server =
        server(&["pg_ttl_index.max_workers=3", "pg_ttl_index.max_workers_per_table=3", "max_worker_processes=16"]);
    let mut db = large(&server, "");
    db.wait_for(SHARED, "t");
    // Where the database's worker would have to wait for long to count its rows, a helper takes the sweep over.
    check_end(
        &mut db,
        "count(*) <= 2 AND sum(rows_removed) BETWEEN 398800 AND 399000 AND sum(batches) >= 7976 AND min(status) = 'done'",
    );
    let last = "SELECT rows_removed FROM ttl_history ORDER BY id DESC LIMIT 1";
    assert_eq!(db.get("SELECT rows_deleted_last_run FROM ttl_summary"), db.get(last));
}

#[test]
fn a_share_whose_process_dies_is_swept_by_its_leader() {
    let server = server(&["pg_ttl_index.max_workers_per_table=2"]);
    let mut db = large(&server, "");
    db.wait_for(SHARED, "t");
    db.run("SELECT pg_terminate_backend(worker_pid) FROM ttl_worker_status() WHERE application_name = 'pg_ttl_index helper'");
    // What it had not told yet of its last batch is not in the history.
    check_end(&mut db, "count(*) <= 2 AND sum(rows_removed) BETWEEN 398900 AND 399000");
}

#[test]
fn a_rule_that_changes_stops_all_who_sweep_it() {
    let server =
        server(&["pg_ttl_index.max_workers=3", "pg_ttl_index.max_workers_per_table=3", "max_worker_processes=16"]);
    let mut db = database(&server);
    db.run(LARGE);
    // A batch takes a tenth of a second, so that some are under way at any moment.
    db.run(
        "CREATE FUNCTION dawdle(int) RETURNS boolean LANGUAGE plpgsql STABLE AS
             'BEGIN PERFORM pg_sleep(0.002); RETURN true; END';
         SELECT ttl_create_index('t', 'at', 60, 50, index_method => 'none', filter => 'dawdle(id)')",
    );
    db.wait_for(SHARED, "t");
    // From the moment this returns, no row goes.
    db.run("SELECT ttl_pause('t')");
    let left = db.get("SELECT count(*) FROM t");
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), left);
    assert_eq!(
        db.get(&format!("SELECT total_rows_deleted = 400000 - {left} FROM ttl_index_table")),
        "t",
        "every row is counted once"
    );
    db.run("SELECT ttl_alter_index('t', 'at', reset => '{filter}'), ttl_resume('t')");
    check_end(&mut db, "sum(rows_removed) BETWEEN 398800 AND 399000");
}

#[test]
fn other_rules_do_not_wait_for_the_end_of_a_share() {
    let server = server(&["pg_ttl_index.max_workers_per_table=2", "pg_ttl_index.batch_delay=20ms"]);
    let mut db = large(&server, "");
    db.wait_for(SHARED, "t");
    // These need a helper, and one that needs none.
    db.run(
        "CREATE TABLE small (at timestamptz); INSERT INTO small VALUES ('2020-01-01'); CREATE TABLE plain (LIKE small);
         INSERT INTO plain TABLE small; CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
         CREATE TRIGGER watch BEFORE DELETE ON small FOR EACH ROW EXECUTE FUNCTION watch();
         SELECT ttl_create_index('small', 'at', 60), ttl_create_index('plain', 'at', 60)",
    );
    db.wait_for("SELECT (SELECT count(*) FROM small), (SELECT count(*) FROM plain)", "0|0");
    assert_eq!(db.get("SELECT count(*) > 300000 FROM t"), "t", "long before the large table is done");
    let left = db.get("SELECT count(*) FROM t");
    db.wait_for(&format!("SELECT count(*) < {left} FROM t"), "t");
}

#[test]
fn a_rule_with_a_rate_or_a_limit_is_swept_by_one() {
    let server = server(&["pg_ttl_index.max_workers=3", "pg_ttl_index.max_workers_per_table=3"]);
    for option in [", max_rows_per_second => 1000000", ", max_rows_per_run => 1000000"] {
        let mut db = large(&server, option);
        db.wait_for("SELECT count(*) < 200000 FROM t", "t");
        assert_eq!(db.get("SELECT count(*) FROM ttl_progress WHERE workers > 1"), "0");
        check_end(&mut db, "sum(rows_removed) = 399000");
    }
}

#[test]
fn a_rule_that_fails_on_rows_of_a_share_has_them_blocked() {
    let server = server(&["pg_ttl_index.max_workers_per_table=2"]);
    let mut db = database(&server);
    db.run(LARGE);
    db.run(
        "SELECT ttl_create_index('t', 'at', 60, 50, index_method => 'none', filter => '1 / (id - 399999) IS NOT NULL')",
    );
    db.wait_for("SELECT count(*) FROM t WHERE at < now()", "1");
    db.wait_for("SELECT state, blocked_rows, last_error FROM ttl_summary", "blocked|1|22012: division by zero");
    assert_eq!(db.get("SELECT total_rows_deleted FROM ttl_summary"), "398999");
}

/// Whoever leads the sweep.
const LEADER: &str = "SELECT pid FROM ttl_progress";

#[test]
fn whoever_has_a_share_stops_when_the_leader_is_gone() {
    let server = server(&["pg_ttl_index.max_workers_per_table=2", "pg_ttl_index.batch_delay=20ms"]);
    let mut db = large(&server, "");
    db.wait_for(SHARED, "t");
    let leader = db.get(LEADER);
    // So that no other leader follows.
    db.run("UPDATE ttl_index_table SET run_every = '1 hour', swept_at = now()");
    db.run(&format!("SELECT pg_terminate_backend({leader}, 10000)"));
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    db.wait_for("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'sweeping blocks%'", "0");
    let left: i64 = db.get("SELECT count(*) FROM t").parse().expect("a count");
    assert!(left > 300_000, "{left} rows are left: the share was not swept to its end");
    assert_eq!(db.get(&format!("SELECT total_rows_deleted = 400000 - {left} FROM ttl_index_table")), "t");
}

#[test]
fn whoever_has_a_share_stops_when_sweeping_is_switched_off() {
    let server = server(&["pg_ttl_index.max_workers_per_table=2", "pg_ttl_index.batch_delay=20ms"]);
    let mut db = large(&server, "");
    db.wait_for(SHARED, "t");
    server.configure("pg_ttl_index.enabled", "off");
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    db.wait_for("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'sweeping blocks%'", "0");
    let left: i64 = db.get("SELECT count(*) FROM t").parse().expect("a count");
    assert!(left > 300_000, "{left} rows are left: the share was not swept to its end");
    assert_eq!(db.get(&format!("SELECT total_rows_deleted = 400000 - {left} FROM ttl_index_table")), "t");
    server.configure("pg_ttl_index.enabled", "on");
    db.wait_for(&format!("SELECT count(*) < {left} FROM t"), "t");
}

#[test]
fn whoever_has_a_share_makes_way_for_another_database() {
    // A slot for the launcher, and two for sweeping.
    let server = server(&[
        "pg_ttl_index.max_workers_per_table=2",
        "pg_ttl_index.batch_delay=20ms",
        "max_worker_processes=4",
        "max_logical_replication_workers=0",
    ]);
    let mut db = large(&server, "");
    db.wait_for(SHARED, "t");
    let mut other = database(&server);
    other.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60)",
    );
    other.wait_for("SELECT count(*) FROM t", "0");
    assert_eq!(db.get("SELECT count(*) > 200000 FROM t"), "t", "long before the large table is done");
}

#[test]
fn large_partitions_are_shared_and_a_sweep_by_hand_beside_them_takes_no_row_twice() {
    let server = server(&["pg_ttl_index.max_workers_per_table=2"]);
    let mut db = database(&server);
    db.run(&LARGE.replace("CREATE TABLE t (", "CREATE TABLE source (").replace("INTO t", "INTO source"));
    db.run(
        "CREATE TABLE t (LIKE source) PARTITION BY HASH (id);
         CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_enabled = off);
         CREATE TABLE t1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (autovacuum_enabled = off);
         INSERT INTO t TABLE source; SELECT ttl_create_index('t', 'at', 60, 50, index_method => 'none')",
    );
    db.wait_for(SHARED, "t");
    // It leaves the rule to whoever sweeps it.
    db.run("CALL ttl_sweep('t')");
    db.wait_for("SELECT count(*) FROM t WHERE at < now()", "0");
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1000");
    assert_eq!(db.get("SELECT total_rows_deleted, state FROM ttl_summary"), "399000|active");
}
