//! What the next sweep would do.

use crate::sweep::with;
use crate::worker::{database, server};
use harness::{Server, Session};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn a_preview_deletes_nothing_and_names_what_is_in_the_way() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone boolean);
         INSERT INTO t SELECT i, '2020-01-01'::timestamptz + i * interval '1 day' FROM generate_series(1, 10) i;
         CREATE TABLE child (t int CONSTRAINT points_to REFERENCES t);
         CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER keep BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION keep();
         SELECT ttl_create_index('t', 'at', interval '1 day'); SET TimeZone = 'UTC'",
    );
    assert_eq!(
        db.get(
            "SELECT schema_name, table_name, column_name, cutoff BETWEEN now() - interval '1 day 1 minute' AND now(), expired_rows,
                    oldest_value, expired_bytes > 300, plan, blockers FROM ttl_preview('t')"
        ),
        "public|t|at|t|10|2020-01-02 00:00:00+00|t|rows by index|{\"foreign key points_to of table public.child\",\"trigger keep\"}"
    );
    assert_eq!(db.get("SELECT count(*) FROM t"), "10");
    let stranger = db.role("stranger");
    assert_eq!(db.session(&stranger).error("SELECT * FROM ttl_preview('t')").code, "42501");
    assert_eq!(db.error("SELECT * FROM ttl_preview('t', 'nowhere')").code, "42704");
    db.run("CREATE TABLE bare (at timestamptz)");
    assert_eq!(db.get("SELECT count(*) FROM ttl_preview('bare')"), "0");
    db.run("SET default_transaction_read_only = on");
    assert_eq!(db.get("SELECT expired_rows FROM ttl_preview('t', 'at')"), "10");
}

#[test]
fn a_preview_of_many_rows_is_an_estimate() {
    let mut db = with(
        "CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 150000); ANALYZE t;
         SELECT ttl_create_index('t', 'at', interval '1 day')",
    );
    assert_eq!(
        db.get(
            "SELECT is_exact, expired_rows BETWEEN 140000 AND 160000, expired_bytes > 4000000 FROM ttl_preview('t')"
        ),
        "f|t|t"
    );
}

#[test]
fn a_preview_has_a_row_for_every_relation() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz) PARTITION BY LIST (id);
         CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2);
         INSERT INTO t SELECT 1, '2020-01-01' FROM generate_series(1, 30); INSERT INTO t SELECT 1, now() FROM generate_series(1, 10);
         INSERT INTO t VALUES (2, now())",
    );
    db.run("SELECT ttl_create_index('t', 'at', interval '1 day')");
    let preview = "SELECT table_name, relation, expired_rows, round(share::numeric, 2), plan, is_exact FROM ttl_preview('t') ORDER BY 2";
    assert_eq!(db.get(preview), "t|public.t1|30|0.75|rows by index|t\nt|public.t2|0|0.00|rows by index|t");
    db.run("DROP TABLE t1, t2");
    assert_eq!(db.get(preview), "t|public.t|0||nothing|t");
}

#[test]
fn the_duration_is_estimated_by_what_sweeps_took_so_far() {
    let mut db = with(
        "CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 100);
         SELECT ttl_create_index('t', 'at', interval '1 day')",
    );
    assert_eq!(db.get("SELECT estimated_duration FROM ttl_preview('t')"), "");
    db.run("SELECT ttl_runner('t')");
    db.run("UPDATE ttl_history_log SET finished_at = started_at + interval '10 seconds'");
    db.run("INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 50)");
    assert_eq!(db.get("SELECT estimated_duration FROM ttl_preview('t')"), "00:00:05");
    db.run("SELECT ttl_alter_index('t', 'at', max_rows_per_second => 1)");
    assert_eq!(db.get("SELECT estimated_duration FROM ttl_preview('t')"), "00:00:50");
}

#[test]
fn a_filter_that_lets_little_go_is_estimated_without_reading_everything() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); CREATE INDEX ON t (at);
         INSERT INTO t SELECT i, '2020-01-01'::timestamptz + i * interval '1 second' FROM generate_series(1, 400000) i; ANALYZE t;
         SELECT ttl_create_index('t', 'at', interval '1 day', filter => 'id % 100 = 0')",
    );
    assert_eq!(
        db.get(
            "SELECT is_exact, expired_rows BETWEEN 3000 AND 5000, share BETWEEN 0.005 AND 0.02 FROM ttl_preview('t')"
        ),
        "f|t|t"
    );
}

