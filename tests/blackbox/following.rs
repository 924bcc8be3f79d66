//! A rule follows its table, and goes with it.

use harness::Database;

const RULES: &str = "SELECT schema_name, table_name, column_name FROM ttl_index_table ORDER BY 1, 2, 3";

fn table() -> Database {
    let mut db = Database::new();
    db.run("CREATE TABLE t (id int, at timestamptz, deleted timestamptz); CREATE SCHEMA app");
    db.run("SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'deleted')");
    db
}

#[test]
fn renames_and_moves_keep_the_rule() {
    let mut db = table();
    db.run("ALTER TABLE t RENAME TO u");
    assert_eq!(db.get(RULES), "public|u|at");
    db.run("ALTER TABLE u SET SCHEMA app");
    assert_eq!(db.get(RULES), "app|u|at");
    db.run("ALTER SCHEMA app RENAME TO application");
    assert_eq!(db.get(RULES), "application|u|at");
    db.run("ALTER TABLE application.u RENAME COLUMN at TO expires");
    assert_eq!(db.get(RULES), "application|u|expires");
    db.run("ALTER TABLE application.u RENAME deleted TO gone");
    assert_eq!(db.get("SELECT soft_delete_column, state, last_error FROM ttl_summary"), "gone|active|");
    assert_eq!(db.get("SELECT ttl_drop_index('application.u', 'expires')"), "t");
}

#[test]
fn a_rule_on_a_child_follows_a_rename_in_its_parent() {
    let mut db = Database::new();
    db.run("CREATE TABLE parent (at timestamptz); CREATE TABLE child () INHERITS (parent)");
    db.run("SELECT ttl_create_index('child', 'at', 60); ALTER TABLE parent RENAME COLUMN at TO moment");
    assert_eq!(db.get(RULES), "public|child|moment");
}

#[test]
fn a_rule_on_a_typed_table_follows_its_type() {
    let mut db = Database::new();
    db.run("CREATE TYPE shape AS (at timestamptz); CREATE TABLE t OF shape; SELECT ttl_create_index('t', 'at', 60)");
    db.run("ALTER TYPE shape RENAME ATTRIBUTE at TO moment CASCADE");
    assert_eq!(db.get(RULES), "public|t|moment");
}

#[test]
fn dropping_the_column_or_table_drops_the_rule() {
    for ddl in [
        "DROP TABLE t",
        "ALTER TABLE t DROP COLUMN at",
        "ALTER TABLE t SET SCHEMA app; DROP SCHEMA app CASCADE",
        "CREATE ROLE \"following drop\"; ALTER TABLE t OWNER TO \"following drop\";
         DROP OWNED BY \"following drop\"; DROP ROLE \"following drop\"",
        "BEGIN; DROP TABLE t; CREATE TABLE t (at timestamptz); COMMIT",
    ] {
        let mut db = table();
        db.run(ddl);
        assert_eq!(db.get(RULES), "", "{ddl}");
        assert_eq!(db.get("SELECT count(*) FROM ttl_binding"), "0", "{ddl}");
    }
}

#[test]
fn dropping_a_columns_type_drops_the_rule() {
    let mut db = Database::new();
    db.run("CREATE DOMAIN moment AS timestamptz; CREATE TABLE t (at moment); SELECT ttl_create_index('t', 'at', 60)");
    db.run("DROP DOMAIN moment CASCADE");
    assert_eq!(db.get(RULES), "");
}

#[test]
fn a_new_table_of_the_old_name_inherits_nothing() {
    let mut db = table();
    db.run("ALTER TABLE t RENAME TO archive; CREATE TABLE t (at timestamptz)");
    assert_eq!(db.get(RULES), "public|archive|at");
    assert_eq!(db.get("SELECT ttl_drop_index('t', 'at')"), "f");
    db.run("ALTER TABLE t RENAME TO x; ALTER TABLE archive RENAME TO t; ALTER TABLE x RENAME TO archive");
    assert_eq!(db.get("SELECT ttl_drop_index('archive', 'at'), ttl_drop_index('t', 'at')"), "f|t");
}

#[test]
fn a_dropped_soft_delete_column_stops_the_rule_and_never_turns_it_into_a_deleting_one() {
    let mut db = table();
    db.run("ALTER TABLE t DROP COLUMN deleted");
    assert_eq!(
        db.get("SELECT cleanup_mode, state, last_error FROM ttl_summary"),
        "soft_delete|error|42703: soft delete column \"deleted\" was dropped"
    );
}

#[test]
fn an_undone_rename_leaves_the_rule_as_it_was() {
    let mut db = table();
    db.run("BEGIN; ALTER TABLE t RENAME TO u; ALTER TABLE u DROP COLUMN at; ROLLBACK");
    assert_eq!(db.get(RULES), "public|t|at");
}

#[test]
fn rules_follow_in_a_session_that_replays_changes() {
    let mut db = table();
    db.run("SET session_replication_role = replica; ALTER TABLE t RENAME TO u");
    assert_eq!(db.get(RULES), "public|u|at");
    db.run("DROP TABLE u");
    assert_eq!(db.get(RULES), "");
}

