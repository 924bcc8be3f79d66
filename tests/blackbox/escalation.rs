//! Code of a table's owner never runs with more rights than the owner has, whoever sweeps.

use crate::worker::{database, server};
use harness::{Database, Session};

/// A database with a role that tries to become more than it is: `trap` writes down who it runs as, and then tries
/// every way out.
struct Trap {
    db: Database,
    owner: String,
}

impl Trap {
    fn set() -> Self {
        let mut db = Database::new();
        let owner = db.role("mallory");
        db.run("CREATE TABLE seen (how text, who text); GRANT INSERT ON seen TO PUBLIC; SELECT ttl_stop_worker()");
        db.wait_for("SELECT count(*) FROM ttl_worker_status() WHERE database_name = current_database()", "0");
        db.session(&owner).run(&format!(
            "CREATE FUNCTION trap(how text) RETURNS boolean STABLE LANGUAGE plpgsql AS $$
             BEGIN PERFORM public.spring(how); RETURN true; END $$;
             CREATE FUNCTION spring(how text) RETURNS void LANGUAGE plpgsql AS $$
             DECLARE
                 attempt text;
             BEGIN
                 INSERT INTO public.seen VALUES (how, current_user);
                 FOREACH attempt IN ARRAY ARRAY['RESET ROLE', 'RESET SESSION AUTHORIZATION', 'SET ROLE postgres',
                     'SET SESSION AUTHORIZATION postgres', 'SET SESSION AUTHORIZATION DEFAULT', 'SET LOCAL ROLE NONE',
                     'ALTER ROLE {owner} SUPERUSER']
                 LOOP
                     BEGIN
                         EXECUTE attempt;
                         INSERT INTO public.seen VALUES (how, attempt || ' as ' || current_user);
                     EXCEPTION WHEN insufficient_privilege THEN NULL;
                     END;
                 END LOOP;
             END $$;
             CREATE FUNCTION trap_row() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN PERFORM public.spring(TG_NAME); RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END; END $$;
             CREATE FUNCTION trap_value(timestamptz) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$
             BEGIN PERFORM public.spring('index'); RETURN 1; END $$;
             CREATE TABLE t (id int PRIMARY KEY, at timestamptz, deleted timestamptz);
             INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 3) AS i"
        ));
        Self { db, owner }
    }

    /// Lets a superuser, the superuser's procedure and the worker sweep, and looks who was seen.
    fn spring(mut self, setup: &str, expected: &str) {
        self.db.session(&self.owner).run(setup);
        for sweep in ["SELECT ttl_runner()", "CALL ttl_sweep()", "SELECT ttl_start_worker()"] {
            // As the owner: were a superuser to fill the table, the traps would catch that one.
            self.db
                .session(&self.owner)
                .run("TRUNCATE t CASCADE; INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 3) AS i");
            self.db.run("TRUNCATE seen");
            self.db.run(sweep);
            self.db.wait_for("SELECT count(*) FROM t WHERE deleted IS NULL", "0");
            let seen = format!("SELECT DISTINCT how, replace(who, '{}', 'owner') FROM seen ORDER BY 1, 2", self.owner);
            assert_eq!(self.db.get(&seen), expected, "{sweep}");
            assert_eq!(self.db.get(&format!("SELECT rolsuper FROM pg_roles WHERE rolname = '{}'", self.owner)), "f");
        }
    }
}

#[test]
fn row_and_statement_triggers() {
    Trap::set().spring(
        "CREATE TRIGGER before_row BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION trap_row();
         CREATE TRIGGER after_row AFTER DELETE ON t FOR EACH ROW EXECUTE FUNCTION trap_row();
         CREATE TRIGGER after_statement AFTER DELETE ON t FOR EACH STATEMENT EXECUTE FUNCTION trap_row();
         SELECT ttl_create_index('t', 'at', 60)",
        "after_row|owner\nafter_statement|owner\nbefore_row|owner",
    );
}

