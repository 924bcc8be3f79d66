//! What a worker does in its passes, and what it shows of it.

use crate::worker::{EXPIRED, ROWS, WORKERS, database, server, worker_pid};
use harness::Database;
use std::time::{Duration, Instant};

#[test]
fn a_failing_rule_is_logged_once_backs_off_and_harms_no_other() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run(
        "CREATE TABLE bad (at timestamptz); INSERT INTO bad VALUES ('2020-01-01');
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM FROM public.nowhere; RETURN OLD; END';
         CREATE TRIGGER broken BEFORE DELETE ON bad FOR EACH ROW EXECUTE FUNCTION broken()",
    );
    let pid = worker_pid(&mut db);
    db.run("SELECT ttl_create_index('bad', 'at', 60)");
    db.wait_for(
        "SELECT state, last_error, consecutive_failures >= 2 FROM ttl_summary",
        "error|42P01: relation \"public.nowhere\" does not exist|t",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for(ROWS, "0");
    assert_eq!(db.get("SELECT next_run > now() + interval '1 second' FROM ttl_summary WHERE table_name = 'bad'"), "t");
    assert_eq!(server.log().matches("relation \"public.nowhere\" does not exist").count(), 1);
    assert_eq!(worker_pid(&mut db), pid);
    db.run("DROP TRIGGER broken ON bad; SELECT ttl_pause('bad'), ttl_resume('bad')");
    db.wait_for("SELECT state, last_error, total_rows_deleted FROM ttl_summary WHERE table_name = 'bad'", "active||1");
}

#[test]
fn a_large_or_slow_rule_does_not_keep_the_others_waiting() {
    for max_workers in ["1", "2"] {
        let server = server(&[&format!("pg_ttl_index.max_workers={max_workers}")]);
        let mut db = database(&server);
        db.run("CREATE TABLE slow (id int, at timestamptz); INSERT INTO slow SELECT i, '2020-01-01' FROM generate_series(1, 200) i;
                CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.2); RETURN OLD; END';
                CREATE TRIGGER slow BEFORE DELETE ON slow FOR EACH ROW EXECUTE FUNCTION slow()");
        db.run(EXPIRED);
        db.run("SELECT ttl_create_index('slow', 'at', 60, 1)");
        db.wait_for("SELECT count(*) < 200 FROM slow", "t");
        let started = Instant::now();
        db.run("SELECT ttl_create_index('t', 'at', 60, 10)");
        db.wait_for(ROWS, "0");
        assert!(started.elapsed() < Duration::from_secs(15), "{:?} with {max_workers}", started.elapsed());
        assert_ne!(db.get("SELECT count(*) FROM slow"), "0");
        if max_workers == "2" {
            db.run("INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 10) i");
            db.wait_for(ROWS, "0");
            db.run("INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 10) i; SELECT ttl_pause('t'), ttl_resume('t')");
            db.wait_for(&WORKERS.replace("index worker", "index helper"), "1");
        }
    }
}

#[test]
fn an_idle_pass_assigns_no_transaction_id_and_writes_no_wal() {
    // The server itself writes what standbys would need from time to time, but not at this level.
    let server = server(&[
        "autovacuum=off",
        "bgwriter_lru_maxpages=0",
        "checkpoint_timeout=1h",
        "wal_level=minimal",
        "max_wal_senders=0",
    ]);
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    db.wait_for(WORKERS, "0");
    db.run(
        "DO $$ BEGIN FOR i IN 1..1000 LOOP
                EXECUTE format('CREATE TABLE t%s (at timestamptz); INSERT INTO t%s VALUES (now())', i, i);
                PERFORM ttl_create_index(format('t%s', i)::regclass, 'at', interval '1 day');
            END LOOP; END $$",
    );
    db.run("CHECKPOINT; SELECT ttl_start_worker()");
    db.wait_for(WORKERS, "1");
    // Two whole passes must have gone by since the first, which reads everything for the first time.
    let wait_for_passes = |db: &mut Database, count: i32| {
        for _ in 0..count {
            let before = db.get("SELECT ttl_next_pass()");
            db.wait_for(&format!("SELECT ttl_next_pass() > '{before}'"), "t");
        }
    };
    db.wait_for("SELECT next_run IS NOT NULL FROM ttl_summary() LIMIT 1", "t");
    wait_for_passes(&mut db, 2);
    let state = "SELECT pg_current_wal_insert_lsn(), pg_snapshot_xmax(pg_current_snapshot())";
    let before = db.get(state);
    wait_for_passes(&mut db, 2);
    assert_eq!(db.get(state), before);
}

