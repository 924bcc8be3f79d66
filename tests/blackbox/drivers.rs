//! Calls as they come from the drivers that people use.

use harness::{Database, run};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where `make` has put the drivers, and the scripts that use them.
fn places() -> (PathBuf, PathBuf) {
    let cache = std::env::var("CACHE").expect("CACHE is not set: run this through make");
    let tests = std::env::var("CARGO_MANIFEST_DIR").expect("cargo");
    (Path::new(&cache).join("drivers"), Path::new(&tests).join("drivers"))
}

fn call(db: &Database, command: &mut Command, script: &str) {
    run(command.arg(places().1.join(script)).arg(db.server.host()).arg(&db.name));
}

#[test]
fn psycopg() {
    call(&Database::new(), &mut Command::new(places().0.join("python/bin/python")), "psycopg_calls.py");
}

#[test]
fn asyncpg() {
    call(&Database::new(), &mut Command::new(places().0.join("python/bin/python")), "asyncpg_calls.py");
}

#[test]
fn node_postgres() {
    let modules = places().0.join("node/node_modules");
    call(&Database::new(), Command::new("node").env("NODE_PATH", modules), "node_calls.cjs");
}

#[test]
fn alembic_proposes_nothing_that_would_harm_a_rule() {
    call(&Database::empty(), &mut Command::new(places().0.join("python/bin/python")), "alembic_diff.py");
}

#[test]
fn django_sees_its_own_tables() {
    call(&Database::empty(), &mut Command::new(places().0.join("python/bin/python")), "django_tables.py");
}

#[test]
fn literals_and_typed_values_find_their_functions() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz); CREATE TABLE d (day date PRIMARY KEY, at timestamptz)");
    for (ttl, seconds) in [
        ("'30 minutes'", "1800"),
        ("'60'", "60"),
        ("60", "60"),
        ("interval '1 day'", "86400"),
        ("'P1D'::text", "86400"),
    ] {
        db.run(&format!("SELECT ttl_create_index('t', 'at', {ttl})"));
        assert_eq!(db.get("SELECT expire_after_seconds FROM ttl_summary"), seconds, "{ttl}");
    }
    db.run(
        "SELECT ttl_create_index('t', 'at', 3600, 500, 'gone'), ttl_create_index('t', 'at', expire_after => '2 hours')",
    );
    assert_eq!(db.error("SELECT ttl_create_index('t', 'at', 'soon')").code, "22007");
    assert_eq!(db.error("SELECT ttl_create_index('t', 'at', '-5')").code, "22023");
    assert_eq!(db.error("SELECT ttl_create_index('t', 'at', NULL)").code, "22004");
    db.run("INSERT INTO t VALUES (42, now()); SELECT ttl_create_index('d', 'at', 3600); INSERT INTO d VALUES ('2026-02-01', now())");
    for key in
        ["42", "'42'", "42::smallint", "42::numeric", "'42'::varchar", "jsonb '{\"id\": 42}'", "json '{\"id\": 42}'"]
    {
        assert_eq!(db.get(&format!("SELECT ttl_get('t', {key}) > 7000, ttl_touch('t', {key})")), "t|t", "{key}");
        for ttl in ["60", "60.5", "'1 minute'", "interval '1 minute'", "'60'::text"] {
            assert_eq!(
                db.get(&format!(
                    "SELECT ttl_set('t', {key}, {ttl}), ttl_set('t', key => {key}, ttl => {ttl}, mode => 'xx')"
                )),
                "t|t",
                "{key} {ttl}"
            );
        }
        db.run(&format!("SELECT ttl_touch('t', {key})"));
    }
    db.run("SET DateStyle = 'German'");
    assert_eq!(db.get("SELECT ttl_get('d', date '2026-02-01') > 3500"), "t");
    assert_eq!(db.error("SELECT ttl_set('t', 42, 'NaN'::float8)").code, "22008");
}

#[test]
fn a_rule_can_be_registered_paused() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60, active => false)");
    assert_eq!(
        db.get("SELECT active, state FROM ttl_summary; SELECT expired_rows FROM ttl_preview('t')"),
        "f|paused\n1"
    );
    // It stays so when it is registered again without a word.
    db.run("SELECT ttl_create_index('t', 'at', 30)");
    assert_eq!(db.get("SELECT active FROM ttl_summary; SELECT ttl_runner('t')"), "f\n0");
    db.run("SELECT ttl_create_index('t', 'at', 30, active => true)");
    db.wait_for("SELECT count(*) FROM t", "0");
}
