//! Expired means invisible: what a query sees of a table whose rule hides expired rows.

use crate::races::Random;
use crate::sources;
use crate::sweep::with;
use harness::{Database, Server, Session, run};
use std::sync::Arc;

/// Two schemas with the same tables: in `hidden` expired rows are there and hidden, in `gone` they are not there.
fn twins() -> Database {
    let mut db = with("CREATE SCHEMA hidden; CREATE SCHEMA gone; CREATE TABLE moment AS SELECT now() AS m");
    for schema in ["gone", "hidden"] {
        db.run(&format!(
            "SET search_path = {schema}, public;
             CREATE TABLE t (id int PRIMARY KEY, grp int, at timestamptz, label text);
             CREATE TABLE u (id int PRIMARY KEY, t int, n numeric, at timestamptz NOT NULL);
             CREATE TABLE p (id int, at timestamptz NOT NULL, n int) PARTITION BY RANGE (at);
             CREATE TABLE p_old PARTITION OF p FOR VALUES FROM (MINVALUE) TO ('2025-01-01');
             CREATE TABLE p_new (n int, at timestamptz NOT NULL, id int); ALTER TABLE p ATTACH PARTITION p_new DEFAULT;
             CREATE TABLE i (id int, at timestamptz); CREATE TABLE i_child (more text) INHERITS (i);
             CREATE TABLE plain (id int PRIMARY KEY, note text);
             INSERT INTO plain SELECT x, 'note ' || x FROM generate_series(1, 40) x;
             INSERT INTO t SELECT x, x % 7, CASE WHEN x % 11 = 0 THEN NULL WHEN x % 3 = 0 THEN m - interval '2 hours' ELSE m + interval '1 day' END,
                                  md5(x::text) FROM generate_series(1, 200) x, moment;
             INSERT INTO u SELECT x, x * 7 % 220, x / 3.0, CASE WHEN x % 4 = 0 THEN '2020-01-01'::timestamptz ELSE m END FROM generate_series(1, 300) x, moment;
             INSERT INTO p SELECT x, CASE WHEN x % 3 = 0 THEN '2020-01-01'::timestamptz WHEN x % 3 = 1 THEN m - interval '3 hours' ELSE m END, x % 5
                           FROM generate_series(1, 90) x, moment;
             INSERT INTO i SELECT x, CASE WHEN x % 2 = 0 THEN '2020-01-01'::timestamptz ELSE m END FROM generate_series(1, 20) x, moment;
             INSERT INTO i_child SELECT x, CASE WHEN x % 2 = 0 THEN '2020-01-01'::timestamptz ELSE m END, 'c' FROM generate_series(21, 40) x, moment;
             CREATE VIEW v AS SELECT t.id, t.label, u.n FROM t LEFT JOIN u ON u.t = t.id;
             CREATE FUNCTION in_sql(g int) RETURNS SETOF t STABLE LANGUAGE sql AS 'SELECT * FROM t WHERE grp = g';
             CREATE FUNCTION in_plpgsql() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t JOIN u ON u.t = t.id); END';
             CREATE FUNCTION atomic() RETURNS TABLE (id int) STABLE LANGUAGE sql BEGIN ATOMIC SELECT t.id FROM t; END"
        ));
    }
    db.run(
        "DELETE FROM gone.t WHERE at <= now() - interval '1 hour'; DELETE FROM gone.u WHERE at <= now() - interval '1 hour';
         DELETE FROM gone.p WHERE at <= now() - interval '1 hour'; DELETE FROM gone.i WHERE at <= now() - interval '1 hour';
         SELECT ttl_create_index(x, 'at', interval '1 hour', hide_expired => true) FROM unnest('{hidden.t,hidden.u,hidden.p,hidden.i}'::regclass[]) x;
         ANALYZE",
    );
    assert_eq!(
        db.get("SET pg_ttl_index.hide_expired = off; SELECT count(*) FROM hidden.t; RESET pg_ttl_index.hide_expired"),
        "200"
    );
    db
}

/// What a session sees of statements in a schema, in a transaction that is undone.
fn seen(db: &mut Database, schema: &str, statements: &str) -> String {
    db.run(&format!("BEGIN; SET LOCAL search_path = {schema}, public"));
    let seen = db.try_get(statements).map_err(|error| (error.code, error.message));
    db.run("ROLLBACK; DEALLOCATE ALL");
    format!("{seen:?}")
}