#[test]
fn deferred_constraint_triggers() {
    Trap::set().spring(
        "CREATE CONSTRAINT TRIGGER deferred AFTER DELETE ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
             EXECUTE FUNCTION trap_row();
         SELECT ttl_create_index('t', 'at', 60)",
        "deferred|owner",
    );
}

#[test]
fn triggers_behind_a_cascade() {
    Trap::set().spring(
        "CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED);
         CREATE FUNCTION add_child() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN INSERT INTO public.child VALUES (NEW.id); RETURN NEW; END';
         CREATE TRIGGER add_child AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION add_child();
         CREATE CONSTRAINT TRIGGER cascaded AFTER DELETE ON child DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
             EXECUTE FUNCTION trap_row();
         SELECT ttl_create_index('t', 'at', 60)",
        "cascaded|owner",
    );
}

#[test]
fn filters() {
    Trap::set().spring("SELECT ttl_create_index('t', 'at', 60, filter => 'trap(''filter'')')", "filter|owner");
}

#[test]
fn expressions_that_rows_expire_by() {
    let create = "CREATE FUNCTION ends(timestamptz) RETURNS timestamptz IMMUTABLE LANGUAGE plpgsql AS
                      'BEGIN PERFORM public.spring(''expression''); RETURN $1; END';";
    Trap::set().spring(&format!("{create} SELECT ttl_create_index('t', 'ends(at)', 60)"), "expression|owner");
    Trap::set().spring(
        &format!("{create} SELECT ttl_create_index('t', 'ends(at)', 60, index_method => 'none')"),
        "expression|owner",
    );
}

#[test]
fn functions_that_are_called_with_rows() {
    Trap::set().spring(
        "CREATE FUNCTION hook(regclass, jsonb) RETURNS void LANGUAGE sql AS 'SELECT public.spring(''hook'')';
         SELECT ttl_create_index('t', 'at', 60, on_expire => 'hook(regclass, jsonb)')",
        "hook|owner",
    );
}

#[test]
fn triggers_and_defaults_of_an_archive() {
    Trap::set().spring(
        "CREATE FUNCTION trap_default() RETURNS int LANGUAGE sql AS 'SELECT public.spring(''default''); SELECT 1';
         CREATE TABLE archive (LIKE t, n int DEFAULT trap_default());
         CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON archive DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
             EXECUTE FUNCTION trap_row();
         CREATE TRIGGER before_insert BEFORE INSERT ON archive FOR EACH ROW EXECUTE FUNCTION trap_row();
         SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive')",
        "before_insert|owner\ndefault|owner\ndeferred|owner",
    );
}

#[test]
fn what_a_worker_reads_and_runs_to_make_an_index() {
    let mut trap = Trap::set();
    // Reading the literal calls the domain's check.
    trap.db.session(&trap.owner).run(
        "CREATE FUNCTION check_it(int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS 'BEGIN PERFORM public.spring(''domain''); RETURN true; END';
         CREATE DOMAIN d AS int CHECK (check_it(VALUE)); CREATE TYPE pair AS (a d);
         SELECT ttl_create_index('t', 'at', interval '100 years', concurrently => true,
                                 filter => $$('(1)'::pair IS NOT NULL) AND trap_value(at) = 1$$)",
    );
    trap.db.run("TRUNCATE seen");
    trap.db.run("SELECT ttl_start_worker()");
    trap.db.wait_for("SELECT index_state, last_error FROM ttl_summary", "valid|");
    let seen = format!("SELECT DISTINCT how, replace(who, '{}', 'owner') FROM seen ORDER BY 1, 2", trap.owner);
    assert_eq!(trap.db.get(&seen), "domain|owner\nindex|owner");
}

/// Since 19, a partition that is detached gets no constraint, for which others would be simplified.
fn detaching_runs_code(session: &mut Session) -> bool {
    session.get("SELECT current_setting('server_version_num')::int < 190000") == "t"
}

