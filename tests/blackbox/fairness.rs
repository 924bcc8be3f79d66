//! Code of one owner decides neither when rows of others are swept nor what becomes of the worker it runs in.

use crate::worker::{EXPIRED, ROWS, database, server};
use harness::{Database, Session};
use std::time::{Duration, Instant};

/// A trigger that nothing but the end of its process ends.
const STUBBORN: &str = "CREATE FUNCTION stubborn() RETURNS trigger LANGUAGE plpgsql AS $$
     BEGIN LOOP BEGIN PERFORM pg_sleep(1000); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; END $$";
const ALL_WORKERS: &str = "SELECT count(*) FROM ttl_worker_status() WHERE database_name = current_database()";

/// A table with expired rows, and a trigger on it that calls the function.
fn table_with_trigger(session: &mut Session, table: &str, function: &str) {
    session.run(&format!(
        "CREATE TABLE {table} (id int, at timestamptz); INSERT INTO {table} SELECT i, '2020-01-01' FROM generate_series(1, 10) i;
         CREATE TRIGGER watch BEFORE DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"
    ));
}

fn rule(session: &mut Session, table: &str, batch_size: i32) {
    session.run(&format!("SELECT ttl_create_index('{table}', 'at', 60, {batch_size})"));
}

/// Tables of two owners beside that of the first, with and without a harmless trigger.
fn others(db: &mut Database) -> String {
    let alice = db.role("alice");
    let mut session = db.session(&alice);
    session.run("CREATE FUNCTION harmless() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'");
    table_with_trigger(&mut session, "hers", "harmless");
    db.run(EXPIRED);
    alice
}

#[test]
fn code_that_catches_every_cancel_is_ended_and_its_rule_alone_backs_off() {
    let server = server(&["pg_ttl_index.batch_timeout=1s"]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    let mut session = db.session(&mallory);
    session.run(STUBBORN);
    table_with_trigger(&mut session, "stuck", "stubborn");
    rule(&mut session, "stuck", 10);
    db.wait_for("SELECT count(*) FROM ttl_progress", "1");
    let alice = others(&mut db);
    rule(&mut db.session(&alice), "hers", 10);
    rule(&mut db, "t", 10);
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT count(*) FROM hers", "0");
    let state =
        "SELECT state, left(last_error, 5), consecutive_failures >= 2 FROM ttl_summary WHERE table_name = 'stuck'";
    db.wait_for(state, "error|57014|t");
    assert_eq!(db.get("SELECT count(*) FROM stuck"), "10");
    session.run("DROP TRIGGER watch ON stuck; SELECT ttl_pause('stuck'), ttl_resume('stuck')");
    db.wait_for("SELECT count(*) FROM stuck", "0");
    db.wait_for("SELECT state, last_error FROM ttl_summary WHERE table_name = 'stuck'", "active|");
}

#[test]
fn a_filter_that_catches_every_cancel_holds_up_nobody_either() {
    let server = server(&["pg_ttl_index.batch_timeout=1s"]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    let mut session = db.session(&mallory);
    session.run(
        "CREATE FUNCTION stubborn(int) RETURNS boolean STABLE LANGUAGE plpgsql AS $$
         BEGIN
             IF current_setting('application_name') NOT LIKE 'pg_ttl_index%' THEN RETURN true; END IF;
             LOOP BEGIN PERFORM pg_sleep(1000); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP;
         END $$;
         CREATE TABLE stuck (id int, at timestamptz); INSERT INTO stuck VALUES (1, '2020-01-01');
         SELECT ttl_create_index('stuck', 'at', 60, filter => 'stubborn(id)')",
    );
    db.wait_for("SELECT count(*) FROM ttl_progress", "1");
    let alice = others(&mut db);
    rule(&mut db.session(&alice), "hers", 10);
    rule(&mut db, "t", 10);
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT count(*) FROM hers", "0");
    db.wait_for("SELECT left(last_error, 5) FROM ttl_summary WHERE table_name = 'stuck'", "57014");
}

#[test]
fn code_that_catches_every_cancel_ends_when_sweeping_is_switched_off() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(STUBBORN);
    table_with_trigger(&mut db, "stuck", "stubborn");
    rule(&mut db, "stuck", 10);
    let is_stuck =
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_ttl_index%' AND wait_event = 'PgSleep'";
    db.wait_for(is_stuck, "1");
    db.run("SELECT ttl_stop_worker()");
    db.wait_for(ALL_WORKERS, "0");
    db.run("SELECT ttl_start_worker()");
    db.wait_for(is_stuck, "1");
    server.configure("pg_ttl_index.enabled", "off");
    db.wait_for(is_stuck, "0");
    assert_eq!(db.get("SELECT state FROM ttl_summary"), "active", "nobody says that the rule failed");
}

#[test]
fn slow_rules_of_one_owner_keep_those_of_others_waiting_for_seconds_only() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    let mut session = db.session(&mallory);
    session.run(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(20); RETURN OLD; END'",
    );
    for nth in 1..=5 {
        table_with_trigger(&mut session, &format!("slow{nth}"), "slow");
        rule(&mut session, &format!("slow{nth}"), 1);
    }
    db.wait_for("SELECT count(*) > 0 FROM ttl_progress", "t");
    let alice = others(&mut db);
    let started = Instant::now();
    rule(&mut db.session(&alice), "hers", 10);
    rule(&mut db, "t", 10);
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT count(*) FROM hers", "0");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    assert_ne!(db.get("SELECT count(*) FROM ttl_progress"), "0", "the slow ones are still at it");
}

