//! When a rule is swept: how often, and in which hours.

use crate::bad_input::refuses;
use crate::worker::{EXPIRED, ROWS, database, server, worker_pid};
use harness::Database;
use std::time::{Duration, Instant};

const REFILL: &str = "INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 10) i";

/// Waits until the worker has begun another pass, and swept a rule without times of its own in it.
fn wait_for_a_pass(db: &mut Database) {
    db.run("INSERT INTO other VALUES ('2020-01-01')");
    db.wait_for("SELECT count(*) FROM other", "0");
}

fn with_another_rule(db: &mut Database) {
    db.run(EXPIRED);
    db.run("CREATE TABLE other (at timestamptz); SELECT ttl_create_index('other', 'at', 60)");
}

#[test]
fn a_rule_rests_for_its_interval_while_others_are_swept() {
    let server = server(&[]);
    let mut db = database(&server);
    with_another_rule(&mut db);
    db.run("SELECT ttl_create_index('t', 'at', 60, run_every => interval '1 hour')");
    db.wait_for(ROWS, "0");
    db.run(REFILL);
    wait_for_a_pass(&mut db);
    wait_for_a_pass(&mut db);
    assert_eq!(db.get(ROWS), "10");
    assert_eq!(
        db.get("SELECT run_every, next_run BETWEEN now() + interval '59 minutes' AND now() + interval '61 minutes' FROM ttl_summary WHERE table_name = 't'"),
        "01:00:00|t"
    );
    db.run(
        "CREATE TABLE idle (at timestamptz); SELECT ttl_create_index('idle', 'at', 60, run_every => interval '1 hour')",
    );
    db.wait_for("SELECT next_run > now() + interval '59 minutes' FROM ttl_summary WHERE table_name = 'idle'", "t");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "10", "who asks for a sweep gets it");
    db.run(REFILL);
    db.run("SELECT ttl_alter_index('t', 'at', run_every => interval '1 second')");
    db.wait_for(ROWS, "0");
}

