//! Code of users finds what it would find in a session of the table's owner, and nothing else is read by that search path.

use crate::sweep::with;
use harness::Database;

/// A schema with a table, an unqualified audit trigger on it, and an expired row; its owner logs in with that schema in its path.
fn audited(place: &str) -> (Database, String) {
    let mut db = with("");
    let (owner, name) = (db.role("owner"), db.name.clone());
    db.run(&format!("CREATE SCHEMA app AUTHORIZATION {owner}; CREATE SCHEMA other AUTHORIZATION {owner}"));
    match place {
        "role in database" => db.run(&format!(
            "ALTER ROLE {owner} IN DATABASE {name} SET search_path = app, public; ALTER ROLE {owner} SET search_path = other;
             ALTER DATABASE {name} SET search_path = other"
        )),
        "role" => db.run(&format!(
            "ALTER ROLE {owner} SET search_path = app, public; ALTER DATABASE {name} SET search_path = other, public"
        )),
        "database" => db.run(&format!("ALTER DATABASE {name} SET search_path = app, public")),
        _ => db.run(&format!("ALTER SCHEMA app RENAME TO app_before; CREATE SCHEMA {owner} AUTHORIZATION {owner}")),
    }
    let schema = if place == "server" { owner.clone() } else { "app".to_owned() };
    let mut own = db.session(&owner);
    own.run(&format!("SET search_path = {schema}, public"));
    own.run(
        "CREATE TABLE audit (what text); CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz);
         INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 3) i;
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO audit VALUES (TG_OP || ' ' || current_user); RETURN coalesce(OLD, NEW); END $$",
    );
    (db, schema)
}

#[test]
fn an_ordinary_audit_trigger_works_as_it_does_for_the_owner() {
    for place in ["role in database", "role", "database", "server"] {
        let (mut db, schema) = audited(place);
        db.run(&format!(
            "CREATE TRIGGER note AFTER DELETE ON {schema}.t FOR EACH ROW EXECUTE FUNCTION {schema}.note();
             SELECT ttl_create_index('{schema}.t', 'at', 60)"
        ));
        assert_eq!(db.get(&format!("SELECT ttl_runner('{schema}.t')")), "3", "{place}");
        let audit = format!(
            "SELECT count(*), min(split_part(what, ' ', 2)) = (SELECT min(relowner::regrole::text) FROM pg_class WHERE oid = '{schema}.t'::regclass) FROM {schema}.audit"
        );
        assert_eq!(db.get(&audit), "3|t", "{place}");
        // So it does in a worker.
        db.run(&format!("INSERT INTO {schema}.t VALUES (9, '2020-01-01'); SELECT ttl_start_worker()"));
        db.wait_for(&format!("SELECT count(*) FROM {schema}.audit"), "4");
    }
}

#[test]
fn cascades_functions_archives_marks_and_room_find_what_the_owner_finds() {
    let (mut db, _) = audited("role");
    let owner = db.get("SELECT relowner::regrole FROM pg_class WHERE oid = 'app.t'::regclass");
    db.session(&owner).run(
        "CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE); INSERT INTO child VALUES (1);
         CREATE TRIGGER note BEFORE DELETE ON child FOR EACH ROW EXECUTE FUNCTION note();
         CREATE TABLE old (LIKE t); CREATE TRIGGER note AFTER INSERT ON old FOR EACH ROW EXECUTE FUNCTION note();
         CREATE FUNCTION told(regclass, jsonb) RETURNS void LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO audit VALUES ('told ' || jsonb_array_length($2)); END $$;
         SELECT ttl_create_index('t', 'at', 60, archive_to => 'old', on_expire => 'told(regclass, jsonb)');
         CREATE TABLE soft (at timestamptz, gone timestamptz); INSERT INTO soft VALUES ('2020-01-01');
         CREATE TRIGGER note BEFORE UPDATE ON soft FOR EACH ROW EXECUTE FUNCTION note();
         CREATE TABLE h (id int PRIMARY KEY, at timestamptz NOT NULL); INSERT INTO h VALUES (1, '2020-01-01');
         CREATE TRIGGER note AFTER DELETE ON h FOR EACH ROW EXECUTE FUNCTION note();
         SELECT ttl_create_index('h', 'at', 60, hide_expired => true)",
    );
    assert_eq!(db.get("SELECT ttl_runner('app.t')"), "3");
    let audit = "SELECT string_agg(split_part(what, ' ', 1) || count, ' ' ORDER BY what) FROM (SELECT what, count(*) FROM app.audit GROUP BY 1) x (what, count)";
    assert_eq!(db.get(audit), "DELETE1 INSERT3 told1");
    db.run("SET search_path = public; TRUNCATE app.audit; INSERT INTO app.h VALUES (1, now())");
    assert_eq!(db.get(audit), "DELETE1");
    db.run("TRUNCATE app.audit");
    db.session(&owner).run("CREATE OR REPLACE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO audit VALUES (TG_OP); RETURN NEW; END $$; SELECT ttl_create_index('soft', 'at', 60, soft_delete_column => 'gone')");
    assert_eq!(db.get("SELECT ttl_runner('app.soft')"), "1");
    assert_eq!(db.get(audit), "UPDATE1");
}

