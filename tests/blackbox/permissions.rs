//! Who may do what, and as whom things run.

use harness::Database;

const CALLS: [&str; 5] = [
    "ttl_create_index('t', 'at', 60)",
    "ttl_alter_index('t', 'at', batch_size => 5)",
    "ttl_drop_index('t', 'at')",
    "ttl_pause('t')",
    "ttl_resume('t')",
];

#[test]
fn only_an_owner_rules_a_table() {
    let mut db = Database::new();
    let stranger = db.role("stranger");
    db.run("CREATE TABLE t (at timestamptz); GRANT ALL ON t TO PUBLIC");
    let mut session = db.session(&stranger);
    for call in CALLS {
        let error = session.error(&format!("SELECT {call}"));
        assert_eq!((error.code.as_str(), error.message.as_str()), ("42501", "must be owner of table t"), "{call}");
    }
}

#[test]
fn an_owner_who_is_no_superuser_may_do_everything() {
    let mut db = Database::new();
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run("CREATE TABLE t (at timestamptz)");
    for call in CALLS {
        session.run(&format!("SELECT {call}"));
    }
}

#[test]
fn a_member_of_the_owning_role_is_an_owner_and_a_superuser_too() {
    let mut db = Database::new();
    let (owner, member) = (db.role("owner"), db.role("member"));
    db.session(&owner).run("CREATE TABLE t (at timestamptz)");
    db.run(&format!("GRANT {owner} TO {member}"));
    db.session(&member).run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("SELECT ttl_alter_index('t', 'at', batch_size => 5)");
    assert_eq!(db.get("SELECT batch_size FROM ttl_summary"), "5");
}

#[test]
fn a_stranger_cannot_lock_a_table_by_trying() {
    let mut db = Database::new();
    let stranger = db.role("stranger");
    db.run("CREATE TABLE t (at timestamptz)");
    db.run("BEGIN; LOCK t IN ACCESS EXCLUSIVE MODE");
    let mut session = db.session(&stranger);
    session.run("SET lock_timeout = '30s'");
    assert_eq!(session.error("SELECT ttl_pause('t')").code, "42501", "refused before waiting for a lock");
    db.run("ROLLBACK");
}

#[test]
fn nobody_but_a_superuser_writes_the_catalog() {
    let mut db = Database::new();
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    for statement in [
        "UPDATE ttl_index_table SET active = false",
        "DELETE FROM ttl_index_table",
        "INSERT INTO ttl_binding (rule_id, relid, attnum) VALUES (1, 'pg_class'::regclass, 1)",
        "TRUNCATE ttl_index_table CASCADE",
        "UPDATE ttl_binding SET relid = 'pg_class'::regclass",
        "DELETE FROM ttl_binding",
        "SELECT ttl_forget('t'::regclass)",
        "SELECT setval('ttl_index_table_id_seq', 1)",
        "ALTER TABLE ttl_index_table DISABLE ROW LEVEL SECURITY",
        "ALTER EVENT TRIGGER ttl_follow_drop DISABLE",
    ] {
        assert_eq!(session.error(statement).code, "42501", "{statement}");
    }
}

#[test]
fn a_user_sees_the_rules_on_tables_they_may_read() {
    let mut db = Database::new();
    let (owner, reader, column_reader, stranger, monitor) =
        (db.role("owner"), db.role("reader"), db.role("column_reader"), db.role("stranger"), db.role("monitor"));
    let mut session = db.session(&owner);
    session.run("CREATE TABLE t (at timestamptz, n int); SELECT ttl_create_index('t', 'at', 60, filter => 'n > 42')");
    session.run(&format!(
        "REVOKE ALL ON t FROM {owner}; GRANT SELECT ON t TO {reader}; GRANT SELECT (n) ON t TO {column_reader}"
    ));
    db.run(&format!("GRANT pg_monitor TO {monitor}"));
    for (role, visible) in [(&owner, "1"), (&reader, "1"), (&column_reader, "1"), (&monitor, "1"), (&stranger, "0")] {
        let mut session = db.session(role);
        assert_eq!(session.get("SELECT count(*) FROM ttl_index_table"), "1", "what was registered is no secret");
        for source in ["ttl_summary", "ttl_summary()", "ttl_states()"] {
            assert_eq!(session.get(&format!("SELECT count(*) FROM {source}")), visible, "{source} for {role}");
        }
    }
}

/// A function that tells who runs it, by making that user's name part of an error.
const TELLTALE: &str = "CREATE FUNCTION telltale(int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$
    BEGIN
        IF current_user <> (SELECT rolname FROM pg_roles JOIN pg_class ON relowner = pg_roles.oid WHERE relname = 'trap') THEN
            RAISE EXCEPTION 'telltale ran as %', current_user;
        END IF;
        RETURN true;
    END $$";

#[test]
fn a_superusers_registration_runs_no_code_of_the_owner_as_superuser() {
    let mut db = Database::new();
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run("CREATE TABLE trap (at timestamptz, n int)");
    session.run(TELLTALE);
    session
        .run("CREATE INDEX decoy ON trap (at) WHERE telltale(1); CREATE INDEX decoy2 ON trap (at) WHERE telltale(n)");
    session.run("INSERT INTO trap VALUES (now(), 1)");
    let mut superuser = db.session("postgres");
    superuser.run("SELECT ttl_create_index('trap', 'at', 60)");
    superuser.run("SELECT ttl_create_index('trap', 'at', 60, filter => 'n > 3')");
}