fn compare(db: &mut Database, statements: &str) {
    let (expected, actual) = (seen(db, "gone", statements), seen(db, "hidden", statements));
    let shown = |seen: &str| seen.chars().take(300).collect::<String>();
    assert!(
        actual == expected,
        "{statements}
expected {}
but got {}",
        shown(&expected),
        shown(&actual)
    );
}

const ALL: &str = "; SELECT id, grp, label FROM t ORDER BY id; SELECT id, t, n FROM u ORDER BY id; SELECT id, n FROM p ORDER BY id; SELECT id FROM i ORDER BY id";

#[test]
fn every_kind_of_query_sees_what_it_would_see_if_the_rows_were_gone() {
    let mut db = twins();
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
        compare(&mut db, query);
        let parallel = "SET LOCAL parallel_setup_cost = 0; SET LOCAL parallel_tuple_cost = 0; SET LOCAL min_parallel_table_scan_size = 0";
        compare(&mut db, &format!("{parallel}; {query}"));
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
        compare(&mut db, &format!("{change}{ALL}"));
    }
    if db.get("SELECT current_setting('server_version_num')::int >= 150000") == "t" {
        let merge = "MERGE INTO t USING (SELECT generate_series(1, 12) AS id) s ON t.id = s.id
                     WHEN MATCHED AND t.grp = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET label = 'matched'
                     WHEN NOT MATCHED THEN INSERT VALUES (s.id, 0, now(), 'merged')";
        compare(&mut db, &format!("{merge}{ALL}"));
    }
}

/// A random query over the twins' tables.
fn random_query(random: &mut Random) -> String {
    let tables = ["t", "u", "p", "i", "plain", "v", "(SELECT * FROM t WHERE grp < 4)", "in_sql(2)", "p_new"];
    let mut from = format!("{} a", random.pick(&tables));
    let joins = random.below(3);
    for alias in ["b", "c"].iter().take(joins as usize) {
        let join = random.pick(&["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"]);
        let on = random.pick(&["a.id", "a.id + 1"]);
        from += &format!(" {join} {} {alias} ON {on} = {alias}.id", random.pick(&tables));
    }
    let condition = match random.below(8) {
        0 => format!("a.id < {}", random.below(200)),
        1 => format!("a.id IN (SELECT id FROM {})", random.pick(&["t", "u", "i"])),
        2 => format!("NOT EXISTS (SELECT FROM {} x WHERE x.id = a.id)", random.pick(&["t", "u", "p"])),
        3 => format!("a.id = (SELECT max(id) FROM {} x WHERE x.id < a.id + 2)", random.pick(&["t", "u"])),
        4 => "a.id % 2 = 0 OR a.id IS NULL".to_owned(),
        5 => format!("a.id > ALL (SELECT id FROM u WHERE n < {})", random.below(5)),
        6 => "a.id::text LIKE '1%'".to_owned(),
        _ => "true".to_owned(),
    };
    let target = random.pick(&["a.id", "count(*), sum(a.id)", "a.id % 5, count(*)", "DISTINCT a.id % 9"]);
    let group = if target.starts_with("a.id % 5") { " GROUP BY 1" } else { "" };
    let select = format!("SELECT {target} FROM {from} WHERE {condition}{group}");
    match random.below(8) {
        0 => format!("WITH x AS ({select}) SELECT * FROM x ORDER BY 1"),
        1 => format!("{select} UNION ALL {select} ORDER BY 1"),
        2 => format!("UPDATE t SET label = 'x' WHERE id IN (SELECT a.id FROM {from} WHERE {condition}){ALL}"),
        3 => format!("DELETE FROM u WHERE id IN (SELECT a.id FROM {from} WHERE {condition}){ALL}"),
        4 => format!(
            "INSERT INTO t SELECT DISTINCT a.id % 50 + 1, 1, now(), 'new' FROM {from} WHERE {condition} ON CONFLICT (id) DO UPDATE SET label = 'both'{ALL}"
        ),
        _ => format!("{select} ORDER BY 1"),
    }
}

