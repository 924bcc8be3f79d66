//! Nothing tells of a hidden row: no operator, no function, no setting, no query behind a foreign key.

use crate::sweep::with;

#[test]
fn a_pattern_that_fails_does_not_tell_what_hidden_tokens_begin_with() {
    let mut db = with(
        "CREATE TABLE t (token text COLLATE \"C\", at timestamptz NOT NULL); CREATE INDEX ON t (token text_pattern_ops);
         INSERT INTO t SELECT 'live' || i, now() FROM generate_series(1, 5000) i; INSERT INTO t VALUES ('4f1c', '2020-01-01');
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true); ANALYZE t",
    );
    for method in ["on", "off"] {
        db.run(&format!("SET enable_seqscan = {method}; SET enable_bitmapscan = {method}"));
        for pattern in ["4f%\\", "4f1c\\", "zz%\\"] {
            assert_eq!(db.get(&format!("SELECT count(*) FROM t WHERE token LIKE '{pattern}'")), "0", "{pattern}");
            db.run(&format!(
                "PREPARE q (text) AS SELECT count(*) FROM t WHERE token LIKE $1; EXECUTE q ('{pattern}'); DEALLOCATE q"
            ));
        }
    }
    db.run("SET enable_seqscan = off; SET enable_bitmapscan = off");
    let plan = db.get("EXPLAIN SELECT * FROM t WHERE token LIKE 'live49%'");
    assert!(plan.contains("token ~>=~ 'live49'"), "a pattern that cannot fail still uses the index: {plan}");
}

/// Types with a value on which many operators fail, and constants to go with it.
const VALUES: [(&str, &str, &str); 17] = [
    ("int2", "-32768", "-1"),
    ("int4", "-2147483648", "-1"),
    ("int8", "-9223372036854775808", "-1"),
    ("float4", "3e38", "1e-38"),
    ("float8", "1e308", "1e-308"),
    ("numeric", "1e100000", "0"),
    ("text", "4f", "\\"),
    ("bytea", "\\x00ff", "\\x5c"),
    ("date", "4713-01-01 BC", "5874897-12-31"),
    ("timestamp", "4713-01-01 BC", "294276-12-31"),
    ("timestamptz", "4713-01-02 BC", "294276-12-30"),
    ("interval", "178000000 years", "178000000 years"),
    ("jsonb", "{\"a\": \"x\"}", "0"),
    ("point", "(1e300,1e300)", "(-1e300,-1e300)"),
    ("int4range", "[-2147483648,2147483646)", "empty"),
    ("inet", "255.255.255.255", "0.0.0.0"),
    ("bit varying", "101", "1"),
];

#[test]
fn no_operator_of_postgresql_is_called_on_a_hidden_row() {
    let columns: Vec<_> = (0..).zip(VALUES).map(|(n, (name, ..))| format!("c{n} {name}")).collect();
    let values: Vec<_> = VALUES.iter().map(|(_, value, _)| format!("'{value}'")).collect();
    let mut db = with(&format!(
        "CREATE TABLE t (at timestamptz NOT NULL, {}); INSERT INTO t VALUES ('2020-01-01', {});
         CREATE TABLE empty (LIKE t); SELECT ttl_create_index('t', 'at', 60, hide_expired => true); ANALYZE t",
        columns.join(", "),
        values.join(", ")
    ));
    db.run(
        "CREATE FUNCTION outcome(query text) RETURNS text LANGUAGE plpgsql AS $$
         DECLARE n bigint; BEGIN EXECUTE query INTO n; RETURN n; EXCEPTION WHEN OTHERS THEN RETURN SQLSTATE; END $$;
         CREATE TABLE samples (type oid, col text, constant text)",
    );
    for (n, (name, _, constant)) in (0..).zip(VALUES) {
        db.run(&format!(
            "INSERT INTO samples VALUES ('{name}'::regtype, 'c{n}', quote_literal('{constant}') || '::{name}')"
        ));
    }
    // Every operator and every function of one or two arguments that can be applied to a column and a constant.
    let conditions = "
        SELECT format(CASE WHEN oprresult = 'bool'::regtype THEN '%s OPERATOR(pg_catalog.%s) %s'
                           ELSE '(%s OPERATOR(pg_catalog.%s) %s) IS NOT NULL' END, l.col, oprname, r.constant) AS condition
        FROM pg_operator JOIN samples l ON l.type = oprleft JOIN samples r ON r.type = oprright WHERE oprcode <> 0
        UNION ALL
        SELECT format(CASE WHEN oprresult = 'bool'::regtype THEN '%s OPERATOR(pg_catalog.%s) %s'
                           ELSE '(%s OPERATOR(pg_catalog.%s) %s) IS NOT NULL' END, l.constant, oprname, r.col)
        FROM pg_operator JOIN samples l ON l.type = oprleft JOIN samples r ON r.type = oprright WHERE oprcode <> 0
        UNION ALL
        SELECT format('pg_catalog.%I(%s) IS NOT NULL', proname, s.col)
        FROM pg_proc JOIN samples s ON pronargs = 1 AND proargtypes[0] = s.type
        WHERE prokind = 'f' AND NOT proretset AND pronamespace = 'pg_catalog'::regnamespace AND provolatile <> 'v'
        UNION ALL
        SELECT format('pg_catalog.%I(%s, %s) IS NOT NULL', proname, s.col, u.constant)
        FROM pg_proc JOIN samples s ON pronargs = 2 AND proargtypes[0] = s.type JOIN samples u ON proargtypes[1] = u.type
        WHERE prokind = 'f' AND NOT proretset AND pronamespace = 'pg_catalog'::regnamespace AND provolatile <> 'v'";
    let tried = db.get(&format!(
        "CREATE TABLE tried AS SELECT condition, outcome('SELECT count(*) FROM t WHERE ' || condition) AS hidden,
                                      outcome('SELECT count(*) FROM empty WHERE ' || condition) AS gone
                               FROM ({conditions}) AS c;
         SELECT count(*) FROM tried"
    ));
    assert!(tried.parse::<u32>().is_ok_and(|tried| tried > 1000), "{tried}");
    assert_eq!(db.get("SELECT condition, hidden, gone FROM tried WHERE hidden <> gone ORDER BY 1"), "");
    // The constants are fit to show it: without the condition many of them fail.
    db.run("SET pg_ttl_index.hide_expired = off; DROP FUNCTION IF EXISTS nothing()");
    let fails = db.get(
        "SELECT count(*) FROM tried WHERE outcome('SELECT count(*) FROM t WHERE ' || condition) NOT IN ('0', '1')",
    );
    assert!(fails.parse::<u32>().is_ok_and(|fails| fails > 50), "{fails}");
}

