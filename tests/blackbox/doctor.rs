//! `ttl_doctor()` says what is wrong, and its statements mend it.

use crate::sweep::with;
use crate::worker::{database, server};
use harness::{Database, Server};
use std::sync::Arc;

/// What it says of a subject, and the statement that it advises.
fn finding(db: &mut Database, subject: &str) -> Option<(String, String)> {
    let subject = subject.replace('\'', "''");
    let said = db.get(&format!("SELECT finding || '|' || statement FROM ttl_doctor() WHERE subject = '{subject}'"));
    said.split_once('|').map(|(finding, statement)| (finding.to_owned(), statement.to_owned()))
}

/// Follows its advice, and checks that nothing is wrong with the subject any more.
fn mend(db: &mut Database, subject: &str, finding_has: &str) {
    let (said, statement) = finding(db, subject).unwrap_or_else(|| panic!("nothing about {subject}"));
    assert!(said.contains(finding_has), "{said}");
    db.run(&statement);
    assert_eq!(finding(db, subject), None, "after {statement}");
}

#[test]
fn nothing_is_said_where_nothing_is_wrong() {
    let mut db = with("CREATE TABLE t (at timestamptz); CREATE TABLE n (at timestamptz)");
    db.run(
        "SELECT ttl_start_worker(); SELECT ttl_create_index('n', 'at', 60, index_method => 'none'),
                ttl_create_index('t', 'at', 60, filter => 'at > timestamptz ''2000-01-01 00:00+00''', rule_name => 'x')",
    );
    assert_eq!(db.get("SELECT finding FROM ttl_doctor()"), "");
}

#[test]
fn what_is_wrong_with_rules_is_named_and_mended() {
    let mut db = with(
        "CREATE SCHEMA \"O'Hara\"; CREATE TABLE \"O'Hara\".\"T t\" (at timestamptz, n int);
         CREATE TABLE typed (at timestamptz); CREATE TABLE parent (id int PRIMARY KEY, at timestamptz);
         CREATE TABLE child (id int REFERENCES parent); INSERT INTO parent VALUES (1, '2020-01-01'); INSERT INTO child VALUES (1);
         CREATE TABLE late (at timestamptz); INSERT INTO late VALUES ('2020-01-01');
         CREATE TABLE scattered (at timestamptz, pad text) WITH (autovacuum_enabled = off);
         INSERT INTO scattered SELECT now() + (i * 7919 % 10007) * interval '1 minute', repeat('x', 900) FROM generate_series(1, 12000) i;
         CREATE TABLE kept (at timestamptz, pad text) WITH (autovacuum_enabled = off);
         INSERT INTO kept SELECT now(), repeat('x', 900) FROM generate_series(1, 12000) i; ANALYZE scattered; ANALYZE kept",
    );
    let odd = "\"O'Hara\".\"T t\" (at, it's)";
    db.run("SELECT ttl_create_index('\"O''Hara\".\"T t\"', 'at', 60, filter => 'n > 0', rule_name => 'it''s')");
    assert_eq!(finding(&mut db, odd), None);
    db.run("DO $$ BEGIN EXECUTE (SELECT format('DROP INDEX \"O''Hara\".%I', index_name) FROM ttl_summary); END $$");
    mend(&mut db, odd, "index of the rule is gone");
    db.run("SELECT ttl_create_index('typed', 'at', 60); ALTER TABLE typed ALTER at TYPE timestamp");
    let (said, _) = finding(&mut db, "public.typed (at)").expect("a finding");
    assert!(said.starts_with("The rule fails: "), "{said}");
    db.run("SELECT ttl_create_index('parent', 'at', 60); SELECT ttl_runner('parent')");
    let (said, preview) = finding(&mut db, "public.parent (at)").expect("a finding");
    assert!(said.starts_with("1 expired rows cannot be removed: 23503"), "{said}");
    assert!(db.get(&preview).contains("child"), "{preview}");
    db.run("SELECT ttl_create_index('late', 'at', 60)");
    mend(&mut db, "public.late (at)", "Expired rows have waited for");
    db.run("SELECT ttl_create_index('scattered', 'at', '90 days', index_method => 'brin')");
    mend(&mut db, "public.scattered (at)", "not in the order of the column");
    db.run(
        "CREATE FUNCTION stays(text) RETURNS boolean STABLE LANGUAGE sql AS 'SELECT true';
         SELECT ttl_create_index('kept', 'at', '90 days', filter => 'stays(pad)')",
    );
    mend(&mut db, "public.kept (at)", "contains rows that the filter keeps");
    // These are for those who see the tables.
    let stranger = db.role("stranger");
    let mut other = db.session(&stranger);
    assert_eq!(other.get("SELECT subject FROM ttl_doctor() WHERE subject LIKE '%.%'"), "");
}

#[test]
fn what_is_wrong_with_the_server_is_named_and_mended() {
    let swept = server(&["pg_ttl_index.max_share_per_run=0.5"]);
    let mut db = database(&swept);
    db.run("SELECT ttl_stop_worker()");
    mend(&mut db, "database", "Automatic sweeping is switched off");
    db.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 1000); ANALYZE t;
         SELECT ttl_create_index('t', 'at', 60)",
    );
    db.wait_for("SELECT state FROM ttl_summary", "held");
    let (said, statement) = finding(&mut db, "public.t (at)").expect("a finding");
    assert!(said.contains("more of its table than max_share_per_run"), "{said}");
    db.run(&statement);
    db.wait_for("SELECT count(*) FROM t", "0");
    assert_eq!(finding(&mut db, "server"), None);
    let mut db = database(&Arc::new(Server::start(&["shared_preload_libraries=pg_stat_statements"])));
    let (said, statement) = finding(&mut db, "server").expect("a finding");
    assert!(said.starts_with("The library is not preloaded"), "{said}");
    assert_eq!(statement, "ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements', 'pg_ttl_index'");
    db.run(&statement);
}
