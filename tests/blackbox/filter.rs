//! Which filters are accepted, what is stored of them, and that the stored text means the same everywhere.

use harness::Database;

fn table() -> Database {
    let mut db = Database::new();
    db.run("CREATE TABLE t (id int, at timestamptz, status text, n int, tags jsonb, ref timestamptz)");
    db
}

fn register(filter: &str) -> String {
    format!("SELECT ttl_create_index('t', 'at', 60, filter => $f${filter}$f$)")
}

#[test]
fn immutable_and_stable_expressions_are_accepted() {
    let mut db = table();
    for filter in [
        "status = 'done'",
        "n > 1 AND (status IS NULL OR status IN ('a', 'b'))",
        "tags ->> 'keep' IS NULL",
        "ref < now() - interval '1 day'",
        "NOT (n BETWEEN 1 AND 5)",
        "CASE WHEN n > 3 THEN true ELSE false END",
        "status ~ '^x' -- a comment at the end",
        "true",
    ] {
        db.run(&register(filter));
    }
}

#[test]
fn what_is_not_one_boolean_expression_over_the_row_is_refused() {
    let mut db = table();
    db.run("CREATE TABLE other (x int)");
    for (filter, code) in [
        ("", "42601"),
        ("n >", "42601"),
        ("n > 1; DELETE FROM t", "42601"),
        ("n > 1, n > 2", "42601"),
        ("n > 1 FROM t", "42601"),
        ("n > 1 AS x", "42601"),
        ("true WHERE true", "42601"),
        ("true UNION SELECT false", "42601"),
        ("true ORDER BY 1", "42601"),
        ("true LIMIT 1", "42601"),
        ("DISTINCT true", "42601"),
        ("true INTO x", "42601"),
        ("true FOR UPDATE", "42601"),
        ("true) OR (true", "42601"),
        ("n", "42804"),
        ("status", "42804"),
        ("nowhere = 1", "42703"),
        ("other.x = 1", "42P01"),
        ("no_such_function(n)", "42883"),
        ("$1", "42P02"),
        ("count(*) > 1", "42803"),
        ("row_number() OVER () > 1", "42P20"),
        ("generate_series(1, n) > 1", "0A000"),
        ("n = (SELECT max(x) FROM other)", "0A000"),
        ("EXISTS (SELECT FROM other)", "0A000"),
        ("random() < 0.5", "42P17"),
        ("ref < clock_timestamp()", "42P17"),
        ("nextval('s') > 1", "42P01"),
        ("t IS NOT NULL", "0A000"),
        ("t.* IS NOT NULL", "0A000"),
        ("ctid IS NOT NULL", "0A000"),
        ("*", "42601"),
    ] {
        let error = db.error(&register(filter));
        assert_eq!(error.code, code, "{filter}: {error:?}");
        assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0", "{filter}");
    }
}

#[test]
fn a_volatile_function_behind_another_is_found() {
    let mut db = table();
    db.run("CREATE FUNCTION luck(int) RETURNS boolean VOLATILE LANGUAGE sql AS 'SELECT random() < 0.5'");
    assert_eq!(db.error(&register("luck(n)")).code, "42P17");
}

#[test]
fn the_stored_filter_does_not_depend_on_the_search_path() {
    let mut db = table();
    db.run(
        "CREATE SCHEMA app; CREATE FUNCTION app.stale(int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT $1 > 1'",
    );
    db.run("CREATE FUNCTION public.stale(int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'");
    db.run("SET search_path = app, public");
    db.run(&register("stale(n)"));
    db.run("RESET search_path");
    assert_eq!(db.get("SELECT filter FROM ttl_index_table"), "app.stale(n)");
    db.run("SELECT ttl_alter_index('t', 'at', batch_size => 5)");
    assert_eq!(db.get("SELECT filter FROM ttl_index_table"), "app.stale(n)");
}

#[test]
fn operators_outside_pg_catalog_are_stored_qualified() {
    let mut db = table();
    db.run("CREATE FUNCTION never(int, int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT false'");
    db.run("CREATE OPERATOR === (FUNCTION = never, LEFTARG = int, RIGHTARG = int)");
    db.run(&register("n === 1"));
    assert_eq!(db.get("SELECT filter FROM ttl_index_table"), "(n OPERATOR(public.===) 1)");
}

#[test]
fn a_filter_whose_function_the_owner_may_not_call_is_refused() {
    let mut db = table();
    let owner = db.role("owner");
    db.run(
        "CREATE FUNCTION secret(int) RETURNS boolean STABLE LANGUAGE sql AS 'SELECT true';
            REVOKE EXECUTE ON FUNCTION secret(int) FROM PUBLIC",
    );
    db.run(&format!("ALTER TABLE t OWNER TO {owner}"));
    db.run(
        "CREATE FUNCTION opaque(int) RETURNS boolean STABLE LANGUAGE plpgsql AS 'BEGIN RETURN true; END';
            REVOKE EXECUTE ON FUNCTION opaque(int) FROM PUBLIC",
    );
    assert_eq!(db.error(&register("opaque(n)")).code, "42501");
    assert_eq!(db.session(&owner).error(&register("secret(n)")).code, "42501");
}

#[test]
fn a_filter_follows_the_rename_of_its_columns() {
    let mut db = table();
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 1 AND status = ''done''', index_method => 'none')");
    db.run("ALTER TABLE t RENAME COLUMN n TO \"Number of; things\"");
    assert_eq!(
        db.get("SELECT filter FROM ttl_index_table"),
        "((\"Number of; things\" > 1) AND (status = 'done'::text))"
    );
}

#[test]
fn a_name_that_passes_to_another_column_does_not_change_what_a_filter_means() {
    let mut db = table();
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 1', index_method => 'none')");
    db.run("ALTER TABLE t RENAME COLUMN n TO swap; ALTER TABLE t RENAME COLUMN id TO n; ALTER TABLE t RENAME COLUMN swap TO id");
    assert_eq!(db.get("SELECT filter, filter_columns FROM ttl_index_table"), "(id > 1)|{id}");
}

#[test]
fn a_filter_whose_column_was_dropped_stops_the_rule_and_says_so() {
    let mut db = table();
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 1', index_method => 'none')");
    db.run("ALTER TABLE t DROP COLUMN n");
    let state = "SELECT state, last_error FROM ttl_summary";
    assert_eq!(db.get(state), "error|42703: column \"n\" of the filter was dropped");
    db.run("ALTER TABLE t ADD COLUMN n int; ALTER TABLE t RENAME TO t2");
    assert_eq!(
        db.get(state),
        "error|42703: column \"n\" of the filter was dropped",
        "a new column of the name is another"
    );
    assert_eq!(db.get("SELECT table_name FROM ttl_summary"), "t2", "the rule still follows its table");
    db.run("SELECT ttl_create_index('t2', 'at', 60, filter => 'n > 1', index_method => 'none')");
    db.run(
        "INSERT INTO t2 (at, n) VALUES ('2020-01-01', 1), ('2020-01-01', 2); SELECT ttl_pause('t2'), ttl_resume('t2')",
    );
    db.wait_for("SELECT n FROM t2", "1");
    db.wait_for(state, "active|");
}