#[test]
fn explain_does_not_count_hidden_rows() {
    let mut db = with(
        "CREATE TABLE t (token text PRIMARY KEY, at timestamptz NOT NULL); INSERT INTO t VALUES ('dead', '2020-01-01'), ('live', now());
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)",
    );
    for query in [
        "SELECT * FROM t WHERE token = 'dead'",
        "SELECT count(*) FROM t x LEFT JOIN (SELECT * FROM t WHERE token < 'e') y ON true",
        "UPDATE t SET at = now() WHERE token = 'dead'",
    ] {
        let [plan, shown] = ["", "SET pg_ttl_index.hide_expired = off; "].map(|setting| {
            let plan = db.get(&format!("{setting}EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) {query}"));
            db.run("RESET pg_ttl_index.hide_expired");
            plan
        });
        assert!(!plan.contains("Removed"), "{plan}");
        assert!(!shown.is_empty());
    }
    db.run("INSERT INTO t VALUES ('gone', '2020-01-01')");
    db.run("SET enable_seqscan = off; SET enable_indexscan = off; SET enable_indexonlyscan = off");
    let [dead, none] = ["gone", "none"].map(|token| {
        let query = format!(
            "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT * FROM t WHERE token = '{token}'"
        );
        let plan = db.get(&query).replace(token, "");
        assert!(plan.contains("Bitmap Heap Scan"), "{plan}");
        plan.lines()
            .filter(|line| !line.contains("Planning") && !line.contains("Buffers"))
            .collect::<Vec<_>>()
            .join("\n")
    });
    assert_eq!(dead, none);
    // Nor does a query around one tell of what that one has read.
    db.run(
        "CREATE FUNCTION find(key text) RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t WHERE token = key); END';
         CREATE FUNCTION fail(key text) RETURNS bigint LANGUAGE plpgsql AS
             'BEGIN RETURN (SELECT 1 / count(*) FROM t WHERE token = key); EXCEPTION WHEN OTHERS THEN RETURN 0; END';
         CREATE FUNCTION open(key text) RETURNS bigint LANGUAGE plpgsql AS
             'DECLARE c refcursor; n bigint; BEGIN OPEN c FOR SELECT count(*) FROM t WHERE token = key; FETCH c INTO n; RETURN n; END'",
    );
    for function in ["find", "fail", "open"] {
        db.run(&format!("SELECT {function}('gone'), {function}('none')"));
        let plan = db.get(&format!(
            "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT {function}('gone') FROM (VALUES (1)) AS v"
        ));
        assert!(!plan.split("Planning").next().unwrap_or_default().contains("Buffers"), "{function}: {plan}");
    }
    db.run("CREATE TABLE open (LIKE t); INSERT INTO open VALUES ('x', now())");
    assert!(db.get("EXPLAIN (ANALYZE, BUFFERS) SELECT * FROM open").contains("Buffers"), "others see theirs");
    let plan = db.get("EXPLAIN (ANALYZE, FORMAT JSON) SELECT * FROM t WHERE token = 'dead'");
    assert!(!plan.contains("\"Rows Removed by Filter\": 1"), "{plan}");
}

#[test]
fn what_an_error_says_of_rows_is_for_owners_and_monitors() {
    let mut db = with("");
    let [owner, reader, monitor] = ["owner", "reader", "monitor"].map(|name| db.role(name));
    db.run(&format!("GRANT pg_monitor TO {monitor}"));
    let mut own = db.session(&owner);
    own.run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, ssn text, at timestamptz NOT NULL); GRANT SELECT (id) ON t TO {reader};
         CREATE FUNCTION fails(regclass, jsonb) RETURNS void LANGUAGE plpgsql AS
             'BEGIN PERFORM (x->>''ssn'')::int FROM jsonb_array_elements($2) x; END';
         SELECT ttl_create_index('t', 'at', 0, hide_expired => true, on_expire => 'fails(regclass, jsonb)');
         INSERT INTO t VALUES (7, 'SSN-123-45', now() - interval '1 hour'); SELECT ttl_runner('t')"
    ));
    let errors = "SELECT last_error FROM ttl_summary UNION ALL SELECT error FROM ttl_history";
    for (role, knows) in [(&owner, true), (&reader, false), (&monitor, true)] {
        let mut session = db.session(role);
        let seen = session.get(errors);
        assert_eq!(
            seen.lines().filter(|line| line.contains("SSN-123-45")).count(),
            if knows { 2 } else { 0 },
            "{seen}"
        );
        assert_eq!(seen.lines().filter(|line| line.starts_with("22P02")).count(), 2, "{seen}");
        if !knows {
            for sql in ["SELECT * FROM ttl_state", "SELECT error FROM ttl_history_log", "SELECT * FROM ttl_binding"] {
                assert_eq!(session.error(sql).code, "42501", "{sql}");
            }
            assert!(!session.get("SELECT * FROM ttl_index_table").contains("SSN"));
        }
    }
}

