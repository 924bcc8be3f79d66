//! Nobody's code runs with the rights of somebody else: behind cascades, in soft deletes, in calls about one row.

use crate::sweep::with;
use harness::{Database, Session};

/// A stranger who has a trap: a function that writes down who it runs as, and tries to make its author a superuser.
fn with_trap(setup: &str) -> (Database, String) {
    let mut db = with("CREATE TABLE seen (how text, who text); GRANT INSERT ON seen TO PUBLIC");
    let stranger = db.role("stranger");
    db.run(setup);
    db.session(&stranger).run(&format!(
        "CREATE FUNCTION spring(how text) RETURNS void LANGUAGE plpgsql AS $$
         BEGIN
             INSERT INTO public.seen VALUES (how, current_user);
             BEGIN ALTER ROLE {stranger} SUPERUSER; EXCEPTION WHEN insufficient_privilege THEN NULL; END;
         END $$;
         CREATE FUNCTION spring() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN PERFORM public.spring(TG_NAME); RETURN NULL; END $$;
         CREATE FUNCTION trap(how text) RETURNS boolean STABLE LANGUAGE plpgsql AS
             'BEGIN PERFORM public.spring(how); RETURN true; END'"
    ));
    (db, stranger)
}

#[test]
fn making_room_fires_no_triggers_of_others() {
    let (mut db, stranger) = with_trap(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text); INSERT INTO t VALUES (1, '2020-01-01', 'dead');
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)",
    );
    db.run(&format!("GRANT INSERT, REFERENCES ON t TO {stranger}"));
    for (action, timing) in [
        ("CASCADE", "CREATE TRIGGER caught AFTER DELETE ON child FOR EACH ROW"),
        ("CASCADE", "CREATE TRIGGER caught AFTER DELETE ON child FOR EACH STATEMENT"),
        ("SET NULL", "CREATE TRIGGER caught AFTER UPDATE ON child FOR EACH ROW"),
        (
            "CASCADE",
            "CREATE CONSTRAINT TRIGGER caught AFTER DELETE ON child DEFERRABLE INITIALLY DEFERRED FOR EACH ROW",
        ),
    ] {
        let mut session = db.session(&stranger);
        session.run(&format!(
            "CREATE TABLE child (id int REFERENCES t ON DELETE {action}); INSERT INTO child VALUES (1);
             {timing} EXECUTE FUNCTION spring()"
        ));
        let error = session.error("INSERT INTO t VALUES (1, now(), 'new')");
        assert_eq!(error.code, "23505", "{timing}");
        assert_eq!(
            db.error("INSERT INTO t VALUES (1, now(), 'new')").code,
            "23505",
            "a superuser lends nothing either"
        );
        assert_eq!(db.get("SELECT how, who FROM seen"), "", "{timing}");
        assert_eq!(db.get(&format!("SELECT rolsuper FROM pg_roles WHERE rolname = '{stranger}'")), "f");
        db.run("DROP TABLE child");
    }
    db.run("INSERT INTO t VALUES (1, now(), 'new')");
    assert_eq!(db.get("SELECT v FROM t"), "new", "nothing of others is in the way any more");
}

#[test]
fn a_soft_delete_fires_no_triggers_of_others() {
    let (mut db, stranger) = with_trap("");
    let owner = db.role("owner");
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone boolean NOT NULL DEFAULT false, UNIQUE (id, gone));
         INSERT INTO t VALUES (1, '2020-01-01'), (2, now()); GRANT REFERENCES ON t TO {stranger};
         SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone')"
    ));
    db.session(&stranger).run(
        "CREATE TABLE child (id int, gone boolean, FOREIGN KEY (id, gone) REFERENCES t (id, gone) ON UPDATE CASCADE);
         INSERT INTO child VALUES (1, false);
         CREATE TRIGGER caught AFTER UPDATE ON child FOR EACH ROW EXECUTE FUNCTION spring()",
    );
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42501");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
    assert_eq!(db.get("SELECT string_agg(id::text, ',') FROM t WHERE gone"), "");
    // A key that the mark is not part of is not updated.
    db.session(&stranger).run(
        "DROP TABLE child; CREATE TABLE child (id int REFERENCES t ON UPDATE CASCADE ON DELETE CASCADE); INSERT INTO child VALUES (1);
         CREATE TRIGGER caught AFTER UPDATE OR DELETE ON child FOR EACH ROW EXECUTE FUNCTION spring()",
    );
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
}

