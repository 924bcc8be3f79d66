//! Expired means invisible: what a query sees of a table whose rule hides expired rows.

use crate::reliability::trials::twins::{ALL, difference, random_query, twins};
use crate::sources;
use crate::sweep::with;
use harness::{Database, Random, Server, Session};
use std::sync::Arc;

fn check(db: &mut Database, statements: &str) {
    if let Some(difference) = difference(db, statements) {
        panic!("{difference}");
    }
}

#[test]
fn every_kind_of_query_sees_what_it_would_see_if_the_rows_were_gone() {
    let mut db = twins(Database::empty());
    for query in [
        "SELECT * FROM t ORDER BY id",
        "TABLE t ORDER BY id",
        "SELECT count(*), sum(id), max(label) FROM t",
        "SELECT t.id, u.id FROM t JOIN u ON u.t = t.id ORDER BY 1, 2",
        "SELECT t.id, u.id FROM t LEFT JOIN u ON u.t = t.id AND u.n > 20 ORDER BY 1, 2",
        "SELECT t.id, u.id FROM t RIGHT JOIN u ON u.t = t.id ORDER BY 1, 2",
        "SELECT t.id, u.id FROM t FULL JOIN u ON u.t = t.id ORDER BY 1, 2",
        "SELECT count(*) FROM t CROSS JOIN u",
        "SELECT plain.id, t.label FROM plain LEFT JOIN t USING (id) ORDER BY 1",
        "SELECT id FROM plain WHERE id IN (SELECT id FROM t) ORDER BY 1",
        "SELECT id FROM plain WHERE id NOT IN (SELECT id FROM t) ORDER BY 1",
        "SELECT id FROM plain WHERE EXISTS (SELECT FROM t WHERE t.id = plain.id) ORDER BY 1",
        "SELECT id FROM plain WHERE NOT EXISTS (SELECT FROM t WHERE t.id = plain.id) ORDER BY 1",
        "SELECT id, (SELECT label FROM t WHERE t.id = plain.id), ARRAY(SELECT id FROM u WHERE u.t = plain.id ORDER BY 1) FROM plain ORDER BY 1",
        "SELECT plain.id, l.* FROM plain, LATERAL (SELECT count(*) FROM u WHERE u.t = plain.id) l ORDER BY 1",
        "WITH x AS (SELECT * FROM t) SELECT count(*) FROM x JOIN x y USING (grp)",
        "WITH x AS MATERIALIZED (SELECT * FROM t WHERE grp = 1) SELECT * FROM x ORDER BY id",
        "WITH RECURSIVE r AS (SELECT min(id) AS id FROM t UNION ALL SELECT (SELECT min(t.id) FROM t WHERE t.id > r.id) FROM r WHERE r.id IS NOT NULL) SELECT * FROM r",
        "SELECT id FROM t UNION SELECT id FROM u ORDER BY 1",
        "SELECT id FROM plain EXCEPT SELECT id FROM t ORDER BY 1",
        "SELECT id FROM plain INTERSECT ALL SELECT id FROM t ORDER BY 1",
        "SELECT * FROM v ORDER BY 1, 3",
        "SELECT * FROM in_sql(3) ORDER BY id",
        "SELECT plain.id, f.id FROM plain, in_sql(plain.id) f ORDER BY 1, 2",
        "SELECT in_plpgsql(), in_plpgsql()",
        "SELECT * FROM atomic() ORDER BY 1",
        "SELECT (SELECT count(*) FROM in_sql(2))",
        "SELECT grp, count(*), rank() OVER (ORDER BY count(*), grp) FROM t GROUP BY ROLLUP (grp) HAVING count(*) > 2 ORDER BY 1",
        "SELECT DISTINCT ON (grp) grp, id FROM t ORDER BY grp, id",
        "SELECT count(*) FROM t TABLESAMPLE SYSTEM (100)",
        "SELECT id FROM t WHERE grp = 2 FOR UPDATE",
        "SELECT t.id FROM t JOIN plain USING (id) WHERE grp = 2 ORDER BY 1 FOR UPDATE OF t",
        "SELECT * FROM ONLY t ORDER BY id LIMIT 5 OFFSET 3",
        "SELECT id FROM p ORDER BY 1",
        "SELECT id FROM p_old ORDER BY 1",
        "SELECT id FROM p_new ORDER BY 1",
        "SELECT id FROM ONLY i ORDER BY 1",
        "SELECT id FROM i ORDER BY 1",
        "SELECT id, more FROM i_child ORDER BY 1",
        "SELECT p.id, i.id FROM p LEFT JOIN i USING (id) ORDER BY 1",
        "DECLARE c CURSOR FOR SELECT id FROM t ORDER BY id; FETCH 5 FROM c; MOVE 10 IN c; FETCH ALL FROM c",
        "CREATE TABLE copied AS SELECT * FROM t; SELECT * FROM copied ORDER BY id",
        "CREATE MATERIALIZED VIEW m AS SELECT * FROM u; SELECT count(*) FROM m; REFRESH MATERIALIZED VIEW m; SELECT count(*) FROM m",
        "PREPARE a (int) AS SELECT id FROM t WHERE grp = $1 ORDER BY 1; EXECUTE a(1); EXECUTE a(2)",
        "SET LOCAL plan_cache_mode = force_generic_plan; PREPARE b (int) AS SELECT id FROM t WHERE grp = $1 ORDER BY 1; EXECUTE b(1)",
        "DO $$ DECLARE r record; n int := 0; BEGIN FOR r IN SELECT * FROM t LOOP n := n + r.id; END LOOP; CREATE TEMP TABLE result AS SELECT n; END $$; TABLE result",
        // Errors that only a hidden row could cause.
        "SELECT count(*) FROM u WHERE 1 / (id - 4) >= 0",
        "SELECT count(*) FROM t WHERE (CASE WHEN id = 3 THEN 'x' ELSE '1' END)::int = 1",
    ] {
        check(&mut db, query);
        let parallel = "SET LOCAL parallel_setup_cost = 0; SET LOCAL parallel_tuple_cost = 0; SET LOCAL min_parallel_table_scan_size = 0";
        check(&mut db, &format!("{parallel}; {query}"));
    }
    for change in [
        "UPDATE t SET label = 'changed' RETURNING id",
        "UPDATE t SET grp = u.id FROM u WHERE u.t = t.id",
        "DELETE FROM t WHERE grp = 1 RETURNING id",
        "DELETE FROM t USING u WHERE u.t = t.id AND u.n < 30",
        "INSERT INTO plain SELECT id + 1000, label FROM t; SELECT * FROM plain ORDER BY id",
        "WITH d AS (DELETE FROM t RETURNING *) INSERT INTO plain SELECT id + 1000, label FROM d; SELECT count(*) FROM plain",
        "UPDATE p SET n = n + 1",
        "UPDATE p_new SET n = 100",
        "DELETE FROM i",
        "UPDATE plain SET note = (SELECT label FROM t WHERE t.id = plain.id); SELECT * FROM plain ORDER BY id",
        "DECLARE c CURSOR FOR SELECT * FROM t ORDER BY id FOR UPDATE; FETCH 3 FROM c; UPDATE t SET grp = 99 WHERE CURRENT OF c; DELETE FROM t WHERE CURRENT OF c",
        "INSERT INTO t SELECT x, 0, now(), 'again' FROM generate_series(1, 200, 3) x WHERE x % 3 = 0",
        "INSERT INTO t SELECT x, 0, now(), 'again' FROM generate_series(3, 9, 3) x RETURNING id",
        "INSERT INTO t VALUES (3, 0, now(), 'again'), (4, 0, now(), 'again') ON CONFLICT (id) DO UPDATE SET label = 'conflict'",
        "INSERT INTO t VALUES (3, 0, now(), 'again'), (4, 0, now(), 'again') ON CONFLICT DO NOTHING",
        "INSERT INTO t VALUES (4, 0, now(), 'again')",
        "UPDATE t SET id = 3 WHERE id = 4",
        "UPDATE t SET id = 5 WHERE id = 4",
    ] {
        check(&mut db, &format!("{change}{ALL}"));
    }
    if db.get("SELECT current_setting('server_version_num')::int >= 150000") == "t" {
        let merge = "MERGE INTO t USING (SELECT generate_series(1, 12) AS id) s ON t.id = s.id
                     WHEN MATCHED AND t.grp = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET label = 'matched'
                     WHEN NOT MATCHED THEN INSERT VALUES (s.id, 0, now(), 'merged')";
        check(&mut db, &format!("{merge}{ALL}"));
    }
}

