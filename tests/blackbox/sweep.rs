//! What a sweep removes, and what it leaves.

use harness::Database;

/// A database whose worker leaves the tables alone, so that only the sweeps of the test happen.
pub fn with(setup: &str) -> Database {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    db.run(setup);
    db
}

const EVENTS: &str = "CREATE TABLE events (id int PRIMARY KEY, at timestamptz, n int DEFAULT 0);
    INSERT INTO events SELECT i, now() - i * interval '1 minute' FROM generate_series(1, 100) AS i;
    INSERT INTO events VALUES (1001, NULL), (1002, 'infinity'), (1003, '-infinity')";

#[test]
fn only_expired_rows_go_and_null_and_infinity_never_do() {
    let mut db = with(EVENTS);
    db.run("SELECT ttl_create_index('events', 'at', interval '30 minutes 30 seconds', batch_size => 7)");
    assert_eq!(db.get("SELECT ttl_runner('events')"), "71");
    assert_eq!(db.get("SELECT count(*), max(id) FILTER (WHERE id < 1000), max(id) FROM events"), "32|30|1002");
    assert_eq!(db.get("SELECT ttl_runner()"), "0");
}

#[test]
fn a_ttl_of_zero_takes_the_column_as_the_expiry() {
    let mut db = with(
        "CREATE TABLE t (id int, expires timestamptz);
         INSERT INTO t VALUES (1, now() - interval '1 second'), (2, now() + interval '1 hour')",
    );
    db.run("SELECT ttl_create_index('t', 'expires', 0)");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT id FROM t"), "2");
}

#[test]
fn every_index_method_removes_the_same_rows() {
    for method in ["btree", "brin", "none"] {
        let mut db = with(EVENTS);
        db.run(&format!(
            "SELECT ttl_create_index('events', 'at', interval '30 minutes 30 seconds', 9, index_method => '{method}', filter => 'id % 2 = 0')"
        ));
        assert_eq!(db.get("SELECT ttl_runner('events')"), "35", "{method}");
        assert_eq!(db.get("SELECT count(*) FROM events WHERE id % 2 = 1"), "52", "{method}");
    }
}

#[test]
fn a_dropped_index_is_done_without() {
    let mut db = with(EVENTS);
    db.run("SELECT ttl_create_index('events', 'at', interval '30 minutes 30 seconds')");
    db.run("DROP INDEX idx_ttl_events_at");
    assert_eq!(db.get("SELECT ttl_runner('events')"), "71");
}

#[test]
fn many_rows_of_one_instant_are_batched() {
    for method in ["btree", "none"] {
        let mut db =
            with("CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2026-01-01' FROM generate_series(1, 120000)");
        db.run("INSERT INTO t SELECT '2025-01-01' FROM generate_series(1, 500)");
        db.run(&format!("SELECT ttl_create_index('t', 'at', 60, 1000, index_method => '{method}')"));
        assert_eq!(db.get("SELECT ttl_runner('t')"), "120500", "{method}");
        assert_eq!(db.get("SELECT batches >= 121, status FROM ttl_history"), "t|done", "{method}");
    }
}

#[test]
fn timestamps_and_dates_are_read_in_the_rules_time_zone() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamp, day date);
         INSERT INTO t SELECT i, (now() AT TIME ZONE 'Asia/Tokyo') - i * interval '1 hour', NULL FROM generate_series(1, 10) i;
         INSERT INTO t SELECT 100 + i, NULL, (now() AT TIME ZONE 'Asia/Tokyo')::date - i FROM generate_series(0, 3) i",
    );
    db.run("SELECT ttl_create_index('t', 'at', interval '5 hours 30 minutes', time_zone => 'Asia/Tokyo')");
    db.run("SELECT ttl_create_index('t', 'day', interval '1 day', time_zone => 'Asia/Tokyo')");
    db.run("SET TimeZone = 'America/Los_Angeles'; SET DateStyle = 'SQL, DMY'");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "8");
    assert_eq!(db.get("SELECT string_agg(id::text, ' ' ORDER BY id) FROM t"), "1 2 3 4 5 100");
}

#[test]
fn partitions_are_swept_one_by_one_and_fresh_rows_of_the_same_place_live() {
    let mut db = with(
        "CREATE TABLE m (id int, at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE m_old PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE m_new PARTITION OF m FOR VALUES FROM ('2021-01-01') TO ('2999-01-01') PARTITION BY HASH (id);
         CREATE TABLE m_new0 PARTITION OF m_new FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE m_new1 PARTITION OF m_new FOR VALUES WITH (MODULUS 2, REMAINDER 1);
         CREATE TABLE m_rest PARTITION OF m DEFAULT;
         INSERT INTO m SELECT i, '2020-06-01' FROM generate_series(1, 50) i;
         INSERT INTO m SELECT i, now() FROM generate_series(1, 50) i;
         INSERT INTO m SELECT i, '2022-06-01' FROM generate_series(1, 50) i;
         INSERT INTO m VALUES (0, NULL), (0, '2019-01-01')",
    );
    db.run("SELECT ttl_create_index('m', 'at', interval '1 day', 7)");
    assert_eq!(db.get("SELECT ttl_runner('m')"), "101");
    assert_eq!(db.get("SELECT count(*), count(*) FILTER (WHERE at > now() - interval '1 hour') FROM m"), "51|50");
}

