//! What a rule says does not depend on the settings of whoever reads it.

use harness::{Database, Server};
use std::sync::Arc;

/// A table of which the filter protects the first row, by a backslash in a string.
const KEEPERS: &str = "CREATE TABLE t (id int PRIMARY KEY, name text, at timestamptz);
     INSERT INTO t VALUES (1, 'keep1', now() - interval '1 day'), (2, 'drop', now() - interval '1 day')";
const FILTER: &str = r"name !~ '^keep\d+$'";

fn keepers() -> Database {
    let mut db = Database::new();
    db.run(KEEPERS);
    db.run(&format!("SELECT ttl_stop_worker(), ttl_create_index('t', 'at', 60, filter => $f${FILTER}$f$)"));
    db
}

/// Since 19, a backslash in a string is always a backslash.
fn has_old_strings(db: &mut Database) -> bool {
    db.get("SELECT current_setting('server_version_num')::int < 190000") == "t"
}

#[test]
fn a_worker_reads_a_filter_as_it_was_written_whatever_the_database_sets() {
    let server = Arc::new(Server::start(&["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1s"]));
    let mut db = Database::on(&server);
    db.run("CREATE EXTENSION pg_ttl_index");
    let settings = "standard_conforming_strings = off; ALTER DATABASE $ SET backslash_quote = off; ALTER DATABASE $ SET DateStyle = 'SQL, DMY';
                    ALTER DATABASE $ SET transform_null_equals = on; ALTER DATABASE $ SET quote_all_identifiers = on";
    let name = db.name.clone();
    let strings =
        if has_old_strings(&mut db) { "" } else { "standard_conforming_strings = off; ALTER DATABASE $ SET " };
    db.run(&format!("ALTER DATABASE $ SET {}", settings.replacen(strings, "", 1)).replace('$', &name));
    db.run("SELECT ttl_stop_worker()");
    db.run(KEEPERS);
    db.run(&format!("SELECT ttl_create_index('t', 'at', 60, filter => $f${FILTER}$f$)"));
    db.run("SELECT ttl_start_worker()");
    db.wait_for("SELECT string_agg(name, ',') FROM t", "keep1");
    // Another pass, over a row that comes now, and still the same filter.
    db.run("INSERT INTO t VALUES (3, 'keep33', 'yesterday'), (4, 'other', 'yesterday')");
    db.wait_for("SELECT string_agg(name, ',' ORDER BY id) FROM t", "keep1,keep33");
}

#[test]
fn a_session_that_reads_strings_the_old_way_sweeps_by_the_same_filter() {
    let mut db = keepers();
    if !has_old_strings(&mut db) {
        return;
    }
    db.run("SET standard_conforming_strings = off; SET escape_string_warning = off");
    assert_eq!(db.get("SELECT expired_rows FROM ttl_preview('t')"), "1");
    assert_eq!(db.get("SELECT ttl_get('t', '1')"), "-1", "the filter keeps it");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT name FROM t"), "keep1");
    db.run("INSERT INTO t VALUES (3, 'drop', now() - interval '1 day')");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT name FROM t"), "keep1");
    db.run("ALTER TABLE t RENAME name TO title; SELECT ttl_alter_index('t', 'at', batch_size => 5)");
    assert_eq!(db.get("SELECT filter, state FROM ttl_summary"), r"(title !~ '^keep\d+$'::text)|active");
    assert_eq!(db.get("SELECT ttl_runner('t'), count(*) FROM t"), "0|1");
}

#[test]
fn an_author_is_understood_under_the_settings_in_force() {
    let mut db = keepers();
    if !has_old_strings(&mut db) {
        return;
    }
    db.run(
        "SET standard_conforming_strings = off; SET escape_string_warning = off; SET DateStyle = 'SQL, DMY';
            SET transform_null_equals = on; SET quote_all_identifiers = on; SET TimeZone = 'Asia/Tokyo'",
    );
    db.run(r"SELECT ttl_create_index('t', 'at', 60, filter => $$name !~ '^keep\\d+$' AND at > '02/01/2020' AND name = NULL$$)");
    assert_eq!(
        db.get("SELECT filter FROM ttl_summary"),
        r"((name !~ '^keep\d+$'::text) AND (at > '2020-01-01 15:00:00+00'::timestamp with time zone) AND (name IS NULL))"
    );
}

