//! Nobody sees, or learns of, what is hidden from him.

use crate::sweep::with;
use harness::{Database, run};

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
fn backups_have_every_row_and_other_copies_what_is_visible() {
    let mut db = with("");
    let (owner, reader) = (db.role("owner"), db.role("reader"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int, at timestamptz, note text); INSERT INTO t VALUES (1, '2020-01-01', 'hidden'), (2, now(), 'visible');
         GRANT SELECT ON t TO {reader}; SELECT ttl_create_index('t', 'at', 60, hide_expired => true)"
    ));
    let lines = |db: &Database, program: &str, arguments: &[&str], role: &str, options: &str| {
        let mut command = db.server.client_program(program);
        let output = run(command.env("PGUSER", role).env("PGOPTIONS", options).args(arguments).args(["-d", &db.name]));
        (output.matches("hidden").count(), output.matches("visible").count())
    };
    for options in
        [&["-t", "t"][..], &["-t", "t", "--inserts"], &["-t", "t", "--column-inserts", "--rows-per-insert=5"]]
    {
        for role in ["postgres", &owner] {
            let sees = "-c pg_ttl_index.hide_expired=off";
            assert_eq!(lines(&db, "pg_dump", options, role, sees), (1, 1), "{options:?}");
            let by_copy = usize::from(options.len() == 2);
            assert_eq!(lines(&db, "pg_dump", options, role, ""), (by_copy, 1), "{options:?}: a name is no credential");
        }
    }
    for copy in ["COPY t TO STDOUT", "COPY t (note, id) TO STDOUT", "COPY public.t TO STDOUT (FORMAT csv)"] {
        assert_eq!(lines(&db, "psql", &["-c", copy], &owner, ""), (1, 1), "{copy}");
        assert_eq!(lines(&db, "psql", &["-c", copy], &reader, ""), (0, 1), "{copy}");
    }
    assert_eq!(lines(&db, "psql", &["-c", "COPY (SELECT * FROM t) TO STDOUT"], &owner, ""), (0, 1));
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