#[test]
fn a_partition_that_cannot_hold_expired_rows_is_not_even_opened() {
    let mut db = with(
        "CREATE TABLE m (at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE m_old PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE m_new PARTITION OF m FOR VALUES FROM ('2090-01-01') TO ('2999-01-01');
         INSERT INTO m VALUES ('2020-06-01')",
    );
    db.run("SELECT ttl_create_index('m', 'at', interval '1 day')");
    let mut other = db.session("postgres");
    other.run("BEGIN; LOCK TABLE ONLY m_new IN ACCESS EXCLUSIVE MODE");
    assert_eq!(db.get("SELECT ttl_runner('m')"), "1");
    other.run("ROLLBACK; BEGIN; LOCK TABLE ONLY m_old IN ACCESS EXCLUSIVE MODE");
    assert_eq!(db.error("SELECT ttl_runner('m')").code, "55P03", "one that can is waited for, but not for long");
}

#[test]
fn inheritance_children_are_swept_too() {
    let mut db = with(
        "CREATE TABLE parent (at timestamptz); CREATE TABLE child (x int) INHERITS (parent);
         INSERT INTO parent VALUES ('2020-01-01'), (now()); INSERT INTO child VALUES ('2020-01-01'), (now())",
    );
    db.run("SELECT ttl_create_index('parent', 'at', interval '1 day')");
    assert_eq!(db.get("SELECT ttl_runner('parent')"), "2");
    assert_eq!(db.get("SELECT count(*) FROM ONLY parent UNION ALL SELECT count(*) FROM child"), "1\n1");
}

#[test]
fn parts_that_are_not_ordinary_heaps_are_skipped_and_named() {
    let mut db = with(
        "CREATE TABLE m (at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE m_old PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         INSERT INTO m VALUES ('2020-06-01')",
    );
    let owner = db.role("owner");
    db.run("SELECT ttl_create_index('m', 'at', interval '1 day', index_method => 'none')");
    db.run(
        "CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
            CREATE FOREIGN TABLE m_far PARTITION OF m FOR VALUES FROM ('2019-01-01') TO ('2020-01-01') SERVER nowhere;
            CREATE ACCESS METHOD other_heap TYPE TABLE HANDLER heap_tableam_handler;
            CREATE TABLE m_other PARTITION OF m FOR VALUES FROM ('2018-01-01') TO ('2019-01-01') USING other_heap;
            CREATE TABLE m_foreign PARTITION OF m FOR VALUES FROM ('2017-01-01') TO ('2018-01-01')",
    );
    db.run(&format!("ALTER TABLE m_foreign OWNER TO {owner}; INSERT INTO m VALUES ('2018-06-01'), ('2017-06-01')"));
    assert_eq!(db.get("SELECT ttl_runner('m')"), "1");
    assert_eq!(
        db.get("SELECT skipped_parts FROM ttl_summary"),
        "public.m_far is a foreign table; public.m_foreign has another owner; public.m_other has access method other_heap"
    );
    assert_eq!(db.get("SELECT count(*) FROM m_other UNION ALL SELECT count(*) FROM m_foreign"), "1\n1");
}

#[test]
fn tables_whose_rows_are_elsewhere_are_refused() {
    let mut db = with(
        "CREATE ACCESS METHOD other_heap TYPE TABLE HANDLER heap_tableam_handler; CREATE TABLE t (at timestamptz) USING other_heap;
         CREATE TABLE m (at timestamptz) PARTITION BY RANGE (at);
         CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
         CREATE FOREIGN TABLE m_far PARTITION OF m DEFAULT SERVER nowhere",
    );
    for table in ["t", "m"] {
        let error = db.error(&format!("SELECT ttl_create_index('{table}', 'at', 60, index_method => 'none')"));
        assert_eq!((error.code.as_str(), error.hint.is_empty()), ("0A000", false), "{table}");
    }
}

