//! What one user registers costs others nothing: DDL and looking do not grow with the number of rules, nor run their code.

use harness::Database;

/// A database with so many rules of one kind.
fn with_rules(count: u32) -> Database {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    db.run(&format!(
        "DO $$ BEGIN FOR n IN 1..{count} LOOP
             EXECUTE format('CREATE TABLE r%s (at timestamptz)', n);
             PERFORM ttl_create_index(format('r%s', n)::regclass, 'at', interval '1 day');
         END LOOP; END $$"
    ));
    db
}

/// Rows of the catalog that a statement reads, by either way.
fn rows_read(db: &mut Database, sql: &str) -> i64 {
    let read = "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) FROM pg_stat_xact_user_tables
                WHERE relname IN ('ttl_index_table', 'ttl_binding')";
    db.run("BEGIN");
    let before: i64 = db.get(read).parse().expect("a number");
    db.run(sql);
    let after: i64 = db.get(read).parse().expect("a number");
    db.run("ROLLBACK");
    after - before
}

#[test]
fn ddl_of_other_tables_reads_no_rules_however_many_there_are() {
    let mut db = with_rules(120);
    db.run(
        "CREATE TABLE other (id int PRIMARY KEY, n int); CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    );
    for ddl in [
        "CREATE TABLE new (id int PRIMARY KEY, other int REFERENCES other)",
        "ALTER TABLE other ADD m int",
        "ALTER TABLE other RENAME n TO m",
        "CREATE INDEX ON other (n)",
        "CREATE OR REPLACE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 2'",
        "DROP FUNCTION f()",
        "DROP TABLE other",
        "CREATE TEMP TABLE passing (n int); DROP TABLE passing",
    ] {
        // A session looks again for rules that hide when autovacuum has analyzed the catalog: not twice in a row.
        let read = (0..3).map(|_| rows_read(&mut db, ddl)).min();
        assert_eq!(read, Some(0), "{ddl}");
    }
}

#[test]
fn ddl_of_a_table_with_a_rule_reads_that_rule_alone() {
    let mut db = with_rules(120);
    // A table of a few pages may be read as a whole: not here.
    db.run("SET enable_seqscan = off");
    for ddl in ["ALTER TABLE r7 RENAME at TO seen", "ALTER TABLE r7 ADD n int", "DROP TABLE r7"] {
        let read = rows_read(&mut db, ddl);
        assert!(read < 60, "{ddl} reads {read}");
    }
    db.run("ALTER TABLE r7 RENAME at TO seen; ALTER TABLE r8 RENAME TO r8_now; DROP TABLE r9");
    assert_eq!(
        db.get("SELECT table_name, column_name FROM ttl_index_table WHERE table_name IN ('r7', 'r8', 'r8_now', 'r9') ORDER BY 1"),
        "r7|seen\nr8_now|at"
    );
}

#[test]
fn a_function_that_others_use_in_rules_is_changed_as_fast_as_ever() {
    let mut db = Database::new();
    let (author, user) = (db.role("author"), db.role("user"));
    db.run("SELECT ttl_stop_worker()");
    let mut author = db.session(&author);
    let define = "CREATE OR REPLACE FUNCTION keep(int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT $1 > ";
    author.run(&format!("{define}0'"));
    let mut user = db.session(&user);
    user.run(
        "DO $$ BEGIN FOR n IN 1..30 LOOP
             EXECUTE format('CREATE TABLE r%s (n int, at timestamptz)', n);
             PERFORM ttl_create_index(format('r%s', n)::regclass, 'at', interval '1 day', filter => 'keep(n)');
         END LOOP; END $$",
    );
    let written =
        "SELECT sum(n_tup_upd) FROM pg_stat_xact_user_tables WHERE relname IN ('ttl_index_table', 'ttl_binding')";
    author.run(&format!("BEGIN; {define}1'"));
    assert_eq!(author.get(written), "0");
    author.run("COMMIT");
    // They notice all the same.
    user.run("INSERT INTO r1 VALUES (2, '2020-01-01')");
    assert_eq!(user.error("SELECT ttl_runner('r1')").code, "55000");
    assert_eq!(user.get("SELECT count(*) FROM r1"), "1");
    // Who rules the tables is followed at once.
    db.run(&format!("{define}2'"));
    assert_eq!(db.get("SELECT DISTINCT state FROM ttl_summary"), "error");
}

#[test]
fn a_summary_reads_every_rule_a_few_times_and_not_once_for_each_other() {
    let mut db = with_rules(120);
    assert_eq!(db.get("SELECT count(*) FROM ttl_summary"), "120");
    assert!(rows_read(&mut db, "SELECT * FROM ttl_summary") < 120 * 20);
}

#[test]
fn looking_at_rules_runs_no_code_of_their_owners() {
    let mut db = Database::new();
    let (owner, monitor) = (db.role("owner"), db.role("monitor"));
    db.run(&format!("SELECT ttl_stop_worker(); GRANT pg_monitor TO {monitor}"));
    let mut own = db.session(&owner);
    own.run(
        "CREATE FUNCTION tells(n int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
             RAISE WARNING 'called by %', session_user; RETURN true; END $$;
         CREATE FUNCTION when_it_was(at timestamptz) RETURNS timestamptz IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
             RAISE WARNING 'called by %', session_user; RETURN at; END $$;
         CREATE TABLE filtered (n int, at timestamptz); CREATE TABLE stable (n int, at timestamptz);
         CREATE TABLE computed (at timestamptz); CREATE TABLE plain (at timestamptz);
         INSERT INTO filtered VALUES (1, now() - interval '1 day'); INSERT INTO stable TABLE filtered;
         INSERT INTO computed SELECT at FROM filtered; INSERT INTO plain TABLE computed;
         SELECT ttl_create_index('filtered', 'at', 3600, filter => 'tells(n)'), ttl_create_index('plain', 'at', 3600),
                ttl_create_index('stable', 'at', 3600, filter => 'n < extract(day FROM now())'),
                ttl_create_index('computed', 'when_it_was(at)', 3600)",
    );
    let mut look = db.session(&monitor);
    look.run("SET statement_timeout = '10s'");
    assert_eq!(
        look.get("SELECT table_name, date_trunc('hour', lag) FROM ttl_summary ORDER BY 1"),
        "computed|23:00:00\nfiltered|23:00:00\nplain|23:00:00\nstable|",
        "an index that has exactly the rows tells by itself"
    );
    look.run("SELECT * FROM ttl_summary(); SELECT * FROM ttl_progress; SELECT * FROM ttl_history");
    assert_eq!(look.notices(), Vec::<String>::new());
}

#[test]
fn lag_skips_what_never_expires_and_what_is_gone() {
    let mut db = Database::new();
    db.run(
        "SELECT ttl_stop_worker(); CREATE TABLE t (at timestamptz); CREATE TABLE n (n bigint); CREATE TABLE d (d date);
         CREATE TABLE p (at timestamp) PARTITION BY RANGE (at);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
         SELECT ttl_create_index('t', 'at', interval '1 month', time_zone => 'Europe/Paris'),
                ttl_create_index('n', 'n', 3600, unit => 's'), ttl_create_index('d', 'd', 0, time_zone => 'UTC'),
                ttl_create_index('p', 'at', 0, time_zone => 'UTC')",
    );
    let lags = "SELECT table_name, justify_hours(lag) > interval '20 hours', lag < interval '3 days' FROM ttl_summary ORDER BY 1";
    assert_eq!(db.get(lags), "d||\nn||\np||\nt||");
    db.run(
        "INSERT INTO t SELECT NULL FROM generate_series(1, 50); INSERT INTO t VALUES ('-infinity'), ('infinity'), (now());
         INSERT INTO t VALUES ((now() AT TIME ZONE 'Europe/Paris' - interval '1 month') AT TIME ZONE 'Europe/Paris' - interval '1 day');
         INSERT INTO n SELECT 0 FROM generate_series(1, 5000); INSERT INTO n VALUES (-5), (extract(epoch FROM now()) - 90000);
         INSERT INTO d VALUES ('-infinity'), ((now() AT TIME ZONE 'UTC')::date - 1), ('infinity');
         INSERT INTO p VALUES ('2099-01-01'), (now() AT TIME ZONE 'UTC' - interval '1 day');
         INSERT INTO t SELECT '2000-01-01' FROM generate_series(1, 100); DELETE FROM t WHERE at = '2000-01-01'",
    );
    assert_eq!(db.get(lags), "d|t|t\nn|t|t\np|t|t\nt|t|t");
    db.run("REINDEX INDEX CONCURRENTLY idx_ttl_t_at");
    assert_eq!(db.get(lags), "d|t|t\nn|t|t\np|t|t\nt|t|t");
    // Nor does looking wait for anybody.
    let mut other = db.session("postgres");
    other.run("BEGIN; LOCK TABLE t");
    assert_eq!(db.get("SET lock_timeout = '5s'; SELECT lag FROM ttl_summary WHERE table_name = 't'"), "");
}

#[test]
fn the_schema_of_the_extension_can_be_renamed() {
    let mut db = Database::empty();
    db.run("CREATE SCHEMA ext; CREATE EXTENSION pg_ttl_index SCHEMA ext; CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int)");
    db.run("SELECT ext.ttl_create_index('t', 'at', 60, filter => 'n > 1 AND ext.ttl_instant(''2020-01-01T00:00:00Z'') < now()')");
    db.run("ALTER SCHEMA ext RENAME TO \"Moved\"");
    let mut fresh = db.session("postgres");
    for session in [&mut *db, &mut fresh] {
        session.run("ALTER TABLE t RENAME n TO m; ALTER TABLE t RENAME m TO n");
        session.run("SELECT * FROM \"Moved\".ttl_history; SELECT * FROM \"Moved\".ttl_progress; SELECT * FROM \"Moved\".ttl_worker_status()");
        assert_eq!(session.get("SELECT table_name, state FROM \"Moved\".ttl_summary"), "t|active");
    }
    assert!(db.get("SELECT filter FROM \"Moved\".ttl_summary").contains("\"Moved\".ttl_instant"));
    db.run("INSERT INTO t VALUES (1, now() - interval '1 day', 2); CREATE TABLE u (at timestamptz)");
    db.run("SELECT \"Moved\".ttl_create_index('u', 'at', 60), \"Moved\".ttl_pause('u')");
    db.wait_for("SELECT count(*) FROM t WHERE \"Moved\".ttl_get('t', id::text) <> -2", "0");
    assert_eq!(db.error("ALTER EXTENSION pg_ttl_index SET SCHEMA public").code, "0A000");
    db.run("DROP TABLE u; SELECT \"Moved\".ttl_drop_index('t', 'at'); ALTER SCHEMA \"Moved\" RENAME TO ext; DROP EXTENSION pg_ttl_index");
}

#[test]
fn a_session_that_knows_the_old_name_of_the_schema_goes_on() {
    let mut db = Database::empty();
    db.run("CREATE SCHEMA ext; CREATE EXTENSION pg_ttl_index SCHEMA ext");
    for table in ["a", "b"] {
        db.run(&format!("CREATE TABLE {table} (at text); INSERT INTO {table} VALUES ('2020-01-01T00:00:00Z'), ('2999-01-01T00:00:00Z')"));
        db.run(&format!("SELECT ext.ttl_create_index('{table}', 'at', 60, hide_expired => true, active => false)"));
    }
    let mut session = db.session("postgres");
    assert_eq!(session.get("SELECT count(*) FROM a"), "1");
    db.run("ALTER SCHEMA ext RENAME TO moved");
    assert_eq!(session.get("SELECT count(*) FROM b"), "1");
    assert_eq!(session.get("SELECT count(*) FROM a"), "1");
}

#[test]
fn a_key_that_no_parser_takes_is_bad_input() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (id numeric PRIMARY KEY, at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    for key in ["{\"id\": 1e400}", "{\"id\": 1e-400}", "1e400", "null", deep.as_str()] {
        for call in [
            "ttl_get('t', $::jsonb)",
            "ttl_touch('t', $::jsonb)",
            "ttl_persist('t', $::jsonb)",
            "ttl_set('t', $::jsonb, '1 day')",
        ] {
            let call = call.replace('$', &format!("'{key}'"));
            assert_eq!(db.error(&format!("SELECT {call}")).code, "22023", "{}", &call[..40]);
        }
    }
}
