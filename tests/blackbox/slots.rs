//! Process slots: every database is swept, however few there are, and none holds one that it does not need.

use crate::worker::{EXPIRED, ROWS, WORKERS, database, server};
use harness::{Database, Server, Session};
use std::sync::Arc;

const REFILL: &str = "INSERT INTO t VALUES (1, '2020-01-01')";

fn swept(server: &Arc<Server>) -> Database {
    let mut db = database(server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db
}

#[test]
fn databases_without_the_extension_do_not_take_the_slots_of_one_that_has_it() {
    let server = server(&["max_worker_processes=8"]);
    let _others: Vec<_> = (0..8).map(|_| Database::on(&server)).collect();
    let mut db = swept(&server);
    db.wait_for(ROWS, "0");
    for _ in 0..3 {
        db.run(REFILL);
        db.wait_for(ROWS, "0");
    }
}

#[test]
fn the_same_holds_when_the_server_starts() {
    let mut server = Server::start(&["shared_preload_libraries=pg_ttl_index", "max_worker_processes=8"]);
    let mut admin = Session::connect(&server, "postgres", "postgres");
    (0..8).for_each(|nth| admin.run(&format!("CREATE DATABASE other{nth}")));
    admin.run("CREATE DATABASE swept");
    let mut db = Session::connect(&server, "swept", "postgres");
    db.run("CREATE EXTENSION pg_ttl_index");
    db.run(EXPIRED);
    db.run("SELECT ttl_stop_worker()");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for(WORKERS, "0");
    db.run("DELETE FROM ttl_worker_off");
    drop((db, admin));
    server.stop();
    server.start_again();
    Session::connect(&server, "swept", "postgres").wait_for(ROWS, "0");
}

#[test]
fn a_database_without_the_extension_is_not_looked_into_again_and_again() {
    let server = server(&["log_min_messages=debug1"]);
    let mut idle = Database::on(&server);
    let _other = Database::on(&server);
    let mut db = swept(&server);
    db.wait_for(ROWS, "0");
    let starts = || server.log().matches("starting background worker process \"pg_ttl_index").count();
    let passes = |db: &mut Database| {
        for _ in 0..4 {
            db.wait_for("SELECT ttl_next_pass() IS NOT NULL", "t");
            let before = db.get("SELECT ttl_next_pass()");
            db.wait_for(&format!("SELECT ttl_next_pass() > '{before}'"), "t");
        }
    };
    // Those that are new are looked into once.
    passes(&mut db);
    let before = starts();
    assert_ne!(before, 0);
    passes(&mut db);
    assert_eq!(starts(), before);
    idle.run("CREATE EXTENSION pg_ttl_index");
    idle.run(EXPIRED);
    idle.run("SELECT ttl_create_index('t', 'at', 60)");
    idle.wait_for(ROWS, "0");
}

#[test]
fn workers_take_turns_where_slots_are_short() {
    // One is the launcher's, one PostgreSQL's own for replication.
    let server = server(&["max_worker_processes=3"]);
    let mut databases: Vec<_> = (0..3).map(|_| swept(&server)).collect();
    for _ in 0..2 {
        for db in &mut databases {
            db.wait_for(ROWS, "0");
            db.run(REFILL);
        }
    }
}

#[test]
fn helpers_and_workers_of_other_databases_take_turns_too() {
    let server = server(&["max_worker_processes=4"]);
    let mut databases: Vec<_> = (0..3).map(|_| database(&server)).collect();
    for db in &mut databases {
        db.run(EXPIRED);
        db.run(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
             CREATE TRIGGER nothing BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION nothing()",
        );
        db.run("SELECT ttl_create_index('t', 'at', 60)");
    }
    for _ in 0..2 {
        for db in &mut databases {
            db.wait_for(ROWS, "0");
            db.run(REFILL);
        }
    }
}

#[test]
fn a_database_with_much_to_do_does_not_keep_its_slot_from_others() {
    let server = server(&["max_worker_processes=3", "pg_ttl_index.batch_delay=200ms"]);
    let mut busy = database(&server);
    busy.run(EXPIRED);
    busy.run("SELECT ttl_create_index('t', 'at', 60, 1)");
    busy.wait_for("SELECT count(*) < 1000 FROM t", "t");
    let mut other = swept(&server);
    other.wait_for(ROWS, "0");
    let left = busy.get(ROWS);
    assert_ne!(left, "0");
    busy.wait_for(&format!("SELECT count(*) < {left} FROM t"), "t");
}

#[test]
fn a_database_without_rules_gives_its_slot_to_one_that_has_some() {
    let server = server(&["max_worker_processes=3"]);
    let mut idle = database(&server);
    idle.wait_for(WORKERS, "1");
    let mut db = swept(&server);
    db.wait_for(ROWS, "0");
    idle.wait_for(WORKERS, "0");
    idle.run(EXPIRED);
    idle.run("SELECT ttl_create_index('t', 'at', 60)");
    idle.wait_for(ROWS, "0");
}

#[test]
fn a_database_that_waits_for_a_slot_says_so_and_the_log_once() {
    let server = server(&["max_worker_processes=2"]);
    let mut db = swept(&server);
    db.wait_for("SELECT hold FROM ttl_summary", "max_worker_processes");
    let waits = format!("database \"{}\"", db.name);
    let lines = || server.log().lines().filter(|line| line.contains("pg_ttl_index") && line.contains(&waits)).count();
    // The launcher has tried again meanwhile.
    for _ in 0..3 {
        db.run("SELECT ttl_pause('t'), ttl_resume('t'), pg_sleep(1)");
    }
    assert_eq!(lines(), 1, "{}", server.log());
    assert_eq!(db.get("SELECT hold FROM ttl_summary"), "max_worker_processes");
    db.run("SELECT ttl_pause('t')");
    assert_eq!(db.get("SELECT hold FROM ttl_summary"), "");
}

#[test]
fn switching_sweeping_off_and_on_again_takes_effect_at_once() {
    // The naptime of this server is a minute.
    let mut db = Database::new();
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    for round in 0..10 {
        db.wait_for(ROWS, "0");
        db.run("SELECT ttl_stop_worker()");
        if round % 2 == 0 {
            db.wait_for(WORKERS, "0");
        }
        db.run(REFILL);
        db.run("SELECT ttl_start_worker()");
    }
    db.wait_for(ROWS, "0");
}