#[test]
fn what_a_worker_reads_to_drop_and_detach_partitions() {
    for action in ["drop", "detach"] {
        let mut trap = Trap::set();
        // Constraints are simplified, and with them calls with constant arguments, to see whether another is needed.
        trap.db.session(&trap.owner).run(&format!(
            "CREATE TABLE p (at timestamptz) PARTITION BY RANGE (at);
             CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
             CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
             ALTER TABLE p1 ADD CHECK (trap_value('2020-01-01') = 1), ADD CHECK (trap_value(at) = 1);
             SELECT ttl_create_index('p', 'at', 60, partition_action => '{action}')"
        ));
        trap.db.run("TRUNCATE seen");
        trap.db.run("SELECT ttl_start_worker()");
        // Not from the summary, which reads the partition.
        trap.db.wait_for("SELECT total_partitions_removed, last_error_code FROM ttl_index_table", "1|");
        let seen = format!("SELECT DISTINCT how, replace(who, '{}', 'owner') FROM seen ORDER BY 1, 2", trap.owner);
        let runs_code = action == "detach" && detaching_runs_code(&mut trap.db);
        assert_eq!(trap.db.get(&seen), if runs_code { "index|owner" } else { "" });
    }
}

#[test]
fn what_detaching_runs_leaves_nothing_behind_in_the_worker_and_does_not_hold_it() {
    let server = server(&["pg_ttl_index.batch_timeout=2s"]);
    let mut db = database(&server);
    let mallory = db.role("mallory");
    db.run("CREATE TABLE t (at timestamptz)");
    for (nth, deed) in [
        "PERFORM set_config('default_transaction_read_only', 'on', false), set_config('search_path', 'mallory', false)",
        "PERFORM pg_sleep(1000)",
    ]
    .iter()
    .enumerate()
    {
        db.session(&mallory).run(&format!(
            "CREATE FUNCTION evil{nth}(int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$
             BEGIN IF current_setting('application_name') LIKE 'pg_ttl_index%' THEN {deed}; END IF; RETURN true; END $$;
             CREATE TABLE p{nth} (at timestamptz) PARTITION BY RANGE (at);
             CREATE TABLE p{nth}_1 PARTITION OF p{nth} FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
             CREATE TABLE p{nth}_2 PARTITION OF p{nth} FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
             ALTER TABLE p{nth}_1 ADD CHECK (evil{nth}(1) AND at IS NOT NULL);
             SELECT ttl_create_index('p{nth}', 'at', 60, partition_action => 'detach')"
        ));
        let outcome = if nth == 1 && detaching_runs_code(&mut db) { "0|57014" } else { "1|" };
        db.wait_for(
            &format!(
                "SELECT total_partitions_removed, left(last_error, 5) FROM ttl_summary WHERE table_name = 'p{nth}'"
            ),
            outcome,
        );
        db.run("INSERT INTO t VALUES ('2020-01-01')");
        if nth == 0 {
            db.run("SELECT ttl_create_index('t', 'at', 60)");
        }
        db.wait_for("SELECT count(*) FROM t", "0");
    }
}

#[test]
fn filters_and_expressions_when_somebody_looks_at_a_row() {
    let mut trap = Trap::set();
    let (owner, reader) = (trap.owner.clone(), trap.db.role("reader"));
    trap.db.session(&owner).run(&format!(
        "GRANT SELECT ON t TO {reader}; SELECT ttl_create_index('t', 'at', 60, filter => 'trap(''filter'')');
         CREATE FUNCTION ends(timestamptz) RETURNS timestamptz IMMUTABLE LANGUAGE plpgsql AS
             'BEGIN PERFORM public.spring(''expression''); RETURN $1; END';
         SELECT ttl_create_index('t', 'ends(at)', 60)"
    ));
    trap.db.run("TRUNCATE seen");
    for session in [&mut trap.db.session("postgres"), &mut trap.db.session(&owner)] {
        session.run("SELECT ttl_get('t', '1', 'at'), ttl_get('t', '1', 'public.ends(at)'), count(*) FROM ttl_summary");
        session.run("SELECT ttl_get('t', '1', 'at')");
    }
    for column in ["at", "public.ends(at)"] {
        let get = format!("SELECT ttl_get('t', '1', '{column}')");
        assert_eq!(trap.db.session(&reader).error(&get).code, "42501", "not in a session of somebody else");
    }
    trap.db.run("SELECT count(*) FROM ttl_preview('t')");
    let seen = format!("SELECT DISTINCT how, replace(who, '{owner}', 'owner') FROM seen ORDER BY 1, 2");
    assert_eq!(trap.db.get(&seen), "expression|owner\nfilter|owner");
}

