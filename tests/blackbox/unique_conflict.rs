//! A hidden row is not in the way of a new one with its key.

use crate::sweep::with;
use harness::run;

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
fn keys_that_cannot_be_freed_are_refused_as_ever() {
    // A softly deleted row stays in the table.
    let mut db = with(
        "CREATE TABLE soft (id int PRIMARY KEY, at timestamptz, gone boolean); INSERT INTO soft VALUES (1, '2020-01-01');
         CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); INSERT INTO parent VALUES (1, '2020-01-01');
         CREATE TABLE child (parent int REFERENCES parent); INSERT INTO child VALUES (1);
         SELECT ttl_create_index('soft', 'at', 60, soft_delete_column => 'gone', hide_expired => true),
                ttl_create_index('parent', 'at', 60, hide_expired => true)",
    );
    assert_eq!(db.get("SELECT (SELECT count(*) FROM soft) + (SELECT count(*) FROM parent)"), "0");
    assert_eq!(db.error("INSERT INTO soft VALUES (1, now())").code, "23505");
    assert_eq!(db.error("INSERT INTO parent VALUES (1, now())").code, "23503");
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
fn foreign_keys_are_so_wherever_the_statement_stands() {
    let mut db = with(
        "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); CREATE TABLE child (id int, parent int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE, at timestamptz);
         SELECT ttl_create_index('parent', 'at', 60, hide_expired => true), ttl_create_index('child', 'at', 60, hide_expired => true);
         CREATE FUNCTION in_sql() RETURNS void LANGUAGE sql AS 'DELETE FROM parent WHERE id = 1';
         CREATE FUNCTION in_plpgsql() RETURNS void LANGUAGE plpgsql AS 'BEGIN DELETE FROM parent WHERE id = 1; END';
         CREATE FUNCTION dynamic() RETURNS void LANGUAGE plpgsql AS $$BEGIN EXECUTE 'DELETE FROM parent WHERE id = $1' USING 1; END$$;
         CREATE FUNCTION nested() RETURNS void LANGUAGE sql AS 'SELECT in_plpgsql()';
         CREATE PROCEDURE called() LANGUAGE plpgsql AS 'BEGIN PERFORM in_sql(); COMMIT; END';
         CREATE FUNCTION by_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN DELETE FROM parent WHERE id = 1; RETURN NEW; END';
         CREATE TABLE other (id int); CREATE TRIGGER t AFTER INSERT ON other FOR EACH ROW EXECUTE FUNCTION by_trigger();
         PREPARE prepared AS DELETE FROM parent WHERE id = 1",
    );
    for statement in [
        "DELETE FROM parent WHERE id = 1",
        "SELECT in_sql()",
        "SELECT in_plpgsql()",
        "SELECT dynamic()",
        "SELECT nested()",
        "CALL called()",
        "DO 'BEGIN DELETE FROM parent WHERE id = 1; END'",
        "EXECUTE prepared",
        "INSERT INTO other VALUES (1)",
        "WITH d AS (DELETE FROM parent WHERE id = 1 RETURNING 1) SELECT count(*) FROM d",
    ] {
        // The child was hidden before it came, and is there all the same.
        db.run("INSERT INTO parent VALUES (1, now()), (2, '2020-01-01'); INSERT INTO child VALUES (1, 1, '2020-01-01'), (2, 2, now())");
        db.run(statement);
        db.run("SET pg_ttl_index.hide_expired = off");
        assert_eq!(db.get("SELECT string_agg(id::text, ',') FROM child"), "2", "{statement}");
        db.run("TRUNCATE parent, child; RESET pg_ttl_index.hide_expired");
    }
}