#[test]
fn an_event_trigger_hears_of_a_dropped_partition_under_the_path_of_the_owner() {
    let (mut db, _) = audited("role");
    let owner = db.get("SELECT relowner::regrole FROM pg_class WHERE oid = 'app.t'::regclass");
    db.session(&owner).run(
        "CREATE TABLE p (at timestamptz NOT NULL) PARTITION BY RANGE (at);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2020-02-01') TO ('2100-01-01');
         SELECT ttl_create_index('p', 'at', 60, partition_action => 'drop')",
    );
    db.run(
        "CREATE FUNCTION public.heard() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO audit VALUES (tg_tag); END $$;
         CREATE EVENT TRIGGER heard ON ddl_command_end WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION public.heard()",
    );
    db.run("SELECT ttl_runner('app.p')");
    assert_eq!(db.get("SELECT what FROM app.audit; SELECT to_regclass('app.p1')"), "DROP TABLE\n");
    db.run("DROP EVENT TRIGGER heard");
}

/// What stands before `pg_catalog` in a path shadows it: no statement of the extension's own may be read so.
#[test]
fn a_hostile_path_of_an_owner_shadows_nothing_of_ours() {
    let mut db = with("CREATE TABLE seen (what text); GRANT ALL ON seen TO PUBLIC");
    let owner = db.role("owner");
    db.run(&format!(
        "CREATE SCHEMA evil AUTHORIZATION {owner}; ALTER ROLE {owner} SET search_path = evil, pg_catalog, public"
    ));
    let mut own = db.session(&owner);
    own.run(
        "CREATE FUNCTION evil.less(timestamptz, timestamptz) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.seen VALUES (''operator''); RETURN true; END';
         CREATE OPERATOR evil.<= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.less);
         CREATE FUNCTION evil.lower(text) RETURNS text LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.seen VALUES (''lower''); RETURN ''x''; END';
         CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.seen VALUES (''now''); RETURN ''3000-01-01''; END';
         CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.seen VALUES (''clock''); RETURN ''3000-01-01''; END';
         CREATE TABLE public.t (id int PRIMARY KEY, k text, at timestamptz); CREATE TABLE public.child (id int REFERENCES public.t ON DELETE CASCADE);
         INSERT INTO public.t VALUES (1, 'X', '2020-01-01'), (2, 'x', pg_catalog.now()), (3, 'y', '2020-01-01'); INSERT INTO public.child VALUES (1);
         CREATE FUNCTION public.quiet() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
         CREATE TRIGGER quiet BEFORE DELETE ON public.t FOR EACH ROW EXECUTE FUNCTION public.quiet()",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'lower(k) = ''x''')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "2,3");
    db.run("INSERT INTO t VALUES (4, 'X', '2020-01-01'); SELECT ttl_start_worker()");
    db.wait_for("SELECT string_agg(id::text, ',' ORDER BY id) FROM t", "2,3");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
}

#[test]
fn a_row_that_fails_leaves_the_path_of_the_others_alone() {
    let (mut db, _) = audited("role");
    let owner = db.get("SELECT relowner::regrole FROM pg_class WHERE oid = 'app.t'::regclass");
    db.session(&owner).run(
        "CREATE FUNCTION picky() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN IF OLD.id = 2 THEN RAISE EXCEPTION 'no'; END IF; EXECUTE 'INSERT INTO audit VALUES ($1)' USING OLD.id; RETURN OLD; END $$;
         CREATE TRIGGER picky BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION picky(); SELECT ttl_create_index('t', 'at', 60)",
    );
    assert_eq!(db.get("SELECT ttl_runner('app.t')"), "2");
    assert_eq!(
        db.get(
            "SELECT string_agg(what, ',' ORDER BY what) FROM app.audit; SELECT blocked_rows, state FROM ttl_summary"
        ),
        "1,3\n1|blocked"
    );
}

#[test]
fn deferred_triggers_of_the_caller_fire_under_the_path_of_the_caller() {
    let mut db = with(
        "CREATE SCHEMA mine; CREATE TABLE mine.log (n int); CREATE TABLE mine.x (at timestamptz); CREATE TABLE mine.c (n int);
         CREATE FUNCTION mine.later() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO log VALUES (NEW.n); RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER later AFTER INSERT ON mine.c DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION mine.later();
         SELECT ttl_create_index('mine.x', 'at', 60); INSERT INTO mine.x VALUES ('2020-01-01')",
    );
    db.run("SET search_path = mine, public; BEGIN; INSERT INTO c VALUES (1)");
    assert_eq!(db.get("SELECT ttl_runner('x')"), "1");
    db.run("COMMIT");
    assert_eq!(db.get("SELECT n FROM log"), "1");
}

