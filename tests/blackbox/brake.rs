//! A sweep that would take too much of its table waits until somebody agrees.

use crate::worker::{database, server};
use harness::{Database, Server};
use std::sync::Arc;

fn braked() -> Arc<Server> {
    server(&["pg_ttl_index.max_share_per_run=0.5"])
}

/// A table of 1,000 rows, so many of them expired.
fn table(db: &mut Database, name: &str, expired: u32) {
    db.run(&format!(
        "CREATE TABLE {name} (id int, at timestamptz);
         INSERT INTO {name} SELECT i, CASE WHEN i <= {expired} THEN timestamptz '2020-01-01' ELSE 'infinity' END FROM generate_series(1, 1000) i"
    ));
}

#[test]
fn a_rule_that_would_take_too_much_is_held_until_it_is_resumed() {
    let server = braked();
    let mut db = database(&server);
    table(&mut db, "much", 900);
    table(&mut db, "little", 400);
    db.run("SELECT ttl_create_index('much', 'at', 60), ttl_create_index('little', 'at', 60)");
    db.wait_for("SELECT count(*) FROM little", "600");
    db.wait_for("SELECT state FROM ttl_summary WHERE table_name = 'much'", "held");
    assert_eq!(
        db.get("SELECT hold FROM ttl_summary WHERE table_name = 'much'"),
        "max_share_per_run: would take 90.0 % of the table"
    );
    assert_eq!(
        db.get("SELECT blockers FROM ttl_preview('much')"),
        "{\"max_share_per_run: would take 90.0 % of the table\"}"
    );
    db.notices();
    assert_eq!(db.get("SELECT ttl_runner('much')"), "0");
    assert!(db.notices().concat().contains("rests: max_share_per_run"));
    db.run("CALL ttl_sweep('much')");
    assert_eq!(db.get("SELECT count(*) FROM much"), "1000");
    assert_eq!(server.log().matches("is held: it would take 90.0 %").count(), 1);
    assert_eq!(db.get("SELECT ttl_resume('much')"), "1");
    db.wait_for("SELECT count(*) FROM much", "100");
    // What somebody has agreed to needs no word again.
    db.run("INSERT INTO much SELECT i, '2020-01-01' FROM generate_series(1, 920) i; SELECT ttl_pause('much'), ttl_resume('much')");
    db.wait_for("SELECT count(*) FROM much", "100");
    // Another time to live is another matter.
    db.run("INSERT INTO much SELECT i, now() - interval '1 hour' FROM generate_series(1, 900) i");
    db.run("SELECT ttl_alter_index('much', 'at', interval '2 hours')");
    db.run("SELECT ttl_alter_index('much', 'at', interval '2 seconds')");
    db.wait_for("SELECT state FROM ttl_summary WHERE table_name = 'much'", "held");
    // So is the time that was meant.
    db.run("SELECT ttl_alter_index('much', 'at', interval '2 days')");
    db.wait_for("SELECT state FROM ttl_summary WHERE table_name = 'much'", "active");
    assert_eq!(db.get("SELECT count(*) FROM much"), "1000");
}