#[test]
fn how_often_a_function_is_called_does_not_tell_of_hidden_rows() {
    let mut db = with(
        "CREATE TABLE t (k int PRIMARY KEY, v text, at timestamptz NOT NULL); CREATE TABLE one (n int); INSERT INTO one VALUES (1);
         INSERT INTO t SELECT i, 'secret' || i, '2020-01-01' FROM generate_series(1, 5) i;
         INSERT INTO t SELECT i, 'live', now() + interval '1 hour' FROM generate_series(101, 2000) i;
         CREATE VIEW w AS SELECT * FROM t; ANALYZE t; SELECT ttl_create_index('t', 'at', 0, hide_expired => true);
         CREATE FUNCTION steady() RETURNS boolean STABLE COST 0.0001 LANGUAGE plpgsql AS 'BEGIN RAISE NOTICE ''called''; RETURN true; END';
         CREATE FUNCTION tell() RETURNS boolean VOLATILE COST 0.0001 LANGUAGE plpgsql AS 'BEGIN RAISE NOTICE ''called''; RETURN true; END'",
    );
    for method in ["enable_seqscan = off", "enable_indexscan = off", "enable_seqscan = on"] {
        db.run(&format!("SET {method}"));
        for query in [
            "SELECT k FROM t WHERE k = 3 AND tell()",
            "SELECT k FROM t WHERE k = 3 AND v > 'secret2' AND tell()",
            "SELECT k FROM t WHERE k = 3 AND (k > 5 OR tell())",
            "SELECT k FROM t WHERE k = 3 AND tell() AND (SELECT true)",
            "SELECT k FROM w WHERE k = 3 AND tell()",
            "SELECT * FROM (SELECT k FROM t WHERE k = 3) x WHERE tell()",
            "WITH x AS (SELECT k FROM t WHERE k = 3) SELECT * FROM x WHERE tell()",
            "UPDATE t SET v = 'x' WHERE k = 3 AND tell()",
            "DELETE FROM t WHERE k = 3 AND tell()",
            "SELECT * FROM one JOIN t ON k = 3 AND tell()",
            "SELECT k FROM t WHERE k = 3 AND (v > 'zzz' OR steady())",
            "SELECT k FROM t, (SELECT 1) s WHERE k = 3 AND tell()",
            "SELECT k FROM t CROSS JOIN (VALUES (1)) s WHERE k = 3 AND tell()",
            "SELECT NULL WHERE (SELECT count(*) FROM w WHERE k = 3 AND tell()) > 5",
            "DELETE FROM t USING (SELECT 1) s WHERE k = 3 AND tell()",
            "MERGE INTO t USING one ON k = 3 AND (k > 1000 OR tell()) WHEN MATCHED THEN DO NOTHING",
        ] {
            // As often as for a key that no row has.
            let [hidden, missing] = ["3", "99"].map(|key| {
                let query = query.replace("k = 3", &format!("k = {key}"));
                db.notices();
                assert_eq!(db.get(&query), "", "{query}");
                db.notices().len()
            });
            assert_eq!(hidden, missing, "{method}: {query}");
        }
        // It is called for rows that are there, and for those that an outer join makes up.
        assert_eq!(db.get("SELECT k FROM t WHERE k = 101 AND tell()"), "101");
        assert_eq!(db.get("SELECT n, k FROM one LEFT JOIN t ON k = 3 WHERE tell()"), "1|");
        assert!(db.notices().len() >= 2);
    }
}

#[test]
fn a_policy_calls_nothing_for_hidden_rows() {
    let mut db = with(
        "CREATE TABLE t (k int PRIMARY KEY, at timestamptz NOT NULL); INSERT INTO t VALUES (3, '2020-01-01'), (4, now() + interval '1 hour');
         CREATE FUNCTION tell() RETURNS boolean VOLATILE COST 0.0001 LANGUAGE plpgsql AS 'BEGIN RAISE NOTICE ''called''; RETURN true; END';
         SELECT ttl_create_index('t', 'at', 0, hide_expired => true); ALTER TABLE t ENABLE ROW LEVEL SECURITY;
         CREATE POLICY p ON t USING (k > 100 OR tell())",
    );
    let reader = db.role("reader");
    db.run(&format!("GRANT SELECT, UPDATE ON t TO {reader}"));
    let mut session = db.session(&reader);
    for (query, rows, calls) in [
        ("SELECT k FROM t WHERE k = 3", "", 0),
        ("SELECT k FROM t WHERE k = 3 AND random() >= 0", "", 0),
        ("SELECT k FROM t", "4", 1),
        ("UPDATE t SET k = 5 WHERE k = 3 RETURNING k", "", 0),
    ] {
        session.notices();
        assert_eq!(session.get(query), rows, "{query}");
        assert_eq!(session.notices().len(), calls, "{query}");
    }
}

#[test]
fn volatile_conditions_mean_what_they_mean_without_hidden_rows() {
    let mut db = with(
        "CREATE TABLE a AS SELECT i AS id FROM generate_series(1, 20) i; CREATE TABLE b AS SELECT i AS id FROM generate_series(5, 25) i;
         CREATE TABLE h (id int, v text, at timestamptz NOT NULL); INSERT INTO h SELECT i, 'old', '2020-01-01' FROM generate_series(1, 6) i;
         INSERT INTO h SELECT i, 'new', now() + interval '1 hour' FROM generate_series(7, 30) i;
         CREATE TABLE d AS SELECT * FROM h WHERE id > 6; SELECT ttl_create_index('h', 'at', 0, hide_expired => true)",
    );
    for query in [
        "SELECT a.id, b.id, t.id FROM a LEFT JOIN b ON (a.id = b.id AND random() < 0) LEFT JOIN $ t ON t.id = a.id",
        "SELECT a.id, t.id FROM a LEFT JOIN $ t ON t.id = a.id AND random() < 0",
        "SELECT a.id, t.id FROM a LEFT JOIN $ t ON t.id = a.id WHERE random() >= 0",
        "SELECT a.id, t.id FROM a FULL JOIN $ t ON t.id = a.id WHERE random() >= 0 AND (t.id > 3 OR random() < 0)",
        "SELECT j.id, j.v FROM (a JOIN $ USING (id)) j WHERE j.v > 'a' OR random() < 0",
        "SELECT t.id FROM $ t WHERE random() >= 0 AND id IN (SELECT id FROM a WHERE random() >= 0)",
        "SELECT count(*), max(t.id) FROM a, $ t WHERE random() >= 0",
    ] {
        let [hidden, deleted] = ["h", "d"].map(|table| {
            let rows = db.get(&query.replace('$', table));
            let mut rows: Vec<_> = rows.lines().map(str::to_owned).collect();
            rows.sort();
            rows
        });
        assert_eq!(hidden, deleted, "{query}");
    }
    db.run(
        "CREATE TABLE x (id int, a timestamptz, b timestamptz);
         INSERT INTO x VALUES (1, now() + interval '1 day', NULL), (2, NULL, now() - interval '1 hour'), (3, NULL, NULL);
         SELECT ttl_create_index('x', 'coalesce(a, b, ''2000-01-01 00:00:00+00''::timestamptz)', 0, hide_expired => true, index_method => 'none')",
    );
    assert_eq!(
        db.get("SELECT l.id, x.id FROM (VALUES (1), (2), (5)) l (id) LEFT JOIN x USING (id) WHERE random() >= 0 AND (x.id IS NULL OR x.id > 0 OR random() < 0) ORDER BY 1"),
        "1|1\n2|\n5|",
        "a row that an outer join makes up is not hidden"
    );
    for change in [
        "UPDATE $ SET v = 'x' FROM a LEFT JOIN b ON (a.id = b.id AND random() < 0) WHERE a.id = $.id RETURNING 1",
        "DELETE FROM a USING a x LEFT JOIN b ON (x.id = b.id AND random() < 0) LEFT JOIN $ t ON t.id = x.id WHERE a.id = x.id AND t.id IS NULL RETURNING 1",
    ] {
        let [hidden, deleted] = ["h", "d"].map(|table| {
            db.run("BEGIN");
            let rows = db.get(&change.replace('$', table)).lines().count();
            db.run("ROLLBACK");
            rows
        });
        assert_eq!(hidden, deleted, "{change}");
    }
}