#[test]
fn tables_that_one_owner_keeps_locked_do_not_hold_up_those_of_others() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    db.run("SELECT ttl_stop_worker()");
    let mut session = db.session(&mallory);
    let tables: Vec<_> = (1..=30).map(|nth| format!("locked{nth}")).collect();
    for table in &tables {
        session.run(&format!("CREATE TABLE {table} (at timestamptz); INSERT INTO {table} VALUES ('2020-01-01')"));
        rule(&mut session, table, 10);
    }
    session.run(&format!("BEGIN; LOCK {}", tables.join(", ")));
    db.run(EXPIRED);
    rule(&mut db, "t", 10);
    let started = Instant::now();
    db.run("SELECT ttl_start_worker()");
    db.wait_for(ROWS, "0");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
}

#[test]
fn rules_of_others_do_not_take_turns_with_those_whose_tables_are_locked() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    db.run("SELECT ttl_stop_worker()");
    let mut session = db.session(&mallory);
    let tables: Vec<_> = (1..=60).map(|nth| format!("locked{nth}")).collect();
    for (nth, table) in tables.iter().enumerate() {
        // What a filter means is read from the table, too.
        let filter = if nth % 2 == 0 { ", filter => 'n > 0'" } else { "" };
        session.run(&format!(
            "CREATE TABLE {table} (n int, at timestamptz); INSERT INTO {table} VALUES (1, '2020-01-01');
             SELECT ttl_create_index('{table}', 'at', 60{filter})"
        ));
    }
    for nth in 1..=30 {
        db.run(&format!("CREATE TABLE free{nth} (at timestamptz); INSERT INTO free{nth} VALUES ('2020-01-01')"));
        rule(&mut db, &format!("free{nth}"), 10);
    }
    session.run(&format!("BEGIN; LOCK {}", tables.join(", ")));
    let started = Instant::now();
    db.run("SELECT ttl_start_worker()");
    db.wait_for("SELECT count(*) FROM ttl_summary WHERE table_name LIKE 'free%' AND total_rows_deleted = 1", "30");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    session.run("ROLLBACK");
    db.wait_for("SELECT count(*) FROM ttl_summary WHERE total_rows_deleted = 1", "90");
}