#[test]
fn a_key_that_a_soft_delete_changes_indirectly_fires_no_triggers_of_others() {
    let (mut db, stranger) = with_trap("");
    let owner = db.role("owner");
    for (table, key) in [
        // A column that is generated from the mark, and one that a trigger sets.
        ("code int GENERATED ALWAYS AS (CASE WHEN gone THEN -id ELSE id END) STORED UNIQUE", "code"),
        ("code int UNIQUE", "code"),
    ] {
        db.session(&owner).run(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone boolean NOT NULL DEFAULT false, {table});
             INSERT INTO t (id, at) VALUES (1, '2020-01-01'); GRANT REFERENCES ON t TO {stranger}"
        ));
        if !table.contains("GENERATED") {
            db.session(&owner).run(
                "UPDATE t SET code = 1;
                 CREATE FUNCTION rename() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.code := -NEW.id; RETURN NEW; END';
                 CREATE TRIGGER rename BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION rename()",
            );
        }
        db.session(&owner).run("SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone')");
        db.session(&stranger).run(&format!(
            "CREATE TABLE child (code int REFERENCES t ({key}) ON UPDATE CASCADE); INSERT INTO child VALUES (1);
             CREATE TRIGGER caught AFTER UPDATE ON child FOR EACH ROW EXECUTE FUNCTION spring()"
        ));
        assert_eq!(db.error("SELECT ttl_runner('t')").code, "42501", "{table}");
        assert_eq!(db.get("SELECT count(*), (SELECT count(*) FROM t WHERE gone) FROM seen"), "0|0", "{table}");
        db.run("DROP TABLE child");
        assert_eq!(db.get("SELECT ttl_runner('t')"), "1", "{table}");
        db.run("DROP TABLE t");
    }
}

#[test]
fn rules_behind_a_cascade_fire_no_triggers_of_others_either() {
    let (mut db, stranger) =
        with_trap("CREATE TABLE t (id int PRIMARY KEY, at timestamptz); INSERT INTO t VALUES (1, '2020-01-01')");
    db.run(&format!("GRANT REFERENCES ON t TO {stranger}; SELECT ttl_create_index('t', 'at', 60)"));
    db.session(&stranger).run(
        "CREATE TABLE log (x int); CREATE TRIGGER caught AFTER INSERT ON log FOR EACH ROW EXECUTE FUNCTION spring();
         CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE); INSERT INTO child VALUES (1);
         CREATE RULE also AS ON DELETE TO child DO ALSO INSERT INTO log VALUES (1)",
    );
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42501");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
}