#[test]
fn a_setting_of_the_caller_does_not_reach_into_functions_of_others() {
    let mut db = with("");
    let (owner, caller) = (db.role("owner"), db.role("caller"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (token text PRIMARY KEY, at timestamptz); INSERT INTO t VALUES ('dead', '2020-01-01'), ('live', now());
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true);
         CREATE FUNCTION invoker(text) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN RETURN EXISTS (SELECT FROM public.t WHERE token = $1); END';
         CREATE FUNCTION accepts(text) RETURNS boolean SECURITY DEFINER LANGUAGE plpgsql AS
             'BEGIN RETURN EXISTS (SELECT FROM public.t WHERE token = $1) OR public.invoker($1); END';
         CREATE FUNCTION accepts_sql(text) RETURNS boolean SECURITY DEFINER LANGUAGE sql AS 'SELECT EXISTS (SELECT FROM public.t WHERE token = $1)';
         REVOKE ALL ON t FROM PUBLIC; GRANT EXECUTE ON FUNCTION accepts, accepts_sql TO {caller}"
    ));
    for setting in ["pg_ttl_index.hide_expired = off", "application_name = 'pg_dump'"] {
        let mut session = db.session(&caller);
        session.run(&format!("SET {setting}"));
        for _ in 0..7 {
            assert_eq!(
                session.get("SELECT accepts('dead'), accepts_sql('dead'), accepts('live')"),
                "f|f|t",
                "{setting}"
            );
        }
    }
    // A plan that the owner made for himself is not one for others, in one session and in either order.
    let mut session = db.session("postgres");
    session.run("SET pg_ttl_index.hide_expired = off");
    for _ in 0..7 {
        session.run(&format!("SET ROLE {owner}"));
        assert_eq!(session.get("SELECT invoker('dead')"), "t", "the owner looks");
        session.run(&format!("SET ROLE {caller}"));
        assert_eq!(session.get("SELECT accepts('dead'), accepts_sql('dead')"), "f|f");
        session.run("RESET ROLE");
        assert_eq!(session.get("SELECT accepts('dead')"), "f", "nor does a superuser's setting reach into it");
        assert_eq!(session.get("SELECT invoker('dead')"), "t", "a superuser looks");
    }
}

#[test]
fn a_trigger_behind_a_foreign_key_neither_sees_nor_revives_hidden_rows() {
    let mut db = with("");
    let (owner, other) = (db.role("owner"), db.role("other"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text); INSERT INTO t VALUES (1, '2020-01-01', 'dead'), (2, now(), 'live');
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true); GRANT SELECT, UPDATE, DELETE ON t TO {other}"
    ));
    let mut session = db.session(&other);
    session.run(
        "CREATE TABLE seen (how text); CREATE TABLE p (id int PRIMARY KEY); CREATE TABLE c (id int REFERENCES p ON DELETE CASCADE ON UPDATE CASCADE);
         CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
         DECLARE r record; n int; BEGIN
             FOR r IN SELECT 1 FROM ONLY public.t x WHERE id = 1 FOR KEY SHARE OF x LOOP INSERT INTO seen VALUES ('static'); END LOOP;
             FOR r IN EXECUTE 'SELECT 1 FROM ONLY \"public\".\"t\" x WHERE \"id\" OPERATOR(pg_catalog.=) $1 FOR KEY SHARE OF x' USING 1
             LOOP INSERT INTO seen VALUES ('as a foreign key'); END LOOP;
             FOR r IN EXECUTE 'SELECT v FROM ONLY public.t x WHERE v > $1 FOR KEY SHARE OF x' USING '' LOOP INSERT INTO seen VALUES (r.v); END LOOP;
             UPDATE public.t SET at = now() WHERE id = 1; GET DIAGNOSTICS n = ROW_COUNT; INSERT INTO seen SELECT 'revived' WHERE n > 0;
             EXECUTE 'DELETE FROM ONLY public.t WHERE $1 OPERATOR(pg_catalog.=) id' USING 1; GET DIAGNOSTICS n = ROW_COUNT; INSERT INTO seen SELECT 'deleted' WHERE n > 0;
             PERFORM query_to_xml('SELECT 1 / (id - 1) FROM ONLY public.t x WHERE id = 1', true, true, '');
             BEGIN PERFORM query_to_xml('EXECUTE q(1)', true, true, ''); EXCEPTION WHEN syntax_error OR feature_not_supported THEN NULL; END;
             RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
         EXCEPTION WHEN division_by_zero THEN INSERT INTO seen VALUES ('through xml'); RETURN NULL;
         END $$;
         CREATE TRIGGER look BEFORE DELETE OR UPDATE ON c FOR EACH ROW EXECUTE FUNCTION look();
         PREPARE q (int) AS SELECT 1 / (id - 1) FROM ONLY public.t x WHERE id = $1 FOR KEY SHARE OF x;
         INSERT INTO p VALUES (1), (2); INSERT INTO c VALUES (1), (2); UPDATE p SET id = 3 WHERE id = 2; DELETE FROM p",
    );
    assert_eq!(session.get("SELECT DISTINCT how FROM seen ORDER BY 1"), "live");
    assert_eq!(session.get("SELECT id FROM t"), "2");
    assert_eq!(db.get("SET pg_ttl_index.hide_expired = off; SELECT id, v FROM t ORDER BY 1"), "1|dead\n2|live");
}