#[test]
fn random_queries_see_what_they_would_see_if_the_rows_were_gone() {
    let mut db = twins(Database::empty());
    let mut random = Random(42);
    for _ in 0..400 {
        check(&mut db, &random_query(&mut random));
    }
}

#[test]
fn every_kind_of_value_is_hidden_from_its_instant_on() {
    for kind in sources::KINDS {
        let mut db = with(&format!("CREATE TABLE t (id int PRIMARY KEY, {})", kind.column));
        db.run(&sources::fill(kind));
        db.run(&format!(
            "SELECT ttl_create_index('t', '{}', interval '2 hours', hide_expired => true {})",
            kind.subject, kind.options
        ));
        let left = format!("{}", 119 + 1 + kind.endless.len());
        assert_eq!(db.get("SELECT count(*) FROM t"), left, "{}", kind.name);
        assert_eq!(db.get("SELECT expired_rows FROM ttl_preview('t')"), "121", "{}", kind.name);
        assert_eq!(db.get("SELECT ttl_runner('t')"), "121", "{}", kind.name);
        assert_eq!(db.get("SELECT count(*) FROM t"), left, "{}", kind.name);
    }
}

#[test]
fn filters_decide_what_is_hidden() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz, kept boolean); INSERT INTO t VALUES (1, '2020-01-01', true), (2, '2020-01-01', false), (3, '2020-01-01', NULL), (4, now(), false);
         SELECT ttl_create_index('t', 'at', 60, filter => 'NOT kept', hide_expired => true)",
    );
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "1,3,4");
    db.run("ALTER TABLE t RENAME kept TO stays; ALTER TABLE t RENAME at TO seen");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "1,3,4");
    db.run("SELECT ttl_pause('t')");
    assert_eq!(db.get("SELECT count(*) FROM t"), "3", "a pause stops sweeping, not hiding");
}

