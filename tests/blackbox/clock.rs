//! A clock that jumps ahead costs no row.

use crate::worker::database;
use harness::{Database, Server};
use std::path::PathBuf;
use std::sync::Arc;

const ROWS: &str = "SELECT count(*) FROM t";

/// A server whose clock is set by a file.
struct Clocked {
    server: Arc<Server>,
    files: Files,
}

/// The file that sets the clock, and a library; both stay as long as the server.
struct Files(PathBuf);

impl Clocked {
    fn start(settings: &[&str]) -> Self {
        let library = ["x86_64", "aarch64"]
            .map(|machine| format!("/usr/lib/{machine}-linux-gnu/faketime/libfaketime.so.1"))
            .into_iter()
            .find(|library| std::path::Path::new(library).exists())
            .expect("libfaketime");
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let file = std::env::temp_dir().join(format!("pg_ttl_clock_{}_{number}", std::process::id()));
        std::fs::write(&file, "+0\n").expect("writing a file");
        let select = file.with_extension("so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/select.c");
        harness::run(std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&select).arg(source));
        let libraries = format!("{}:{library}", select.display());
        let mut all = vec!["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1"];
        all.extend(settings);
        let environment = [
            ("LD_PRELOAD", libraries.as_str()),
            ("FAKETIME_TIMESTAMP_FILE", file.to_str().expect("a name")),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ];
        let server = Arc::new(Server::start_in(&environment, &all));
        Self { server, files: Files(file) }
    }

    /// Sets the clock ahead of the real one by so many seconds.
    fn set(&self, ahead: u32) {
        let next = self.files.0.with_extension("next");
        std::fs::write(&next, format!("+{ahead}\n")).expect("writing a file");
        std::fs::rename(&next, &self.files.0).expect("renaming a file");
    }

    /// A table with 100 rows that live for an hour, and one that hides its rows; its worker has looked at the clock.
    fn database(&self) -> Database {
        let mut db = database(&self.server);
        db.run(
            "CREATE TABLE t (id int, at timestamptz); CREATE TABLE hiding (id int PRIMARY KEY, at timestamptz, what text);
             INSERT INTO t SELECT i, now() FROM generate_series(1, 100) i; INSERT INTO hiding VALUES (1, now(), 'old');
             SELECT ttl_create_index('t', 'at', '1 hour'), ttl_create_index('hiding', 'at', '1 hour', hide_expired => true)",
        );
        db.wait_for("SELECT count(*) FROM ttl_clock", "1");
        db
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("so"));
    }
}

#[test]
fn nothing_is_removed_until_the_clock_is_back() {
    let clocked = Clocked::start(&[]);
    let mut db = clocked.database();
    clocked.set(2 * 3600);
    // At once, not only when the worker has noticed.
    for call in ["SELECT ttl_runner('t')", "SELECT ttl_runner()", "CALL ttl_sweep('t')"] {
        assert_eq!(db.error(call).code, "55000", "{call}");
    }
    assert_eq!(db.error("INSERT INTO hiding VALUES (1, now(), 'new')").code, "23505");
    db.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
    assert_eq!(db.get("SELECT state FROM ttl_worker_status() WHERE worker_pid IS NULL"), "held: clock");
    assert_eq!(db.error("INSERT INTO hiding VALUES (1, now(), 'new')").code, "23505");
    assert_eq!(db.error("CALL ttl_sweep('t')").code, "55000");
    db.run("INSERT INTO t VALUES (101, '2020-01-01')");
    // A rule that is changed wakes the worker.
    db.run("SELECT ttl_alter_index('t', 'at', batch_size => 7)");
    assert_eq!(db.get(ROWS), "101");
    clocked.set(0);
    db.wait_for("SELECT count(DISTINCT hold) FROM ttl_summary", "0");
    db.wait_for(ROWS, "100");
    assert_eq!(db.get("SELECT what FROM hiding"), "old");
    let log = clocked.server.log();
    let times = |text: &str| log.matches(text).count();
    // PostgreSQL's timeouts go by the wall clock: the transaction that notices the jump may be cancelled by it.
    assert!((1..=2).contains(&times("WARNING:  pg_ttl_index does not sweep")), "{log}");
    assert_eq!(times("again: the clock is back"), 1, "{log}");
}

#[test]
fn starting_the_worker_says_that_the_clock_is_right() {
    let clocked = Clocked::start(&[]);
    let (mut db, mut other) = (clocked.database(), clocked.database());
    clocked.set(2 * 3600);
    db.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
    other.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
    assert_eq!(db.get("SELECT ttl_start_worker()"), "t");
    db.wait_for(ROWS, "0");
    assert_eq!(
        other.get("SELECT hold, (SELECT count(*) FROM t) FROM ttl_summary WHERE table_name = 't'"),
        "clock|100",
        "for this database alone"
    );
    // From now on, this clock is the right one.
    clocked.set(2 * 3600 + 600);
    db.run("INSERT INTO t VALUES (1, '2020-01-01')");
    db.wait_for(ROWS, "0");
    clocked.set(5 * 3600);
    db.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
}