#[test]
fn neither_alter_table_nor_what_stands_in_from_gets_at_hidden_rows() {
    let mut db = with("");
    let (owner, other) = (db.role("owner"), db.role("other"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (token text PRIMARY KEY, at timestamptz NOT NULL); INSERT INTO t VALUES ('dead', '2020-01-01'), ('live', now());
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true); GRANT SELECT ON t TO {other}"
    ));
    let mut session = db.session(&other);
    session.run("CREATE TABLE m (c text); INSERT INTO m VALUES ('x')");
    for query in [
        "SELECT fk.token FROM public.t fk",
        "SELECT fk.token FROM ONLY public.t fk LEFT OUTER JOIN ONLY public.m pk ON (pk.c OPERATOR(pg_catalog.=) fk.token) WHERE pk.c IS NULL AND (fk.token IS NOT NULL)",
    ] {
        session.run(&format!("ALTER TABLE m ALTER c TYPE text USING query_to_xml('{query}', true, false, '')::text"));
        assert!(!session.get("SELECT c FROM m").contains("dead"), "{query}");
    }
    session.run("CREATE FUNCTION leak(text) RETURNS int LANGUAGE plpgsql IMMUTABLE COST 0.0001 AS 'BEGIN RAISE NOTICE ''%'', $1; RETURN 1; END'; SET enable_indexscan = off; SET enable_bitmapscan = off");
    for query in [
        "SELECT t.token FROM t, LATERAL (VALUES (leak(t.token))) v (y) WHERE v.y = 1",
        "SELECT t.token FROM t, LATERAL leak(t.token) AS y WHERE y = 1",
        "SELECT t.token FROM t, LATERAL generate_series(1, leak(t.token)) AS y WHERE y = 1",
    ] {
        assert_eq!(session.get(query), "live", "{query}");
        assert!(!session.notices().iter().any(|notice| notice.contains("dead")), "{query}");
    }
    db.run("CREATE TABLE g (id int PRIMARY KEY, a text COLLATE \"C\", b text COLLATE \"POSIX\", at timestamptz NOT NULL);
            INSERT INTO g VALUES (1, 'a', 'b', '2020-01-01'); SELECT ttl_create_index('g', 'at', 60, hide_expired => true); SET enable_seqscan = off");
    for id in [1, 2] {
        assert_eq!(db.get(&format!("SELECT count(*) FROM g WHERE id = {id} AND a < b")), "0", "row or no row");
    }
}

#[test]
fn an_outer_join_that_becomes_an_inner_one_does_not_tell_of_hidden_rows() {
    let mut db = harness::Database::new();
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE s (id int PRIMARY KEY, secret text UNIQUE, at timestamptz, parent int);
         SELECT ttl_create_index('s', 'at', 0, hide_expired => true, active => false);
         INSERT INTO s VALUES (1, 's1', now() - interval '1 hour', NULL), (2, 's2', now() + interval '1 hour', 1), (3, 's3', now() - interval '1 hour', 2);
         GRANT SELECT ON s TO {reader}"
    ));
    let mut session = db.session(&reader);
    session.run(
        "CREATE FUNCTION tell() RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS $$ BEGIN RAISE NOTICE 'told'; RETURN true; END $$;
         CREATE TABLE o (x int); INSERT INTO o VALUES (1); CREATE TABLE o2 (y int); INSERT INTO o2 VALUES (1);
         CREATE VIEW v AS SELECT s.* FROM o LEFT JOIN s ON true",
    );
    const ASKS: &str = "CASE WHEN s.secret = 's1' THEN tell() ELSE false END";
    for query in [
        format!("SELECT s.id FROM (VALUES (1)) v (x) LEFT JOIN s ON true WHERE s.id > 0 AND {ASKS}"),
        format!("SELECT s.id FROM o LEFT JOIN s ON true WHERE s.id > 0 AND {ASKS}"),
        format!("SELECT s.id FROM s RIGHT JOIN o ON true WHERE s.id > 0 AND {ASKS}"),
        format!("SELECT s.id FROM o FULL JOIN s ON o.x = s.id WHERE s.id > 0 AND {ASKS}"),
        format!("SELECT s.id FROM o FULL JOIN s ON o.x = s.id WHERE s.id > 0 AND o.x > 0 AND {ASKS}"),
        format!("SELECT x FROM o WHERE x IN (SELECT s.id FROM o2 LEFT JOIN s ON true WHERE s.id > 0 AND {ASKS})"),
        format!("SELECT o.x FROM o LEFT JOIN (o2 LEFT JOIN s ON true) ON s.id = 1 AND {ASKS}"),
        format!("SELECT o.x FROM o LEFT JOIN (o2 LEFT JOIN s ON true) ON true WHERE s.id = 1 AND {ASKS}"),
        "SELECT id FROM v WHERE id > 0 AND CASE WHEN secret = 's1' THEN tell() ELSE false END".to_owned(),
        format!(
            "WITH q AS NOT MATERIALIZED (SELECT s.* FROM o LEFT JOIN s ON true) SELECT id FROM q AS s WHERE id > 0 AND {ASKS}"
        ),
    ] {
        for plan in ["on", "off"] {
            session.run(&format!("SET enable_seqscan = {plan}"));
            session.notices();
            assert_eq!(session.get(&query).lines().filter(|line| *line != "1").count(), 0, "{query}");
            assert_eq!(session.notices().concat(), "", "{query}");
        }
    }
    // A function that is given nothing of a row is called for the one that is visible.
    let alone = "SELECT s.id FROM (VALUES (1)) v (x) LEFT JOIN s ON true WHERE s.id > 0 AND tell()";
    assert_eq!(session.get(alone), "2");
    assert_eq!(session.notices().len(), 1);
    // Rows that a join has made up are asked about as ever.
    assert_eq!(session.get("SELECT count(*) FROM o LEFT JOIN s ON s.id = 7 WHERE s.id IS NULL AND tell()"), "1");
    assert_eq!(session.notices().len(), 1);
}