#[test]
fn a_sweep_that_was_interrupted_goes_on_without_a_rest() {
    let server = server(&["pg_ttl_index.batch_delay=20ms"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60, 20, run_every => interval '1 day')");
    db.wait_for("SELECT count(*) < 900 FROM t", "t");
    db.run("SELECT pg_terminate_backend(worker_pid) FROM ttl_worker_status()");
    db.wait_for(ROWS, "0");
    db.run(REFILL);
    db.run("CREATE TABLE other (at timestamptz); SELECT ttl_create_index('other', 'at', 60)");
    wait_for_a_pass(&mut db);
    assert_eq!(db.get(ROWS), "10", "now it rests");
}

#[test]
fn an_interval_can_be_shorter_than_the_naptime() {
    // The shared server's naptime is a minute.
    let mut db = Database::new();
    db.run("CREATE TABLE t (id int, at timestamptz); SELECT ttl_create_index('t', 'at', 60, run_every => interval '1 second')");
    for _ in 0..3 {
        db.run(REFILL);
        db.wait_for(ROWS, "0");
    }
}

/// A window by the clock of UTC, from and to so long from now, as the summary shows it: without seconds where they are 0.
fn window(db: &mut Database, from: &str, to: &str) -> String {
    let time = |span: &str| {
        format!(
            "regexp_replace(to_char(now() AT TIME ZONE 'UTC' + interval '{span}', 'HH24:MI:SS'), '^(..:..):00$', '\\1')"
        )
    };
    db.get(&format!("SELECT {} || '-' || {} || ' UTC'", time(from), time(to)))
}

#[test]
fn a_rule_rests_outside_its_window() {
    let server = server(&[]);
    let mut db = database(&server);
    with_another_rule(&mut db);
    let closed = window(&mut db, "1 hour", "2 hours");
    db.run(&format!("SELECT ttl_create_index('t', 'at', 60, run_window => '{closed}', time_zone => 'Asia/Tokyo')"));
    wait_for_a_pass(&mut db);
    wait_for_a_pass(&mut db);
    assert_eq!(db.get(ROWS), "1000");
    assert_eq!(
        db.get(
            "SELECT hold, run_window, next_run BETWEEN now() + interval '58 minutes' AND now() + interval '61 minutes'
                FROM ttl_summary WHERE table_name = 't'"
        ),
        format!("run_window|{closed}|t")
    );
    let open = window(&mut db, "-1 hour", "1 hour");
    db.run(&format!("SELECT ttl_alter_index('t', 'at', run_window => '{open}')"));
    db.wait_for(ROWS, "0");
    assert_eq!(db.get("SELECT hold FROM ttl_summary WHERE table_name = 't'"), "");
}

#[test]
fn a_window_opens_and_closes_by_itself() {
    let server = server(&["pg_ttl_index.batch_delay=50ms", "pg_ttl_index.naptime=1h"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let soon = window(&mut db, "2 seconds", "5 seconds");
    db.run(&format!(
        "SELECT ttl_create_index('t', 'at', 60, 1, run_window => '{soon}', run_every => interval '7 days')"
    ));
    assert_eq!(db.get(ROWS), "1000");
    db.wait_for("SELECT count(*) < 1000 FROM t", "t");
    db.wait_for("SELECT hold FROM ttl_summary", "run_window");
    db.wait_for("SELECT status FROM ttl_history", "stopped");
    let left = db.get(ROWS);
    assert_ne!(left, "0");
    db.run("SELECT pg_sleep(1)");
    assert_eq!(db.get(ROWS), left);
    // It goes on when it opens again.
    db.wait_for("SELECT next_run < now() + interval '25 hours' FROM ttl_summary", "t");
}

#[test]
fn a_worker_that_has_nothing_to_do_yet_does_nothing() {
    let server = server(&["pg_ttl_index.naptime=8s"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60, run_every => interval '1 day')");
    db.wait_for("SELECT total_rows_deleted, rows_removed FROM ttl_summary, ttl_history", "1000|1000");
    db.run(
        "CREATE TABLE bad (at timestamptz); INSERT INTO bad VALUES ('2020-01-01');
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM FROM public.nowhere; RETURN OLD; END';
         CREATE TRIGGER broken BEFORE DELETE ON bad FOR EACH ROW EXECUTE FUNCTION broken()",
    );
    db.run("SELECT ttl_create_index('bad', 'at', 60, run_every => interval '1 day')");
    db.wait_for("SELECT consecutive_failures >= 3 FROM ttl_summary WHERE table_name = 'bad'", "t");
    let pid = worker_pid(&mut db);
    db.run(&format!("SELECT pg_terminate_backend({pid})"));
    db.wait_for(
        &format!(
            "SELECT count(*) FROM ttl_worker_status() WHERE database_name = current_database() AND worker_pid <> {pid}"
        ),
        "1",
    );
    let commits =
        "SELECT pg_stat_clear_snapshot(); SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";
    let count = |db: &mut Database| db.get(commits).trim().parse::<u32>().expect("a number");
    let before = count(&mut db);
    db.run("SELECT pg_sleep(4)");
    let after = count(&mut db);
    assert!(after - before < 40, "{}", after - before);
}

#[test]
fn windows_go_by_the_clock_on_the_wall() {
    let mut db = Database::new();
    db.run("SET TimeZone = 'UTC'");
    let mut state = |window: &str, zone: &str, at: &str| {
        db.get(&format!("SELECT is_open, until FROM ttl_run_window('{window}', '{zone}', '{at}')"))
    };
    // Its edges, the first included and the last not, across midnight, and by days: 2026-11-16 is a Monday.
    assert_eq!(state("22:00-06:00", "Europe/Paris", "2026-11-16 20:59:59.9Z"), "f|2026-11-16 21:00:00+00");
    assert_eq!(state("22:00-06:00", "Europe/Paris", "2026-11-16 21:00:00Z"), "t|2026-11-17 05:00:00+00");
    assert_eq!(state("22:00-06:00", "Europe/Paris", "2026-11-17 04:59:59Z"), "t|2026-11-17 05:00:00+00");
    assert_eq!(state("22:00-06:00", "Europe/Paris", "2026-11-17 05:00:00Z"), "f|2026-11-17 21:00:00+00");
    assert_eq!(state("Mon-Fri 22:00-06:00 UTC", "Asia/Tokyo", "2026-11-21 03:00:00Z"), "t|2026-11-21 06:00:00+00");
    assert_eq!(state("Mon-Fri 22:00-06:00 UTC", "Asia/Tokyo", "2026-11-22 03:00:00Z"), "f|2026-11-23 22:00:00+00");
    // In New York clocks are put forward at 2:00 on 8 March 2026, and back at 2:00 on 1 November.
    let new_york = "America/New_York";
    assert_eq!(state("02:00-03:00", new_york, "2026-03-08 06:59:59Z"), "f|2026-03-08 07:00:00+00", "1:59:59");
    assert_eq!(
        state("02:00-03:00", new_york, "2026-03-08 07:00:00Z"),
        "f|2026-03-09 06:00:00+00",
        "3:00, and no 2:00 today"
    );
    assert_eq!(state("01:00-05:00", new_york, "2026-03-08 06:30:00Z"), "t|2026-03-08 09:00:00+00", "three hours long");
    assert_eq!(state("01:00-02:00", new_york, "2026-11-01 05:30:00Z").split('|').next(), Some("t"), "1:30, the first");
    assert_eq!(state("01:00-02:00", new_york, "2026-11-01 06:30:00Z"), "t|2026-11-01 07:00:00+00", "1:30, the second");
    assert_eq!(state("01:00-02:00", new_york, "2026-11-01 07:00:00Z").split('|').next(), Some("f"));
}

#[test]
fn what_is_no_time_is_refused() {
    refuses(
        "CREATE TABLE t (at timestamptz)",
        &[
            ("ttl_create_index('t', 'at', 60, run_every => interval '0')", "22023"),
            ("ttl_create_index('t', 'at', 60, run_every => interval '-1 hour')", "22023"),
            ("ttl_create_index('t', 'at', 60, run_window => 'at night')", "22023"),
            ("ttl_create_index('t', 'at', 60, run_window => '22:00-22:00')", "22023"),
            ("ttl_create_index('t', 'at', 60, run_window => '22:00-06:00 Nowhere/Land')", "22023"),
        ],
    );
}

#[test]
fn a_rule_without_an_index_rests_for_longer_than_it_reads() {
    let server = server(&[]);
    let mut db = database(&server);
    with_another_rule(&mut db);
    // Reading takes two seconds.
    db.run(
        "TRUNCATE t; INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 100) i;
         CREATE FUNCTION dawdle(int) RETURNS boolean LANGUAGE plpgsql STABLE AS
             'BEGIN PERFORM pg_sleep(0.02); RETURN false; END'",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, index_method => 'none', filter => 'dawdle(id)')");
    db.wait_for(
        "SELECT hold, next_run > now() + interval '15 seconds' FROM ttl_summary WHERE table_name = 't'",
        "index_method|t",
    );
    wait_for_a_pass(&mut db);
    // A rule that is changed is another rule.
    let started = Instant::now();
    db.run("SELECT ttl_alter_index('t', 'at', reset => '{filter}')");
    db.wait_for(ROWS, "0");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    db.wait_for("SELECT hold FROM ttl_summary WHERE table_name = 't'", "");
}
