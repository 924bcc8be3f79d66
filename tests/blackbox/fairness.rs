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