#[test]
fn a_plan_for_any_parameter_does_not_tell_of_hidden_rows() {
    let mut db = harness::Database::new();
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE h (id int PRIMARY KEY, at timestamptz, v int);
         SELECT ttl_create_index('h', 'at', 0, hide_expired => true, active => false);
         INSERT INTO h SELECT i, now() + (i - 5) * interval '1 hour', i FROM generate_series(1, 10) i; GRANT SELECT ON h TO {reader}"
    ));
    let mut session = db.session(&reader);
    session.run(
        "CREATE FUNCTION tell(int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE COST 0.0000001 AS $$ BEGIN RAISE NOTICE 'told'; RETURN true; END $$;
         SET plan_cache_mode = force_generic_plan;
         PREPARE one (int, int) AS SELECT id FROM h WHERE id = $1 AND CASE WHEN tell($2) THEN v IS NULL END;
         PREPARE two (int, int, int) AS SELECT id FROM h WHERE id = $1 AND CASE WHEN v = $2 THEN tell($3) END;
         PREPARE three (int, int) AS SELECT o.id FROM (VALUES (1)) l (x) LEFT JOIN h o ON true WHERE o.id = $1 AND CASE WHEN tell($2) THEN o.v IS NULL END",
    );
    for plan in ["on", "off"] {
        session.run(&format!("SET enable_seqscan = {plan}"));
        session.notices();
        for query in ["EXECUTE one (1, 0)", "EXECUTE two (4, 4, 1)", "EXECUTE three (2, 0)"] {
            session.run(query);
            assert_eq!(session.notices().concat(), "", "{query}");
        }
        session.run("EXECUTE one (9, 0)");
        assert_eq!(session.notices().len(), 1);
    }
}

/// A hidden row with id 1, live ones from 6 on, and a twin of the table without the hidden ones.
fn with_twin(db: &mut harness::Database) -> String {
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE h (id int PRIMARY KEY, at timestamptz, v int, d date, name text);
         SELECT ttl_create_index('h', 'at', 0, hide_expired => true, active => false);
         INSERT INTO h SELECT i, now() + (i - 5) * interval '1 hour', i, NULL, 'n' || i FROM generate_series(1, 10) i;
         CREATE TABLE twin AS SELECT * FROM h WHERE at > now(); ALTER TABLE twin ADD PRIMARY KEY (id);
         CREATE VIEW h_view AS SELECT * FROM h; GRANT SELECT ON h, h_view, twin TO {reader}; GRANT UPDATE, DELETE ON h, twin TO {reader}"
    ));
    reader
}

fn outcome(session: &mut harness::Session, call: &str) -> String {
    match session.try_get(call) {
        Ok(rows) => rows,
        Err(error) => format!("{}: {}", error.code, error.message),
    }
}

#[test]
fn nothing_that_is_given_nothing_of_a_row_tells_whether_there_is_one() {
    let mut db = harness::Database::new();
    let reader = with_twin(&mut db);
    let mut session = db.session(&reader);
    session.run("CREATE TABLE o (x int); INSERT INTO o VALUES (1), (2)");
    session.run(
        "CREATE FUNCTION boom(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE COST 0.0001
         AS $$ BEGIN RAISE NOTICE 'called'; RETURN true; END $$",
    );
    let conditions = [
        "v = 1 / $2",
        "CASE WHEN v > 0 THEN sqrt($2 - 1) > 0 END",
        "v = sqrt($2 - 1)",
        "coalesce(v, 0) > length(repeat('x', 5)::text) / $2",
        "v = ANY (ARRAY[1, 1 / $2])",
        "at > now() - make_interval(secs => 1 / $2)",
        "(v IS NULL OR 'a' ~ repeat('[', 1 - $2))",
        "(v IS NULL OR has_table_privilege('nosuch' || $2, 'select'))",
        "(v IS NULL OR has_table_privilege('nosuch', 'select'))",
        "(v IS NULL OR boom(current_setting('my.setting', true)))",
        "(v IS NULL OR boom($2::text))",
        "(v IS NULL OR (SELECT 1 / (count(*) - 2) > 0 FROM o))",
        "(v IS NULL OR EXISTS (SELECT FROM o WHERE 1 / (x - 1) > 0))",
        "(v < 1 OR (SELECT boom(max(x)::text) FROM o))",
    ];
    let statements = [
        ("SELECT 1 FROM h WHERE id = $1 AND", ""),
        ("SELECT 1 FROM h_view WHERE id = $1 AND", ""),
        ("WITH c AS (SELECT * FROM h) SELECT id FROM c WHERE id = $1 AND", ""),
        ("SELECT 1 FROM (SELECT *, v + 1 AS w FROM h OFFSET 0) s WHERE id = $1 AND", ""),
        ("SELECT v, at FROM h WHERE id = $1 GROUP BY v, at HAVING", ""),
        ("SELECT 1 FROM o LEFT JOIN h ON h.id = $1 WHERE h.id = $1 AND", ""),
        ("SELECT 1 FROM o LEFT JOIN h ON h.id = $1 AND", ""),
        ("SELECT 1 FROM o JOIN h ON h.id = o.x + $1 - 1 AND", ""),
        ("SELECT 1 FROM o WHERE EXISTS (SELECT FROM h WHERE id = $1 AND", ")"),
        ("SELECT min(id) FROM h WHERE id = $1 AND", ""),
        ("UPDATE h SET name = 'x' WHERE id = $1 AND", ""),
        ("DELETE FROM h USING o WHERE id = $1 AND", ""),
        ("MERGE INTO h USING o ON h.id = $1 AND", " WHEN MATCHED THEN DO NOTHING"),
        ("SELECT 1 FROM h WHERE ctid = ANY (ARRAY(SELECT format('(0,%s)', $1)::tid)) AND", ""),
    ];
    for plan in ["force_generic_plan", "force_custom_plan"] {
        session.run(&format!("SET plan_cache_mode = {plan}"));
        for (statement, end) in statements {
            for condition in conditions {
                session.run(&format!("PREPARE q (int, int) AS {statement} {condition}{end}"));
                // One is hidden, the other was never there.
                session.notices();
                let hidden = (outcome(&mut session, "EXECUTE q (1, 0)"), session.notices().concat());
                let missing = (outcome(&mut session, "EXECUTE q (77, 0)"), session.notices().concat());
                assert_eq!(hidden, missing, "{plan}: {statement} {condition}");
                session.run("DEALLOCATE q");
            }
        }
    }
}