#[test]
fn soft_delete_marks_each_row_once() {
    for (column, marked) in [("deleted timestamptz", "deleted IS NOT NULL"), ("deleted boolean", "deleted")] {
        let mut db = with(&format!(
            "CREATE TABLE t (id int, at timestamptz, {column}, changes int DEFAULT 0);
             CREATE FUNCTION count_changes() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.changes := OLD.changes + 1; RETURN NEW; END';
             CREATE TRIGGER t BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION count_changes();
             INSERT INTO t SELECT i, now() - i * interval '1 hour' FROM generate_series(1, 100) i"
        ));
        db.run("SELECT ttl_create_index('t', 'at', interval '50 hours 30 minutes', 7, 'deleted')");
        assert_eq!(db.get("SELECT ttl_runner('t'), ttl_runner('t')"), "50|0");
        assert_eq!(db.get(&format!("SELECT count(*), max(changes), min(id) FROM t WHERE {marked}")), "50|1|51");
        assert_eq!(db.get("SELECT count(*) FROM t"), "100");
    }
}

#[test]
fn foreign_keys_cascade() {
    let mut db = with(
        "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz);
         CREATE TABLE child (parent int REFERENCES parent ON DELETE CASCADE);
         INSERT INTO parent SELECT i, '2020-01-01' FROM generate_series(1, 10) i; INSERT INTO child SELECT id FROM parent",
    );
    db.run("SELECT ttl_create_index('parent', 'at', 60); SELECT ttl_runner('parent')");
    assert_eq!(db.get("SELECT count(*) FROM child"), "0");
}

#[test]
fn ttl_runner_is_part_of_the_callers_transaction() {
    let mut db = with(EVENTS);
    db.run("SELECT ttl_create_index('events', 'at', 60)");
    db.run("BEGIN; SELECT ttl_runner('events'); ROLLBACK");
    assert_eq!(db.get("SELECT count(*) FROM events"), "103");
    assert_eq!(db.get("SELECT total_rows_deleted, last_run IS NULL FROM ttl_summary"), "0|t");
    assert_eq!(db.get("SELECT count(*) FROM ttl_history"), "0");
}

#[test]
fn ttl_sweep_commits_every_batch_and_keeps_to_its_limits() {
    let mut db =
        with("CREATE TABLE t (at timestamptz); INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 1000)");
    db.run("SELECT ttl_create_index('t', 'at', 60, 100)");
    db.run("CALL ttl_sweep('t', max_rows => 250)");
    assert_eq!(db.get("SELECT count(*) FROM t"), "750");
    assert_eq!(db.get("SELECT rows_removed, batches, status FROM ttl_history"), "250|3|stopped");
    assert_eq!(db.notices(), ["NOTICE: TTL rule on column at of table public.t: 250 rows removed"]);
    assert_eq!(db.get("SELECT count(DISTINCT xmax::text) FROM t"), "1", "nothing is left locked");
    db.run("CALL ttl_sweep(max_time => interval '1 hour')");
    assert_eq!(db.get("SELECT count(*) FROM t"), "0");
    assert_eq!(db.error("CALL ttl_sweep(max_rows => 0)").code, "22023");
    assert_eq!(db.error("BEGIN; CALL ttl_sweep()").code, "2D000");
}

#[test]
fn paused_rules_and_rules_of_others_are_not_swept() {
    let mut db = with("");
    let (owner, stranger) = (db.role("owner"), db.role("stranger"));
    let mut session = db.session(&owner);
    session.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); SELECT ttl_create_index('t', 'at', 60)",
    );
    assert_eq!(db.session(&stranger).get("SELECT ttl_runner()"), "0");
    assert_eq!(db.session(&stranger).error("SELECT ttl_runner('t')").code, "42501");
    assert_eq!(db.session(&stranger).error("CALL ttl_sweep('t')").code, "42501");
    session.run("SELECT ttl_pause('t')");
    assert_eq!(db.get("SELECT ttl_runner()"), "0");
    session.run("SELECT ttl_resume('t')");
    assert_eq!(session.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn forced_row_level_security_hides_nothing_from_the_sweep() {
    let mut db = with("");
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); ALTER TABLE t ENABLE ROW LEVEL SECURITY;
                 ALTER TABLE t FORCE ROW LEVEL SECURITY; SELECT ttl_create_index('t', 'at', 60)",
    );
    assert_eq!(session.get("SELECT count(*) FROM t"), "0");
    session.run("SET row_security = off");
    assert_eq!(session.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn unusual_settings_neither_break_nor_redirect_a_sweep() {
    let mut db = with("CREATE TABLE t (id int PRIMARY KEY, at timestamptz); INSERT INTO t VALUES (1, '2020-01-01'), (2, '2020-01-01');
                       CREATE TABLE child (id int REFERENCES t); INSERT INTO child VALUES (2);
                       CREATE SCHEMA other; CREATE TABLE other.t (at timestamptz); INSERT INTO other.t VALUES ('2020-01-01')");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("SET search_path = other, public; SET session_replication_role = replica; SET enable_indexscan = off;
            SET enable_tidscan = off; SET DateStyle = 'German'; SET IntervalStyle = 'sql_standard'; SET TimeZone = 'Asia/Tokyo'");
    assert_eq!(db.get("SELECT ttl_runner()"), "1");
    assert_eq!(db.get("SELECT count(*) FROM other.t"), "1");
    assert_eq!(db.get("SELECT blocked_rows FROM ttl_summary"), "1", "the foreign key was enforced");
}

#[test]
fn a_new_index_over_rows_updated_before_it_is_done_without() {
    // The planner may not use the index in this transaction, and sorts instead.
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 10) i",
    );
    let removed = db.get(
        "BEGIN; UPDATE t SET at = '2020-01-02' WHERE id = 1; SELECT ttl_create_index('t', 'at', 60); SELECT ttl_runner('t'); COMMIT",
    );
    assert_eq!(removed, "t\n10");
}

