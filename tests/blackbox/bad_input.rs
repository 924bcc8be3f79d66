//! Every error of the contract, with its SQLSTATE, and a catalog that does not change.

use harness::Database;

/// Runs each call, expects its SQLSTATE, and checks that no rule and no index came of it.
pub fn refuses(setup: &str, calls: &[(&str, &str)]) {
    let mut db = Database::new();
    db.run(setup);
    let indexes = db.get("SELECT count(*) FROM pg_index");
    for (call, code) in calls {
        let error = db.error(&format!("SELECT {call}"));
        assert_eq!(&error.code, code, "{call}: {error:?}");
        let first = error.message.chars().next().unwrap_or_default();
        assert!(
            !error.message.ends_with('.') && !first.is_uppercase() || error.message.starts_with("TTL"),
            "{error:?}"
        );
    }
    assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
    assert_eq!(db.get("SELECT count(*) FROM pg_index"), indexes);
    assert_eq!(db.notices().iter().filter(|notice| notice.starts_with("WARNING")).count(), 0);
}

#[test]
fn an_unknown_table() {
    refuses(
        "",
        &[
            ("ttl_create_index('nowhere', 'at', 60)", "42P01"),
            ("ttl_create_index(4294967295::oid::regclass, 'at', 60)", "42P01"),
            ("ttl_alter_index('nowhere', 'at')", "42P01"),
            ("ttl_drop_index('nowhere', 'at')", "42P01"),
            ("ttl_pause('nowhere')", "42P01"),
            ("ttl_resume('nowhere')", "42P01"),
        ],
    );
}

#[test]
fn an_unknown_column() {
    refuses(
        "CREATE TABLE t (at timestamptz, gone timestamptz); ALTER TABLE t DROP COLUMN gone",
        &[
            ("ttl_create_index('t', 'nowhere', 60)", "42703"),
            ("ttl_create_index('t', 'gone', 60)", "42703"),
            ("ttl_create_index('t', '........pg.dropped.2........', 60)", "42703"),
            ("ttl_create_index('t', 'AT', 60)", "42703"),
            ("ttl_create_index('t', '', 60)", "42703"),
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'nowhere')", "42703"),
            ("ttl_alter_index('t', 'nowhere')", "42703"),
            ("ttl_drop_index('t', 'nowhere')", "42703"),
            ("ttl_pause('t', 'nowhere')", "42703"),
        ],
    );
}

#[test]
fn a_type_that_cannot_expire() {
    let columns = ["i", "b", "ti", "iv", "n", "a", "f", "d", "x", "own"];
    let calls: Vec<_> = columns.iter().map(|column| format!("ttl_create_index('t', '{column}', 60)")).collect();
    let calls: Vec<_> = calls.iter().map(|call| (call.as_str(), "42804")).collect();
    refuses(
        "CREATE SCHEMA other; CREATE DOMAIN other.timestamptz AS int;
         CREATE TABLE t (i int, b bigint, ti time, iv interval, n numeric, a timestamptz[], f boolean, d float8, x xml,
                         own other.timestamptz)",
        &calls,
    );
    refuses("CREATE TABLE t (at timestamptz)", &[("ttl_create_index('t', 'xmin', 60)", "42804")]);
}

#[test]
fn the_refusal_of_a_type_names_what_can_be_used() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (n boolean)");
    let error = db.error("SELECT ttl_create_index('t', 'n', 60)");
    assert_eq!(error.message, "column \"n\" of type boolean cannot expire");
    assert!(error.hint.contains("timestamp with time zone") && error.hint.contains("date"), "{}", error.hint);
}

#[test]
fn what_is_not_a_table() {
    refuses(
        "CREATE TABLE base (at timestamptz); CREATE INDEX base_at ON base (at);
         CREATE TABLE parts (at timestamptz) PARTITION BY RANGE (at); CREATE INDEX parts_at ON parts (at);
         CREATE VIEW v AS SELECT * FROM base; CREATE MATERIALIZED VIEW m AS SELECT * FROM base;
         CREATE SEQUENCE s; CREATE TYPE composite AS (at timestamptz);
         CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
         CREATE FOREIGN TABLE f (at timestamptz) SERVER nowhere",
        &[
            ("ttl_create_index('v', 'at', 60)", "42809"),
            ("ttl_create_index('m', 'at', 60)", "42809"),
            ("ttl_create_index('s', 'at', 60)", "42809"),
            ("ttl_create_index('base_at', 'at', 60)", "42809"),
            ("ttl_create_index('parts_at', 'at', 60)", "42809"),
            ("ttl_create_index('composite', 'at', 60)", "42809"),
            ("ttl_create_index('f', 'at', 60)", "42809"),
            ("ttl_drop_index('v', 'at')", "42809"),
        ],
    );
}