#[test]
fn what_a_query_guards_itself_against_is_not_computed_because_rows_are_hidden() {
    let mut db = harness::Database::new();
    let reader = with_twin(&mut db);
    let mut session = db.session(&reader);
    session.run("CREATE TABLE o (x int); INSERT INTO o VALUES (1), (2)");
    let queries = [
        ("int", "1", "SELECT count(*) FROM t WHERE $1 IN (SELECT x FROM o)"),
        ("int", "1", "SELECT count(*) FROM t WHERE (id, $1) IN (SELECT x, x FROM o)"),
        ("int", "1", "SELECT count(*) FROM t WHERE $1 > ALL (SELECT x FROM o)"),
        ("int", "1", "SELECT count(*) FROM t WHERE ($1, id) = (SELECT x, x FROM o LIMIT 1)"),
        ("int", "6", "SELECT count(*) FROM t WHERE CASE v WHEN $1 THEN true END"),
        ("int", "0", "SELECT count(*) FROM t WHERE $1 = 0 OR v > 100 / $1"),
        ("int", "0", "SELECT count(*) FROM t WHERE $1 <> 0 AND v = 100 / $1"),
        ("text", "''", "SELECT count(*) FROM t WHERE $1 = '' OR d = $1::date"),
        ("text", "'hi'", "SELECT count(*) FROM t WHERE CASE WHEN name = 'd' THEN d = $1::date ELSE name = $1 END"),
        ("text", "'abc'", "SELECT count(*) FROM t WHERE length(name) > 0 AND ($1 !~ '^\\d+$' OR v = $1::int)"),
        ("int", "0", "UPDATE t SET v = v WHERE $1 = 0 OR v = 100 / $1"),
        ("int", "0", "DELETE FROM t WHERE id > 1000 AND ($1 = 0 OR v = 100 / $1)"),
        ("int", "0", "SELECT count(*) FROM o LEFT JOIN t ON $1 = 0 OR t.v = 10 / $1"),
    ];
    for plan in ["force_generic_plan", "auto"] {
        session.run(&format!("SET plan_cache_mode = {plan}"));
        for (kind, value, query) in queries {
            let mut outcomes = Vec::new();
            for table in ["h", "twin"] {
                let query = query.replace(" t ", &format!(" {table} t "));
                session.run(&format!("PREPARE q ({kind}) AS {query}"));
                outcomes.push(outcome(&mut session, &format!("EXECUTE q ({value})")));
                session.run("DEALLOCATE q");
            }
            assert_eq!(outcomes[0], outcomes[1], "{plan}: {query}");
        }
    }
}

/// Tables of which every row is hidden, each with a twin that is empty.
fn with_hidden_rows_alone(db: &mut harness::Database, definition: &str, expired: &str, options: &str) -> String {
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE h ({definition}); CREATE TABLE twin ({definition});
         INSERT INTO h SELECT i, i % 10, 'a' || i % 7, {expired} FROM generate_series(1, 80) i;
         SELECT ttl_create_index('h', 'at', 0, hide_expired => true, active => false {options}),
                ttl_create_index('twin', 'at', 0, hide_expired => true, active => false {options});
         GRANT SELECT ON h, twin TO {reader}"
    ));
    reader
}

/// A sequence that is advanced by functions, which tells how often they were called.
const CALLS: &str = "CREATE SEQUENCE calls; SELECT setval('calls', 1);
    CREATE FUNCTION vol(i int) RETURNS int LANGUAGE plpgsql VOLATILE COST 1 AS $$ BEGIN PERFORM nextval('calls'); RETURN i; END $$;
    CREATE FUNCTION sta(i int) RETURNS int LANGUAGE plpgsql STABLE COST 1 AS $$ BEGIN PERFORM nextval('calls'); RETURN i; END $$";

#[test]
fn policies_elsewhere_do_not_put_the_condition_behind_what_users_call() {
    for (definition, expired, options) in [
        ("id int, x int, t text, at text", "to_json(now() - interval '1 day') #>> '{}'", ""),
        ("id int, x int, t text, at timestamptz", "now() - interval '1 day'", ", filter => 't LIKE ''a%'''"),
    ] {
        let mut db = harness::Database::new();
        let reader = with_hidden_rows_alone(&mut db, definition, expired, options);
        let mut session = db.session(&reader);
        session.run(CALLS);
        session.run(
            "CREATE TABLE mine (k int); INSERT INTO mine VALUES (1); ALTER TABLE mine ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
             CREATE POLICY p ON mine USING (k > 0)",
        );
        for condition in ["x = vol(3)", "t = 'a3' AND x = vol(3)", "vol(1) = 1", "x + 1 = vol(4)"] {
            session.run(&format!("SELECT count(*) FROM h, mine WHERE {condition}"));
            assert_eq!(session.get("SELECT last_value FROM calls"), "1", "{condition}");
        }
    }
}