#[test]
fn what_takes_long_to_read_holds_up_nobody() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    db.run("SELECT ttl_stop_worker()");
    let mut session = db.session(&mallory);
    // Each comparison unpacks its value, and calls no code of users.
    let filter = "v > ''a'' AND ".repeat(15) + "v < ''a''";
    session.run(&format!(
        "CREATE TABLE large (v text, at timestamptz); INSERT INTO large VALUES (repeat('x', 40000000), '2020-01-01');
         INSERT INTO large SELECT v, at FROM large, generate_series(1, 24);
         SELECT ttl_create_index('large', 'at', 60, filter => '{filter}', index_method => 'none')"
    ));
    for nth in 1..=8 {
        db.run(&format!("CREATE TABLE free{nth} (at timestamptz); INSERT INTO free{nth} VALUES ('2020-01-01')"));
        rule(&mut db, &format!("free{nth}"), 10);
    }
    db.run("SELECT ttl_start_worker()");
    let (mut worst, mut last) = (Duration::ZERO, Instant::now());
    let swept = "SELECT count(*) FROM ttl_summary WHERE table_name LIKE 'free%' AND total_rows_deleted > 0";
    let mut seen = db.get(swept);
    while seen != "8" {
        let now = db.get(swept);
        if now != seen {
            (worst, last, seen) = (worst.max(last.elapsed()), Instant::now(), now);
        }
        assert!(last.elapsed() < Duration::from_secs(30), "{seen} of 8 were swept");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(worst < Duration::from_secs(8), "{worst:?}");
}

#[test]
fn a_long_batch_does_not_keep_a_database_from_being_dropped() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(STUBBORN);
    table_with_trigger(&mut db, "stuck", "stubborn");
    rule(&mut db, "stuck", 10);
    db.wait_for(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_ttl_index%' AND wait_event = 'PgSleep'",
        "1",
    );
    let name = db.name.clone();
    db.release();
    Session::connect(&server, "postgres", "postgres").run(&format!("DROP DATABASE {name}"));
}

#[test]
fn an_index_that_is_never_finished_keeps_nobody_from_beginning_another_or_dropping_the_rule() {
    let server = server(&["pg_ttl_index.max_workers=1"]);
    let mut db = database(&server);
    let (mallory, alice) = (db.role("mallory"), db.role("alice"));
    let mut session = db.session(&mallory);
    session.run(
        "CREATE FUNCTION stubborn(int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$
         BEGIN
             IF current_setting('application_name') NOT LIKE 'pg_ttl_index%' THEN RETURN true; END IF;
             LOOP BEGIN PERFORM pg_sleep(1000); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP;
         END $$;
         CREATE TABLE stuck (id int, at timestamptz); INSERT INTO stuck VALUES (1, now());
         SELECT ttl_create_index('stuck', 'at', 60, filter => 'stubborn(id)', concurrently => true)",
    );
    db.wait_for("SELECT count(*) FROM ttl_progress WHERE phase = 'building'", "1");
    db.session(&alice)
        .run("CREATE TABLE hers (at timestamptz); SELECT ttl_create_index('hers', 'at', 60, concurrently => true)");
    // PostgreSQL itself waits for all transactions before an index is valid, and so for the one that is stuck.
    db.wait_for("SELECT count(*) FROM ttl_progress WHERE phase = 'building'", "2");
    session.run("SELECT ttl_drop_index('stuck', 'at')");
    db.wait_for("SELECT index_state FROM ttl_summary", "valid");
}

#[test]
fn builders_that_wait_give_their_processes_to_what_sweeps() {
    // One is the launcher's, one PostgreSQL's own for replication.
    let server = server(&["max_worker_processes=4"]);
    let mut building = database(&server);
    building.run("CREATE TABLE b (id int, at timestamptz); INSERT INTO b VALUES (1, now())");
    let mut idle = building.session("postgres");
    idle.run("BEGIN; INSERT INTO b VALUES (2, now())");
    building.run("SELECT ttl_create_index('b', 'at', interval '1 hour', concurrently => true)");
    building.wait_for("SELECT count(*) FROM ttl_progress WHERE phase = 'building'", "1");
    let mut other = database(&server);
    other.run(EXPIRED);
    rule(&mut other, "t", 10);
    other.wait_for(ROWS, "0");
    // A helper of its own database has one before it, too.
    other.run("SELECT ttl_drop_index('t', 'at')");
    building.wait_for("SELECT count(*) FROM ttl_progress WHERE phase = 'building'", "1");
    building.run("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'");
    table_with_trigger(&mut building, "t", "nothing");
    rule(&mut building, "t", 10);
    building.wait_for(ROWS, "0");
    idle.run("COMMIT");
    building.wait_for("SELECT index_state FROM ttl_summary WHERE table_name = 'b'", "valid");
}