#[test]
fn manual_sweeps_filters_limits_and_partitions_count_too() {
    let server = braked();
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    table(&mut db, "t", 900);
    db.run(
        "CREATE FUNCTION is_even(i int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN i % 2 = 0; END'",
    );
    db.run(
        "SELECT ttl_create_index('t', 'at', 60, filter => 'is_even(id)', index_method => 'none', rule_name => 'even')",
    );
    assert_eq!(db.get("SELECT ttl_runner('t')"), "450", "it takes less than half");
    db.run("SELECT ttl_create_index('t', 'at', 60, max_rows_per_run => 100, rule_name => 'slow')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "100");
    db.run("SELECT ttl_drop_index('t', 'at', 'slow'), ttl_create_index('t', 'at', 60, rule_name => 'all')");
    db.notices();
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    assert!(db.notices().concat().contains("ttl_resume lets it"));
    assert_eq!(db.get("SELECT rule_name, state FROM ttl_summary"), "all|held\neven|active");
    assert_eq!(db.get("SELECT ttl_resume('t', 'at', 'all'), ttl_runner('t')"), "1|350");

    db.run(
        "CREATE TABLE p (id int, at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
         INSERT INTO p SELECT i, CASE WHEN i <= 900 THEN timestamptz '2020-01-01' ELSE now() END FROM generate_series(1, 1000) i;
         ANALYZE p1; ANALYZE p2; SELECT ttl_create_index('p', 'at', '1 year', partition_action => 'drop')",
    );
    assert_eq!(db.get("SELECT ttl_runner('p')"), "0");
    assert_eq!(db.get("SELECT state, (SELECT count(*) FROM p) FROM ttl_summary WHERE table_name = 'p'"), "held|1000");
    db.run("SELECT ttl_resume('p')");
    db.run("CALL ttl_sweep('p')");
    assert_eq!(db.get("SELECT count(*), to_regclass('p1') IS NULL FROM p"), "100|t");
}

#[test]
fn old_statistics_do_not_mislead_it() {
    let server = braked();
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker(); CREATE TABLE p (id int, at timestamptz) PARTITION BY RANGE (at);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01') WITH (autovacuum_enabled = off);
        CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01') WITH (autovacuum_enabled = off);
        SELECT ttl_create_index('p', 'at', '1 year', partition_action => 'drop');
        INSERT INTO p SELECT i, CASE WHEN i <= 900 THEN timestamptz '2020-01-01' ELSE now() END FROM generate_series(1, 1000) i");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "0");
    assert_eq!(db.get("SELECT count(*) FROM p"), "1000");

    db.run("CREATE TABLE t (id int, at timestamptz) WITH (autovacuum_enabled = off); INSERT INTO t SELECT i, now() FROM generate_series(1, 300000) i");
    db.run("SELECT ttl_create_index('t', 'at', '1 hour'); ANALYZE t; UPDATE t SET at = at - interval '1 day'");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    assert_eq!(db.get("SELECT state FROM ttl_summary WHERE table_name = 't'"), "held");

    db.run("CREATE TABLE s (id int, at timestamptz) WITH (autovacuum_enabled = off); INSERT INTO s SELECT i, now() FROM generate_series(1, 1000) i");
    db.run("SELECT ttl_create_index('s', 'at', '1 hour'); ANALYZE s; DELETE FROM s WHERE id > 100; UPDATE s SET at = now() - interval '2 hours' WHERE id <= 90");
    db.run("CALL ttl_sweep('s', max_rows => 200)");
    assert_eq!(db.get("SELECT count(*) FROM s"), "100");
}

#[test]
fn few_rows_in_many_blocks_and_rows_that_cannot_be_judged_are_counted_too() {
    let server = braked();
    let mut db = database(&server);
    db.run(
        "SELECT ttl_stop_worker(); CREATE TABLE t (id int, at timestamptz, pad text) WITH (autovacuum_enabled = off)",
    );
    db.run("ALTER TABLE t ALTER pad SET STORAGE plain; INSERT INTO t SELECT i, now(), repeat('x', 7000) FROM generate_series(1, 5000) i");
    db.run("DELETE FROM t; INSERT INTO t SELECT i, '2020-01-01', 'y' FROM generate_series(1, 100) i");
    db.run("SELECT ttl_create_index('t', 'at', 60, index_method => 'none')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    assert_eq!(db.get("SELECT state FROM ttl_summary"), "held");
    // Whoever agreed to a mark has not agreed to a delete.
    db.run("ALTER TABLE t ADD gone timestamptz; SELECT ttl_alter_index('t', 'at', soft_delete_column => 'gone')");
    db.run("SELECT ttl_runner('t')");
    assert_eq!(db.get("SELECT ttl_resume('t'), ttl_runner('t')"), "1|100");
    db.run("UPDATE t SET gone = NULL; SELECT ttl_alter_index('t', 'at', reset => '{soft_delete_column}')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");

    db.run("CREATE TABLE u (id int, at timestamptz, n int); INSERT INTO u SELECT i, CASE WHEN i <= 10 THEN '2020-01-01' ELSE now() END, 1 FROM generate_series(1, 100) i; INSERT INTO u VALUES (0, '2020-01-01', 0); ANALYZE u");
    db.run("SELECT ttl_create_index('u', 'at + make_interval(secs => 1/n)', 60, index_method => 'none')");
    assert_eq!(db.get("SELECT ttl_runner('u'), count(*) FROM u"), "10|101");
    assert_eq!(db.get("SELECT blocked_rows FROM ttl_summary WHERE table_name = 'u'"), "1");
}

#[test]
fn a_higher_limit_or_none_lets_a_held_rule_go_on() {
    for setting in ["0.95", "0"] {
        let server = server(&[]);
        server.configure("pg_ttl_index.max_share_per_run", "0.5");
        let mut db = database(&server);
        table(&mut db, "t", 900);
        db.run("SELECT ttl_create_index('t', 'at', 60)");
        db.wait_for("SELECT state FROM ttl_summary", "held");
        server.configure("pg_ttl_index.max_share_per_run", setting);
        db.wait_for("SELECT count(*) FROM t", "100");
        db.wait_for("SELECT state, hold FROM ttl_summary", "active|");
        // What was held is not held again when the limit comes back.
        server.configure("pg_ttl_index.max_share_per_run", "0.5");
        db.run("INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 20) i");
        db.wait_for("SELECT count(*) FROM t", "100");
        assert_eq!(db.get("SELECT state, hold FROM ttl_summary"), "active|");
    }
}

#[test]
fn partitions_that_stay_count_and_a_limit_on_rows_is_none_on_partitions() {
    let server = braked();
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    for action in ["delete", "drop"] {
        db.run(&format!(
            "DROP TABLE IF EXISTS p; CREATE TABLE p (at timestamptz) PARTITION BY RANGE (at);
             CREATE TABLE p_old PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
             CREATE TABLE p_new PARTITION OF p FOR VALUES FROM ('2090-01-01') TO ('2091-01-01');
             INSERT INTO p SELECT '2020-05-05' FROM generate_series(1, 10); INSERT INTO p SELECT '2090-05-05' FROM generate_series(1, 1000);
             ANALYZE p_old; ANALYZE p_new; SELECT ttl_create_index('p', 'at', '10 days', partition_action => '{action}')"
        ));
        db.run("CALL ttl_sweep('p')");
        assert_eq!(db.get("SELECT state, (SELECT count(*) FROM p) FROM ttl_summary"), "active|1000", "{action}");
    }
    db.run(
        "DROP TABLE p; CREATE TABLE p (at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2020-02-01') TO ('2100-01-01');
         INSERT INTO p SELECT '2020-01-05' FROM generate_series(1, 1000); INSERT INTO p SELECT now() FROM generate_series(1, 10);
         ANALYZE p1; ANALYZE p2; SELECT ttl_create_index('p', 'at', '10 days', partition_action => 'drop', max_rows_per_run => 10)",
    );
    db.run("CALL ttl_sweep('p')");
    assert_eq!(db.get("SELECT state, (SELECT count(*) FROM p) FROM ttl_summary"), "held|1010");
}

#[test]
fn a_row_that_cannot_be_judged_says_nothing_of_the_others() {
    let server = braked();
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker(); CREATE TABLE t (id int, at timestamptz, n int)");
    for (rows, rule, state) in [
        // All but a few rows would go.
        (
            "CASE WHEN i <= 950 THEN timestamptz '2020-01-01' ELSE 'infinity' END, 1",
            "'at + make_interval(secs => 1/n)', 60",
            "held",
        ),
        // The filter takes few.
        ("timestamptz '2020-01-01', i", "'at', 60, filter => '1000/n > 400'", "blocked"),
    ] {
        db.run(&format!(
            "TRUNCATE t; INSERT INTO t SELECT i, {rows} FROM generate_series(1, 1000) i; INSERT INTO t VALUES (0, '2020-01-01', 0);
             SELECT ttl_create_index('t', {rule}, index_method => 'none', rule_name => 'x')"
        ));
        db.run("CALL ttl_sweep('t')");
        assert_eq!(db.get("SELECT state FROM ttl_summary"), state, "{rule}");
        db.run("SELECT ttl_drop_index('t', column_name, 'x') FROM ttl_summary");
    }
}

#[test]
fn no_share_is_given_away_before_the_sweep_is_judged() {
    let server = server(&[
        "pg_ttl_index.max_share_per_run=0.5",
        "pg_ttl_index.max_workers=3",
        "pg_ttl_index.max_workers_per_table=3",
        "max_worker_processes=16",
    ]);
    let mut db = database(&server);
    // The leader reads live rows for so long that it would give away a share, whose rows have all expired.
    db.run(
        "CREATE UNLOGGED TABLE t (at text) WITH (autovacuum_enabled = off);
         INSERT INTO t SELECT '2100-01-01T00:00:00Z' FROM generate_series(1, 600000);
         INSERT INTO t SELECT '2020-01-01T00:00:00Z' FROM generate_series(1, 700000); ANALYZE t;
         SELECT ttl_create_index('t', 'at', 60, index_method => 'none')",
    );
    db.wait_for("SELECT state FROM ttl_summary", "held");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1300000");
}

#[test]
fn an_owner_who_keeps_a_rule_locked_holds_up_nobody_who_sweeps_all() {
    let server = braked();
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    table(&mut db, "a", 900);
    table(&mut db, "b", 100);
    db.run("SELECT ttl_create_index('a', 'at', 60), ttl_create_index('b', 'at', 60)");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT ttl_alter_index('a', 'at', batch_size => 5)");
    db.run("SET statement_timeout = '30s'");
    assert_eq!(db.get("SELECT ttl_runner()"), "100");
}