#[test]
fn keys_are_freed_in_the_tables_of_the_rule_alone() {
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
        "CREATE TRIGGER stolen BEFORE INSERT ON victim FOR EACH ROW EXECUTE FUNCTION ttl_free_key('{id}')"
    ));
    assert_eq!(session.error("INSERT INTO victim VALUES (1, now(), 'mine')").code, "23505");
    assert_eq!(db.get("SELECT v FROM victim"), "theirs");
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
    let upsert =
        "INSERT INTO soft VALUES (1, now(), 'new') ON CONFLICT (id) DO UPDATE SET v = soft.v || '!' RETURNING v";
    assert_eq!(db.error(upsert).code, "23505");
    assert_eq!(
        db.get("SET pg_ttl_index.hide_expired = off; SELECT v FROM soft; RESET pg_ttl_index.hide_expired"),
        "dead"
    );
    db.run("DELETE FROM par");
    db.run("SET pg_ttl_index.hide_expired = off; UPDATE x SET at = now(); RESET pg_ttl_index.hide_expired");
    assert_eq!(db.get("SELECT name, par FROM x"), "a|");
}

#[test]
fn keys_are_freed_beside_deferred_foreign_keys() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text); INSERT INTO t VALUES (1, '2020-01-01', 'dead'), (2, '2020-01-01', 'dead');
         CREATE TABLE child (id int REFERENCES t DEFERRABLE INITIALLY DEFERRED, note text);
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)",
    );
    db.run("INSERT INTO t VALUES (1, now(), 'new')");
    assert_eq!(db.get("SELECT id, v FROM t"), "1|new");
    // A child that comes first is what such a foreign key is for.
    db.run("BEGIN; INSERT INTO child VALUES (2, 'early'); INSERT INTO t VALUES (2, now(), 'new'); COMMIT");
    assert_eq!(db.get("SELECT string_agg(v, ',') FROM t"), "new,new");
    // One that the new row does not help is checked at the end.
    db.run("SET pg_ttl_index.hide_expired = off; UPDATE t SET at = '2020-01-01' WHERE id = 2; RESET pg_ttl_index.hide_expired; CREATE UNIQUE INDEX ON t (v) WHERE id > 1");
    db.run("BEGIN");
    db.run("INSERT INTO t VALUES (3, now(), 'new')");
    assert_eq!(db.error("COMMIT").code, "23503");
}

#[test]
fn keys_are_freed_for_roles_that_may_not_use_the_schema_of_the_extension() {
    let mut db = harness::Database::empty();
    db.run("CREATE SCHEMA ext; CREATE EXTENSION pg_ttl_index SCHEMA ext; SELECT ext.ttl_stop_worker()");
    let writer = db.role("writer");
    db.run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, expires text, v text); INSERT INTO t VALUES (1, '2020-01-01T00:00:00Z', 'dead');
         SELECT ext.ttl_create_index('t', 'expires', 0, hide_expired => true); GRANT SELECT, INSERT, UPDATE ON t TO {writer}"
    ));
    let mut session = db.session(&writer);
    session.run("INSERT INTO t VALUES (1, '2999-01-01T00:00:00Z', 'new')");
    session
        .run("INSERT INTO t VALUES (1, '2999-01-01T00:00:00Z', 'newer') ON CONFLICT (id) DO UPDATE SET v = excluded.v");
    assert_eq!(session.get("SELECT v FROM t"), "newer");
}

#[test]
fn a_key_that_cannot_be_freed_does_not_tell_of_other_columns() {
    let mut db = harness::Database::new();
    let (owner, writer) = (db.role("owner"), db.role("writer"));
    db.session(&owner).run(&format!(
        "CREATE TABLE parent (id int PRIMARY KEY, k int UNIQUE, at timestamptz);
         SELECT ttl_create_index('parent', 'at', 0, hide_expired => true, active => false);
         CREATE TABLE child (id int REFERENCES parent); INSERT INTO parent VALUES (4711, 2, now() + interval '1 hour');
         INSERT INTO child VALUES (4711); GRANT INSERT ON parent TO {writer}"
    ));
    db.run("UPDATE parent SET at = '2020-01-01'");
    let error = db.session(&writer).error("INSERT INTO parent VALUES (1, 2, now())");
    assert_eq!((error.code.as_str(), error.detail.contains("4711")), ("23503", false), "{error:?}");
    let error = db.session(&owner).error("INSERT INTO parent VALUES (1, 2, now())");
    assert!(error.detail.contains("4711"), "{error:?}");
}