#[test]
fn statistics_reach_autovacuum() {
    let server = server(&["autovacuum=off"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT n_tup_del, n_dead_tup FROM pg_stat_user_tables WHERE relname = 't'", "1000|1000");
}

#[test]
fn settings_of_database_and_role_neither_break_nor_redirect_a_worker() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let name = db.name.clone();
    for setting in [
        "default_transaction_read_only = on",
        "default_transaction_isolation = 'serializable'",
        "statement_timeout = '1ms'",
        "search_path = nowhere",
        "\"TimeZone\" = 'Asia/Tokyo'",
        "\"DateStyle\" = 'German, DMY'",
        "session_replication_role = replica",
        "enable_indexscan = off",
        "row_security = off",
        "lock_timeout = '1ms'",
    ] {
        db.run(&format!("ALTER DATABASE {name} SET {setting}; ALTER ROLE postgres IN DATABASE {name} SET {setting}"));
    }
    let pid = worker_pid(&mut db);
    db.run("CREATE TABLE child (id int); ALTER TABLE t ADD PRIMARY KEY (id); ALTER TABLE child ADD FOREIGN KEY (id) REFERENCES t;
            INSERT INTO child VALUES (7)");
    db.run(&format!("SELECT pg_terminate_backend({pid})"));
    db.wait_for(&format!("{WORKERS} AND worker_pid <> {pid}"), "1");
    db.run("SELECT ttl_create_index('t', 'at', 60, 100)");
    db.wait_for(ROWS, "1");
    db.wait_for("SELECT state, blocked_rows FROM ttl_summary", "blocked|1");
}

#[test]
fn history_is_pruned() {
    let server = server(&["pg_ttl_index.history_retention=1min"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for("SELECT count(*) FROM ttl_history", "1");
    db.run("UPDATE ttl_history_log SET finished_at = now() - interval '2 minutes', rows_removed = -1");
    db.run("INSERT INTO t VALUES (1, '2020-01-01')");
    db.wait_for("SELECT rows_removed FROM ttl_history", "1");
}

#[test]
fn steady_inserts_of_short_lived_rows_do_not_keep_a_sweep_from_ending() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run("CREATE TABLE a (at timestamptz DEFAULT now()); CREATE TABLE b (at timestamptz DEFAULT now())");
    db.run("SELECT ttl_create_index('a', 'at', interval '100 ms', 100), ttl_create_index('b', 'at', interval '100 ms', 100)");
    let mut writer = db.session("postgres");
    let until = Instant::now() + Duration::from_secs(6);
    let mut written = 0;
    while Instant::now() < until {
        writer
            .run("INSERT INTO a SELECT FROM generate_series(1, 15); INSERT INTO b SELECT FROM generate_series(1, 15)");
        written += 15;
        std::thread::sleep(Duration::from_millis(10));
    }
    for table in ["a", "b"] {
        let swept = format!("SELECT count(*) >= 3 FROM ttl_history WHERE table_name = '{table}' AND status = 'done'");
        assert_eq!(db.get(&swept), "t", "{table}");
        db.wait_for(&format!("SELECT count(*) FROM {table}"), "0");
        db.wait_for(
            &format!("SELECT total_rows_deleted FROM ttl_summary WHERE table_name = '{table}'"),
            &written.to_string(),
        );
    }
}

#[test]
fn progress_is_visible_to_those_who_may_see_the_rule() {
    let mut db = Database::new();
    let (owner, stranger) = (db.role("owner"), db.role("stranger"));
    let mut session = db.session(&owner);
    session.run("CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 300) i;
                 CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.1); RETURN OLD; END';
                 CREATE TRIGGER slow BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION slow();
                 SELECT ttl_create_index('t', 'at', 60, 5)");
    session.wait_for(
        "SELECT table_name, phase, rows_removed > 0, rows_per_second > 0 FROM ttl_progress",
        "t|removing|t|t",
    );
    assert_eq!(db.session(&stranger).get("SELECT count(*) FROM ttl_progress"), "0");
    assert_eq!(db.session(&stranger).get("SELECT count(*) FROM ttl_progress_slots()"), "0");
    session.run("SELECT ttl_pause('t')");
    session.wait_for("SELECT count(*) FROM ttl_progress", "0");
    assert_ne!(session.get(ROWS), "0", "a pause stops a sweep within a batch");
}

#[test]
fn code_that_never_ends_fails_its_rule_and_not_the_others() {
    let server = server(&["pg_ttl_index.batch_timeout=1s"]);
    let mut db = database(&server);
    db.run(
        "CREATE TABLE stuck (at timestamptz); INSERT INTO stuck VALUES ('2020-01-01');
            CREATE FUNCTION stuck() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1000); RETURN OLD; END';
            CREATE TRIGGER stuck BEFORE DELETE ON stuck FOR EACH ROW EXECUTE FUNCTION stuck()",
    );
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('stuck', 'at', 60), ttl_create_index('t', 'at', 60)");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT state, left(last_error, 5) FROM ttl_summary WHERE table_name = 'stuck'", "error|57014");
}

#[test]
fn a_rule_that_failed_is_tried_again_in_time_and_not_with_the_next_pass() {
    // The naptime of this server is a minute.
    let mut db = Database::new();
    db.run("CREATE TABLE bad (at timestamptz, n int); INSERT INTO bad VALUES ('2020-01-01', 0)");
    db.run(
        "CREATE FUNCTION fail(regclass, jsonb) RETURNS void LANGUAGE plpgsql AS 'BEGIN PERFORM 1 FROM nowhere; END'",
    );
    db.run("SELECT ttl_create_index('bad', 'at', 60, on_expire => 'fail(regclass, jsonb)')");
    db.wait_for("SELECT consecutive_failures >= 3 FROM ttl_summary", "t");
    db.run("CREATE OR REPLACE FUNCTION fail(regclass, jsonb) RETURNS void LANGUAGE sql AS 'SELECT'");
    db.wait_for("SELECT count(*) FROM bad", "0");
}

#[test]
fn what_a_sweep_has_done_is_in_the_history_although_its_rule_is_locked() {
    let server = server(&["pg_ttl_index.batch_delay=20ms"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60, 10)");
    db.wait_for("SELECT count(*) < 1000 FROM t", "t");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT FROM ttl_index_table FOR UPDATE");
    let left: i64 = db.get(ROWS).parse().expect("a count");
    assert!(left > 0, "the sweep is not over");
    db.wait_for("SELECT initiator, status, rows_removed FROM ttl_history", &format!("worker|stopped|{}", 1000 - left));
    other.run("COMMIT");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT sum(rows_removed) FROM ttl_history", "1000");
}