#[test]
fn an_owners_code_does_not_run_in_sessions_that_could_have_poisoned_it() {
    let mut db = with("CREATE TABLE seen (who text); GRANT INSERT ON seen TO PUBLIC");
    let other = db.role("other");
    db.run(&format!(
        "CREATE SCHEMA evil AUTHORIZATION {other};
         CREATE FUNCTION may_go(k text) RETURNS boolean STABLE LANGUAGE plpgsql AS 'DECLARE v text; BEGIN v := k; RETURN v <> ''keep''; END';
         CREATE TABLE t (id int PRIMARY KEY, kind text, at timestamptz); INSERT INTO t VALUES (1, 'x', now());
         SELECT ttl_create_index('t', 'at', 3600, filter => 'may_go(kind)'); GRANT SELECT, UPDATE ON t TO {other};
         CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS
             'DECLARE v text; BEGIN IF TG_OP = ''DELETE'' THEN v := OLD.token; RETURN OLD; END IF; RETURN NEW; END';
         CREATE TABLE h (token text PRIMARY KEY, at timestamptz); CREATE TRIGGER a BEFORE INSERT OR DELETE ON h FOR EACH ROW EXECUTE FUNCTION audit();
         INSERT INTO h VALUES ('k', '2020-01-01'); SELECT ttl_create_index('h', 'at', 60, hide_expired => true); GRANT INSERT ON h TO {other};
         CREATE TABLE simple (id int PRIMARY KEY, kind text, at timestamptz); INSERT INTO simple VALUES (1, 'x', now());
         SELECT ttl_create_index('simple', 'at', 3600, filter => 'kind <> ''keep'' AND length(kind) < 5'); GRANT SELECT, UPDATE ON simple TO {other}"
    ));
    let mut session = db.session(&other);
    session.run(
        "CREATE FUNCTION evil.note(pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.seen VALUES (current_user); RETURN true; END';
         CREATE DOMAIN evil.text AS pg_catalog.text CHECK (evil.note(VALUE)); SET search_path = evil, pg_catalog, public",
    );
    session.run("SELECT public.may_go('a'); INSERT INTO h VALUES ('other', now())");
    for call in ["ttl_get('t', '1'::pg_catalog.text)", "ttl_touch('t', '1'::pg_catalog.text)"] {
        assert_eq!(session.error(&format!("SELECT {call}")).code, "42501", "{call}");
    }
    assert_eq!(session.error("INSERT INTO h VALUES ('k', now())").code, "23505");
    assert_eq!(db.get(&format!("SELECT count(*) FROM seen WHERE who <> '{other}'")), "0");
    // What calls nothing of users is for everybody who may read and write the row.
    assert_eq!(
        session.get("SELECT ttl_touch('simple', '1'::pg_catalog.text), ttl_get('simple', '1'::pg_catalog.text) > 3000"),
        "t|t"
    );
    db.run("INSERT INTO h VALUES ('k', now())");
}