#[test]
fn random_queries_see_what_they_would_see_if_the_rows_were_gone() {
    let mut db = twins();
    let mut random = Random(42);
    for _ in 0..400 {
        compare(&mut db, &random_query(&mut random));
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
fn the_owner_and_superusers_may_look_behind_the_curtain_and_nobody_else() {
    let mut db = with("");
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t VALUES (1, '2020-01-01'), (2, now()); GRANT SELECT ON t TO {reader};
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)"
    ));
    let off = "SET pg_ttl_index.hide_expired = off; SELECT count(*) FROM t; RESET pg_ttl_index.hide_expired";
    assert_eq!(db.session(&owner).get(off), "2");
    assert_eq!(db.session("postgres").get(off), "2");
    assert_eq!(db.session(&reader).get(off), "1");
    // A plan that was made for one who may look is not one for others.
    db.run(
        "SET pg_ttl_index.hide_expired = off; PREPARE q AS SELECT count(*) FROM t;
            CREATE FUNCTION f() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM public.t); END'",
    );
    assert_eq!(db.get("EXECUTE q; SELECT f()"), "2\n2");
    db.run(&format!("SET ROLE {reader}"));
    assert_eq!(db.get("EXECUTE q; SELECT f()"), "1\n1");
    db.run("RESET ROLE");
    assert_eq!(db.get("EXECUTE q; SELECT f()"), "2\n2");
    db.run("RESET pg_ttl_index.hide_expired");
    assert_eq!(db.get("EXECUTE q; SELECT f()"), "1\n1");
    assert_eq!(db.get("BEGIN; SET LOCAL pg_ttl_index.hide_expired = off; EXECUTE q; COMMIT; EXECUTE q"), "2\n1");
}

#[test]
fn nothing_that_could_tell_of_a_hidden_row_is_called_for_it() {
    let mut db = with("");
    let reader = db.role("reader");
    db.run(&format!(
        "CREATE TABLE t (id int, who name, secret text, at timestamptz); GRANT SELECT ON t TO {reader};
         INSERT INTO t VALUES (1, '{reader}', 'hidden', '2020-01-01'), (2, '{reader}', 'mine', now()), (3, 'other', 'theirs', now());
         ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON t USING (who = current_user);
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)"
    ));
    let mut session = db.session(&reader);
    session.run("CREATE FUNCTION leak(text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS 'BEGIN RAISE NOTICE ''%'', $1; RETURN true; END'");
    assert_eq!(session.get("SELECT secret FROM t WHERE leak(secret)"), "mine");
    assert_eq!(session.notices(), ["NOTICE: mine"]);
    assert_eq!(session.get("SELECT t.secret FROM t LEFT JOIN t u ON leak(u.secret)"), "mine");
    assert_eq!(session.notices().iter().filter(|notice| !notice.ends_with("mine")).count(), 0);
}

#[test]
fn a_new_row_takes_the_key_of_a_hidden_one() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int, at timestamptz DEFAULT now(), on_list boolean, UNIQUE (a, b));
         CREATE UNIQUE INDEX ON t (lower(a)) WHERE on_list;
         INSERT INTO t VALUES (1, 'A', 1, '2020-01-01', NULL), (2, 'B', 1, '2020-01-01', true), (3, 'C', 1, '2020-01-01', NULL), (4, 'D', 1, now(), NULL);
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)",
    );
    db.run("INSERT INTO t VALUES (1, 'x', 1), (10, 'C', 1); INSERT INTO t VALUES (11, 'b', 5, now(), true)");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "1,4,10,11");
    db.run("SET pg_ttl_index.hide_expired = off");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "1,4,10,11", "they are gone for good");
    db.run("RESET pg_ttl_index.hide_expired; INSERT INTO t VALUES (20, 'E', 1, '2020-01-01')");
    db.run("BEGIN; INSERT INTO t VALUES (20, 'F', 1); ROLLBACK");
    assert_eq!(
        db.get("SET pg_ttl_index.hide_expired = off; SELECT a FROM t WHERE id = 20; RESET pg_ttl_index.hide_expired"),
        "E"
    );
    assert_eq!(db.error("INSERT INTO t VALUES (4, 'G', 1)").code, "23505");
    run(db.server.client_program("psql").args([
        "-d",
        &db.name,
        "-c",
        "COPY t (id, a) FROM PROGRAM 'printf \"20\\tH\\n\"'",
    ]));
    assert_eq!(db.get("SELECT a FROM t WHERE id = 20"), "H");
}

