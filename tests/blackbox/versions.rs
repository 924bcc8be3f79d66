//! The library and the schema of a database need not be of one version: nothing fails, and an upgrade keeps everything.

use crate::worker::{EXPIRED, ROWS, database, server};
use harness::{Database, Server, Session, install_script, replace_library};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A database with the schema of version 3.0.0 on a server of its own.
fn with_3_0_0(settings: &[&str]) -> Database {
    install_script("pg_ttl_index--3.0.0.sql");
    let mut db = Database::on(&server(settings));
    db.run("CREATE EXTENSION pg_ttl_index VERSION '3.0.0'");
    db
}

/// Statements of users who know nothing of the extension.
const INNOCENT: &str = "SELECT 1; SELECT count(*) FROM pg_class; CREATE TABLE innocent (id int PRIMARY KEY, at timestamptz);
    INSERT INTO innocent VALUES (1, now()) ON CONFLICT DO NOTHING; UPDATE innocent SET at = now(); ALTER TABLE innocent ADD n int;
    CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'; SELECT f(); COPY innocent TO '/dev/null'; DELETE FROM innocent;
    DROP FUNCTION f(); DROP TABLE innocent";

#[test]
fn no_query_fails_where_the_schema_is_that_of_3_0_0() {
    let mut db = with_3_0_0(&[]);
    let mut fresh = db.session("postgres");
    for session in [&mut *db, &mut fresh] {
        session.run(INNOCENT);
        for function in ["ttl_start_worker", "ttl_stop_worker"] {
            let error = session.error(&format!("SELECT {function}()"));
            assert_eq!(
                (error.code.as_str(), error.hint.as_str()),
                ("55000", "Use ALTER EXTENSION pg_ttl_index UPDATE.")
            );
        }
        session.run("SELECT * FROM ttl_summary(); SELECT * FROM ttl_worker_status()");
    }
    let line = format!("pg_ttl_index does not work in database \"{}\"", db.name);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while db.server.log().matches(&line).count() == 0 {
        assert!(std::time::Instant::now() < deadline, "{}", db.server.log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // Another look, and the log is silent.
    let server = Arc::clone(&db.server);
    server.configure("pg_ttl_index.naptime", "2");
    let mut other = database(&server);
    other.run(EXPIRED);
    other.run("SELECT ttl_create_index('t', 'at', 60)");
    other.wait_for(ROWS, "0");
    assert_eq!(server.log().matches(&line).count(), 1, "{}", server.log());
    assert!(server.log().contains("Use ALTER EXTENSION pg_ttl_index UPDATE."));
}

/// A table with hidden rows, one that is kept fresh, and one that is swept.
const RULED: &str = "CREATE TABLE hidden (id int PRIMARY KEY, at timestamptz); INSERT INTO hidden VALUES (1, '2020-01-01'), (2, now());
    CREATE TABLE fresh (id int PRIMARY KEY, at timestamptz, n int); INSERT INTO fresh VALUES (1, now() - interval '1 minute', 0);
    SELECT ttl_stop_worker(), ttl_create_index('hidden', 'at', interval '1 hour', hide_expired => true),
           ttl_create_index('fresh', 'at', interval '1 hour'), ttl_enable_touch('fresh')";

const USE: &str = "SELECT count(*) FROM hidden; INSERT INTO hidden VALUES (3, now()); INSERT INTO hidden VALUES (1, now()) ON CONFLICT DO NOTHING;
    UPDATE fresh SET n = n + 1; UPDATE hidden SET id = 30 WHERE id = 3; DELETE FROM hidden WHERE id >= 3";

/// The versions whose schemas are kept in `sql/`: those that the upgrade scripts lead to.
fn kept_versions() -> Vec<String> {
    let scripts = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../sql")).expect("the scripts are there");
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name().into_string().expect("a name");
    let version =
        |name: String| Some(name.strip_suffix(".sql")?.strip_prefix("pg_ttl_index--")?.split("--").nth(1)?.to_string());
    scripts.map(name).filter_map(version).collect()
}

#[test]
fn the_schema_of_every_release_is_served() {
    let versions = kept_versions();
    assert!(!versions.is_empty());
    for version in versions {
        let mut db = with_3_0_0(&["pg_ttl_index.naptime=1"]);
        db.run(&format!("ALTER EXTENSION pg_ttl_index UPDATE TO '{version}'"));
        db.run(RULED);
        let mut session = db.session("postgres");
        session.run(INNOCENT);
        session.run(USE);
        assert_eq!(
            session.get("SELECT count(*) FROM hidden WHERE id = 1 AND at < now() - interval '1 day'"),
            "0",
            "{version}"
        );
        assert_eq!(session.get("SELECT at >= now() - interval '30 seconds' FROM fresh"), "t", "{version}");
        db.run("INSERT INTO hidden VALUES (9, '2020-01-01'); SELECT ttl_start_worker()");
        db.wait_for("SELECT total_rows_deleted >= 1 FROM ttl_summary WHERE table_name = 'hidden'", "t");
        db.run("ALTER EXTENSION pg_ttl_index UPDATE");
        assert_eq!(session.get("SELECT count(*) FROM hidden WHERE at < now() - interval '1 day'"), "0", "{version}");
    }
}

#[test]
fn with_a_newer_schema_the_library_keeps_out_of_the_way() {
    let mut db = Database::new();
    db.run(RULED);
    assert_eq!(db.get("SELECT count(*) FROM hidden"), "1");
    let version = |to: &str| {
        format!(
            "SET allow_system_table_mods = on; UPDATE pg_extension SET extversion = '{to}' WHERE extname = 'pg_ttl_index'; SELECT ttl_wake()"
        )
    };
    db.run(&version("4.99.0"));
    let mut session = db.session("postgres");
    session.run(INNOCENT);
    session.run(USE);
    assert_eq!(session.get("SELECT count(*) FROM hidden"), "2");
    for call in [
        "SELECT * FROM ttl_summary",
        "SELECT ttl_create_index('fresh', 'at', 60)",
        "SELECT ttl_runner()",
        "SELECT ttl_get('fresh', '1')",
        "SELECT ttl_start_worker()",
    ] {
        let error = session.error(call);
        assert_eq!(error.code, "55000", "{call}");
        assert_eq!(error.hint, "Restart the server with the library of that version.", "{call}");
    }
    let status = "SELECT state FROM ttl_worker_status() WHERE database_name = current_database()";
    assert!(session.get(status).ends_with("does not serve version 4.99.0 of its schema"), "{}", session.get(status));
    db.run(&version("4.0.0"));
    assert_eq!(session.get("SELECT count(*) FROM hidden"), "1");
    session.run("SELECT * FROM ttl_summary");
}

#[test]
fn no_query_fails_whatever_is_missing_in_the_schema() {
    let mut db = Database::new();
    db.run(RULED);
    let columns = db.get(
        "SELECT format('ALTER TABLE %s DROP COLUMN %I CASCADE', c.oid::regclass, a.attname)
         FROM pg_depend d JOIN pg_class c ON c.oid = d.objid AND d.classid = 'pg_class'::regclass
         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
         WHERE d.deptype = 'e' AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_ttl_index') AND c.relkind = 'r'",
    );
    let functions = db.get(
        "SELECT format('ALTER EXTENSION pg_ttl_index DROP FUNCTION %s; DROP FUNCTION %1$s CASCADE', p.oid::regprocedure)
         FROM pg_depend d JOIN pg_proc p ON p.oid = d.objid AND d.classid = 'pg_proc'::regclass
         WHERE d.deptype = 'e' AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_ttl_index')
           AND p.prokind = 'f' AND p.proname NOT IN ('ttl_free_key', 'ttl_touch_row')",
    );
    let tables = "DROP TABLE ttl_binding CASCADE\nDROP TABLE ttl_history_log CASCADE\nALTER TABLE ttl_index_table ALTER batch_size TYPE text\nALTER TABLE ttl_binding RENAME TO elsewhere";
    assert!(columns.lines().count() > 60 && functions.lines().count() > 20);
    for damage in columns.lines().chain(functions.lines()).chain(tables.lines()) {
        let damage = match damage.strip_prefix("DROP TABLE ") {
            Some(table) => {
                format!("ALTER EXTENSION pg_ttl_index DROP TABLE {}; DROP TABLE {table}", table.replace(" CASCADE", ""))
            }
            None => damage.to_owned(),
        };
        db.run("BEGIN");
        if db.try_get(&damage).is_err() {
            db.run("ROLLBACK");
            continue;
        }
        for sql in [INNOCENT, USE] {
            if let Err(error) = db.try_get(sql) {
                panic!("{error:?} after {damage}");
            }
        }
        db.run("ROLLBACK");
    }
    assert_eq!(db.get("SELECT count(*) FROM hidden"), "1");
}

#[test]
fn rules_of_3_0_0_are_kept_by_an_update() {
    let mut db = with_3_0_0(&[]);
    db.run(
        "CREATE SCHEMA app; CREATE TABLE app.\"Sessions\" (id int PRIMARY KEY, at timestamptz, gone timestamptz);
         CREATE INDEX idx_ttl_sessions ON app.\"Sessions\" (at); CREATE INDEX mine ON app.\"Sessions\" (gone);
         INSERT INTO app.\"Sessions\" SELECT i, '2020-01-01' FROM generate_series(1, 100) i;
         CREATE TABLE logs (at timestamp, n int); CREATE INDEX ON logs (at); INSERT INTO logs VALUES ('2020-01-01', 1);
         CREATE TABLE paused (at date); INSERT INTO paused VALUES ('2020-01-01'); CREATE TABLE lost (at timestamptz);
         INSERT INTO ttl_index_table (schema_name, table_name, column_name, expire_after_seconds, active, batch_size, index_name,
                                      soft_delete_column, index_created_by_extension, total_rows_deleted, last_run)
         VALUES ('app', 'Sessions', 'at', 1800, true, 7, 'idx_ttl_sessions', 'gone', true, 42, '2026-01-01'),
                ('public', 'logs', 'at', 60, true, 10000, 'logs_at_idx', NULL, false, NULL, NULL),
                ('public', 'paused', 'at', 0, false, 10000, 'was_dropped', NULL, true, 0, NULL),
                ('public', 'lost', 'gone_column', 60, true, 10000, NULL, NULL, false, 0, NULL),
                ('nowhere', 'nothing', 'at', 60, true, 10000, NULL, NULL, false, 0, NULL)",
    );
    db.notices();
    db.run("ALTER EXTENSION pg_ttl_index UPDATE");
    let warnings: Vec<_> = db.notices().into_iter().filter(|notice| notice.starts_with("WARNING")).collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings.iter().any(|warning| warning.contains("gone_column") && warning.contains("public.lost")),
        "{warnings:?}"
    );
    assert!(warnings.iter().any(|warning| warning.contains("nowhere.nothing")), "{warnings:?}");
    assert_eq!(
        db.get(
            "SELECT table_name, column_name, expire_after_seconds, batch_size, active, index_name, soft_delete_column, index_state, state
             FROM ttl_summary"
        ),
        "Sessions|at|1800|7|t|idx_ttl_sessions|gone|valid|active\nlogs|at|60|10000|t|logs_at_idx||valid|active\npaused|at|0|10000|f|||missing|paused"
    );
    // Sweeping begins by itself, and goes on from the counters there were.
    db.wait_for("SELECT count(*) FROM app.\"Sessions\" WHERE gone IS NULL", "0");
    db.wait_for("SELECT count(*) FROM logs", "0");
    assert_eq!(db.get("SELECT total_rows_deleted FROM ttl_summary WHERE table_name = 'Sessions'"), "142");
    assert_eq!(db.get("SELECT count(*) FROM paused"), "1");
    // An index that the extension made goes with its rule.
    db.run("SELECT ttl_drop_index('app.\"Sessions\"', 'at'), ttl_drop_index('logs', 'at')");
    assert_eq!(
        db.get("SELECT to_regclass('app.idx_ttl_sessions') IS NULL, to_regclass('logs_at_idx') IS NOT NULL"),
        "t|t"
    );
}

/// Everything that belongs to the extension, as far as anybody can tell.
const OBJECTS: &str = "WITH own AS (
         SELECT d.classid, d.objid FROM pg_depend d
         WHERE d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
           AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_ttl_index'))
     SELECT pg_describe_object(classid, objid, 0), obj_description(objid, classid::regclass::text) FROM own
     UNION ALL SELECT format('%s.%s %s %s %s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
                             pg_get_expr(x.adbin, x.adrelid)), col_description(c.oid, a.attnum)
     FROM own JOIN pg_class c ON c.oid = own.objid JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
     LEFT JOIN pg_attrdef x ON x.adrelid = c.oid AND x.adnum = a.attnum
     UNION ALL SELECT 'order', string_agg(format('%s.%s', c.relname, a.attname), ' ' ORDER BY c.relname, a.attnum)
     FROM own JOIN pg_class c ON c.oid = own.objid JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
     UNION ALL SELECT format('%s %s %s', c.relname, c.relrowsecurity, c.relkind), (SELECT string_agg(acl::text, ' ' ORDER BY acl::text) FROM unnest(c.relacl) acl)
     FROM own JOIN pg_class c ON c.oid = own.objid
     UNION ALL SELECT pg_get_constraintdef(k.oid), k.conname FROM own JOIN pg_constraint k ON k.conrelid = own.objid
     UNION ALL SELECT pg_get_indexdef(i.indexrelid), NULL FROM own JOIN pg_index i ON i.indrelid = own.objid
     UNION ALL SELECT pg_get_triggerdef(t.oid), t.tgenabled::text FROM own JOIN pg_trigger t ON t.tgrelid = own.objid AND NOT t.tgisinternal
     UNION ALL SELECT p.polname, pg_get_expr(p.polqual, p.polrelid) FROM own JOIN pg_policy p ON p.polrelid = own.objid
     UNION ALL SELECT pg_get_functiondef(p.oid), (SELECT string_agg(acl::text, ' ' ORDER BY acl::text) FROM unnest(p.proacl) acl)
     FROM own JOIN pg_proc p ON p.oid = own.objid AND own.classid = 'pg_proc'::regclass
     UNION ALL SELECT pg_get_viewdef(c.oid), NULL FROM own JOIN pg_class c ON c.oid = own.objid AND c.relkind = 'v'
     UNION ALL SELECT e.evtname, concat(e.evtevent, e.evtenabled, e.evttags) FROM own JOIN pg_event_trigger e ON e.oid = own.objid
     UNION ALL SELECT format('%s %s', c.oid::regclass, condition), 'dumped'
     FROM pg_extension e, unnest(e.extconfig, e.extcondition) AS config (relid, condition) JOIN pg_class c ON c.oid = relid
     WHERE e.extname = 'pg_ttl_index'
     ORDER BY 1, 2";

#[test]
fn an_update_from_3_0_0_makes_what_a_new_install_makes() {
    let mut updated = with_3_0_0(&[]);
    updated.run("ALTER EXTENSION pg_ttl_index UPDATE");
    let mut new = Database::new();
    let (updated, new) = (updated.get(OBJECTS), new.get(OBJECTS));
    let lines = |of: &str| of.lines().map(str::to_owned).collect::<Vec<_>>();
    let (updated, new) = (lines(&updated), lines(&new));
    let only = |here: &[String], there: &[String]| {
        here.iter().filter(|line| !there.contains(line)).cloned().collect::<Vec<_>>().join("\n")
    };
    assert_eq!((only(&updated, &new), only(&new, &updated)), (String::new(), String::new()), "run make schema");
    assert!(new.len() > 300);
}

#[test]
fn everything_that_a_user_sees_has_a_comment() {
    let mut db = Database::new();
    let silent = db.get(
        "SELECT pg_describe_object(d.classid, d.objid, 0) FROM pg_depend d
         WHERE d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
           AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_ttl_index')
           AND d.classid IN ('pg_proc'::regclass, 'pg_class'::regclass, 'pg_event_trigger'::regclass)
           AND obj_description(d.objid, d.classid::regclass::text) IS NULL
           AND NOT EXISTS (SELECT FROM pg_class WHERE oid = d.objid AND relkind = 'S')",
    );
    assert_eq!(silent, "");
}

#[test]
fn the_extension_can_come_and_go_beside_queries() {
    let mut db = Database::empty();
    db.run("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int); INSERT INTO t VALUES (1, now(), 0)");
    let is_over = Arc::new(AtomicBool::new(false));
    let users: Vec<_> = (0..3)
        .map(|_| {
            let (mut session, is_over) = (db.session("postgres"), Arc::clone(&is_over));
            std::thread::spawn(move || {
                let mut ran = 0;
                while !is_over.load(Ordering::Relaxed) {
                    session.run("SELECT count(*) FROM t; UPDATE t SET n = n + 1 WHERE id = 1; SELECT 1");
                    ran += 1;
                }
                ran
            })
        })
        .collect();
    for round in 0..8 {
        // The trigger that makes room depends on the extension, so that dropping this or its schema has to drop that, too.
        let (schema, drop) = match round % 4 {
            3 => ("apart", "DROP SCHEMA apart CASCADE"),
            _ => ("public", "DROP EXTENSION pg_ttl_index CASCADE"),
        };
        db.run(&format!("CREATE SCHEMA IF NOT EXISTS {schema}; CREATE EXTENSION pg_ttl_index SCHEMA {schema}"));
        let hides = round % 2 == 1;
        db.run(&format!("SELECT {schema}.ttl_create_index('t', 'at', interval '1 day', hide_expired => {hides})"));
        db.session("postgres").run("SELECT count(*) FROM t");
        db.run("ALTER SCHEMA public RENAME TO elsewhere; ALTER SCHEMA elsewhere RENAME TO public");
        db.run(drop);
    }
    is_over.store(true, Ordering::Relaxed);
    for user in users {
        assert!(user.join().expect("no query failed") > 8);
    }
}

#[test]
fn a_server_that_has_another_version_in_one_database_sweeps_the_others() {
    let mut old = with_3_0_0(&[]);
    let mut db = database(&old.server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for(ROWS, "0");
    old.run("ALTER EXTENSION pg_ttl_index UPDATE");
    old.run(EXPIRED);
    old.run("SELECT ttl_create_index('t', 'at', 60)");
    old.wait_for(ROWS, "0");
    let mut session = Session::connect(&old.server, &old.name, "postgres");
    session.run("SELECT * FROM ttl_summary");
}

#[test]
fn the_library_can_be_replaced_while_sessions_have_it() {
    // Preloaded, or loaded by each session when it needs it.
    for server in [server(&["pg_ttl_index.naptime=1"]), Arc::new(Server::start(&[]))] {
        let is_preloaded =
            !Session::connect(&server, "postgres", "postgres").get("SHOW shared_preload_libraries").is_empty();
        let mut db = Database::on(&server);
        db.run("CREATE EXTENSION pg_ttl_index; CREATE TABLE kept (id int PRIMARY KEY, at timestamptz, n int)");
        let mut idle = db.session("postgres");
        let mut busy = db.session("postgres");
        busy.run("SELECT ttl_create_index('kept', 'at', interval '1 hour'), ttl_enable_touch('kept')");
        if is_preloaded {
            busy.run("SELECT ttl_create_index('kept', 'at', interval '1 hour', hide_expired => true)");
        }
        for round in 0..3 {
            replace_library();
            let mut fresh = db.session("postgres");
            for session in [&mut busy, &mut idle, &mut fresh, &mut *db] {
                session.run(
                    "SELECT * FROM ttl_summary; INSERT INTO kept VALUES (1, '2020-01-01') ON CONFLICT (id) DO NOTHING",
                );
                session.run(
                    "UPDATE kept SET n = 1; SELECT ttl_get('kept', 1); CREATE TABLE other (n int); DROP TABLE other",
                );
            }
            fresh.run(&format!("DROP TABLE IF EXISTS t; {EXPIRED}"));
            fresh.run("SELECT ttl_create_index('t', 'at', 60)");
            if is_preloaded {
                fresh.wait_for(ROWS, "0");
                assert_eq!(fresh.get("SELECT count(*) FROM kept"), "0", "round {round}");
            } else {
                assert_ne!(fresh.get("SELECT ttl_runner('t')"), "0");
            }
        }
    }
}
