//! After a point-in-time recovery nothing is deleted until somebody says so.

use crate::worker::{EXPIRED, ROWS, WORKERS, database, server};
use harness::{Server, Session};

const HOLD: &str = "SELECT DISTINCT hold FROM ttl_summary";

/// A server with a database `rescue` in which rows have expired that nothing has swept.
fn original() -> std::sync::Arc<Server> {
    let server = server(&["pg_ttl_index.enabled=off"]);
    let mut admin = Session::connect(&server, "postgres", "postgres");
    admin.run("CREATE DATABASE rescue");
    let mut db = Session::connect(&server, "rescue", "postgres");
    db.run("CREATE EXTENSION pg_ttl_index");
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    server
}

#[test]
fn recovered_rows_stay_until_sweeping_is_switched_on() {
    let original = original();
    let mut server = original.start_recovered(&["pg_ttl_index.enabled=on"]);
    let mut db = Session::reconnect(&server, "rescue");
    db.wait_for(HOLD, "recovery");
    assert_eq!(
        db.get("SELECT state FROM ttl_worker_status() WHERE database_name = current_database()"),
        "held: recovery"
    );
    let told = |server: &Server| server.log().matches("after a point-in-time recovery").count();
    assert_eq!(told(&server), 1);
    assert!(server.log().contains("Call ttl_start_worker()"), "{}", server.log());

    // It survives restarts, and nobody is told again.
    drop(db);
    server.stop();
    server.start_again();
    let mut db = Session::connect(&server, "rescue", "postgres");
    db.run("SELECT ttl_pause('t'), ttl_resume('t')");
    db.run("CREATE DATABASE fresh");
    let mut fresh = Session::connect(&server, "fresh", "postgres");
    fresh.run("CREATE EXTENSION pg_ttl_index");
    fresh.run(EXPIRED);
    fresh.run("SELECT ttl_create_index('t', 'at', 60)");
    // A database that is made after it has nothing to rescue.
    fresh.wait_for(ROWS, "0");
    assert_eq!(db.get(HOLD), "recovery");
    assert_eq!(db.get(ROWS), "1000");
    assert_eq!(told(&server), 1);

    // On request, rows go.
    assert_eq!(db.get("INSERT INTO t VALUES (1001, '2020-01-01'); SELECT ttl_runner('t')"), "1001");
    db.run("INSERT INTO t VALUES (1, '2020-01-01'); SELECT ttl_start_worker()");
    db.wait_for(ROWS, "0");
    assert_eq!(db.get(HOLD), "");
    drop((db, fresh));
    server.stop();
    server.start_again();
    let mut db = Session::connect(&server, "rescue", "postgres");
    db.run("INSERT INTO t VALUES (1, '2020-01-01')");
    db.wait_for(ROWS, "0");
}

#[test]
fn a_recovery_that_shuts_down_before_a_worker_looked_is_not_forgotten() {
    let original = original();
    let mut server = original.start_recovered(&[]);
    server.stop();
    server.start_again();
    server.set("pg_ttl_index.enabled=on");
    server.stop();
    server.start_again();
    let mut db = Session::connect(&server, "rescue", "postgres");
    db.wait_for(HOLD, "recovery");
    assert_eq!(db.get(ROWS), "1000");
}

#[test]
fn a_promoted_standby_a_crash_and_the_setting_hold_nothing() {
    let original = original();
    let mut standby = original.start_standby();
    standby.set("pg_ttl_index.enabled=on");
    standby.stop();
    standby.start_again();
    let mut db = Session::connect(&standby, "rescue", "postgres");
    db.run("SELECT pg_promote()");
    db.wait_for(ROWS, "0");

    let recovered = original.start_recovered(&["pg_ttl_index.enabled=on", "pg_ttl_index.hold_after_recovery=off"]);
    let mut db = Session::reconnect(&recovered, "rescue");
    db.wait_for(ROWS, "0");
    assert_eq!(db.get(HOLD), "");

    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_stop_worker(), ttl_create_index('t', 'at', 60)");
    db.wait_for(WORKERS, "0");
    db.run("DELETE FROM ttl_worker_off");
    let name = db.name.clone();
    db.release();
    let mut victim = Session::connect(&server, "postgres", "postgres");
    let pid = victim.get("SELECT pg_backend_pid()");
    harness::run(std::process::Command::new("kill").args(["-9", &pid]));
    drop(victim);
    Session::reconnect(&server, &name).wait_for(ROWS, "0");
}
