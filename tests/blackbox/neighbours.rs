//! Tables that Citus or TimescaleDB keep rows of elsewhere: refused, or named, and never swept by what their own heap seems to
//! hold. The catalogs here have the shape of theirs.

use harness::Database;

const CITUS: &str = "SET allow_system_table_mods = on;
    CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass PRIMARY KEY);
    CREATE TABLE pg_catalog.pg_dist_shard (logicalrelid regclass, shardid bigint PRIMARY KEY);
    GRANT SELECT ON pg_catalog.pg_dist_partition, pg_catalog.pg_dist_shard TO PUBLIC;
    RESET allow_system_table_mods";

/// As of 2.29, in which TimescaleDB's own catalog has lost columns.
const TIMESCALEDB: &str = "CREATE SCHEMA _timescaledb_catalog; CREATE SCHEMA timescaledb_information;
    CREATE TABLE _timescaledb_catalog.hypertable (id int, schema_name name, table_name name);
    CREATE TABLE _timescaledb_catalog.chunk (id int, hypertable_id int);
    CREATE TABLE timescaledb_information.hypertables (hypertable_schema name, hypertable_name name);
    CREATE TABLE timescaledb_information.chunks
        (hypertable_schema name, hypertable_name name, chunk_schema name, chunk_name name, is_compressed boolean);
    GRANT USAGE ON SCHEMA timescaledb_information TO PUBLIC;
    GRANT SELECT ON ALL TABLES IN SCHEMA timescaledb_information TO PUBLIC";

const HYPERTABLE: &str = "CREATE TABLE hyper (at timestamptz); CREATE TABLE one () INHERITS (hyper); CREATE TABLE two () INHERITS (hyper);
    INSERT INTO one SELECT '2020-01-01' FROM generate_series(1, 100); INSERT INTO two SELECT '2020-01-01' FROM generate_series(1, 10);
    INSERT INTO timescaledb_information.hypertables VALUES ('public', 'hyper');
    INSERT INTO timescaledb_information.chunks
    VALUES ('public', 'hyper', 'public', 'one', false), ('public', 'hyper', 'public', 'two', false)";

const COMPRESS_ONE: &str = "UPDATE timescaledb_information.chunks SET is_compressed = true WHERE chunk_name = 'one'";

fn with(setup: &[&str]) -> Database {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    for sql in setup {
        db.run(sql);
    }
    db
}

#[test]
fn tables_of_citus_are_refused() {
    let mut db = with(&[CITUS, "CREATE TABLE t (at timestamptz); INSERT INTO pg_dist_partition VALUES ('t')"]);
    let error = db.error("SELECT ttl_create_index('t', 'at', 60)");
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("0A000", "rows of public.t are not in a heap of its own: it is a Citus table")
    );
}

#[test]
fn a_rule_on_a_table_that_citus_takes_over_removes_nothing_and_says_why() {
    let mut db = with(&[
        CITUS,
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60)",
        "INSERT INTO pg_dist_partition VALUES ('t')",
    ]);
    const REASON: &str = "rows of public.t are not in a heap of its own: it is a Citus table";
    for call in ["SELECT ttl_runner('t')", "CALL ttl_sweep('t')", "SELECT * FROM ttl_preview('t')"] {
        let error = db.error(call);
        assert_eq!((error.code.as_str(), error.message.as_str()), ("0A000", REASON), "{call}");
    }
    db.run("SELECT ttl_start_worker()");
    db.wait_for("SELECT state, last_error FROM ttl_summary", &format!("error|0A000: {REASON}"));
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    assert_eq!(db.get("SELECT ttl_drop_index('t', 'at')"), "t");
}