#[test]
fn rules_follow_ddl_of_users_who_cannot_see_the_catalog() {
    let mut db = Database::new();
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run("CREATE TABLE mine (at timestamptz); SELECT ttl_create_index('mine', 'at', 60)");
    session.run("ALTER TABLE mine RENAME TO still_mine");
    assert_eq!(db.get(RULES), "public|still_mine|at");
    session.run("DROP TABLE still_mine");
    assert_eq!(db.get(RULES), "");
}

#[test]
fn a_table_that_is_altered_as_a_view_is_followed_too() {
    let mut db = Database::new();
    db.run(
        "SELECT ttl_stop_worker(); CREATE TABLE t (a timestamptz, b timestamptz); INSERT INTO t VALUES (now(), '2020-01-01');
         SELECT ttl_create_index('t', 'a', 60, soft_delete_column => 'b')",
    );
    db.run("ALTER VIEW t RENAME a TO x; ALTER VIEW t RENAME b TO a; ALTER VIEW t RENAME x TO b");
    assert_eq!(db.get("SELECT column_name, soft_delete_column FROM ttl_summary"), "b|a");
    db.run("CREATE TABLE other (n int); ALTER TABLE other ADD m int; DROP TABLE other");
    assert_eq!(db.error("UPDATE ttl_index_table SET soft_delete_column = 'b'").code, "23514");
}

#[test]
fn names_that_nobody_followed_remove_nothing() {
    let mut db = Database::new();
    db.run(
        "SELECT ttl_stop_worker(); CREATE TABLE t (a timestamptz, b timestamptz); INSERT INTO t VALUES (now(), '2020-01-01');
         SELECT ttl_create_index('t', 'a', 60); ALTER EVENT TRIGGER ttl_follow_alter DISABLE;
         ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
    );
    // As if the rule had been loaded before: its row is as it was.
    assert_eq!(db.get("SELECT column_name FROM ttl_index_table"), "a");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42703");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}

#[test]
fn ddl_of_a_stranger_holds_up_neither_sweeps_nor_ddl_of_an_owner() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    let (owner, eve, mal) = (db.role("owner"), db.role("eve"), db.role("mal"));
    let mut own = db.session(&owner);
    own.run(&format!(
        "CREATE TABLE v (k int PRIMARY KEY, at timestamptz NOT NULL); GRANT REFERENCES ON v TO {eve};
         CREATE TABLE part (k int, at timestamptz NOT NULL) PARTITION BY RANGE (k);
         CREATE TABLE part1 PARTITION OF part FOR VALUES FROM (0) TO (1000); CREATE TABLE old (k int, at timestamptz NOT NULL);
         CREATE FUNCTION okay() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
         CREATE TRIGGER okay BEFORE INSERT ON part FOR EACH ROW EXECUTE FUNCTION okay();
         SELECT ttl_create_index('v', 'at', 0), ttl_create_index('part', 'at', 0, archive_to => 'old')"
    ));
    let mut eve = db.session(&eve);
    eve.run("CREATE TABLE child (k int REFERENCES v ON DELETE CASCADE); CREATE TABLE pa (k int PRIMARY KEY)");
    let mut mal = db.session(&mal);
    mal.run("CREATE TABLE a (k int PRIMARY KEY); CREATE TABLE b (k int REFERENCES a)");
    own.run("SET lock_timeout = '3s'");
    mal.run("SET lock_timeout = '3s'");
    for ddl in ["ALTER TABLE child ALTER k SET STATISTICS 100", "ALTER TABLE child ADD z int"] {
        eve.run(&format!("BEGIN; {ddl}"));
        own.run("INSERT INTO v VALUES (1, now() - interval '1 day')");
        assert_eq!(own.get("SELECT ttl_runner('part')"), "0");
        own.run("SELECT ttl_pause('v'), ttl_resume('v'), ttl_alter_index('v', 'at', batch_size => 5)");
        if ddl.contains("STATISTICS") {
            assert_eq!(own.get("SELECT ttl_runner('v')"), "1", "{ddl}");
        }
        eve.run("ROLLBACK");
        own.run("DELETE FROM v");
    }
    eve.run("BEGIN; CREATE TABLE pc (k int REFERENCES pa); DROP TABLE pc");
    mal.run("DROP TABLE b");
    own.run("ALTER TABLE part ADD z int");
    assert_eq!(own.get("SELECT count(*) FROM ttl_summary WHERE last_error IS NOT NULL"), "0");
    eve.run("ROLLBACK");
}

#[test]
fn a_rename_that_is_just_committing_is_no_error_of_the_rule() {
    let mut db = Database::new();
    for _ in 0..40 {
        // Registering wakes the worker, and so does each command.
        db.run("CREATE TABLE t (id int, at timestamptz, n int)");
        db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 0')");
        db.run("ALTER TABLE t RENAME at TO expires");
        db.run("ALTER TABLE t RENAME n TO number");
        db.run("ALTER TABLE t RENAME TO u");
        assert_eq!(db.get("SELECT state, last_error FROM ttl_summary"), "active|");
        db.run("DROP TABLE u");
    }
}
