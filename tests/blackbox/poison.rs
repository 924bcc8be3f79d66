//! Rows on which the filter or the expression of a rule fails keep no others.

use crate::sweep::with;
use crate::worker::{database, server};

/// Some rows that the filter fails on, in several places; one of them has not expired.
const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int);
    INSERT INTO t SELECT i, '2020-01-01'::timestamptz + i * interval '1 minute', CASE WHEN i IN (1, 1500, 4999) THEN 0 ELSE 1 + i % 2 END
    FROM generate_series(1, 5000) i; INSERT INTO t VALUES (6000, now(), 0)";
const STATE: &str = "SELECT state, blocked_rows, last_error FROM ttl_summary";

#[test]
fn a_filter_that_fails_on_some_rows_keeps_those_alone() {
    for index in ["", "CREATE INDEX ON t (at)"] {
        let mut db = with(TABLE);
        db.run(index);
        let method = if index.is_empty() { "none" } else { "btree" };
        // It is about half of them.
        db.run(&format!(
            "SELECT ttl_create_index('t', 'at', 60, 100, filter => '100000 / n > 60000', index_method => '{method}')"
        ));
        assert_eq!(db.get("SELECT ttl_runner('t')"), "2499", "{index}");
        assert_eq!(db.get(STATE), "blocked|3|22012: division by zero", "{index}");
        assert_eq!(db.get("SELECT count(*) FILTER (WHERE n = 1), count(*) FILTER (WHERE n = 0) FROM t"), "0|4");
        let before = db.get("SELECT count(*) FROM ttl_history");
        assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
        assert_eq!(db.get("SELECT count(*) FROM ttl_history"), before, "nothing new");
        db.run("UPDATE t SET n = 1 WHERE n = 0");
        assert_eq!(db.get("SELECT ttl_runner('t')"), "3");
        assert_eq!(db.get(STATE), "active|0|");
    }
}

#[test]
fn a_row_that_fails_in_a_small_table_keeps_no_other() {
    for index in ["SELECT", "CREATE INDEX ON t (at)", "CREATE INDEX ON t USING brin (at)"] {
        let mut db = with(
            "CREATE TABLE t (id int, at timestamptz, n int);
             INSERT INTO t SELECT i, '2020-01-01', i % 100 FROM generate_series(1, 199) i",
        );
        db.run(index);
        // The planner would rather read the table than look up a row.
        db.run("ANALYZE t");
        db.run("SELECT ttl_create_index('t', 'at', 60, filter => '1 / n >= 0', index_method => 'none')");
        assert_eq!(db.get("SELECT ttl_runner('t')"), "198", "{index}");
        assert_eq!(db.get("SELECT array_agg(id) FROM t"), "{100}", "{index}");
        assert_eq!(db.get(STATE), "blocked|1|22012: division by zero", "{index}");
    }
}

#[test]
fn an_expression_that_fails_on_some_rows_keeps_those_alone() {
    let mut db = with(
        "CREATE TABLE t (id int, doc jsonb);
         INSERT INTO t SELECT i, jsonb_build_object('at', CASE WHEN i % 1000 = 5 THEN 'soon' ELSE '2020-01-01' END) FROM generate_series(1, 5000) i;
         INSERT INTO t VALUES (6000, jsonb_build_object('at', now()))",
    );
    db.run("SELECT ttl_create_index('t', '(doc->>''at'')::timestamptz', 60, 100, index_method => 'none')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "4995");
    assert_eq!(db.get("SELECT state, blocked_rows, left(last_error, 5) FROM ttl_summary"), "blocked|5|22007");
    assert_eq!(db.get("SELECT count(*) FROM t"), "6");
}

#[test]
fn preview_and_summary_tell_of_it_and_do_not_fail() {
    for index in ["", "CREATE INDEX ON t (at)"] {
        let mut db = with(TABLE);
        db.run(index);
        let method = if index.is_empty() { "none" } else { "btree" };
        db.run(&format!(
            "SELECT ttl_create_index('t', 'at', 60, filter => '100000 / n > 60000', index_method => '{method}')"
        ));
        let preview =
            db.get("SELECT is_exact, expired_rows > 0, array_to_string(blockers, '; ') FROM ttl_preview('t')");
        assert!(preview.starts_with("f|t|") && preview.contains("22012: division by zero"), "{preview}");
        assert_eq!(db.get("SELECT table_name, lag IS NULL FROM ttl_summary"), "t|t");
    }
}

#[test]
fn a_pass_over_poisoned_rows_writes_nothing() {
    for (setup, rule) in [
        ("CREATE INDEX ON t (at)", "'at', 60, filter => '100000 / n > 60000'"),
        ("SELECT", "'at', 60, filter => '100000 / n > 60000', index_method => 'none'"),
        ("SELECT", "'''2020-01-01''::timestamptz + n / n * interval ''1 day''', 60, index_method => 'none'"),
    ] {
        let server = server(&["autovacuum=off"]);
        let mut db = database(&server);
        db.run(TABLE);
        db.run("UPDATE t SET n = 1 WHERE n = 2");
        db.run(setup);
        db.run(&format!("SELECT ttl_create_index('t', {rule})"));
        db.wait_for("SELECT state, left(last_error, 5) FROM ttl_summary", "blocked|22012");
        db.wait_for("SELECT blocked_retry_at > now() + interval '6 seconds' FROM ttl_index_table", "t");
        let state = "SELECT pg_snapshot_xmax(pg_current_snapshot())";
        let before = db.get(state);
        for _ in 0..3 {
            let before = db.get("SELECT ttl_next_pass()");
            db.wait_for(&format!("SELECT ttl_next_pass() > '{before}'"), "t");
        }
        assert_eq!(db.get(state), before, "{rule}");
        // Others go meanwhile.
        db.run("INSERT INTO t SELECT i, now() - interval '1 day', 1 FROM generate_series(10001, 10200) i");
        db.wait_for("SELECT count(*) FROM t WHERE n <> 0", "0");
    }
}
