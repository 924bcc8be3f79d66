//! Rows that cannot be removed: they are remembered, tried again at growing intervals, and cost next to nothing meanwhile.

use crate::sweep::with;
use crate::worker::{database, server};
use harness::Database;
use std::time::{Duration, Instant};

const STATE: &str = "SELECT state, blocked_rows, left(last_error, 5) FROM ttl_summary";

/// Parents that expired long ago, all of them referenced.
const REFERENCED: &str = "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz);
    CREATE TABLE child (parent int CONSTRAINT points REFERENCES parent);
    INSERT INTO parent SELECT i, '2020-01-01'::timestamptz + i * interval '1 second' FROM generate_series(1, 2000) i;
    INSERT INTO child SELECT id FROM parent; CREATE INDEX ON child (parent)";

fn transactions(db: &mut Database) -> i64 {
    db.get("SELECT pg_snapshot_xmax(pg_current_snapshot())").parse().expect("a number")
}

/// Waits until the worker has begun so many more passes.
fn wait_for_passes(db: &mut Database, count: usize) {
    for _ in 0..count {
        let before = db.get("SELECT ttl_next_pass()");
        db.wait_for(&format!("SELECT ttl_next_pass() > '{before}'"), "t");
    }
}

#[test]
fn blocked_rows_cost_next_to_nothing_from_pass_to_pass() {
    for index in ["btree", "none"] {
        let server = server(&["autovacuum=off"]);
        let mut db = database(&server);
        db.run(REFERENCED);
        db.run(&format!("SELECT ttl_create_index('parent', 'at', 60, index_method => '{index}')"));
        db.wait_for(STATE, "blocked|2000|23503");
        let before = transactions(&mut db);
        wait_for_passes(&mut db, 10);
        let used = transactions(&mut db) - before;
        assert!(used < 4 * 2200, "{used} transaction ids in ten passes, {index}");
        // Others go as ever, and the blocked ones are still told of.
        db.run("INSERT INTO parent SELECT i, now() - interval '1 day' FROM generate_series(3001, 3100) i");
        db.wait_for("SELECT total_rows_deleted FROM ttl_summary", "100");
        db.wait_for(STATE, "blocked|2000|23503");
        // A session that asks tries all of them.
        db.run("DELETE FROM child WHERE parent <= 500");
        db.run("SELECT ttl_runner('parent')");
        assert_eq!(db.get("SELECT count(*) FROM parent"), "1500", "{index}");
        // And so does the worker, after a while.
        db.run("DELETE FROM child");
        db.wait_for("SELECT count(*) FROM parent", "0");
        db.wait_for(STATE, "active|0|");
    }
}

#[test]
fn a_limit_does_not_have_blocked_rows_tried_in_every_sweep() {
    let server = server(&["autovacuum=off"]);
    let mut db = database(&server);
    db.run(REFERENCED);
    db.run("INSERT INTO parent SELECT i, now() - interval '1 day' + i * interval '1 second' FROM generate_series(3001, 3500) i");
    db.run("SELECT ttl_create_index('parent', 'at', 60, max_rows_per_run => 10)");
    db.wait_for("SELECT total_rows_deleted >= 20, blocked_rows FROM ttl_summary", "t|2000");
    let before = transactions(&mut db);
    wait_for_passes(&mut db, 8);
    let used = transactions(&mut db) - before;
    assert!(used < 3 * 2200, "{used} transaction ids in eight passes");
    db.wait_for("SELECT blocked_rows, total_rows_deleted >= 40 FROM ttl_summary", "2000|t");
}

#[test]
fn more_blocked_rows_are_added_and_all_are_tried_in_the_end() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(REFERENCED);
    db.run("SELECT ttl_create_index('parent', 'at', 60)");
    db.wait_for(STATE, "blocked|2000|23503");
    db.run("BEGIN; INSERT INTO parent SELECT i, now() - interval '1 day' FROM generate_series(3001, 3005) i; INSERT INTO child VALUES (3002), (3004); COMMIT");
    db.wait_for(STATE, "blocked|2002|23503");
    // One that comes late, and is older than those, waits until they are tried again.
    db.run("INSERT INTO parent VALUES (4000, '2020-01-01')");
    db.wait_for("SELECT count(*) FROM parent WHERE id = 4000", "0");
    db.wait_for(STATE, "blocked|2002|23503");
}