#[test]
fn index_expressions_and_triggers_of_soft_deletes() {
    Trap::set().spring(
        "CREATE INDEX ON t (trap_value(at)); CREATE INDEX ON t (deleted);
         CREATE TRIGGER before_update BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION trap_row();
         SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'deleted')",
        "before_update|owner\nindex|owner",
    );
}

#[test]
fn user_code_leaves_nothing_behind_in_the_session() {
    let mut db = Database::new();
    let owner = db.role("mallory");
    db.run("SELECT ttl_stop_worker()");
    db.session(&owner).run(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM set_config('search_path', 'public', false), set_config('default_transaction_read_only', 'on', false),
                     set_config('statement_timeout', '1', false);
             RETURN OLD;
         END $$;
         CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01');
         CREATE TRIGGER meddle BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION meddle();
         SELECT ttl_create_index('t', 'at', 60)",
    );
    let settings = "SELECT current_setting('search_path'), current_setting('default_transaction_read_only'),
                           current_setting('statement_timeout')";
    let before = db.get(settings);
    assert_eq!(db.get("SELECT ttl_runner()"), "1");
    assert_eq!(db.get(settings), before);
}

#[test]
fn deferred_constraints_the_caller_has_pending_are_checked_as_the_caller() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    db.run("CREATE TABLE other (id int PRIMARY KEY); CREATE TABLE ref (id int REFERENCES other DEFERRABLE INITIALLY DEFERRED)");
    db.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60)",
    );
    assert_eq!(
        db.get("BEGIN; INSERT INTO ref VALUES (1); INSERT INTO other VALUES (1); SELECT ttl_runner(); COMMIT"),
        "1"
    );
}

#[test]
fn triggers_of_others_behind_a_cascade_do_not_run_with_the_owners_rights() {
    let mut db = Database::new();
    let mallory = db.role("mallory");
    db.run("SELECT ttl_stop_worker(); CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); CREATE TABLE seen (who text)");
    db.run(&format!("INSERT INTO parent VALUES (1, '2020-01-01'); GRANT REFERENCES, SELECT ON parent TO {mallory}; GRANT INSERT ON seen TO PUBLIC"));
    let mut session = db.session(&mallory);
    session.run(
        "CREATE TABLE child (id int REFERENCES parent ON DELETE CASCADE); INSERT INTO child VALUES (1);
                 CREATE FUNCTION trap() RETURNS trigger LANGUAGE plpgsql AS
                     'BEGIN INSERT INTO public.seen VALUES (current_user); RETURN OLD; END';
                 CREATE TRIGGER trap AFTER DELETE ON child FOR EACH ROW EXECUTE FUNCTION trap()",
    );
    db.run("SELECT ttl_create_index('parent', 'at', 60)");
    assert_eq!(db.error("SELECT ttl_runner('parent')").code, "42501");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
    session.run(
        "DROP TRIGGER trap ON child; CREATE TRIGGER trap BEFORE DELETE ON child FOR EACH ROW EXECUTE FUNCTION trap()",
    );
    assert_eq!(db.get("SELECT ttl_runner('parent')"), "1");
    assert_eq!(db.get("SELECT who FROM seen"), mallory, "the cascade itself runs as the child's owner");
}

