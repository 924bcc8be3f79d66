//! A rule that comes to mean something else, by a change of type or of what its words stand for, touches nothing until
//! somebody says what is meant.

use harness::{Database, Server, run};
use std::sync::Arc;

const STATE: &str = "SELECT state, left(last_error, 5) FROM ttl_summary";

fn database(sql: &str) -> Database {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    db.run(sql);
    db
}

/// A server whose worker comes soon.
fn server() -> Arc<Server> {
    Arc::new(Server::start(&["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1s"]))
}

#[test]
fn a_number_of_another_type_is_not_read_in_the_old_unit() {
    let mut db = database(
        "CREATE TABLE t (n bigint); SELECT ttl_create_index('t', 'n', 3600, unit => 'ms');
         INSERT INTO t SELECT extract(epoch FROM now()) * 1000;
         ALTER TABLE t ALTER n TYPE int USING n / 1000",
    );
    assert_eq!(db.get(STATE), "error|42804");
    let error = db.error("SELECT ttl_runner('t')");
    assert_eq!(error.code, "42804");
    assert_eq!(db.get("SELECT ttl_runner()"), "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    assert_eq!(db.error("SELECT ttl_alter_index('t', 'n', batch_size => 5)").code, "22023", "too small for ms");
    db.run("SELECT ttl_alter_index('t', 'n', unit => 's')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    assert_eq!(db.get(STATE), "active|");
    db.run("UPDATE t SET n = n - 7200");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn a_time_without_zone_is_not_read_in_the_zone_of_an_old_session() {
    let mut db = database(
        "SET TimeZone = 'Asia/Tokyo'; CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 3600);
         SET TimeZone = 'UTC'; INSERT INTO t VALUES (now() - interval '10 minutes');
         ALTER TABLE t ALTER at TYPE timestamp",
    );
    assert_eq!(db.get(STATE), "error|42804");
    assert_eq!(db.get("SELECT ttl_runner()"), "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    db.notices();
    db.run("SELECT ttl_alter_index('t', 'at', time_zone => 'UTC')");
    assert!(db.notices().iter().any(|notice| notice.contains("timestamp without time zone, in time zone UTC")));
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    db.run("UPDATE t SET at = at - interval '1 hour'");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn the_worker_leaves_such_a_rule_alone_and_says_so() {
    let mut db = Database::on(&server());
    db.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
    db.run(
        "CREATE TABLE t (n bigint); SELECT ttl_create_index('t', 'n', 3600, unit => 'ms');
         INSERT INTO t SELECT extract(epoch FROM now()) * 1000; CREATE TABLE other (at timestamptz);
         INSERT INTO other VALUES ('yesterday')",
    );
    db.run("BEGIN; ALTER TABLE t ALTER n TYPE int USING n / 1000; SELECT ttl_create_index('other', 'at', 60), ttl_start_worker(); COMMIT");
    db.wait_for("SELECT count(*) FROM other", "0");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    assert_eq!(db.get("SELECT state FROM ttl_summary WHERE table_name = 't'"), "error");
}

#[test]
fn the_same_instants_in_another_domain_or_precision_go_on() {
    let mut db = database(
        "CREATE TABLE t (at timestamptz, n varchar(5)); INSERT INTO t VALUES ('yesterday', 'a');
         SELECT ttl_create_index('t', 'at', 60, filter => 'n = ''a''');
         CREATE DOMAIN instant AS timestamptz; CREATE DOMAIN moment AS instant;
         ALTER TABLE t ALTER at TYPE timestamptz(3); ALTER TABLE t ALTER at TYPE moment;
         ALTER TABLE t ALTER n TYPE varchar(9); ALTER DOMAIN moment RENAME TO point_in_time",
    );
    assert_eq!(db.get(STATE), "active|");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn columns_of_expressions_filters_and_marks_count_too() {
    for (rule, change) in [
        ("'to_timestamp(n / 1000)', 60", "n TYPE int USING n / 1000"),
        ("'at', 60, filter => 'n > 5'", "n TYPE int USING n / 1000"),
        ("'at', 60, filter => 'name > ''5'''", "name TYPE bpchar(5)"),
        ("'at', 60, soft_delete_column => 'gone'", "gone TYPE timestamp"),
    ] {
        let mut db = database(&format!(
            "CREATE TABLE t (n bigint, at timestamptz, gone timestamptz, name text);
             INSERT INTO t VALUES (1000, 'yesterday', NULL, '9'); SELECT ttl_create_index('t', {rule});
             ALTER TABLE t ALTER {change}"
        ));
        assert_eq!(db.get(STATE), "error|42804", "{change}");
        assert_eq!(db.error("SELECT ttl_runner('t')").code, "42804", "{change}");
        assert_eq!(db.get("SELECT count(*), count(gone) FROM t"), "1|0", "{change}");
        db.run(&format!("SELECT ttl_create_index('t', {rule})"));
    }
}

#[test]
fn a_label_that_was_given_to_another_value_is_followed() {
    let mut db = database(
        "CREATE TYPE status AS ENUM ('open', 'done'); CREATE TABLE t (id int, at timestamptz, has status);
         INSERT INTO t VALUES (1, 'yesterday', 'open'), (2, 'yesterday', 'done');
         SELECT ttl_create_index('t', 'at', 60, filter => 'has = ''done''');
         ALTER TYPE status RENAME VALUE 'done' TO 'x'; ALTER TYPE status RENAME VALUE 'open' TO 'done';
         ALTER TYPE status RENAME VALUE 'x' TO 'open'",
    );
    assert_eq!(db.get("SELECT filter FROM ttl_summary"), "(has = 'open'::public.status)");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT id FROM t"), "1", "the row that was open when the rule was registered");
    db.run("ALTER TYPE status ADD VALUE 'late' BEFORE 'open'; ALTER TYPE status RENAME TO state");
    assert_eq!(db.get("SELECT filter, state FROM ttl_summary"), "(has = 'open'::public.state)|active");
}

const KEEPER: &str = "CREATE SCHEMA app; CREATE TABLE t (id int, at timestamptz);
     INSERT INTO t SELECT n, 'yesterday' FROM generate_series(1, 3) n;
     CREATE FUNCTION app.may_go(id int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT id = 1';
     SELECT ttl_create_index('t', 'at', 60, filter => 'app.may_go(id)', index_method => 'none');";

#[test]
fn a_name_that_another_function_has_now_does_not_decide() {
    let mut db = database(KEEPER);
    db.run(
        "BEGIN; ALTER SCHEMA app RENAME TO old; CREATE SCHEMA app;
         CREATE FUNCTION app.may_go(id int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'; COMMIT",
    );
    assert_eq!(db.get("SELECT filter, state FROM ttl_summary"), "old.may_go(id)|active");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT count(*) FROM t"), "2");
    db.run("ALTER FUNCTION old.may_go SET SCHEMA public; ALTER FUNCTION may_go(int) RENAME TO goes");
    assert_eq!(db.get("SELECT filter, state FROM ttl_summary"), "public.goes(id)|active");
}

#[test]
fn a_function_that_was_replaced_decides_only_when_the_rule_is_registered_again() {
    for change in [
        "CREATE OR REPLACE FUNCTION app.may_go(id int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'",
        "DROP FUNCTION app.may_go;
         CREATE FUNCTION app.may_go(id int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'",
        "ALTER FUNCTION app.may_go SET search_path = app",
    ] {
        let mut db = database(KEEPER);
        db.run(change);
        assert_eq!(db.get("SELECT state FROM ttl_summary"), "error", "{change}");
        let error = db.error("SELECT ttl_runner('t')");
        assert!(error.hint.contains("ttl_alter_index"), "{error:?}");
        assert_eq!(db.get("SELECT count(*) FROM t"), "3", "{change}");
        db.run("SELECT ttl_alter_index('t', 'at', batch_size => 10)");
        assert_eq!(db.get("SELECT ttl_runner('t') > 0"), "t", "{change}");
    }
    let mut db = database(KEEPER);
    db.run("GRANT EXECUTE ON FUNCTION app.may_go TO PUBLIC; ALTER FUNCTION app.may_go COST 5; ANALYZE t");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT count(*) FROM t"), "2");
}

#[test]
fn a_function_replaced_in_the_middle_of_a_sweep_decides_about_no_further_row() {
    let mut db = database(KEEPER);
    db.run(
        "CREATE OR REPLACE FUNCTION app.may_go(id int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT id % 2 = 1';
            INSERT INTO t SELECT n, 'yesterday' FROM generate_series(4, 40) n;
            SELECT ttl_alter_index('t', 'at', batch_size => 5)",
    );
    db.run(
        "CREATE FUNCTION replace() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             CREATE OR REPLACE FUNCTION app.may_go(id int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true';
             RETURN NULL; END $$;
         CREATE TRIGGER replace AFTER DELETE ON t FOR EACH STATEMENT EXECUTE FUNCTION replace()",
    );
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "55000");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE id % 2 = 0"), "20");
}

#[test]
fn a_rule_restored_onto_columns_of_other_types_waits() {
    let mut source = database(
        "CREATE TABLE t (n bigint, at timestamptz); SELECT ttl_create_index('t', 'n', 3600, unit => 'ms', index_method => 'none');
         SELECT ttl_create_index('t', 'at', 3600, index_method => 'none')",
    );
    let mut target = Database::on(&server());
    target.run("CREATE EXTENSION pg_ttl_index");
    target.run("CREATE TABLE t (n int, at timestamptz); INSERT INTO t SELECT extract(epoch FROM now()), now()");
    let dump = run(source
        .server
        .client_program("pg_dump")
        .args(["--data-only", "--table=public.ttl_index_table"])
        .arg(&source.name));
    let file = std::env::temp_dir().join(format!("{}-types.sql", source.name));
    std::fs::write(&file, dump).expect("writing the dump");
    run(target.server.client_program("psql").args(["-q", "-d", &target.name, "-f"]).arg(&file));
    std::fs::remove_file(&file).expect("removing the dump");
    source.run("SELECT 1");
    target.wait_for("SELECT count(*) FROM ttl_summary WHERE column_name = 'n' AND state = 'error'", "1");
    assert_eq!(target.error("SELECT ttl_runner('t')").code, "42804");
    assert_eq!(target.get("SELECT count(*) FROM t WHERE n IS NOT NULL"), "1");
}

#[test]
fn another_default_of_an_argument_is_another_function() {
    let mut db = crate::sweep::with(
        "CREATE FUNCTION old(n int, years int DEFAULT 10) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT n > years';
         CREATE TABLE t (at timestamptz, age int); INSERT INTO t VALUES ('2020-01-01', 5);
         SELECT ttl_create_index('t', 'at', 60, filter => 'old(age)', index_method => 'none')",
    );
    db.run("CREATE OR REPLACE FUNCTION old(n int, years int DEFAULT 3) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT n > years'");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "55000");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}