#[test]
fn a_rule_that_has_followed_its_table_into_a_shard_says_so() {
    let mut db = with(&[
        CITUS,
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60)",
        "ALTER TABLE t RENAME TO t_102008; CREATE TABLE t (at timestamptz);
         INSERT INTO pg_dist_partition VALUES ('t'); INSERT INTO pg_dist_shard VALUES ('t', 102008)",
    ]);
    let error = db.error("SELECT ttl_runner('t_102008')");
    assert_eq!(error.message, "rows of public.t_102008 are not in a heap of its own: it is a shard of a Citus table");
    assert_eq!(db.get("SELECT count(*) FROM t_102008"), "1");
    assert_eq!(db.error("SELECT ttl_create_index('t_102008', 'at', 60)").code, "0A000");
    assert_eq!(db.get("SELECT ttl_drop_index('t_102008', 'at')"), "t");
}

#[test]
fn the_shard_of_a_long_name_is_recognised_and_a_table_with_such_a_name_is_not() {
    let long = "l".repeat(56);
    let mut db = with(&[
        CITUS,
        &format!("CREATE TABLE {long} (at timestamptz); CREATE TABLE {long}_102009 (at timestamptz)"),
        &format!("INSERT INTO pg_dist_shard VALUES ('{long}', 102009), ('{long}', 7)"),
        "CREATE TABLE year_2020 (at timestamptz); CREATE TABLE other_7 (at timestamptz);
         CREATE SCHEMA away; CREATE TABLE away.other_7 (at timestamptz)",
    ]);
    assert_eq!(db.error(&format!("SELECT ttl_create_index('{long}_102009', 'at', 60)")).code, "0A000");
    for table in ["year_2020", "other_7", "away.other_7"] {
        db.run(&format!("SELECT ttl_create_index('{table}', 'at', 60)"));
    }
}

#[test]
fn a_distributed_partitioned_table_is_no_table_with_skipped_parts() {
    let mut db = with(&[
        CITUS,
        "CREATE TABLE m (at timestamptz) PARTITION BY RANGE (at); CREATE TABLE m_1 PARTITION OF m DEFAULT;
         INSERT INTO m VALUES ('2020-01-01'); SELECT ttl_create_index('m', 'at', 60)",
        "INSERT INTO pg_dist_partition VALUES ('m_1')",
    ]);
    assert_eq!(db.get("SELECT ttl_runner('m')"), "0");
    assert_eq!(db.get("SELECT skipped_parts FROM ttl_summary"), "public.m_1 is a Citus table");
    db.run("INSERT INTO pg_dist_partition VALUES ('m')");
    assert_eq!(db.error("SELECT ttl_runner('m')").code, "0A000");
    assert_eq!(db.get("SELECT count(*) FROM m"), "1");
}

#[test]
fn an_archive_that_citus_takes_over_gets_no_rows() {
    let mut db = with(&[
        CITUS,
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); CREATE TABLE a (at timestamptz);
         SELECT ttl_create_index('t', 'at', 60, archive_to => 'a'); INSERT INTO pg_dist_partition VALUES ('a')",
    ]);
    let error = db.error("SELECT ttl_runner('t')");
    assert_eq!(error.message, "rows of public.a are not in a heap of its own: it is a Citus table");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}

