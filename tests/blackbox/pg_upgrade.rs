//! `pg_upgrade` to another major version. It takes two of them: `make pg_upgrade FROM=16 PG=18`.

use harness::{Database, Server, Session, installation};
use std::sync::Arc;

const RULES: &str =
    "SELECT t.id, table_name, column_name, filter, active, purges, hide_expired, total_rows_deleted, index_name,
            b.relid::regclass, b.attnum, b.index_relid::regclass, b.archive_relid::regclass, b.types::regtype[], b.uses @> ARRAY[b.relid]
     FROM ttl_index_table t JOIN ttl_binding b ON b.rule_id = t.id ORDER BY t.id";

#[test]
#[ignore = "needs two major versions: make pg_upgrade"]
fn rules_hidden_rows_indexes_and_archives_come_through_an_upgrade_of_the_server() {
    let settings = ["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1"];
    let server = Arc::new(Server::start_of(installation("FROM_HOME"), &settings));
    let mut old = Database::on(&server);
    let owner = old.role("owner");
    old.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
    old.session(&owner).run(
        "CREATE FUNCTION stale(n int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT n > 1';
         CREATE TABLE called (rows jsonb);
         CREATE FUNCTION on_expire(regclass, jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO called VALUES ($2)';
         CREATE TABLE swept (id int PRIMARY KEY, at timestamptz, n int); CREATE TABLE archive (LIKE swept);
         CREATE TABLE hidden (id int PRIMARY KEY, at timestamptz); CREATE TABLE touched (id int PRIMARY KEY, at timestamptz, n int);
         CREATE TABLE hooked (at timestamptz); CREATE TABLE soft (at timestamptz, gone timestamptz);
         CREATE TABLE parts (made timestamp, days int) PARTITION BY RANGE (made); CREATE TABLE part PARTITION OF parts DEFAULT;
         CREATE DOMAIN moment AS timestamptz; CREATE TABLE domains (at moment); CREATE TABLE doubt (at timestamptz);
         INSERT INTO swept SELECT n, '2020-01-01', n FROM generate_series(1, 3) n; INSERT INTO hidden VALUES (1, '2020-01-01'), (2, now());
         INSERT INTO touched VALUES (1, now() - interval '59 minutes', 0); INSERT INTO hooked VALUES ('2020-01-01');
         INSERT INTO soft VALUES ('2020-01-01'); INSERT INTO parts VALUES ('2020-01-01', 1), (now(), 1); INSERT INTO domains VALUES ('2020-01-01');
         SELECT ttl_create_index('swept', 'at', interval '1 hour', filter => 'stale(n)', archive_to => 'archive'),
                ttl_create_index('hidden', 'at', interval '1 hour', hide_expired => true),
                ttl_create_index('touched', 'at', interval '1 hour'), ttl_enable_touch('touched'),
                ttl_create_index('hooked', 'at', interval '1 hour', on_expire => 'on_expire(regclass, jsonb)'),
                ttl_create_index('soft', 'at', interval '1 hour', soft_delete_column => 'gone', purge_after => interval '1 day'),
                ttl_create_index('parts', 'made + days * interval ''1 day''', 0), ttl_create_index('domains', 'at', 60),
                ttl_create_index('doubt', 'at', 60); ALTER TABLE doubt ALTER at TYPE timestamp",
    );
    let (before, name) = (old.get(RULES), old.name.clone());
    assert_eq!(before.lines().count(), 9);
    old.release();
    let mut server = Arc::into_inner(server).expect("a server that nobody else has");
    server.stop();
    let new = Arc::new(server.upgrade());
    let mut db = Session::connect(&new, &name, "postgres");
    assert_eq!(db.get(RULES), before);
    // The switch came along, too. Hidden is hidden from the first query on, and its key is free.
    assert_eq!(db.get("SELECT count(*) FROM hidden"), "1");
    db.run("INSERT INTO hidden VALUES (1, now()); UPDATE touched SET n = 1; SELECT ttl_start_worker()");
    assert_eq!(db.get("SELECT count(*) FROM hidden"), "2");
    for (query, expected) in [
        ("SELECT count(*) FROM swept", "1"),
        ("SELECT count(*) FROM archive", "2"),
        ("SELECT count(*) FROM hooked", "0"),
        ("SELECT count(*) FROM called", "1"),
        ("SELECT count(gone) FROM soft", "1"),
        ("SELECT count(*) FROM parts", "1"),
        ("SELECT count(*) FROM domains", "0"),
        ("SELECT count(*) FROM ttl_summary WHERE state = 'active'", "8"),
        ("SELECT table_name FROM ttl_summary WHERE state = 'error'", "doubt"),
    ] {
        db.wait_for(query, expected);
    }
    assert_eq!(db.get("SELECT ttl_get('touched', 1) > 3000"), "t");
    // DDL is followed, and a function that is replaced is noticed.
    let mut own = Session::connect(&new, &name, &owner);
    own.run("ALTER TABLE swept RENAME n TO m; CREATE OR REPLACE FUNCTION stale(n int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'");
    assert_eq!(own.get("SELECT filter, state FROM ttl_summary WHERE table_name = 'swept'"), "public.stale(m)|error");
    let mut fresh = Database::on(&new);
    fresh.run("CREATE EXTENSION pg_ttl_index");
    assert_eq!(db.get(OBJECTS), fresh.get(OBJECTS));
    db.run("DROP EXTENSION pg_ttl_index CASCADE; CREATE EXTENSION pg_ttl_index");
}

/// What the extension has, as far as it does not depend on the version.
const OBJECTS: &str = "SELECT pg_describe_object(d.classid, d.objid, 0), obj_description(d.objid, d.classid::regclass::text)
     FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_ttl_index'
     WHERE d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass AND d.classid <> 'pg_type'::regclass
     UNION ALL SELECT pg_get_triggerdef(t.oid), t.tgenabled::text FROM pg_trigger t WHERE t.tgrelid::regclass::text LIKE 'ttl%' AND NOT tgisinternal
     UNION ALL SELECT c.oid::regclass::text, c.relacl::text FROM pg_class c WHERE c.relname LIKE 'ttl%' AND c.relkind = 'r'
     UNION ALL SELECT evtname::text, evtenabled::text FROM pg_event_trigger
     ORDER BY 1, 2";