#[test]
fn what_is_only_planned_or_read_again_does_not_run_as_somebody_else() {
    let mut trap = Trap::set();
    let owner = trap.owner.clone();
    trap.db.session(&owner).run(
        "CREATE FUNCTION constant() RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS
             'BEGIN PERFORM public.spring(''constant''); RETURN true; END';
         SELECT ttl_create_index('t', 'at', 60, filter => 'constant()'),
                ttl_create_index('t', 'CASE WHEN constant() THEN at ELSE deleted END', 60, index_method => 'none')",
    );
    trap.db.run("TRUNCATE seen");
    trap.db.run("SELECT ttl_get('t', '1', column_name) FROM ttl_summary");
    trap.db.run("SELECT ttl_pause('t', column_name), ttl_resume('t', column_name) FROM ttl_summary");
    trap.db.run("SELECT ttl_alter_index('t', column_name, batch_size => 7) FROM ttl_summary");
    trap.db.run("SELECT expired_rows FROM ttl_preview('t')");
    trap.db.run("SELECT ttl_drop_index('t', column_name) FROM ttl_summary");
    let seen = format!("SELECT DISTINCT how, replace(who, '{owner}', 'owner') FROM seen ORDER BY 1, 2");
    assert_eq!(trap.db.get(&seen), "constant|owner");
}