#[test]
fn a_query_with_a_table_of_citus_is_left_to_citus() {
    let mut db = with(&[
        CITUS,
        "CREATE TABLE hid (id int PRIMARY KEY, at timestamptz); INSERT INTO hid VALUES (1, '2020-01-01'), (2, NULL);
         CREATE TABLE spread (id int); INSERT INTO spread VALUES (1), (2); INSERT INTO pg_dist_partition VALUES ('spread')",
        "SELECT ttl_create_index('hid', 'at', 60, hide_expired => true)",
    ]);
    const LOCAL: &str = "EXPLAIN (COSTS OFF) SELECT FROM hid";
    assert!(db.get(LOCAL).contains("statement_timestamp"), "a query of this node alone hides");
    for query in [
        "SELECT FROM hid JOIN spread USING (id)",
        "SELECT FROM hid WHERE id IN (SELECT id FROM spread)",
        "WITH s AS MATERIALIZED (SELECT id FROM spread) SELECT FROM hid, s",
        "SELECT (SELECT max(id) FROM spread) FROM hid",
        "UPDATE hid SET at = at FROM (SELECT * FROM spread) AS s",
    ] {
        let plan = db.get(&format!("EXPLAIN (COSTS OFF) {query}"));
        assert!(!plan.contains("statement_timestamp"), "{query}: {plan}");
    }
    let conflict = "INSERT INTO hid SELECT id FROM spread ON CONFLICT (id) DO UPDATE SET at = now()";
    assert!(db.get(&format!("EXPLAIN (COSTS OFF) {conflict}")).contains("statement_timestamp"), "nobody else does it");
    // As Citus tells of a table that it lets go.
    db.run("DELETE FROM pg_dist_partition; ALTER TABLE spread SET (fillfactor = 50)");
    assert!(db.get("EXPLAIN (COSTS OFF) SELECT FROM hid JOIN spread USING (id)").contains("statement_timestamp"));
}

#[test]
fn a_hidden_table_that_citus_takes_over_stays_in_working_order() {
    let mut db = with(&[
        CITUS,
        "CREATE TABLE hid (id int PRIMARY KEY, at timestamptz); INSERT INTO hid VALUES (1, '2020-01-01')",
        "SELECT ttl_create_index('hid', 'at', 60, hide_expired => true); SELECT FROM hid",
        "INSERT INTO pg_dist_partition VALUES ('hid'); ALTER TABLE hid SET (fillfactor = 50)",
    ]);
    let plan = db.get("EXPLAIN (COSTS OFF) SELECT FROM hid");
    assert!(!plan.contains("statement_timestamp"), "{plan}");
}

#[test]
fn a_rule_can_be_registered_beside_the_newest_timescaledb() {
    let mut db = with(&[TIMESCALEDB, "CREATE TABLE plain (at timestamptz)"]);
    db.run("SELECT ttl_create_index('plain', 'at', 60)");
}

#[test]
fn hypertables_with_compressed_chunks_are_refused() {
    let mut db = with(&[TIMESCALEDB, HYPERTABLE, COMPRESS_ONE]);
    for table in ["hyper", "one"] {
        let error = db.error(&format!("SELECT ttl_create_index('{table}', 'at', 60)"));
        assert_eq!(
            (error.code.as_str(), error.message.as_str()),
            ("0A000", "rows of public.one are not in a heap of its own: it is a compressed chunk"),
            "{table}"
        );
    }
    db.run("SELECT ttl_create_index('two', 'at', 60)");
}

#[test]
fn a_chunk_that_was_compressed_later_is_skipped_and_named() {
    let mut db = with(&[TIMESCALEDB, HYPERTABLE, "SELECT ttl_create_index('hyper', 'at', 60)", COMPRESS_ONE]);
    assert_eq!(db.get("SELECT ttl_runner('hyper')"), "10");
    assert_eq!(db.get("SELECT skipped_parts FROM ttl_summary"), "public.one is a compressed chunk");
    assert_eq!(db.get("SELECT count(*) FROM one"), "100");
    assert_eq!(
        db.get("SELECT relation, plan, blockers FROM ttl_preview('hyper') WHERE relation = 'public.one'"),
        "public.one|nothing|{\"public.one is a compressed chunk\"}"
    );
}

#[test]
fn a_chunk_that_is_compressed_under_a_sweep_is_left() {
    let mut db = with(&[TIMESCALEDB, HYPERTABLE, "SELECT ttl_create_index('hyper', 'at', 60, batch_size => 7)"]);
    db.run(&format!(
        "CREATE FUNCTION compress() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {COMPRESS_ONE}; RETURN OLD; END $$;
         CREATE TRIGGER compress BEFORE DELETE ON one FOR EACH ROW EXECUTE FUNCTION compress()"
    ));
    assert_eq!(db.get("SELECT ttl_runner('hyper')"), "7", "the batch under way, and no other");
    assert_eq!(db.get("SELECT count(*) FROM one"), "93");
}