#[test]
fn keys_that_cannot_be_made_room_for_are_refused_as_ever() {
    // A softly deleted row stays in the table.
    let mut db = with(
        "CREATE TABLE soft (id int PRIMARY KEY, at timestamptz, gone boolean); INSERT INTO soft VALUES (1, '2020-01-01');
         CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); INSERT INTO parent VALUES (1, '2020-01-01');
         CREATE TABLE child (parent int REFERENCES parent); INSERT INTO child VALUES (1);
         CREATE TABLE span (during int4range, at timestamptz, EXCLUDE USING gist (during WITH &&)); INSERT INTO span VALUES ('[1,5]', '2020-01-01');
         SELECT ttl_create_index('soft', 'at', 60, soft_delete_column => 'gone', hide_expired => true),
                ttl_create_index('parent', 'at', 60, hide_expired => true), ttl_create_index('span', 'at', 60, hide_expired => true)",
    );
    assert_eq!(
        db.get("SELECT (SELECT count(*) FROM soft) + (SELECT count(*) FROM parent) + (SELECT count(*) FROM span)"),
        "0"
    );
    assert_eq!(db.error("INSERT INTO soft VALUES (1, now())").code, "23505");
    assert_eq!(db.error("INSERT INTO parent VALUES (1, now())").code, "23503");
    assert_eq!(db.error("INSERT INTO span VALUES ('[3,7]', now())").code, "23P01");
}

#[test]
fn foreign_keys_are_about_physical_rows() {
    let mut db = with(
        "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); INSERT INTO parent VALUES (1, '2020-01-01'), (2, now());
         CREATE TABLE child (id int, parent int REFERENCES parent ON DELETE CASCADE, at timestamptz);
         SELECT ttl_create_index('parent', 'at', 60, hide_expired => true), ttl_create_index('child', 'at', 60, hide_expired => true);
         INSERT INTO child VALUES (1, 1, now()), (2, 2, '2020-01-01'), (3, 2, now())",
    );
    db.run("ALTER TABLE child ADD CONSTRAINT again FOREIGN KEY (parent) REFERENCES parent; ALTER TABLE child DROP CONSTRAINT again");
    db.run("DELETE FROM parent WHERE id = 2; SET pg_ttl_index.hide_expired = off");
    assert_eq!(db.get("SELECT string_agg(id::text, ',') FROM child"), "1", "hidden children went with it");
}

#[test]
fn backups_have_every_row_and_other_copies_what_is_visible() {
    let mut db = with("");
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int, at timestamptz, note text); INSERT INTO t VALUES (1, '2020-01-01', 'hidden'), (2, now(), 'visible');
         GRANT SELECT ON t TO {reader}; SELECT ttl_create_index('t', 'at', 60, hide_expired => true)"
    ));
    let lines = |db: &Database, program: &str, arguments: &[&str], role: &str| {
        let mut command = db.server.client_program(program);
        let output = run(command.env("PGUSER", role).args(arguments).args(["-d", &db.name]));
        (output.matches("hidden").count(), output.matches("visible").count())
    };
    for options in
        [&["-t", "t"][..], &["-t", "t", "--inserts"], &["-t", "t", "--column-inserts", "--rows-per-insert=5"]]
    {
        assert_eq!(lines(&db, "pg_dump", options, "postgres"), (1, 1), "{options:?}");
        assert_eq!(lines(&db, "pg_dump", options, &owner), (1, 1), "{options:?}");
    }
    for copy in ["COPY t TO STDOUT", "COPY t (note, id) TO STDOUT", "COPY public.t TO STDOUT (FORMAT csv)"] {
        assert_eq!(lines(&db, "psql", &["-c", copy], &owner), (1, 1), "{copy}");
        assert_eq!(lines(&db, "psql", &["-c", copy], &reader), (0, 1), "{copy}");
    }
    assert_eq!(lines(&db, "psql", &["-c", "COPY (SELECT * FROM t) TO STDOUT"], &owner), (0, 1));
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
fn what_hides_cannot_be_made_to_run_code_of_users() {
    let mut db = with("");
    let owner = db.role("owner");
    db.session(&owner).run(
        "CREATE FUNCTION evil(text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''ran as %'', current_user; END';
         CREATE DOMAIN dom AS text CHECK (evil(VALUE)); CREATE TYPE comp AS (a dom); CREATE TYPE pair AS (a text); CREATE VIEW spy AS SELECT evil('x');
         CREATE TABLE t (id int, at timestamptz, doc jsonb, p pair, tags text[]); CREATE TYPE mood AS ENUM ('fine'); ALTER TABLE t ADD m mood",
    );
    let mut session = db.session(&owner);
    for filter in [
        "(jsonb_populate_record(NULL::comp, doc)) IS NOT NULL",
        "table_to_xml('spy', true, true, '') IS NOT NULL",
        "query_to_xml('TABLE spy', true, true, '') IS NOT NULL",
        "p::text <> 'y'",
        "p = ROW('x')::pair",
        "m::text = 'x'",
        "(doc->>'x')::dom IS NULL",
        "array_to_string(tags, ',') = ''",
        "at < now()",
    ] {
        let call = format!("SELECT ttl_create_index('t', 'at', 60, hide_expired => true, filter => $f${filter}$f$)");
        assert!(
            ["0A000", "42P17"].contains(&session.error(&call).code.as_str()),
            "{filter}: {:?}",
            session.error(&call)
        );
    }
    session.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true, filter => $$doc->>'kind' = 'x' AND id > 1 AND tags IS NULL$$)");
}