#[test]
fn blocked_rows_are_tried_at_once_when_the_rule_or_the_table_changes() {
    for change in [
        "DELETE FROM child; SELECT ttl_pause('parent'), ttl_resume('parent')",
        "DELETE FROM child; SELECT ttl_alter_index('parent', 'at', expire_after_seconds => 61)",
        "ALTER TABLE child DROP CONSTRAINT points",
        "DROP TABLE child",
    ] {
        let server = server(&[]);
        let mut db = database(&server);
        db.run(REFERENCED);
        db.run("SELECT ttl_create_index('parent', 'at', 60)");
        db.wait_for(STATE, "blocked|2000|23503");
        db.run("UPDATE ttl_index_table SET blocked_retry_at = now() + interval '1 day'");
        wait_for_passes(&mut db, 2);
        assert_eq!(db.get("SELECT blocked_retry_at > now() + interval '1 hour' FROM ttl_index_table"), "t", "{change}");
        db.run(change);
        db.wait_for("SELECT count(*) FROM parent", "0");
        db.wait_for(STATE, "active|0|");
        assert_eq!(db.get("SELECT blocked_retry_at, blocked_tries FROM ttl_index_table"), "|0");
    }
}

#[test]
fn a_row_that_others_hold_is_not_kept_waiting_with_the_blocked_ones() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(REFERENCED);
    db.run("DELETE FROM child WHERE parent = 7; UPDATE ttl_index_table SET active = true");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT FROM parent WHERE id = 7 FOR UPDATE");
    db.run("SELECT ttl_create_index('parent', 'at', 60)");
    db.wait_for("SELECT blocked_rows, locked_rows FROM ttl_summary", "1999|1");
    // However often that was tried.
    db.run("UPDATE ttl_index_table SET blocked_tries = 20, blocked_retry_at = now()");
    db.wait_for("SELECT blocked_tries FROM ttl_index_table", "21");
    assert_eq!(db.get("SELECT blocked_retry_at < now() + interval '61 seconds' FROM ttl_index_table"), "t");
    other.run("COMMIT");
    db.run("UPDATE ttl_index_table SET blocked_retry_at = now()");
    db.wait_for(
        "SELECT blocked_rows, locked_rows, count(*) FILTER (WHERE id = 7) FROM ttl_summary, parent GROUP BY 1, 2",
        "1999|0|0",
    );
}

/// Softly deleted rows of a user, in three ways.
const SOFT: &str = "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, deleted_at timestamptz, writes int DEFAULT 0);
    INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 500) i;";
const TRIGGER: &str = "CREATE FUNCTION soft() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN UPDATE public.t SET deleted_at = now(), writes = writes + 1 WHERE id = OLD.id; RETURN NULL; END $$;
    CREATE TRIGGER soft BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION soft();";
const RULE: &str = "CREATE RULE soft AS ON DELETE TO t DO INSTEAD
    UPDATE t SET deleted_at = now(), writes = writes + 1 WHERE id = OLD.id;";
const TAKES_BACK: &str = "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN NEW.deleted_at := NULL; NEW.writes := OLD.writes + 1; RETURN NEW; END $$;
    CREATE TRIGGER keep BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION keep();";

#[test]
fn rows_that_removal_rewrites_are_blocked_wherever_they_lie_now() {
    for (setup, option) in [
        (TRIGGER, ""),
        (TRIGGER, ", index_method => 'none'"),
        (RULE, ""),
        (TRIGGER, ", archive_to => 'archive'"),
        (TAKES_BACK, ", soft_delete_column => 'deleted_at'"),
    ] {
        let server = server(&["autovacuum=off"]);
        let mut db = database(&server);
        db.run(SOFT);
        db.run("CREATE TABLE archive (LIKE t)");
        db.run(setup);
        db.run(&format!("SELECT ttl_create_index('t', 'at', 60, 100{option})"));
        db.wait_for(
            "SELECT state, blocked_rows, last_error IS NOT NULL, total_rows_deleted FROM ttl_summary",
            "blocked|500|t|0",
        );
        wait_for_passes(&mut db, 10);
        let most = db.get("SELECT max(writes) FROM t").parse::<i64>().expect("a number");
        assert!(most < 6, "each row was written {most} times in ten passes: {setup} {option}");
        assert_eq!(db.get("SELECT count(*), (SELECT count(*) FROM archive) FROM t"), "500|0");
    }
}