#[test]
fn rows_of_a_chunk_go_by_sql_which_timescaledb_hears_of() {
    let mut db = with(&[
        TIMESCALEDB,
        HYPERTABLE,
        "CREATE TABLE plain (at timestamptz); INSERT INTO plain VALUES ('2020-01-01')",
    ]);
    db.run("SELECT ttl_create_index('hyper', 'at', 60), ttl_create_index('plain', 'at', 60)");
    db.run(
        "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
            SET client_min_messages = log",
    );
    db.notices();
    for (table, rows, goes_by_sql) in [("plain", "1", false), ("hyper", "110", true)] {
        assert_eq!(db.get(&format!("SELECT ttl_runner('{table}')")), rows);
        let has_delete = db.notices().iter().any(|plan| plan.contains("DELETE FROM ONLY"));
        assert_eq!(has_delete, goes_by_sql, "{table}");
    }
}

#[test]
fn the_index_of_a_hypertable_is_not_made_concurrently() {
    let mut db = with(&[TIMESCALEDB, HYPERTABLE]);
    let error = db.error("SELECT ttl_create_index('hyper', 'at', 60, concurrently => true)");
    assert_eq!((error.code.as_str(), error.hint.is_empty()), ("0A000", false));
    db.run("CREATE INDEX ON hyper (at)");
    assert_eq!(db.error("SELECT ttl_create_index('hyper', 'at', 60, concurrently => true)").code, "0A000");
    db.run("SELECT ttl_create_index('two', 'at', 60, concurrently => true)");
    // Nor is that of a table which has become one since.
    db.run(
        "CREATE TABLE later (at timestamptz); SELECT ttl_create_index('later', 'at', 60, concurrently => true);
         INSERT INTO timescaledb_information.hypertables VALUES ('public', 'later'); SELECT ttl_start_worker()",
    );
    db.wait_for("SELECT last_error LIKE '0A000%' FROM ttl_summary WHERE table_name = 'later'", "t");
}

#[test]
fn views_that_pose_as_those_of_timescaledb_are_not_read() {
    let mut db = Database::new();
    let mallory = db.role("mallory");
    let name = db.name.clone();
    db.run(&format!("GRANT CREATE ON DATABASE {name} TO {mallory}; CREATE TABLE t (at timestamptz)"));
    let mut session = db.session(&mallory);
    session.run(
        "CREATE TABLE loot (who text); GRANT ALL ON loot TO PUBLIC;
         CREATE FUNCTION take(text) RETURNS name LANGUAGE plpgsql AS
             $$ BEGIN INSERT INTO public.loot VALUES (current_user); RETURN $1; END $$",
    );
    for schema in ["_timescaledb_catalog", "timescaledb_information"] {
        session.run(&format!("CREATE SCHEMA {schema}; GRANT USAGE ON SCHEMA {schema} TO PUBLIC"));
        for view in ["chunk", "hypertable", "chunks", "hypertables"] {
            session.run(&format!(
                "CREATE VIEW {schema}.{view} AS SELECT 1 AS id, 1 AS hypertable_id, 1 AS compressed_chunk_id,
                     take('public') AS schema_name, take('x') AS table_name, take('public') AS hypertable_schema,
                     take('x') AS hypertable_name, take('public') AS chunk_schema, take('x') AS chunk_name, true AS is_compressed;
                 GRANT SELECT ON {schema}.{view} TO PUBLIC"
            ));
        }
    }
    db.run("SELECT ttl_create_index('t', 'at', 60); SELECT ttl_runner('t')");
    assert_eq!(db.get("SELECT DISTINCT who FROM loot"), "");
}