/// An owner's function that another role has had compiled for a search path with a domain of its own, which tells who checks it.
const COMPILED: &str = "CREATE DOMAIN public.word AS text;
    CREATE FUNCTION public.norm(x text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'DECLARE w word; BEGIN w := lower(x); RETURN w; END';
    SELECT norm('a')";

fn poisoned(setup: &str) -> (Database, Session, String) {
    let mut db = with("CREATE TABLE seen (who text); GRANT INSERT ON seen TO PUBLIC");
    let (owner, eve) = (db.role("owner"), db.role("eve"));
    db.run(&format!("CREATE SCHEMA evil AUTHORIZATION {eve}; GRANT USAGE ON SCHEMA evil TO PUBLIC"));
    let mut own = db.session(&owner);
    own.run(COMPILED);
    own.run(&setup.replace("$eve", &eve));
    let mut session = db.session(&eve);
    session.run(
        "CREATE FUNCTION evil.note(text) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.seen VALUES (current_user); RETURN true; END';
         CREATE DOMAIN evil.word AS text CHECK (evil.note(VALUE)); SET search_path = evil, public; SELECT public.norm('q')",
    );
    (db, session, owner)
}

#[test]
fn writing_a_row_runs_what_indexes_are_on_as_the_writer() {
    for key in [
        "CREATE UNIQUE INDEX ON t (norm(k))",
        "ALTER TABLE t ADD n text GENERATED ALWAYS AS (norm(k)) STORED UNIQUE",
        "CREATE UNIQUE INDEX ON t (k) WHERE norm(k) <> norm('none')",
    ] {
        let (mut db, mut eve, owner) = poisoned(&format!(
            "CREATE TABLE t (k text, at timestamptz NOT NULL); {key}; SELECT ttl_create_index('t', 'at', 0, hide_expired => true);
             INSERT INTO t VALUES ('live', now() + interval '1 hour'); GRANT INSERT ON t TO $eve"
        ));
        eve.run("INSERT INTO t VALUES ('live', now() + interval '1 hour') ON CONFLICT DO NOTHING; INSERT INTO t VALUES ('x', now())");
        assert_eq!(db.get(&format!("SELECT count(*) FROM seen WHERE who = '{owner}'")), "0", "{key}");
    }
}

#[test]
fn writing_a_row_has_nothing_planned_as_the_owner() {
    let (mut db, mut eve, owner) = poisoned(
        "CREATE TABLE t (k text PRIMARY KEY, v text, at timestamptz NOT NULL);
         CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
         CREATE TRIGGER d BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION nothing();
         CREATE STATISTICS s ON (k || norm('A')), v FROM t; CREATE INDEX ON t (at) WHERE v <> norm('A');
         SELECT ttl_create_index('t', 'at', 0, hide_expired => true); GRANT INSERT ON t TO $eve;
         CREATE TABLE plain (k text PRIMARY KEY, v text, at timestamptz NOT NULL); CREATE INDEX ON plain (at) WHERE v <> norm('A');
         SELECT ttl_create_index('plain', 'at', 0, hide_expired => true); GRANT INSERT ON plain TO $eve",
    );
    eve.run("INSERT INTO t VALUES ('live', 'y', now() + interval '1 hour'); INSERT INTO plain VALUES ('live', 'y', now() + interval '1 hour')");
    assert_eq!(db.get(&format!("SELECT count(*) FROM seen WHERE who = '{owner}'")), "0");
}

#[test]
fn ddl_of_others_reads_nothing_as_the_owner_of_a_rule() {
    let (mut db, mut eve, owner) = poisoned(
        "CREATE TABLE t (id int PRIMARY KEY, kind text, at timestamptz NOT NULL); CREATE INDEX ON t (at);
         SELECT ttl_create_index('t', 'at', 0, filter => 'kind = public.norm(''A'')'); GRANT REFERENCES ON t TO $eve",
    );
    eve.run(
        "CREATE TABLE evil.child (id int REFERENCES public.t); ALTER TABLE evil.child ADD n int; DROP TABLE evil.child",
    );
    assert_eq!(db.get(&format!("SELECT count(*) FROM seen WHERE who = '{owner}'")), "0");
}

#[test]
fn an_index_on_a_function_that_needs_the_search_path_is_used_under_that_of_the_writer() {
    let mut db = with(
        "CREATE FUNCTION helper(x text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT lower(x)';
         CREATE FUNCTION norm(x text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN helper(x); END';
         CREATE TABLE t (k text, at timestamptz NOT NULL); CREATE UNIQUE INDEX ON t (norm(k));
         SELECT ttl_create_index('t', 'at', 0, hide_expired => true); INSERT INTO t VALUES ('live', now() + interval '1 hour')",
    );
    db.run("INSERT INTO t VALUES ('Live', now() + interval '1 hour') ON CONFLICT DO NOTHING");
    db.session("postgres").run("INSERT INTO t VALUES ('LIVE', now() + interval '1 hour') ON CONFLICT DO NOTHING");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}

#[test]
fn what_making_room_leaves_behind_does_not_run_later_as_the_writer() {
    let (mut db, _, _) = poisoned(
        "CREATE TABLE log (who text); CREATE TABLE r (id int PRIMARY KEY, at timestamptz);
         CREATE TABLE ref (rid int REFERENCES r DEFERRABLE INITIALLY DEFERRED); CREATE TABLE side (n int);
         CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.log VALUES (current_user); RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER later AFTER INSERT ON side DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION later();
         CREATE FUNCTION early() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.side VALUES (1); RETURN OLD; END';
         CREATE TRIGGER early BEFORE DELETE ON r FOR EACH ROW EXECUTE FUNCTION early();
         SELECT ttl_create_index('r', 'at', 0, hide_expired => true); INSERT INTO r VALUES (1, now() - interval '1 second')",
    );
    assert_eq!(db.error("INSERT INTO r VALUES (1, 'infinity')").code, "23505");
    assert_eq!(db.get("SELECT count(*) FROM log"), "0");
}

#[test]
fn calls_about_one_row_run_an_owners_code_as_the_owner() {
    let (mut db, owner) = with_trap("");
    let reader = db.role("reader");
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text, who name DEFAULT '{reader}');
         INSERT INTO t SELECT i, now() FROM generate_series(1, 3) i; INSERT INTO t VALUES (4, now(), 'other', 'nobody');
         SELECT ttl_create_index('t', 'at', interval '1 hour', filter => 'trap(''filter'')');
         CREATE FUNCTION later(timestamptz) RETURNS timestamptz STABLE LANGUAGE plpgsql AS
             'BEGIN PERFORM public.spring(''expression''); RETURN $1 + interval ''1 day''; END';
         CREATE TABLE e (id int PRIMARY KEY, at timestamptz); INSERT INTO e VALUES (1, now());
         SELECT ttl_create_index('e', 'later(at)', 0, index_method => 'none');
         GRANT SELECT (id, at, v), UPDATE (at) ON t TO {reader}; GRANT SELECT ON e TO {reader};
         ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON t USING (who = current_user)"
    ));
    assert_eq!(db.session(&reader).error("SELECT ttl_get('t', '1')").code, "42501");
    for caller in ["postgres", &owner] {
        db.run("TRUNCATE seen");
        let mut session = db.session(caller);
        for (call, expected) in [
            ("ttl_set('t', '1', interval '2 hours')", "t"),
            ("ttl_set('t', '1', interval '3 hours', mode => 'gt')", "t"),
            ("ttl_set('t', '1', interval '1 hour', mode => 'gt')", "f"),
            ("ttl_expire_at('t', '2', now() + interval '5 hours', mode => 'xx')", "t"),
            ("ttl_touch('t', '2')", "t"),
            ("ttl_get('t', '2') > 3500", "t"),
            ("ttl_get('e', '1') > 3500", "t"),
            ("ttl_persist('t', '3')", "t"),
            ("ttl_get('t', '3')", "-1"),
            ("ttl_get('t', '99')", "-2"),
            ("ttl_touch('t', '99')", "f"),
        ] {
            assert_eq!(session.get(&format!("SELECT {call}")), expected, "{call} as {caller}");
        }
        assert_eq!(db.get("SELECT string_agg(DISTINCT who, ',') FROM seen"), owner, "as {caller}");
    }
    // An expired row is gone for all of them.
    db.run("UPDATE t SET at = '2020-01-01' WHERE id = 1");
    assert_eq!(db.get("SELECT ttl_get('t', '1'), ttl_touch('t', '1')"), "-2|f");
    assert_eq!(db.get(&format!("SELECT rolsuper FROM pg_roles WHERE rolname = '{owner}'")), "f");
}