#[test]
fn a_stored_filter_is_never_read_with_more_rights_than_its_owner_has() {
    let mut db = Database::new();
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run("CREATE TABLE trap (at timestamptz, n int, c int)");
    session.run(TELLTALE);
    // A literal of a composite type whose field is a domain calls the domain's check whenever it is parsed.
    session.run(
        "CREATE DOMAIN trapped AS int CHECK (telltale(VALUE)); CREATE TYPE pair AS (x trapped);
                 CREATE FUNCTION x_of(pair) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1'",
    );
    session.run("SELECT ttl_create_index('trap', 'at', 60, filter => 'x_of(''(1)''::pair) = n')");
    assert!(session.get("SELECT filter FROM ttl_summary").contains("'(1)'::public.pair"));
    let mut superuser = db.session("postgres");
    superuser.run("SELECT ttl_alter_index('trap', 'at', batch_size => 5)");
    superuser.run("SELECT ttl_alter_index('trap', 'at', index_method => 'brin')");
    superuser.run("ALTER TABLE trap RENAME COLUMN n TO m");
    assert_eq!(
        db.get("SELECT state, filter_columns FROM ttl_summary JOIN ttl_index_table USING (table_name)"),
        "active|{m}"
    );
}

#[test]
fn a_hostile_search_path_changes_nothing() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz, n int); CREATE SCHEMA hostile");
    db.run("CREATE FUNCTION hostile.now() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''taken over''; END';
            CREATE FUNCTION hostile.pg_has_role(oid, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';
            CREATE TABLE hostile.pg_class (oid oid); CREATE TABLE hostile.ttl_index_table (id int);
            CREATE FUNCTION hostile.nope(oid, oid) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''taken over''; END';
            CREATE OPERATOR hostile.= (FUNCTION = hostile.nope, LEFTARG = oid, RIGHTARG = oid)");
    db.run("SET search_path = hostile, public, pg_catalog");
    db.run("SELECT ttl_create_index('t', 'at', 60); SELECT ttl_alter_index('t', 'at', batch_size => 5)");
    db.run("ALTER TABLE t RENAME TO t2; SELECT count(*) FROM ttl_summary");
    assert_eq!(db.get("SELECT table_name FROM public.ttl_index_table"), "t2");
    assert_eq!(db.get("SELECT ttl_pause('t2'), ttl_drop_index('t2', 'at')"), "1|t");
}

#[test]
fn temporary_objects_do_not_stand_in_for_the_catalog() {
    let mut db = Database::new();
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run("CREATE TABLE t (at timestamptz)");
    session.run("CREATE TEMP TABLE pg_class (oid oid); CREATE TEMP TABLE ttl_index_table (id int); CREATE TEMP TABLE ttl_binding (id int)");
    session.run("SELECT ttl_create_index('t', 'at', 60); ALTER TABLE t RENAME TO t2");
    assert_eq!(db.get("SELECT table_name FROM public.ttl_index_table"), "t2");
}

#[test]
fn a_rule_that_cannot_follow_its_columns_does_not_stand_in_the_way_of_others() {
    let mut db = Database::new();
    let owner = db.role("mallory");
    let mut session = db.session(&owner);
    session.run(
        "CREATE TABLE trap (at timestamptz, n int); CREATE TABLE mood (bad boolean); INSERT INTO mood VALUES (false);
                 CREATE FUNCTION moody(int) RETURNS boolean LANGUAGE plpgsql AS
                     'BEGIN IF (SELECT bad FROM public.mood) THEN PERFORM pg_sleep(1000); END IF; RETURN $1 < 5; END';
                 CREATE DOMAIN trapped AS int CHECK (moody(VALUE)); CREATE TYPE pair AS (x trapped);
                 CREATE FUNCTION x_of(pair) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1'",
    );
    session
        .run("SELECT ttl_create_index('trap', 'at', 60, filter => 'x_of(''(1)''::pair) = n', index_method => 'none')");
    session.run("ALTER DOMAIN trapped ADD CHECK (VALUE > 1) NOT VALID; ALTER TABLE trap RENAME COLUMN n TO m");
    // The new name is there without running anything; reading the filter again does not work any more.
    assert!(db.get("SELECT filter FROM ttl_summary").ends_with("= m)"));
    db.run("SELECT ttl_runner()");
    // The worker may be just recording the same.
    db.wait_for("SELECT state FROM ttl_summary", "error");
    session.run("UPDATE mood SET bad = true");
    db.run("SET statement_timeout = '20s'; CREATE TABLE other (x int); ALTER TABLE other RENAME TO another; DROP TABLE another");
}

#[test]
fn ddl_of_a_function_does_not_wait_for_a_stranger_who_uses_it_in_a_rule() {
    let mut db = Database::new();
    let (author, other) = (db.role("author"), db.role("other"));
    let mut session = db.session(&author);
    session.run("CREATE FUNCTION keep(int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT $1 > 0'");
    let mut stranger = db.session(&other);
    stranger.run(
        "CREATE TABLE t (at timestamptz, n int); SELECT ttl_create_index('t', 'at', 60, filter => 'keep(n)', index_method => 'none')",
    );
    stranger.run("BEGIN; SELECT ttl_pause('t')");
    session.run(
        "SET statement_timeout = '10s'; ALTER FUNCTION keep(int) RENAME TO keeps; ALTER FUNCTION keeps(int) COST 50",
    );
    stranger.run("COMMIT; SELECT ttl_resume('t')");
    db.run("INSERT INTO t VALUES ('2020-01-01', 1)");
    stranger.error("SELECT ttl_runner('t')");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}
