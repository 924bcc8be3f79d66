//! How a sweep goes through a table: by an index, by what a BRIN index leaves over, or by blocks.

use crate::sweep::with;
use crate::worker::{database, server};
use harness::{Database, Session};
use std::time::{Duration, Instant};

/// 200,000 rows, one a second, the last of them now; `place` of row `i` says where in this order it is.
fn rows(place: &str) -> Database {
    let mut db = with(&format!(
        "CREATE TABLE t (id int, at timestamptz, pad text DEFAULT repeat('x', 100)) WITH (autovacuum_enabled = off);
         INSERT INTO t SELECT i, now() - (200000 - {place}) * interval '1 second' FROM generate_series(1, 200000) AS i"
    ));
    db.run("VACUUM ANALYZE t");
    db
}

/// How many blocks of the heap a sweep reads.
fn blocks_read_by_sweep(db: &mut Database) -> i64 {
    let before = blocks_read(db);
    db.run("CALL ttl_sweep('t')");
    blocks_read(db) - before
}

fn blocks_read(db: &mut Database) -> i64 {
    db.run("SELECT pg_stat_force_next_flush()");
    let sql = "SELECT heap_blks_read + heap_blks_hit FROM pg_statio_user_tables WHERE relname = 't'";
    db.get(sql).parse().expect("a number")
}

fn plan(db: &mut Database) -> String {
    db.get("SELECT plan FROM ttl_preview('t')")
}

fn last_plan(db: &mut Database) -> String {
    db.get("SELECT plan FROM ttl_history ORDER BY id DESC LIMIT 1")
}

#[test]
fn brin_leaves_out_the_blocks_without_expired_rows() {
    let mut db = rows("i");
    let blocks: i64 = db.get("SELECT pg_relation_size('t') / 8192").parse().expect("a number");
    db.run("SELECT ttl_create_index('t', 'at', interval '1 year', index_method => 'brin')");
    assert_eq!(plan(&mut db), "rows by block ranges");
    let read = blocks_read_by_sweep(&mut db);
    assert!(read < blocks / 10, "{read} of {blocks} blocks");
    db.run("SELECT ttl_alter_index('t', 'at', expire_after => interval '190000 seconds')");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*) < 190010, min(id) > 9990 FROM t"), "t|t");
    assert_eq!(last_plan(&mut db), "rows by block ranges");
    // Blocks that nobody has summarized yet are not left out.
    db.run("INSERT INTO t SELECT i, now() - interval '1 year' FROM generate_series(200001, 210000) AS i");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE id > 200000"), "0");
}

#[test]
fn brin_leaves_out_the_blocks_whose_expired_rows_are_gone() {
    let mut db = rows("i");
    db.run("SELECT ttl_create_index('t', 'at', interval '100000 seconds', index_method => 'brin')");
    db.run("CALL ttl_sweep('t')");
    assert!(blocks_read_by_sweep(&mut db) > 1000, "the summaries are those of the rows that are gone");
    // An old snapshot keeps vacuum from cleaning the blocks, and a sweep summarizes for half a second at most.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        db.run("VACUUM t");
        db.run("CALL ttl_sweep('t')");
        let read = blocks_read_by_sweep(&mut db);
        if read < 500 {
            break;
        }
        assert!(Instant::now() < deadline, "{read} blocks");
    }
    // A range whose rows are summarized again is read again when it has expired rows.
    db.run("INSERT INTO t SELECT i, now() - interval '1 year' FROM generate_series(200001, 210000) AS i");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE id > 200000"), "0");
}

/// How many bytes of WAL idle sweeps write.
fn written_by_idle_sweeps(db: &mut Database) -> i64 {
    db.run("CALL ttl_sweep('t')");
    db.run("VACUUM t");
    // The first one summarizes.
    db.run("CALL ttl_sweep('t')");
    let before = db.get("SELECT pg_current_wal_insert_lsn()");
    for _ in 0..3 {
        db.run("CALL ttl_sweep('t')");
    }
    db.get(&format!("SELECT pg_current_wal_insert_lsn() - '{before}'")).parse().expect("a number")
}

#[test]
fn a_brin_index_that_can_rule_out_no_more_is_left_as_it_is() {
    let server = server(&["autovacuum=off", "pg_ttl_index.enabled=off"]);
    for (index, options) in [
        ("CREATE INDEX ON t USING brin (at)", "filter => 'id % 2 = 0'"),
        ("CREATE INDEX ON t USING brin (at) WHERE id > 0", "filter => 'id > 0 AND id % 2 = 0'"),
        ("CREATE INDEX ON t USING brin (at) WHERE id % 2 = 0", "filter => 'id % 2 = 0'"),
        ("CREATE INDEX ON t USING brin (at)", "soft_delete_column => 'deleted'"),
        ("CREATE INDEX ON t USING brin (at) WHERE deleted IS NULL", "soft_delete_column => 'deleted'"),
    ] {
        let mut db = database(&server);
        db.run(
            "CREATE TABLE t (id int, at bigint, deleted timestamptz);
             INSERT INTO t SELECT i, CASE WHEN i % 3 = 0 THEN 0 ELSE 1 + i % 2 * 4e9 END FROM generate_series(1, 50000) i",
        );
        db.run(index);
        db.run("VACUUM ANALYZE t");
        db.run(&format!("SELECT ttl_create_index('t', 'at', 0, unit => 's', index_method => 'none', {options})"));
        assert_eq!(plan(&mut db), "rows by block ranges", "{index} {options}");
        assert_eq!(written_by_idle_sweeps(&mut db), 0, "{index} {options}");
        db.run("SELECT ttl_drop_index('t', 'at')");
    }
}