#[test]
fn triggers_of_the_extension_change_no_key_in_a_sweep() {
    let (mut db, stranger) = with_trap("");
    let owner = db.role("owner");
    for also in [", hide_expired => true); SELECT 1", "); SELECT ttl_enable_touch('t')"] {
        db.session(&owner).run(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz); GRANT REFERENCES, SELECT ON t TO {stranger};
             SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone'{also}"
        ));
        db.session(&stranger).run(
            "CREATE TABLE child (id int REFERENCES t ON UPDATE CASCADE);
             CREATE TRIGGER caught AFTER UPDATE ON child FOR EACH ROW EXECUTE FUNCTION spring()",
        );
        db.run("INSERT INTO t VALUES (1, '2020-01-01')");
        assert_eq!(db.get("SELECT ttl_runner('t')"), "1", "{also}");
        assert_eq!(db.get("SELECT count(*) FROM seen"), "0", "{also}");
        db.run("DROP TABLE child, t");
    }
}

#[test]
fn a_filter_in_a_call_about_a_row_means_what_it_was_stored_as_whatever_the_search_path() {
    let (mut db, stranger) = with_trap("");
    db.session(&stranger).run(
        "CREATE FUNCTION trap(text, text) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.seen VALUES (current_user); RETURN false; END';
         CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap)",
    );
    db.run(
        "SET search_path = pg_catalog, public; CREATE TABLE public.t (id int PRIMARY KEY, at timestamptz, level text);
         INSERT INTO t VALUES (1, now(), 'x'), (2, now(), 'y');
         SELECT ttl_create_index('t', 'at', 3600, filter => $$level = 'x'$$);
         SET search_path = public, pg_catalog",
    );
    db.run("SELECT ttl_set('t', 1, '2 hours'), ttl_touch('t', 2), ttl_persist('t', 2)");
    assert_eq!(db.get("SELECT ceil(ttl_get('t', 1) / 3600), ttl_get('t', 2) = -1"), "2|t");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
    // Triggers find names by the caller's search path all the same.
    db.run(
        "CREATE TABLE paths (path text); CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
             $$BEGIN INSERT INTO public.paths VALUES (pg_catalog.current_setting('search_path')); RETURN NEW; END$$;
         CREATE TRIGGER note BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION note();
         SET search_path = public, pg_temp; SELECT ttl_touch('t', 1)",
    );
    assert_eq!(db.get("SELECT path FROM paths"), "public, pg_temp");
}