#[test]
fn room_is_made_in_the_tables_of_the_rule_alone() {
    let mut db = with("");
    let (owner, other) = (db.role("owner"), db.role("other"));
    db.session(&owner).run(&format!(
        "CREATE TABLE victim (id int PRIMARY KEY, at timestamptz, v text); INSERT INTO victim VALUES (1, '2020-01-01', 'theirs');
         GRANT INSERT, TRIGGER ON victim TO {other}"
    ));
    let mut session = db.session(&other);
    session.run("CREATE TABLE own (id int PRIMARY KEY, at timestamptz, v text); SELECT ttl_create_index('own', 'at', 60, hide_expired => true)");
    let id = session.get("SELECT id FROM ttl_index_table");
    session.run(&format!(
        "CREATE TRIGGER stolen BEFORE INSERT ON victim FOR EACH ROW EXECUTE FUNCTION ttl_make_room('{id}')"
    ));
    assert_eq!(session.error("INSERT INTO victim VALUES (1, now(), 'mine')").code, "23505");
    assert_eq!(db.get("SELECT v FROM victim"), "theirs");
}

#[test]
fn nobody_passes_for_the_engine_or_a_foreign_key() {
    let mut db = with("");
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text); INSERT INTO t VALUES (1, '2020-01-01', 'dead'), (2, now(), 'live');
         GRANT SELECT ON t TO {reader}; SELECT ttl_create_index('t', 'at', 60, hide_expired => true)"
    ));
    let mut session = db.session(&reader);
    session.run(
        "CREATE TABLE seen (v text);
         CREATE FUNCTION look() RETURNS text LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT string_agg(v, '','' ORDER BY id) FROM public.t); END';
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
         DECLARE r record; BEGIN
             INSERT INTO public.seen VALUES (public.look());
             FOR r IN EXECUTE '/* pg_ttl_index */ SELECT v FROM public.t' LOOP INSERT INTO public.seen VALUES (r.v); END LOOP;
             FOR r IN EXECUTE 'SELECT fk.v FROM public.t fk' LOOP INSERT INTO public.seen VALUES (r.v); END LOOP;
             FOR r IN EXECUTE 'SELECT 1 FROM ONLY public.t x WHERE v = ''dead''' LOOP INSERT INTO public.seen VALUES ('dead'); END LOOP;
             FOR r IN EXECUTE 'SELECT 1 FROM (SELECT v FROM public.t) x WHERE v = ''dead''' LOOP INSERT INTO public.seen VALUES ('dead'); END LOOP;
             FOR r IN EXECUTE 'SELECT 1 FROM ONLY public.z x, public.t WHERE v = ''dead'' FOR KEY SHARE OF x' LOOP INSERT INTO public.seen VALUES ('dead'); END LOOP;
             FOR r IN EXECUTE 'SELECT 1 FROM ONLY public.z x WHERE EXISTS (SELECT FROM public.t WHERE v = ''dead'') FOR KEY SHARE OF x' LOOP INSERT INTO public.seen VALUES ('dead'); END LOOP;
             FOR r IN EXECUTE 'SELECT 1 FROM (SELECT a FROM public.z x WHERE EXISTS (SELECT FROM public.t WHERE v = ''dead'') FOR KEY SHARE OF x) y' LOOP INSERT INTO public.seen VALUES ('dead'); END LOOP;
             RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
         END $$;
         CREATE FUNCTION cast_it(text) RETURNS int LANGUAGE plpgsql AS $$
         DECLARE r record; BEGIN
             FOR r IN EXECUTE 'SELECT fk.v FROM public.t fk' LOOP INSERT INTO public.seen VALUES (r.v); END LOOP; RETURN 1;
         END $$;
         CREATE TABLE z (a text); INSERT INTO z VALUES ('x');
         CREATE TABLE p (id int PRIMARY KEY); INSERT INTO p VALUES (1);
         CREATE TABLE c (id int REFERENCES p ON DELETE CASCADE); INSERT INTO c VALUES (1);
         CREATE TRIGGER note BEFORE DELETE ON c FOR EACH ROW EXECUTE FUNCTION note();
         DELETE FROM p;
         ALTER TABLE z ALTER a TYPE int USING public.cast_it(a);
         CREATE TABLE own (id int PRIMARY KEY, at timestamptz); INSERT INTO own VALUES (1, '2020-01-01'), (2, '2020-01-01');
         CREATE TRIGGER note BEFORE DELETE ON own FOR EACH ROW EXECUTE FUNCTION note();
         SELECT ttl_create_index('own', 'at', 60, hide_expired => true);
         INSERT INTO own VALUES (1, now()); SELECT ttl_runner('own')",
    );
    assert_eq!(session.get("SELECT DISTINCT v FROM seen; SELECT look()"), "live\nlive");
    assert_eq!(session.get("SELECT count(*) FROM own"), "1");
}