#[test]
fn a_restart_forgets_no_jump_and_a_small_one_is_none() {
    let mut clocked = Clocked::start(&[]);
    let mut db = clocked.database();
    clocked.set(1800);
    db.run("INSERT INTO t VALUES (101, '2020-01-01')");
    db.wait_for(ROWS, "100");
    clocked.set(2 * 3600 + 1800);
    db.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
    let name = db.name.clone();
    db.release();
    Arc::get_mut(&mut clocked.server).expect("no other user").stop();
    Arc::get_mut(&mut clocked.server).expect("no other user").start_again();
    let mut db = harness::Session::reconnect(&clocked.server, &name);
    db.wait_for("SELECT count(*) FROM ttl_worker_status() WHERE worker_pid IS NOT NULL", "1");
    assert_eq!(db.get("SELECT DISTINCT hold FROM ttl_summary"), "clock");
    assert_eq!(db.get(ROWS), "100");
    clocked.set(1800);
    db.wait_for("SELECT count(DISTINCT hold) FROM ttl_summary", "0");
    db.run("INSERT INTO t VALUES (101, '2020-01-01')");
    db.wait_for(ROWS, "100");
}

#[test]
fn a_clock_that_is_set_back_stops_no_sweep_that_keeps_to_a_rate() {
    for setting in ["pg_ttl_index.max_wal_per_second=4MB", "pg_ttl_index.max_rows_per_second=20000"] {
        let clocked = Clocked::start(&[setting]);
        clocked.set(1200);
        let mut db = database(&clocked.server);
        db.run("CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 100000)");
        db.run("SELECT ttl_create_index('t', 'at', 60)");
        db.wait_for_often("SELECT count(*) FROM ttl_progress WHERE hold IS NOT NULL AND rows_removed > 0", "1");
        clocked.set(0);
        db.wait_for(ROWS, "0");
    }
}

#[test]
fn the_setting_says_how_far_a_clock_may_jump() {
    let clocked = Clocked::start(&["pg_ttl_index.max_clock_jump=0"]);
    let mut db = clocked.database_without_clock();
    clocked.set(2 * 3600);
    db.wait_for(ROWS, "0");
}

#[test]
fn a_machine_that_starts_in_the_past_may_set_its_clock() {
    let clocked = Clocked::start(&[]);
    let mut db = clocked.database();
    // As after a start of the machine, with a clock that is behind.
    db.run("UPDATE ttl_clock SET boot = 'another', seen = now() + interval '90 minutes'");
    db.run("INSERT INTO t VALUES (101, '2020-01-01')");
    db.wait_for(ROWS, "100");
    assert_eq!(db.get("SELECT boot FROM ttl_clock"), "another");
    clocked.set(2 * 3600);
    db.wait_for(ROWS, "0");
    assert_eq!(db.get("SELECT boot <> 'another' FROM ttl_clock"), "t");
    // A database that was held then stays so.
    db.run("INSERT INTO t VALUES (1, now())");
    clocked.set(4 * 3600);
    db.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
    db.run("UPDATE ttl_clock SET boot = 'another'");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "55000");
    db.run("SELECT ttl_start_worker()");
    db.wait_for(ROWS, "0");
}

impl Clocked {
    fn database_without_clock(&self) -> Database {
        let mut db = database(&self.server);
        db.run("CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, now() FROM generate_series(1, 100) i; SELECT ttl_create_index('t', 'at', '1 hour')");
        db
    }
}

#[test]
fn a_stop_outlasts_the_clock() {
    let clocked = Clocked::start(&[]);
    let mut db = clocked.database();
    clocked.set(2 * 3600);
    db.wait_for("SELECT DISTINCT hold FROM ttl_summary", "clock");
    assert_eq!(db.get("SELECT ttl_stop_worker()"), "t");
    clocked.set(0);
    db.run("INSERT INTO t VALUES (101, '2020-01-01')");
    let mut other = clocked.database();
    other.run("INSERT INTO t VALUES (101, '2020-01-01')");
    other.wait_for(ROWS, "100");
    assert_eq!(db.get(ROWS), "101");
    assert_eq!(db.get("SELECT because IS NULL FROM ttl_worker_off"), "t");
    // After a start of the machine, a manual sweep notes the clock, too.
    db.run("UPDATE ttl_clock SET boot = 'another', seen = now() - interval '1 day'");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    clocked.set(2 * 3600);
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "55000");
    assert_eq!(db.get(ROWS), "100");
}

#[test]
fn a_sweep_in_an_open_transaction_keeps_nobody_from_sweeping() {
    let mut db = crate::sweep::with(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); CREATE TABLE u (LIKE t); INSERT INTO u TABLE t;
         SELECT ttl_create_index('t', 'at', 60), ttl_create_index('u', 'at', 60); DELETE FROM ttl_clock",
    );
    let mut open = db.session("postgres");
    open.run("BEGIN");
    assert_eq!(open.get("SELECT ttl_runner('t')"), "1");
    db.run("SET statement_timeout = '20s'");
    assert_eq!(db.get("SELECT ttl_runner('u')"), "1");
}