#[test]
fn builders_that_run_code_of_users_give_their_processes_up_too() {
    let server = server(&["max_worker_processes=4"]);
    let mut building = database(&server);
    building.run(
        "CREATE FUNCTION slow(timestamptz) RETURNS timestamptz IMMUTABLE LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_sleep(100000); RETURN $1; END';
         CREATE TABLE b (at timestamptz); INSERT INTO b VALUES (now());
         SELECT ttl_create_index('b', 'slow(at)', 60, concurrently => true, run_window => '00:00-00:01')",
    );
    building.wait_for("SELECT count(*) FROM ttl_progress WHERE phase = 'building'", "1");
    let mut other = database(&server);
    other.run(EXPIRED);
    rule(&mut other, "t", 10);
    other.wait_for(ROWS, "0");
}

#[test]
fn rules_that_cannot_be_swept_and_are_locked_hold_up_nobody_and_do_not_fill_the_log() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    let mut session = db.session(&mallory);
    session.run(
        "DO $$ BEGIN FOR i IN 1..150 LOOP
             EXECUTE format('CREATE TABLE b%s (at timestamptz, n int)', i);
             PERFORM ttl_create_index(format('b%s', i)::regclass, 'at', 60, filter => 'n > 0', index_method => 'none');
         END LOOP; END $$;
         DO $$ BEGIN FOR i IN 1..150 LOOP EXECUTE format('ALTER TABLE b%s DROP n', i); END LOOP; END $$",
    );
    session.run("BEGIN; SELECT sum(ttl_pause(format('b%s', i)::regclass)) FROM generate_series(1, 150) i");
    db.run(EXPIRED);
    let before = server.log().lines().count();
    let started = Instant::now();
    rule(&mut db, "t", 1000);
    db.wait_for(ROWS, "0");
    for _ in 0..3 {
        db.run("INSERT INTO t VALUES (1, '2020-01-01')");
        db.wait_for(ROWS, "0");
    }
    assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
    let lines = server.log().lines().count() - before;
    assert!(lines < 20, "{lines} lines in the log");
}