#[test]
fn the_instant_is_that_of_the_statement() {
    let mut db =
        with("CREATE TABLE t (id int, at timestamptz); SELECT ttl_create_index('t', 'at', 0, hide_expired => true)");
    db.run("INSERT INTO t VALUES (1, clock_timestamp() + interval '1 second'); BEGIN");
    assert_eq!(db.get("SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM t WHERE pg_sleep(1.2) IS NOT NULL), (SELECT count(*) FROM t)"), "1|1|1");
    assert_eq!(db.get("SELECT count(*) FROM t"), "0", "the next statement of the transaction is later");
    db.run("COMMIT");
}

#[test]
fn plans_of_other_sessions_follow_the_rule_at_once() {
    let mut db = with("CREATE TABLE t (id int PRIMARY KEY, at timestamptz) PARTITION BY HASH (id); CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 1, REMAINDER 0);
                       INSERT INTO t VALUES (1, '2020-01-01'), (2, now())");
    let mut other = db.session("postgres");
    other.run("PREPARE whole AS SELECT count(*) FROM t; PREPARE part AS SELECT count(*) FROM t0;
               CREATE FUNCTION pg_temp.f() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t); END'");
    let mut count = |expected: &str| {
        for query in ["EXECUTE whole", "EXECUTE part", "SELECT pg_temp.f()"] {
            assert_eq!(other.get(query), expected, "{query}");
        }
    };
    count("2");
    db.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true)");
    count("1");
    db.run("SELECT ttl_alter_index('t', 'at', interval '100 years')");
    count("2");
    db.run("SELECT ttl_alter_index('t', 'at', 60 * interval '1 second')");
    count("1");
    db.run("UPDATE ttl_index_table SET hide_expired = false");
    count("2");
    db.run("SELECT ttl_alter_index('t', 'at', hide_expired => true)");
    count("1");
    db.run("SELECT ttl_drop_index('t', 'at')");
    count("2");
    db.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true)");
    count("1");
    db.run("DROP EXTENSION pg_ttl_index CASCADE");
    count("2");
    db.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker(), ttl_create_index('t', 'at', 60, hide_expired => true)");
    count("1");
}