#[test]
fn a_large_heap_without_an_index_is_sampled() {
    // Twenty thousand blocks.
    let mut db = with(
        "CREATE TABLE t (id int, at text, pad text) WITH (fillfactor = 10); ALTER TABLE t ALTER pad SET STORAGE PLAIN;
         INSERT INTO t SELECT i, CASE WHEN i % 4 = 0 THEN 'garbage' WHEN i % 4 = 1 THEN '2020-01-01T00:00:00Z' ELSE '2100-01-01T00:00:00Z' END,
                repeat('x', 3000) FROM generate_series(1, 40000) i;
         SELECT ttl_create_index('t', 'at', interval '1 day', index_method => 'none')",
    );
    let started = Instant::now();
    assert_eq!(
        db.get(
            "SELECT plan, is_exact, expired_rows BETWEEN 7000 AND 13000, unreadable_values BETWEEN 7000 AND 13000,
                    share BETWEEN 0.2 AND 0.3, blockers FROM ttl_preview('t')"
        ),
        "rows by blocks|f|t|t|t|{\"there is no index: workers read the whole table, for at most a twentieth of the time\"}"
    );
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn a_preview_assigns_no_transaction_id() {
    let mut db = with(
        "CREATE TABLE p (id int, at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01'); INSERT INTO p VALUES (1, '2020-05-05');
         CREATE TABLE t (id int, at timestamptz); CREATE TABLE child () INHERITS (t); INSERT INTO t VALUES (1, '2020-05-05');
         INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 2000) i",
    );
    db.run("SELECT ttl_create_index('p', 'at', 60, partition_action => 'drop'), ttl_create_index('t', 'at', 60, filter => 'id > 0')");
    for table in ["p", "t"] {
        db.run(&format!("BEGIN; SELECT count(*) FROM ttl_preview('{table}'); SELECT count(*) FROM ttl_summary"));
        assert_eq!(db.get("SELECT pg_current_xact_id_if_assigned()"), "", "{table}");
        db.run("COMMIT");
    }
}

#[test]
fn a_preview_works_on_a_standby() {
    let server = server(&["hot_standby=on"]);
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker(); CREATE TABLE p (id int, at timestamptz) PARTITION BY RANGE (at);
            CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
            CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01'); INSERT INTO p VALUES (1, '2020-05-05'), (2, '2022-05-05');
            SELECT ttl_create_index('p', 'at', 60, partition_action => 'drop')");
    let standby = server.start_standby();
    let mut there = Session::connect(&standby, &db.name, "postgres");
    assert_eq!(
        there.get("SELECT relation, plan FROM ttl_preview('p') ORDER BY 1"),
        "public.p1|drop partition\npublic.p2|rows by index"
    );
    assert_eq!(there.get("SELECT count(*) FROM ttl_summary"), "1");
}

#[test]
fn sweeps_leave_as_many_statements_in_the_statistics_as_one() {
    let server = Arc::new(Server::start(&["shared_preload_libraries=pg_stat_statements,pg_ttl_index"]));
    let mut db = database(&server);
    db.run("CREATE EXTENSION pg_stat_statements; CREATE TABLE t (id int, at timestamptz); SELECT ttl_stop_worker(), ttl_create_index('t', 'at', 60, 1000); SET pg_ttl_index.debug_scan = index");
    let fill =
        "INSERT INTO t SELECT i, '2020-01-01'::timestamptz + i * interval '1 second' FROM generate_series(1, 25000) i";
    let mut counts = Vec::new();
    for _ in 0..3 {
        db.run(fill);
        assert_eq!(db.get("SELECT ttl_runner('t')"), "25000");
        db.run("SELECT count(*) FROM ttl_preview('t')");
        counts.push(db.get("SELECT count(*) FROM pg_stat_statements"));
    }
    assert_eq!(counts[1], counts[2], "{}", db.get("SELECT left(query, 150) FROM pg_stat_statements ORDER BY 1"));
    db.run("SET pg_stat_statements.track = 'all'");
    counts.clear();
    for _ in 0..3 {
        db.run(fill);
        assert_eq!(db.get("SELECT ttl_runner('t')"), "25000");
        db.run("SELECT count(*) FROM ttl_preview('t')");
        counts.push(db.get("SELECT count(*) FROM pg_stat_statements"));
    }
    assert_eq!(counts[1], counts[2], "{}", db.get("SELECT left(query, 150) FROM pg_stat_statements ORDER BY 1"));
}