#[test]
fn nothing_tells_of_hidden_rows_through_subqueries_either() {
    let mut db = with(
        "CREATE TABLE t (id int, v text, at timestamptz); INSERT INTO t VALUES (1, 'dead', '2020-01-01'), (2, 'live', now());
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true); CREATE VIEW w AS SELECT * FROM t;
         CREATE FUNCTION leak(text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql COST 0.0000001 AS 'BEGIN RAISE NOTICE ''%'', $1; RETURN true; END'",
    );
    for query in [
        "SELECT count(*) FROM t WHERE leak(v)",
        "SELECT count(*) FROM (SELECT * FROM t) s WHERE leak(v)",
        "SELECT count(*) FROM w WHERE leak(v)",
        "WITH s AS (SELECT * FROM t) SELECT count(*) FROM s WHERE leak(v)",
        "SELECT count(*) FROM (SELECT v FROM t UNION ALL SELECT v FROM t) s WHERE leak(v)",
        "SELECT v FROM t GROUP BY v HAVING leak(v)",
        "SELECT * FROM (SELECT DISTINCT v FROM t) s WHERE leak(v)",
        "SELECT count(*) FROM t, LATERAL (SELECT 1 WHERE leak(t.v)) s",
        "SELECT * FROM (SELECT leak(v) AS l FROM t) s WHERE l",
        "SELECT count(*) FROM generate_series(1, 2) g WHERE EXISTS (SELECT FROM t WHERE leak(v))",
        "UPDATE t SET id = 3 WHERE leak(v)",
        "DELETE FROM t USING (SELECT 1) x WHERE leak(v) AND false",
    ] {
        db.notices();
        db.run(query);
        assert!(!db.notices().iter().any(|notice| notice.contains("dead")), "{query}");
    }
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
fn a_hidden_row_in_the_way_is_neither_shown_nor_changed() {
    let mut db = with(
        "CREATE TABLE soft (id int PRIMARY KEY, at timestamptz, v text, gone boolean); INSERT INTO soft VALUES (1, '2020-01-01', 'dead');
         SELECT ttl_create_index('soft', 'at', 60, soft_delete_column => 'gone', hide_expired => true);
         CREATE TABLE par (id int PRIMARY KEY); INSERT INTO par VALUES (1);
         CREATE TABLE x (name text, par int REFERENCES par ON DELETE SET NULL, at timestamptz); CREATE UNIQUE INDEX ON x (lower(name));
         INSERT INTO x VALUES ('a', 1, '2020-01-01'); SELECT ttl_create_index('x', 'at', 60, hide_expired => true)",
    );
    assert_eq!(
        db.get(
            "INSERT INTO soft VALUES (1, now(), 'new') ON CONFLICT (id) DO UPDATE SET v = soft.v || '!' RETURNING v"
        ),
        ""
    );
    assert_eq!(
        db.get("SET pg_ttl_index.hide_expired = off; SELECT v FROM soft; RESET pg_ttl_index.hide_expired"),
        "dead"
    );
    db.run("DELETE FROM par");
    db.run("SET pg_ttl_index.hide_expired = off; UPDATE x SET at = now(); RESET pg_ttl_index.hide_expired");
    assert_eq!(db.get("SELECT name, par FROM x"), "a|");
}

#[test]
fn a_part_is_hidden_by_the_rule_of_its_parent() {
    let mut db = with(
        "CREATE TABLE p (id int, at timestamptz) PARTITION BY LIST (id); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    );
    let error = db.error("SELECT ttl_create_index('p1', 'at', 60, hide_expired => true)");
    assert_eq!((error.code.as_str(), error.hint.as_str()), ("0A000", "Register the rule on the parent."));
}