#[test]
fn an_owner_who_may_not_summarize_sweeps_all_the_same() {
    let mut db = rows("i");
    let owner = db.role("owner");
    db.run(&format!("ALTER TABLE t OWNER TO {owner}"));
    db.run(
        "REVOKE EXECUTE ON FUNCTION brin_summarize_range(regclass, bigint), brin_desummarize_range(regclass, bigint) FROM PUBLIC",
    );
    db.run("SELECT ttl_create_index('t', 'at', interval '100000 seconds', index_method => 'brin')");
    for _ in 0..2 {
        db.run("CALL ttl_sweep('t')");
        db.run("VACUUM t");
    }
    assert_eq!(db.get("SELECT state, last_error IS NULL FROM ttl_summary"), "active|t");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE at <= now() - interval '100010 seconds'"), "0");
}

#[test]
fn any_brin_index_on_the_column_serves_a_rule_without_an_index() {
    let mut db = rows("i");
    db.run("SELECT ttl_create_index('t', 'at', interval '190000 seconds', index_method => 'none')");
    assert_eq!(plan(&mut db), "rows by blocks");
    db.run("CREATE INDEX ON t USING brin (at)");
    assert_eq!(plan(&mut db), "rows by block ranges");
}

#[test]
fn a_heap_that_is_not_in_expiry_order_is_swept_by_blocks() {
    let mut db = rows("(i::bigint * 31415 % 200000)");
    db.run("SELECT ttl_create_index('t', 'at', interval '100000 seconds')");
    assert_eq!(plan(&mut db), "rows by blocks");
    db.run("CREATE TABLE live AS SELECT id FROM t WHERE at > now() - interval '99990 seconds'");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(last_plan(&mut db), "rows by blocks");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE at <= now() - interval '100010 seconds'"), "0");
    assert_eq!(db.get("SELECT count(*) FROM live WHERE id NOT IN (SELECT id FROM t)"), "0");
    // Next to nothing has expired now: the index tells so, whatever the statistics say.
    db.run("VACUUM t");
    let read = blocks_read_by_sweep(&mut db);
    assert!(read < 500, "{read} blocks");
    assert_eq!(plan(&mut db), "rows by index");
}

#[test]
fn a_heap_in_expiry_order_or_with_a_limit_is_swept_by_its_index() {
    let mut db = rows("i");
    // Where half of the rows have expired, reading the others costs less than the index.
    for (age, expected) in [(150000, "rows by index"), (100000, "rows by blocks")] {
        db.run(&format!("SELECT ttl_create_index('t', 'at', interval '{age} seconds')"));
        assert_eq!(plan(&mut db), expected);
    }
    let mut db = rows("(i::bigint * 31415 % 200000)");
    db.run("SELECT ttl_create_index('t', 'at', interval '100000 seconds', max_rows_per_run => 20000)");
    assert_eq!(plan(&mut db), "rows by index");
    let oldest = db.get("SELECT min(at) + interval '20001 seconds' FROM t");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(
        db.get(&format!("SELECT count(*), min(at) >= '{oldest}'::timestamptz - interval '2 seconds' FROM t")),
        "180000|t"
    );
}

#[test]
fn a_developer_can_choose_how_sweeps_go() {
    for (scan, expected) in [("index", "rows by index"), ("blocks", "rows by blocks")] {
        let mut db = rows("(i::bigint * 31415 % 200000)");
        db.run("SELECT ttl_create_index('t', 'at', interval '100000 seconds')");
        db.run(&format!("SET pg_ttl_index.debug_scan = {scan}"));
        assert_eq!(plan(&mut db), expected);
        db.run("CALL ttl_sweep('t')");
        assert_eq!(last_plan(&mut db), expected);
        assert_eq!(db.get("SELECT count(*) FROM t WHERE at <= now() - interval '100010 seconds'"), "0");
        assert_eq!(db.get("SELECT count(*) >= 99990 FROM t"), "t");
    }
}

/// A table whose rows go by SQL, because of a trigger that `keeps` a row or none, in more batches than one.
fn with_trigger(keeps: &str) -> Database {
    with(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int DEFAULT 0);
         INSERT INTO t SELECT i, now() - interval '2 days' + i * interval '1 second' FROM generate_series(1, 5000) i;
         CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN IF {keeps} THEN RETURN NULL; END IF; RETURN OLD; END';
         CREATE TRIGGER guard BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION guard();
         SELECT ttl_create_index('t', 'at', interval '1 day', 100)"
    ))
}