#[test]
fn an_expression_is_one_rule_however_names_are_quoted_or_zones_are_set() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz, other timestamptz)");
    let expression = "greatest(at, other, '2020-01-01 00:00:00+00'::timestamptz)";
    let register = format!("SELECT ttl_create_index('t', $e${expression}$e$, 60)");
    db.run(&register);
    for setting in [
        "quote_all_identifiers = on",
        "TimeZone = 'Asia/Tokyo'",
        "DateStyle = 'SQL, DMY'",
        if has_old_strings(&mut db) { "standard_conforming_strings = off" } else { "DateStyle = 'German'" },
    ] {
        db.run(&format!("SET {setting}; {register}; RESET ALL"));
        assert_eq!(db.get("SELECT count(*) FROM ttl_summary"), "1", "{setting}");
    }
}

#[test]
fn making_room_removes_nothing_that_a_filter_keeps() {
    let mut db = Database::new();
    if !has_old_strings(&mut db) {
        return;
    }
    let (owner, writer) = (db.role("owner"), db.role("writer"));
    let mut own = db.session(&owner);
    own.run(KEEPERS);
    own.run(&format!("SELECT ttl_create_index('t', 'at', 60, filter => $f${FILTER}$f$, hide_expired => true)"));
    own.run(&format!("SELECT ttl_pause('t'); GRANT SELECT, INSERT ON t TO {writer}"));
    let mut other = db.session(&writer);
    other.run("SET standard_conforming_strings = off; SET escape_string_warning = off");
    assert_eq!(other.get("SELECT name FROM t"), "keep1");
    assert_eq!(other.error("INSERT INTO t VALUES (1, 'mine', now())").code, "23505");
    assert_eq!(own.get("SELECT name FROM t"), "keep1");
}

#[test]
fn what_hides_does_not_depend_on_the_settings_of_a_session() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz, local timestamp, f float8, r real, b bytea, p point, n text, i interval)");
    for filter in [
        "f::text = '0.1'",
        "r::text = '0.1'",
        "b::text <> 'a'",
        "p::text = '(1,2)'",
        "quote_ident(n) = n",
        "i::text = '1 day'",
        "extract(hour FROM at) > 5",
        "at - interval '1 day' > '2020-01-01 00:00:00+00'",
        "local AT TIME ZONE 'EST' > '2020-01-01 00:00:00+00'",
    ] {
        let register =
            format!("SELECT ttl_create_index('t', 'at', 60, filter => $f${filter}$f$, hide_expired => true)");
        assert_eq!(db.error(&register).code, "0A000", "{filter}");
    }
    let zone = "SELECT ttl_create_index('t', 'local', 60, time_zone => 'EST', hide_expired => true)";
    assert_eq!(db.error(zone).code, "0A000");
    db.run("SELECT ttl_create_index('t', 'local', interval '1 month', time_zone => 'America/New_York', hide_expired => true,
            filter => 'f > 0.1 AND n LIKE ''a%'' AND extract(hour FROM local AT TIME ZONE ''Asia/Tokyo'' AT TIME ZONE ''UTC'') > 1')");
}

#[test]
fn what_a_function_reads_follows_the_rule_and_not_the_session() {
    let mut db = Database::new();
    db.run(
        "CREATE TABLE t (id int, at timestamptz);
         INSERT INTO t SELECT n, now() - interval '1 day' FROM generate_series(1, 3) n;
         CREATE FUNCTION keeps(id int) RETURNS boolean STABLE LANGUAGE plpgsql AS $$ BEGIN
             RETURN id = ANY ('{1,NULL}'::int[]) AND bytea '\\x31' = convert_to('1', 'UTF8')
                AND (0.1::float8 + 0.2::float8)::text = '0.30000000000000004' AND interval '1 day 1 hour'::text = '1 day 01:00:00';
         END $$;
         SELECT ttl_stop_worker(), ttl_create_index('t', 'at', 60, filter => 'NOT coalesce(keeps(id), false)')",
    );
    db.run(
        "SET extra_float_digits = 0; SET IntervalStyle = iso_8601; SET array_nulls = off; SET bytea_output = escape",
    );
    assert_eq!(db.get("SELECT ttl_runner('t'), (SELECT min(id) FROM t)"), "2|1");
}