#[test]
fn rows_that_a_trigger_has_taken_out_of_the_filter_are_not_blocked() {
    let mut db = with(SOFT);
    db.run(TRIGGER);
    db.run("SELECT ttl_create_index('t', 'at', 60, 100, filter => 'deleted_at IS NULL'); SELECT ttl_runner('t')");
    assert_eq!(db.get("SELECT count(deleted_at), max(writes) FROM t"), "500|1");
    db.run("SELECT ttl_runner('t')");
    assert_eq!(db.get("SELECT state, blocked_rows, max(writes) FROM ttl_summary, t GROUP BY 1, 2"), "active|0|1");
}

#[test]
fn a_mark_that_is_taken_back_for_some_rows_counts_for_the_others_and_their_function() {
    let mut db = with(SOFT);
    db.run(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN IF NEW.id % 100 = 7 THEN NEW.deleted_at := NULL; END IF; RETURN NEW; END $$;
         CREATE TRIGGER keep BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION keep();
         CREATE TABLE seen (id int); CREATE FUNCTION hook(regclass, rows jsonb) RETURNS void LANGUAGE sql AS
         $$ INSERT INTO public.seen SELECT (r->>'id')::int FROM jsonb_array_elements(rows) r $$",
    );
    for hook in ["", ", on_expire => 'hook(regclass, jsonb)'"] {
        db.run(&format!("UPDATE t SET deleted_at = NULL; SELECT ttl_create_index('t', 'at', 60, 100, soft_delete_column => 'deleted_at'{hook})"));
        assert_eq!(db.get("SELECT ttl_runner('t')"), "495");
        assert_eq!(db.get("SELECT state, blocked_rows FROM ttl_summary"), "blocked|5");
        assert_eq!(db.get("SELECT count(*) FROM t WHERE deleted_at IS NULL"), "5");
    }
    assert_eq!(
        db.get("SELECT count(*), count(DISTINCT id), count(*) FILTER (WHERE id % 100 = 7) FROM seen"),
        "495|495|0"
    );
}

#[test]
fn many_rows_that_others_hold_keep_nobody_waiting_long() {
    let mut db = with(
        "CREATE TABLE p (id int PRIMARY KEY, at timestamptz, x int);
         CREATE TABLE c (id int PRIMARY KEY, p_id int REFERENCES p ON DELETE CASCADE); CREATE INDEX ON c (p_id);
         INSERT INTO p SELECT i, '2020-01-01', 0 FROM generate_series(1, 64) i;
         INSERT INTO c SELECT i, i FROM generate_series(2, 64) i;
         SELECT ttl_create_index('p', 'at', 60)",
    );
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT count(*) FROM (SELECT FROM c FOR UPDATE) AS held");
    let started = Instant::now();
    db.run("CALL ttl_sweep('p')");
    assert!(started.elapsed() < Duration::from_secs(4), "a tenth of a second for each row would be six");
    assert_eq!(db.get("SELECT count(*), min(id) FROM p"), "63|2");
    other.run("COMMIT");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "63");
}

#[test]
fn a_trigger_that_sweeps_its_own_table_begins_nothing() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 300) i;
         CREATE TABLE other (at timestamptz); INSERT INTO other VALUES ('2020-01-01');
         CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN PERFORM ttl_runner(''t''), ttl_runner(''other''); RETURN OLD; END';
         CREATE TRIGGER again BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION again();
         SELECT ttl_create_index('t', 'at', 60), ttl_create_index('other', 'at', 60)",
    );
    db.run("SET client_min_messages = warning");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "300");
    assert_eq!(db.get("SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM other)"), "0|0");
}

#[test]
fn a_rule_that_removes_other_rows_instead_removes_none() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 300) i;
         CREATE TABLE other (id int); INSERT INTO other SELECT id FROM t;
         CREATE RULE instead AS ON DELETE TO t DO INSTEAD DELETE FROM other WHERE other.id = OLD.id;
         SELECT ttl_create_index('t', 'at', 60, 100)",
    );
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "300");
    assert_eq!(db.get("SELECT total_rows_deleted, blocked_rows, state FROM ttl_summary"), "0|300|blocked");
}