#[test]
fn a_row_that_another_session_holds_is_left_where_a_statement_finds_its_rows_itself() {
    let mut db = with_trigger("false");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT FROM t WHERE id = 2500 FOR UPDATE");
    let started = Instant::now();
    db.run("CALL ttl_sweep('t')");
    assert!(started.elapsed() < Duration::from_secs(20), "nobody waits for the other session");
    assert_eq!(db.get("SELECT array_agg(id) FROM t"), "{2500}");
    assert_eq!(db.get("SELECT locked_rows, blocked_rows, last_error FROM ttl_summary"), "1|0|");
    other.run("UPDATE t SET at = now(); COMMIT");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT array_agg(id) FROM t"), "{2500}", "it lives now");
    assert_eq!(db.get("SELECT sum(rows_removed) FROM ttl_history"), "4999");
}

#[test]
fn a_row_that_a_trigger_keeps_keeps_no_other_where_a_statement_finds_its_rows_itself() {
    let mut db = with_trigger("OLD.id = 2500");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT array_agg(id) FROM t"), "{2500}");
    assert_eq!(db.get("SELECT blocked_rows, state FROM ttl_summary"), "1|blocked");
    assert_eq!(db.get("SELECT rows_removed FROM ttl_history"), "4999");
}

#[test]
fn a_batch_takes_as_many_rows_as_fit_into_the_target_time() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz);
         INSERT INTO t SELECT i, now() - interval '2 days' + i * interval '1 millisecond' FROM generate_series(1, 150000) i;
         CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_sleep(0.0005); RETURN OLD; END'",
    );
    db.run("SELECT ttl_create_index('t', 'at', interval '1 day')");
    db.run("CALL ttl_sweep('t', 100000)");
    let batches: i32 = db.get("SELECT batches FROM ttl_history").parse().expect("a number");
    assert!(batches < 60, "{batches} batches: they grow while rows go fast");
    db.run("CREATE TRIGGER dawdle BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION dawdle()");
    db.run("CALL ttl_sweep('t', max_time => interval '3 seconds')");
    let line = db.get("SELECT batches, rows_removed FROM ttl_history ORDER BY id DESC LIMIT 1");
    let (batches, rows) = line.split_once('|').expect("two columns");
    let (batches, rows): (i32, i32) = (batches.parse().expect("a number"), rows.parse().expect("a number"));
    assert!(batches >= 6 && rows / batches < 500, "{batches} batches of {rows} rows that take half a millisecond each");
}

#[test]
fn a_crash_in_the_middle_of_a_sweep_loses_nothing_whatever_the_plan() {
    let trigger = "CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
                   CREATE TRIGGER watch BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION watch()";
    let ways = [("btree", "index", ""), ("btree", "blocks", ""), ("brin", "auto", ""), ("btree", "auto", trigger)];
    for (method, scan, also) in ways {
        let server = server(&[&format!("pg_ttl_index.debug_scan={scan}")]);
        let mut session = Session::connect(&server, "postgres", "postgres");
        session.run(
            "CREATE EXTENSION pg_ttl_index; CREATE EXTENSION amcheck; CREATE TABLE t (id int PRIMARY KEY, at timestamptz);
             INSERT INTO t SELECT i, CASE WHEN i % 100 = 0 THEN 'infinity' ELSE now() - interval '1 year' + i * interval '1 second' END
             FROM generate_series(1, 60000) i",
        );
        if !also.is_empty() {
            session.run(also);
        }
        session.run(&format!("SELECT ttl_create_index('t', 'at', interval '1 day', 20, index_method => '{method}')"));
        session.wait_for("SELECT count(*) < 55000 FROM t", "t");
        let victim = session.get("SELECT coalesce((SELECT pid FROM ttl_progress LIMIT 1), pg_backend_pid())");
        harness::run(std::process::Command::new("kill").args(["-9", &victim]));
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_back =
            || server.log().contains("reinitializing") && Session::try_connect(&server, "postgres", "postgres").is_ok();
        while !is_back() {
            assert!(Instant::now() < deadline, "the server did not come back");
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut session = Session::connect(&server, "postgres", "postgres");
        session.wait_for("SELECT count(*) FROM t WHERE at < 'infinity'", "0");
        assert_eq!(session.get("SELECT count(*), min(id) FROM t"), "600|100", "{method} {scan}");
        let counted = "SELECT total_rows_deleted FROM ttl_summary";
        assert_eq!(session.get(counted), "59400", "{method} {scan}: a batch is counted if it is committed");
        session.run("SELECT bt_index_check('t_pkey', true)");
        assert_eq!(session.get("SELECT count(*) FROM verify_heapam('t')"), "0", "{method} {scan}");
    }
}