#[test]
fn ttl_sweep_reads_filters_that_call_immutable_functions() {
    let mut db = with(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01');
         CREATE FUNCTION yes() RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'yes()')");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*) FROM t"), "0");
}

#[test]
fn a_partition_that_is_detached_during_a_sweep_keeps_its_rows() {
    let mut db = with(
        "CREATE TABLE m (id int, at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE m_old PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         INSERT INTO m SELECT i, '2020-06-01' FROM generate_series(1, 20000) i",
    );
    db.run("SELECT ttl_create_index('m', 'at', interval '1 day', 10)");
    let mut sweeper = db.session("postgres");
    let sweeping = std::thread::spawn(move || sweeper.run("CALL ttl_sweep('m')"));
    db.wait_for("SELECT count(*) < 20000 FROM m_old", "t");
    db.run("ALTER TABLE m DETACH PARTITION m_old");
    let left = db.get("SELECT count(*) FROM m_old");
    sweeping.join().expect("the sweep");
    assert_ne!(left, "0");
    assert_eq!(db.get("SELECT count(*) FROM m_old"), left);
}

#[test]
fn rows_that_are_removed_as_they_are_found_are_all_that_have_expired() {
    for index in ["btree", "none"] {
        let mut db = with(&format!(
            "CREATE TABLE t (id int, at timestamptz, n int);
             INSERT INTO t SELECT i, now() - interval '2 days' + (i % 500) * interval '1 second', i FROM generate_series(1, 3000) i;
             INSERT INTO t SELECT i, now() - interval '1 day', i FROM generate_series(3001, 6500) i;
             INSERT INTO t SELECT i, now() + (i % 7) * interval '1 hour', i FROM generate_series(6501, 7000) i;
             INSERT INTO t SELECT i, now() - interval '5 hours' + i * interval '1 second', i FROM generate_series(7001, 8000) i;
             SELECT ttl_create_index('t', 'at', interval '1 hour', 100, filter => 'n <> 250', index_method => '{index}')"
        ));
        let mut other = db.session("postgres");
        other.run("BEGIN; SELECT FROM t WHERE id IN (5, 1500, 4000, 7500) FOR UPDATE; UPDATE t SET at = now() WHERE id = 1501");
        let live = "SELECT string_agg(id::text, ',' ORDER BY id) FROM t WHERE id <= 6500 OR id > 7000";
        db.run("CALL ttl_sweep('t')");
        assert_eq!(db.get(live), "5,250,1500,1501,4000,7500", "{index}");
        assert_eq!(db.get("SELECT locked_rows FROM ttl_summary"), "5", "{index}");
        other.run("COMMIT");
        db.run("CALL ttl_sweep('t')");
        assert_eq!(db.get(live), "250,1501", "{index}");
        assert_eq!(db.get("SELECT count(*) FROM t WHERE id BETWEEN 6501 AND 7000"), "500", "{index}");
        let batches: u32 = db.get("SELECT sum(batches) FROM ttl_history").parse().expect("a number");
        assert!((50..=110).contains(&batches), "{index}: {batches}");
    }
}

#[test]
fn a_limit_holds_also_where_rows_share_a_value() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz);
         INSERT INTO t SELECT i, now() - interval '2 days' + (i % 667) * interval '1 second' FROM generate_series(1, 2000) i;
         SELECT ttl_create_index('t', 'at', interval '1 hour', 100)",
    );
    for (most, left) in [(250, 1750), (70, 1680), (1, 1679), (333, 1346)] {
        db.run(&format!("CALL ttl_sweep('t', max_rows => {most})"));
        assert_eq!(db.get("SELECT count(*) FROM t"), left.to_string(), "{most}");
    }
    db.run("SELECT ttl_alter_index('t', 'at', max_rows_per_run => 155)");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*) FROM t"), (1346 - 155).to_string());
}