#[test]
fn partitions_that_come_later_are_hidden_too() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz) PARTITION BY LIST (id); SELECT ttl_create_index('t', 'at', 60, hide_expired => true)",
    );
    let mut other = db.session("postgres");
    assert_eq!(other.get("SELECT count(*) FROM t"), "0");
    db.run("CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); INSERT INTO t VALUES (1, '2020-01-01')");
    assert_eq!(other.get("SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM t1)"), "0|0");
    db.run("ALTER TABLE t DETACH PARTITION t1");
    assert_eq!(other.get("SELECT count(*) FROM t1"), "1");
    db.run("ALTER TABLE t ATTACH PARTITION t1 FOR VALUES IN (1)");
    assert_eq!(other.get("SELECT count(*) FROM t1"), "0");
}

#[test]
fn the_planner_knows_what_to_make_of_it() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, pad text);
         INSERT INTO t SELECT i, now() - i * interval '1 minute', repeat('x', 50) FROM generate_series(1, 50000) i;
         SELECT ttl_create_index('t', 'at', interval '1 hour', hide_expired => true);
         CREATE TABLE p (at timestamptz NOT NULL, n int) PARTITION BY RANGE (at);
         CREATE TABLE p_2020 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE p_now PARTITION OF p FOR VALUES FROM ('2026-01-01') TO ('2126-01-01');
         SELECT ttl_create_index('p', 'at', interval '1 hour', hide_expired => true)",
    );
    db.run("ANALYZE");
    let scan = db.get("EXPLAIN SELECT * FROM t");
    assert!(
        scan.contains("idx_ttl_t_at")
            && scan.contains("Index Cond: (at > (statement_timestamp() - '01:00:00'::interval))"),
        "{scan}"
    );
    let rows: u32 =
        scan.split("rows=").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).expect("an estimate");
    assert!((20..500).contains(&rows), "{scan}");
    let point = db.get("EXPLAIN SELECT * FROM t WHERE id = 5");
    assert!(point.contains("t_pkey") && point.contains("Filter: (at >"), "{point}");
    db.run(
        "CREATE TYPE mood AS ENUM ('fine', 'so-so');
         CREATE TABLE k (id numeric PRIMARY KEY, at timestamptz NOT NULL, tags jsonb, mood mood, name text COLLATE \"C\");
         INSERT INTO k SELECT i, now(), jsonb_build_object('n', i), 'fine', 'name ' || i FROM generate_series(1, 20000) i;
         CREATE INDEX by_tags ON k USING gin (tags); CREATE INDEX by_mood ON k (mood); CREATE INDEX by_name ON k (name);
         SELECT ttl_create_index('k', 'at', interval '1 hour', hide_expired => true)",
    );
    db.run("ANALYZE k");
    for (condition, index) in [
        ("id = 5", "k_pkey"),
        ("id IN (5, 6)", "k_pkey"),
        (r#"tags @> '{"n": 5}'"#, "by_tags"),
        ("mood = 'so-so'", "by_mood"),
        ("name LIKE 'name 777%'", "by_name"),
    ] {
        let plan = db.get(&format!("EXPLAIN SELECT * FROM k WHERE {condition}"));
        assert!(plan.contains(index) && plan.contains("statement_timestamp()"), "{plan}");
    }
    let pruned = db.get("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT * FROM p");
    assert!(
        !pruned.contains("p_2020") || pruned.contains("Subplans Removed: 1") || pruned.contains("never executed"),
        "{pruned}"
    );
}

#[test]
fn hiding_needs_the_library_in_every_session_and_no_code_of_users() {
    let server = Arc::new(Server::start(&[]));
    let mut db = Database::on(&server);
    db.run("CREATE EXTENSION pg_ttl_index; CREATE TABLE t (at timestamptz)");
    let create = "SELECT ttl_create_index('t', 'at', 60, hide_expired => true)";
    let error = db.error(create);
    assert_eq!(error.code, "55000");
    assert!(error.hint.contains("session_preload_libraries"), "{}", error.hint);
    server.configure("session_preload_libraries", "pg_ttl_index");
    let mut session = db.session("postgres");
    session.run(create);
    session.run("INSERT INTO t VALUES ('2020-01-01'), (now())");
    assert_eq!(session.get("SELECT count(*) FROM t"), "1");
    let mut db = with("CREATE TABLE t (at timestamptz, n int); CREATE FUNCTION own(int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT $1 > 1';
                       CREATE FUNCTION ends(timestamptz) RETURNS timestamptz IMMUTABLE LANGUAGE sql AS 'SELECT $1'");
    assert_eq!(
        db.error("SELECT ttl_create_index('t', 'at', 60, hide_expired => true, filter => 'own(n)')").code,
        "0A000"
    );
    assert_eq!(db.error("SELECT ttl_create_index('t', 'ends(at)', 60, hide_expired => true)").code, "0A000");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'own(n)')");
    assert_eq!(db.error("SELECT ttl_alter_index('t', 'at', hide_expired => true)").code, "0A000");
    db.run("SELECT ttl_create_index('t', 'ttl_instant(n, ''s'')', 60, hide_expired => true)");
}

#[test]
fn a_standby_hides_too() {
    let primary = Arc::new(Server::start(&["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.enabled=off"]));
    let mut session = Session::connect(&primary, "postgres", "postgres");
    session.run("CREATE EXTENSION pg_ttl_index; CREATE TABLE t (id int, at timestamptz); INSERT INTO t VALUES (1, '2020-01-01'), (2, now())");
    let standby = primary.start_standby();
    let mut replica = Session::connect(&standby, "postgres", "postgres");
    replica.run("PREPARE q AS SELECT count(*) FROM t");
    assert_eq!(replica.get("EXECUTE q"), "2");
    session.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true)");
    replica.wait_for("EXECUTE q", "1");
    assert_eq!(replica.get("SELECT count(*) FROM t"), "1");
    session.run("SELECT ttl_alter_index('t', 'at', hide_expired => false)");
    replica.wait_for("EXECUTE q", "2");
}

#[test]
fn what_an_old_snapshot_sees_is_not_remembered() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t VALUES (1, '2020-01-01'), (2, now()); CREATE TABLE other (n int)",
    );
    let mut session = db.session("postgres");
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM other");
    db.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true)");
    assert_eq!(session.get("SELECT count(*) FROM t"), "1");
    session.run("COMMIT");
    assert_eq!(session.get("SELECT count(*) FROM t"), "1");
    assert_eq!(
        session.get("BEGIN; SELECT ttl_drop_index('t', 'at'); SELECT count(*) FROM t; SELECT ttl_create_index('t', 'at', 60, hide_expired => true); SELECT count(*) FROM t; ROLLBACK; SELECT count(*) FROM t"),
        "t\n2\nt\n1\n1"
    );
}

#[test]
fn a_part_is_hidden_by_the_rule_of_its_parent() {
    let mut db = with(
        "CREATE TABLE p (id int, at timestamptz) PARTITION BY LIST (id); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    );
    let error = db.error("SELECT ttl_create_index('p1', 'at', 60, hide_expired => true)");
    assert_eq!((error.code.as_str(), error.hint.as_str()), ("0A000", "Register the rule on the parent."));
}