#[test]
fn policies_of_the_table_itself_come_after_the_condition() {
    let mut db = harness::Database::new();
    let reader = db.role("reader");
    db.run(&format!(
        "CREATE TABLE hr (id int, x int, s text, at timestamptz NOT NULL);
         INSERT INTO hr VALUES (1, 0, 'zz', now() - interval '1 day'), (2, 5, 'b', now() + interval '1 day');
         SELECT ttl_create_index('hr', 'at', 0, filter => 's LIKE ''%z''', hide_expired => true, active => false);
         ALTER TABLE hr ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON hr USING (10 / x > 0); GRANT SELECT ON hr TO {reader}"
    ));
    assert_eq!(db.session(&reader).get("SELECT id FROM hr"), "2");
}

#[test]
fn rechecking_what_an_index_has_found_calls_nothing_for_hidden_rows() {
    for method in ["hash", "brin", "btree"] {
        let mut db = harness::Database::new();
        let definition = "id int, x int, t text, at timestamptz";
        let reader =
            with_hidden_rows_alone(&mut db, definition, "now() - interval '1 day'", ", index_method => 'none'");
        db.run(&format!("CREATE INDEX ON h USING {method} (x); CREATE INDEX ON twin USING {method} (x)"));
        let mut session = db.session(&reader);
        session.run(CALLS);
        session.run("SET enable_seqscan = off; SET work_mem = '64kB'");
        for setting in ["on", "off"] {
            session.run(&format!("SET enable_indexscan = {setting}"));
            for query in ["SELECT * FROM t WHERE x = sta(3)", "SELECT * FROM t a, t b WHERE a.x = sta(3) AND b.x = a.x"]
            {
                let calls: Vec<_> = ["h", "twin"]
                    .into_iter()
                    .map(|table| {
                        session.run("SELECT setval('calls', 1)");
                        session.run(&query.replace(" t ", &format!(" {table} ")).replace(" t,", &format!(" {table},")));
                        session.get("SELECT last_value FROM calls")
                    })
                    .collect();
                assert_eq!(calls[0], calls[1], "{method}, {setting}: {query}");
            }
        }
    }
}

#[test]
fn a_query_may_combine_collations_where_that_matters_to_nobody() {
    let mut db = harness::Database::new();
    db.run(
        "CREATE TABLE h (a text COLLATE \"C\", b text COLLATE \"POSIX\", at timestamptz NOT NULL);
         SELECT ttl_create_index('h', 'at', 0, hide_expired => true, active => false);
         INSERT INTO h VALUES ('x', 'y', now() + interval '1 hour'), ('z', 'z', '2020-01-01')",
    );
    assert_eq!(db.get("SELECT count(*) FROM h WHERE a || b IS NOT NULL"), "1");
    assert_eq!(db.get("SELECT count(c) FROM (SELECT a || b AS c FROM h) s"), "1");
    assert_eq!(db.error("SELECT count(*) FROM h WHERE a < b").code, "42P22");
}

#[test]
fn explain_tells_nothing_of_what_parallel_workers_have_seen() {
    let mut db = harness::Database::new();
    let definition = "id int, x int, t text, at timestamptz";
    let reader = with_hidden_rows_alone(&mut db, definition, "now() - interval '1 day'", ", index_method => 'none'");
    db.run("CREATE INDEX ON h (id)");
    let parallel =
        match db.get("SELECT name FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query')") {
            name if name.is_empty() => return,
            name => name,
        };
    let mut session = db.session(&reader);
    session.run(&format!("SET {parallel} = on; SET enable_indexscan = off; SET enable_seqscan = off"));
    let explain = |session: &mut harness::Session, id: u32| {
        let sql = format!(
            "EXPLAIN (ANALYZE, VERBOSE, BUFFERS, TIMING off, COSTS off, SUMMARY off) SELECT * FROM h WHERE id = {id}"
        );
        let plan = session.get(&sql).replace(&format!("= {id})"), "= ?)");
        // What planning reads depends on what other sessions have changed.
        plan.split("\nPlanning:").next().unwrap_or_default().to_owned()
    };
    assert_eq!(explain(&mut session, 4), explain(&mut session, 1004));
}

#[test]
fn an_index_that_sorts_by_distance_computes_none_of_hidden_rows() {
    let mut db = with(
        "CREATE EXTENSION btree_gist; CREATE TABLE t (n float8, at timestamptz NOT NULL); CREATE INDEX ON t USING gist (n);
         INSERT INTO t SELECT i, now() FROM generate_series(1, 1000) i; INSERT INTO t VALUES (-1.7e308, '2020-01-01');
         CREATE TABLE parent (LIKE t) PARTITION BY RANGE (at); CREATE INDEX ON parent USING gist (n);
         CREATE TABLE part PARTITION OF parent FOR VALUES FROM (MINVALUE) TO (MAXVALUE); INSERT INTO parent TABLE t;
         CREATE TABLE point (p point, at timestamptz NOT NULL); CREATE INDEX ON point USING spgist (p);
         INSERT INTO point VALUES ('(-1.7e308,0)', '2020-01-01'), ('(1,1)', now()), ('(2,2)', now());
         CREATE TABLE open (LIKE t INCLUDING INDEXES); ANALYZE; SET enable_seqscan = off; SET enable_sort = off;
         SELECT ttl_create_index(name, 'at', 60, hide_expired => true) FROM unnest('{t,parent,point}'::text[]) name",
    );
    let far = [
        ("t", "n <-> 1.7e308"),
        ("parent", "n <-> 1.7e308"),
        ("part", "n <-> 1.7e308"),
        ("point", "p <-> '(1.7e308,0)'"),
    ];
    for (table, order) in far {
        let sql = format!("SELECT count(*) FROM (SELECT * FROM {table} ORDER BY {order} LIMIT 1) q");
        assert_eq!(db.get(&sql), "1", "{table}: the distance of the hidden row would overflow");
    }
    let plan = db.get("EXPLAIN SELECT FROM open ORDER BY n <-> 5 LIMIT 1");
    assert!(plan.contains("Order By: (n <-> "), "tables that hide nothing keep their plans: {plan}");
}