#[test]
fn system_catalogs_and_the_extensions_own() {
    refuses(
        "",
        &[
            ("ttl_create_index('pg_class', 'relname', 60)", "42501"),
            ("ttl_create_index('pg_catalog.pg_authid', 'rolvaliduntil', 60)", "42501"),
            ("ttl_create_index('information_schema.sql_features', 'feature_id', 60)", "42501"),
            ("ttl_create_index('ttl_index_table', 'created_at', 60)", "42501"),
            ("ttl_create_index('ttl_binding', 'relid', 60)", "42501"),
        ],
    );
}

#[test]
fn a_temporary_table() {
    refuses("CREATE TEMP TABLE t (at timestamptz)", &[("ttl_create_index('t', 'at', 60)", "0A000")]);
}

#[test]
fn numbers_out_of_range() {
    refuses(
        "CREATE TABLE t (at timestamptz)",
        &[
            ("ttl_create_index('t', 'at', -1)", "22023"),
            ("ttl_create_index('t', 'at', interval '-1 microsecond')", "22023"),
            ("ttl_create_index('t', 'at', interval '1 month -31 days')", "22023"),
            ("ttl_create_index('t', 'at', interval '7000 years')", "22023"),
            ("ttl_create_index('t', 'at', interval '178000000 years')", "22023"),
            ("ttl_create_index('t', 'at', 60, 0)", "22023"),
            ("ttl_create_index('t', 'at', 60, -5)", "22023"),
            ("ttl_create_index('t', 'at', 60, 99999999999)", "42883"),
            ("ttl_create_index('t', 'at', 60, time_zone => 'Mars/Olympus')", "22023"),
            ("ttl_create_index('t', 'at', 60, time_zone => '')", "22023"),
            ("ttl_create_index('t', 'at', 60, index_method => 'hash')", "22023"),
            ("ttl_create_index('t', 'at', 60, index_method => 'BTREE')", "22023"),
        ],
    );
}

#[test]
fn what_must_not_be_null() {
    refuses(
        "CREATE TABLE t (at timestamptz)",
        &[
            ("ttl_create_index(NULL, 'at', 60)", "22004"),
            ("ttl_create_index('t', NULL, 60)", "22004"),
            ("ttl_create_index('t', 'at', NULL::int)", "22004"),
            ("ttl_create_index('t', 'at', NULL::interval)", "22004"),
            ("ttl_alter_index(NULL, 'at')", "22004"),
            ("ttl_drop_index('t', NULL)", "22004"),
            ("ttl_pause(NULL)", "22004"),
        ],
    );
}

#[test]
fn a_column_that_cannot_mark_a_deleted_row() {
    refuses(
        "CREATE TABLE t (at timestamptz, n int, x text, required timestamptz NOT NULL,
                         computed timestamp GENERATED ALWAYS AS (timestamp '2026-01-01') STORED)",
        &[
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'at')", "22023"),
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'n')", "42804"),
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'x')", "42804"),
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'required')", "22023"),
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'computed')", "428C9"),
        ],
    );
}

#[test]
fn a_call_that_writes_in_a_read_only_transaction() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); SET default_transaction_read_only = on");
    for call in
        ["ttl_create_index('t', 'at', 60)", "ttl_alter_index('t', 'at')", "ttl_drop_index('t', 'at')", "ttl_pause('t')"]
    {
        assert_eq!(db.error(&format!("SELECT {call}")).code, "25006", "{call}");
    }
    assert_eq!(db.get("SELECT count(*) FROM ttl_summary"), "0", "looking is allowed");
}

#[test]
fn a_refused_change_leaves_the_rule_as_it_was() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz, n int)");
    db.run("SELECT ttl_create_index('t', 'at', 60, 500, filter => 'n > 1')");
    let before = db.get("SELECT * FROM ttl_index_table");
    for call in [
        "ttl_create_index('t', 'at', -1)",
        "ttl_create_index('t', 'at', 60, filter => 'nonsense')",
        "ttl_alter_index('t', 'at', batch_size => 0)",
        "ttl_alter_index('t', 'at', interval '-1 day')",
        "ttl_alter_index('t', 'at', filter => 'n')",
        "ttl_alter_index('t', 'at', soft_delete_column => 'n')",
        "ttl_alter_index('t', 'at', time_zone => 'nowhere')",
        "ttl_alter_index('t', 'at', index_method => 'gin')",
        "ttl_alter_index('t', 'at', reset => '{everything}')",
    ] {
        db.error(&format!("SELECT {call}"));
        assert_eq!(db.get("SELECT * FROM ttl_index_table"), before, "{call}");
    }
}