#[test]
fn changing_rules_all_the_time_holds_up_nobody() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    let mut session = db.session(&mallory);
    session.run(
        "DO $$ BEGIN FOR i IN 1..300 LOOP
             EXECUTE format('CREATE TABLE s%s (at timestamptz)', i);
             PERFORM ttl_create_index(format('s%s', i)::regclass, 'at', 60, index_method => 'none');
         END LOOP; END $$",
    );
    for nth in 1..=10 {
        db.run(&format!("CREATE TABLE v{nth} (at timestamptz)"));
        rule(&mut db, &format!("v{nth}"), 10);
    }
    let until = Instant::now() + Duration::from_secs(8);
    let spam = std::thread::spawn(move || {
        while Instant::now() < until {
            session.run("SELECT ttl_alter_index('s1', 'at', batch_size => 7)");
        }
    });
    let mut worst = Duration::ZERO;
    while !spam.is_finished() {
        let started = Instant::now();
        db.run("INSERT INTO v5 VALUES ('2020-01-01')");
        db.wait_for("SELECT count(*) FROM v5", "0");
        worst = worst.max(started.elapsed());
    }
    spam.join().expect("a thread");
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[test]
fn what_user_code_leaves_in_a_worker_is_gone_after_each_batch() {
    let server = server(&[]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    db.run("CREATE TABLE seen (id serial, what text); GRANT ALL ON seen, seen_id_seq TO PUBLIC");
    let name = db.name.clone();
    db.run(&format!("GRANT ALL ON DATABASE {name} TO PUBLIC"));
    let mut session = db.session(&mallory);
    session.run(
        "CREATE FUNCTION litter() RETURNS trigger LANGUAGE plpgsql AS $$
         DECLARE
             deed text;
         BEGIN
             INSERT INTO public.seen (what) SELECT concat_ws(' ',
                 (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objid = 42),
                 (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors WHERE is_holdable),
                 (SELECT count(*) FROM pg_listening_channels()),
                 (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()),
                 (SELECT count(*) FROM pg_proc WHERE pronamespace = pg_my_temp_schema()),
                 (SELECT count(*) FROM pg_type WHERE typnamespace = pg_my_temp_schema()),
                 current_setting('work_mem'), current_setting('litter.left', true));
             FOREACH deed IN ARRAY ARRAY['SELECT pg_advisory_lock(42)', 'SELECT pg_advisory_lock_shared(42)', 'PREPARE p AS SELECT 1',
                 'CREATE TEMP TABLE left_behind ()', 'LISTEN left_behind', 'SET work_mem = ''64kB''', 'SET litter.left = ''yes''',
                 'CREATE FUNCTION pg_temp.left_behind() RETURNS int LANGUAGE sql AS ''SELECT 1''',
                 'CREATE TYPE pg_temp.left_behind AS ENUM ()', 'DECLARE c CURSOR WITH HOLD FOR SELECT 1']
             LOOP
                 BEGIN EXECUTE deed; EXCEPTION WHEN OTHERS THEN NULL; END;
             END LOOP;
             RETURN OLD;
         END $$",
    );
    table_with_trigger(&mut session, "t", "litter");
    rule(&mut session, "t", 1);
    db.wait_for(ROWS, "0");
    assert_eq!(db.get("SELECT count(*), string_agg(DISTINCT what, ',') FROM seen"), "10|0 0 0 0 0 0 0 4MB");
    db.wait_for("SELECT pg_try_advisory_lock(42)", "t");
}

#[test]
fn locked_rules_hold_up_nobodys_ddl_however_many_they_are() {
    let mut db = Database::new();
    let (author, mallory) = (db.role("author"), db.role("mallory"));
    let mut author = db.session(&author);
    author.run("CREATE TYPE kind AS ENUM ('a', 'b')");
    db.run("SELECT ttl_stop_worker(); CREATE FUNCTION stale(timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT true'");
    let mut mallory = db.session(&mallory);
    mallory.run(
        "DO $$ BEGIN FOR i IN 1..100 LOOP
             EXECUTE format('CREATE TABLE m%s (at timestamptz, k kind)', i);
             PERFORM ttl_create_index(format('m%s', i)::regclass, 'at', 60, filter => 'k = ''a'' AND stale(at)', index_method => 'none');
         END LOOP; END $$",
    );
    mallory.run("BEGIN; SELECT sum(ttl_pause(format('m%s', i)::regclass)) FROM generate_series(1, 100) i");
    let started = Instant::now();
    author.run("SET statement_timeout = '60s'; ALTER TYPE kind RENAME VALUE 'a' TO 'aa'");
    let locked = started.elapsed();
    db.run("SET statement_timeout = '60s'; CREATE OR REPLACE FUNCTION stale(timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT 1 = 1'");
    mallory.run("COMMIT");
    // Waiting for each of them would take five seconds more, or for ever.
    let started = Instant::now();
    author.run("ALTER TYPE kind RENAME VALUE 'b' TO 'bb'");
    let free = started.elapsed();
    assert!(locked < 2 * free + Duration::from_secs(3), "{locked:?} beside {free:?}");
    // They notice when they are swept.
    mallory.run("INSERT INTO m1 VALUES ('2020-01-01', 'aa'); SELECT ttl_resume('m1')");
    mallory.error("SELECT ttl_runner('m1')");
    assert_eq!(mallory.get("SELECT count(*) FROM m1"), "1");
}