#[test]
fn a_schema_whose_name_contains_that_of_temporary_ones_is_none() {
    let mut db = with(
        "CREATE SCHEMA my_pg_temp; CREATE TABLE public.target (n int); CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01')",
    );
    let name = db.name.clone();
    db.run(&format!("ALTER DATABASE {name} SET search_path = my_pg_temp, public"));
    db.run(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO target VALUES (1); RETURN OLD; END';
         CREATE TRIGGER note BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION note(); SELECT ttl_create_index('t', 'at', 60);
         CREATE TEMP TABLE target (n int); SELECT ttl_runner('t')",
    );
    assert_eq!(db.get("SELECT count(*) FROM public.target"), "1");
}

#[test]
fn a_function_in_sql_is_read_where_it_runs() {
    let (mut db, _) = audited("role");
    let owner = db.get("SELECT relowner::regrole FROM pg_class WHERE oid = 'app.t'::regclass");
    db.session(&owner).run(
        "CREATE FUNCTION told(regclass, jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO audit SELECT jsonb_array_length($2)';
         SELECT ttl_create_index('t', 'at', 60, on_expire => 'told(regclass, jsonb)')",
    );
    assert_eq!(db.get("SELECT ttl_runner('app.t')"), "3");
    assert_eq!(db.get("SELECT string_agg(what, ' ' ORDER BY what) FROM app.audit"), "3");
}

/// Operators and a function of somebody else's that fit types better than PostgreSQL's own do, and tell who calls them.
const BETTER: &str = "CREATE FUNCTION public.format(text, text, regprocedure, text) RETURNS text LANGUAGE plpgsql AS
     'BEGIN RAISE EXCEPTION ''called as %'', current_user; END';
     DO $$
     DECLARE
         types regtype[] = '{oid,regclass,regproc,regprocedure,regtype,\"char\",smallint,integer,bigint,real,double precision,numeric,text,name,
                             varchar,boolean,interval,timestamptz,timestamp,date,text[],name[],oid[],smallint[]}';
         it record;
     BEGIN
         FOR it IN
             SELECT o.op, a, b, 'better_' || n AS function, CASE WHEN o.op IN ('+', '-', '*', '/', '||') THEN a::text ELSE 'boolean' END AS result
             FROM unnest('{=,<>,<,<=,>,>=,+,-,*,/,||,~,!~,~~}'::text[]) WITH ORDINALITY AS o (op, n), unnest(types) a, unnest(types) b
             WHERE NOT EXISTS (SELECT FROM pg_operator p WHERE p.oprname = o.op AND p.oprleft = a AND p.oprright = b)
         LOOP
             EXECUTE format('CREATE FUNCTION public.%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN RAISE EXCEPTION ''''called as %%'''', current_user; END''',
                            it.function, it.a, it.b, it.result);
             EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.%s)', it.op, it.a, it.b, it.function);
         END LOOP;
     END $$";

/// What of the extension uses something of the stranger's.
const CAUGHT: &str = "SET search_path = pg_catalog; SELECT string_agg(pg_describe_object(d.classid, d.objid, d.objsubid) || ' uses ' || pg_describe_object(d.refclassid, d.refobjid, 0), '; ')
     FROM pg_depend d
     WHERE (d.refclassid = 'pg_operator'::regclass AND d.refobjid IN (SELECT oid FROM pg_operator WHERE oprnamespace = 'public'::regnamespace)
            OR d.refclassid = 'pg_proc'::regclass AND d.refobjid IN (SELECT oid FROM pg_proc WHERE proname LIKE 'better%' OR proname = 'format' AND pronamespace = 'public'::regnamespace))
       AND d.classid <> 'pg_operator'::regclass; RESET search_path";

#[test]
fn operators_in_the_schema_of_the_extension_are_not_used_by_it() {
    harness::install_script("pg_ttl_index--3.0.0.sql");
    for version in ["", " VERSION '3.0.0'"] {
        let mut db = Database::empty();
        let stranger = db.role("stranger");
        db.session(&stranger).run(BETTER);
        db.run(&format!("CREATE EXTENSION pg_ttl_index{version}; ALTER EXTENSION pg_ttl_index UPDATE"));
        assert_eq!(db.get(CAUGHT), "", "{version}");
        db.run(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int); INSERT INTO t SELECT i, '2020-01-01', i FROM generate_series(1, 100) i;
             SELECT ttl_create_index('t', 'at', 60, filter => 'n > 50', hide_expired => true)",
        );
        db.wait_for("SELECT count(*) FROM t", "50");
        db.run("SELECT * FROM ttl_summary; SELECT * FROM ttl_overview; SELECT * FROM ttl_metrics; SELECT * FROM ttl_progress; SELECT * FROM ttl_doctor();
                SELECT * FROM ttl_history; SELECT * FROM ttl_preview('t'); SELECT ttl_get('t', 1), ttl_set('t', 1, '1 day')");
        assert_eq!(db.get("SELECT state, last_error FROM ttl_summary"), "active|");
        assert!(!db.server.log().contains("called as"));
    }
}