#[test]
fn operators_of_others_in_the_search_path_are_not_called() {
    let mut db = Database::new();
    let mallory = db.role("mallory");
    db.run(
        "SELECT ttl_stop_worker();
         CREATE TABLE t (id int PRIMARY KEY, n numeric, b bigint, x text, j jsonb, u uuid, at timestamptz, l timestamp, d date);
         INSERT INTO t VALUES (1, 5000000000, 5000000000, '2100-01-01T00:00:00Z', '{\"at\": \"2100-01-01T00:00:00Z\"}', gen_random_uuid(), now(), now(), now());
         SELECT ttl_create_index('t', 'n', 60, unit => 's'), ttl_create_index('t', 'b', interval '1 month', unit => 's'),
                ttl_create_index('t', 'x', 60), ttl_create_index('t', 'j', 60), ttl_create_index('t', 'u', 60),
                ttl_create_index('t', 'at', interval '2 days'), ttl_create_index('t', 'l', 60), ttl_create_index('t', 'd', interval '1 month');
         SELECT ttl_enable_touch('t', c) FROM unnest('{n,b,x,at,l,d}'::text[]) c; CREATE TABLE seen (who text)",
    );
    db.run("GRANT INSERT ON seen TO PUBLIC");
    // Every pair of types that the statements combine, in every operator that they use.
    db.session(&mallory).run(
        "DO $do$ DECLARE o text; l text; r text; BEGIN
             FOREACH o IN ARRAY '{*,+,-,<,<=,>,>=,#>>,^,/}'::text[] LOOP
                 FOREACH l IN ARRAY '{numeric,bigint,int,timestamptz,timestamp,date,interval,jsonb,text,uuid}'::text[] LOOP
                     FOREACH r IN ARRAY '{numeric,bigint,int,timestamptz,timestamp,date,interval,jsonb,text,uuid}'::text[] LOOP
                         EXECUTE format('CREATE FUNCTION spy_%s(a %s, b %s) RETURNS %s LANGUAGE plpgsql AS
                             ''BEGIN INSERT INTO public.seen VALUES (current_user); RETURN NULL; END''', md5(o), l, r,
                             CASE WHEN o IN ('<', '<=', '>', '>=') THEN 'boolean' ELSE l END);
                         EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = spy_%s)', o, l, r, md5(o));
                     END LOOP;
                 END LOOP;
             END LOOP;
         END $do$",
    );
    db.run("SELECT ttl_get('t', '1', c) FROM unnest('{n,b,x,j,u,at,l,d}'::text[]) c");
    for column in ["n", "b", "x", "at", "l", "d"] {
        for mode in ["always", "nx", "xx", "gt", "lt"] {
            db.run(&format!("SELECT ttl_set('t', '1', '3 days', '{column}', '{mode}'), ttl_expire_at('t', '1', '2090-01-01', '{column}', '{mode}')"));
        }
        db.run(&format!("SELECT ttl_touch('t', '1', '{column}')"));
    }
    db.run("UPDATE t SET u = gen_random_uuid(); SELECT ttl_runner(); SELECT expired_rows, lag FROM ttl_preview('t') JOIN ttl_summary USING (column_name)");
    assert_eq!(db.get("SELECT count(*) FROM seen"), "0");
}

#[test]
fn code_in_a_rule_does_not_run_as_the_next_owner_of_its_table() {
    let mut db = Database::new();
    let (stranger, other) = (db.role("stranger"), db.role("other"));
    db.run("SELECT ttl_stop_worker(); CREATE TABLE ran (who text); GRANT INSERT ON ran TO PUBLIC");
    db.session(&stranger).run(
        "CREATE FUNCTION told(regclass, jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO public.ran VALUES (current_user)';
         CREATE FUNCTION stale(n int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO public.ran VALUES (current_user || ' filter'); RETURN true; END $$;
         CREATE TABLE t (id int PRIMARY KEY, at timestamptz); CREATE TABLE f (id int PRIMARY KEY, at timestamptz);
         CREATE FUNCTION trap() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO public.ran VALUES (current_user || ' trigger'); RETURN coalesce(OLD, NEW); END $$;
         CREATE TABLE w (id int PRIMARY KEY, at timestamptz); CREATE TABLE wa (LIKE w); CREATE TABLE x (LIKE w);
         CREATE TRIGGER trap BEFORE INSERT ON wa FOR EACH ROW EXECUTE FUNCTION trap();
         CREATE TRIGGER trap BEFORE DELETE ON x FOR EACH ROW EXECUTE FUNCTION trap();
         INSERT INTO t VALUES (1, '2020-01-01'); INSERT INTO f TABLE t; INSERT INTO w TABLE t; INSERT INTO x TABLE t;
         SELECT ttl_create_index('t', 'at', 60, on_expire => 'told(regclass, jsonb)'), ttl_create_index('w', 'at', 60, archive_to => 'wa'), ttl_create_index('x', 'at', 60),
                ttl_create_index('f', 'at', 60, filter => 'stale(id)', index_method => 'none')",
    );
    db.run("TRUNCATE ran");
    for owner in ["postgres", &other] {
        db.run(&format!(
            "ALTER TABLE t OWNER TO {owner}; ALTER TABLE f OWNER TO {owner}; ALTER TABLE w OWNER TO {owner}; ALTER TABLE wa OWNER TO {owner};
             ALTER TABLE x OWNER TO {owner}"
        ));
        db.run("ALTER TABLE t ADD n int; ALTER TABLE f RENAME id TO number; ALTER TABLE f RENAME number TO id; ALTER TABLE t DROP n");
        for table in ["t", "f", "w", "x"] {
            assert_eq!(db.error(&format!("SELECT ttl_runner('{table}')")).code, "55000");
            assert_eq!(
                db.get(&format!("SELECT plan, blockers[1] LIKE '%not confirmed%' FROM ttl_preview('{table}')")),
                "nothing|t"
            );
        }
        assert_eq!(db.error("SELECT ttl_get('f', 1)").code, "55000");
        db.run("SELECT ttl_pause('f'), ttl_resume('f'); SELECT * FROM ttl_summary");
        assert_eq!(db.get("SELECT count(*) FROM ran"), "0", "{owner}");
        assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    }
    // They go on when the new owner says so.
    db.session(&other).run("SELECT ttl_alter_index('t', 'at')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT who FROM ran"), other);
}
