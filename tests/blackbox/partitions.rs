//! Partitions of which every row has expired go as a whole, where nobody has anything to say about their rows.

use crate::bad_input::refuses;
use crate::sweep::with;
use crate::worker::{database, server};
use std::time::{Duration, Instant};

/// Two years that have expired, one that has begun to, and what belongs nowhere.
const TABLE: &str = "CREATE TABLE p (id int, at timestamptz, gone timestamptz) PARTITION BY RANGE (at);
    CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
    CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2022-01-01');
    CREATE TABLE p3 PARTITION OF p FOR VALUES FROM ('2022-01-01') TO ('2100-01-01');
    INSERT INTO p SELECT i, '2020-06-01' FROM generate_series(1, 10) i;
    INSERT INTO p SELECT i, '2021-06-01' FROM generate_series(11, 20) i;
    INSERT INTO p VALUES (21, '2022-06-01'), (22, now())";
const PARTS: &str =
    "SELECT string_agg(inhrelid::regclass::text, ',' ORDER BY inhrelid::regclass::text) FROM pg_inherits
                     WHERE inhparent = 'p'::regclass";

#[test]
fn expired_partitions_are_dropped_and_the_boundary_is_swept_by_rows() {
    let mut db = with(TABLE);
    db.run("CREATE TABLE rest PARTITION OF p DEFAULT; INSERT INTO p VALUES (23, '2019-01-01'), (24, NULL)");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    assert_eq!(
        db.get("SELECT relation, plan, is_exact, blockers FROM ttl_preview('p') ORDER BY 1"),
        "public.p1|drop partition|f|{}\npublic.p2|drop partition|f|{}\n\
         public.p3|rows by index|t|{}\npublic.rest|rows by index|t|{}"
    );
    assert_eq!(db.get("SELECT ttl_runner('p')"), "2", "rows that were removed one by one");
    assert_eq!(db.get(PARTS), "p3,rest");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM p"), "22,24");
    assert_eq!(db.get("SELECT to_regclass('p1'), to_regclass('p2')"), "|");
    assert_eq!(db.get("SELECT total_partitions_removed, total_rows_deleted FROM ttl_summary"), "2|2");
    assert_eq!(db.get("SELECT partitions_removed, rows_removed, status FROM ttl_history"), "2|2|done");
}

#[test]
fn detached_partitions_keep_their_rows() {
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'detach', notify_channel => 'gone'); LISTEN gone");
    assert_eq!(db.get("SELECT DISTINCT plan FROM ttl_preview('p') ORDER BY 1"), "detach partition\nrows by index");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "1");
    assert_eq!(db.get(PARTS), "p3");
    assert_eq!(db.get("SELECT (SELECT count(*) FROM p1) + (SELECT count(*) FROM p2)"), "20");
    assert!(db.notification().contains(r#""action":"detach","count":null,"relation":"public.p1""#));
}

#[test]
fn a_worker_detaches_without_waiting_for_readers_and_ends_what_was_left_half_done() {
    let server = server(&["pg_ttl_index.lock_timeout=200ms"]);
    let mut db = database(&server);
    db.run(TABLE);
    let mut reader = db.session("postgres");
    reader.run("BEGIN; SELECT count(*) FROM p");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'detach')");
    db.wait_for("SELECT count(*) FROM pg_inherits WHERE inhdetachpending", "1");
    db.wait_for("SELECT state, left(last_error, 5) FROM ttl_summary", "error|55P03");
    // Nobody else is kept waiting meanwhile.
    db.run("SET lock_timeout = '5s'; INSERT INTO p VALUES (30, now()); SELECT count(*) FROM p");
    reader.run("COMMIT");
    db.wait_for(PARTS, "p3");
    db.wait_for("SELECT state, total_partitions_removed FROM ttl_summary", "active|2");
    assert_eq!(db.get("SELECT (SELECT count(*) FROM p1) + (SELECT count(*) FROM p2)"), "20");
}

#[test]
fn a_lock_on_the_parent_holds_up_the_drop_and_nothing_else() {
    let server = server(&["pg_ttl_index.lock_timeout=200ms"]);
    let mut db = database(&server);
    db.run(TABLE);
    let mut reader = db.session("postgres");
    reader.run("BEGIN; SELECT count(*) FROM p");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    db.wait_for("SELECT state, left(last_error, 5), total_rows_deleted FROM ttl_summary", "error|55P03|1");
    assert_eq!(db.get(PARTS), "p1,p2,p3");
    assert_eq!(db.get("SELECT count(*) FROM p"), "21");
    reader.run("COMMIT");
    db.wait_for(PARTS, "p3");
    db.wait_for("SELECT state, total_partitions_removed FROM ttl_summary", "active|2");
}

#[test]
fn the_last_partition_stays_even_if_all_of_it_has_expired() {
    let mut db = with(TABLE);
    db.run("DROP TABLE p3; CREATE TABLE rest PARTITION OF p DEFAULT");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    assert_eq!(
        db.get("SELECT relation, plan, blockers FROM ttl_preview('p') ORDER BY 1"),
        "public.p1|drop partition|{}\npublic.p2|rows by index|{\"partition public.p2 is the last partition\"}\npublic.rest|rows by index|{}"
    );
    assert_eq!(db.get("SELECT ttl_runner('p')"), "10");
    assert_eq!(db.get(PARTS), "p2,rest");
    assert_eq!(db.get("SELECT count(*) FROM p"), "0");
}

#[test]
fn sub_partitions_go_with_their_parent_or_by_themselves() {
    let mut db = with(
        "CREATE TABLE p (at date, region text) PARTITION BY LIST (region);
         CREATE TABLE north PARTITION OF p FOR VALUES IN ('north') PARTITION BY RANGE (at);
         CREATE TABLE north_20 PARTITION OF north FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE north_now PARTITION OF north FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
         CREATE TABLE south PARTITION OF p FOR VALUES IN ('south') PARTITION BY RANGE (at);
         CREATE TABLE south_20 PARTITION OF south FOR VALUES FROM ('2020-01-01') TO ('2021-01-01') PARTITION BY HASH (at);
         CREATE TABLE south_20_0 PARTITION OF south_20 FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE south_20_1 PARTITION OF south_20 FOR VALUES WITH (MODULUS 2, REMAINDER 1);
         CREATE TABLE south_now PARTITION OF south FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
         INSERT INTO p SELECT d, r FROM unnest('{2020-05-05,2020-05-06,2020-05-07,2022-05-05,2099-05-05}'::date[]) d, unnest('{north,south}'::text[]) r",
    );
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "2");
    assert_eq!(db.get("SELECT count(*) FROM p"), "2");
    assert_eq!(
        db.get("SELECT string_agg(relid::text, ',') FROM pg_partition_tree('p')"),
        "p,north,south,north_now,south_now"
    );
    assert_eq!(db.get("SELECT to_regclass('south_20_1')"), "");
    assert_eq!(db.get("SELECT total_partitions_removed FROM ttl_summary"), "2");
}

#[test]
fn rows_go_one_by_one_where_somebody_has_a_say_about_them() {
    let cases = [
        ("", ", filter => 'id > 0'", "goes by rows: filter"),
        ("", ", soft_delete_column => 'gone'", "goes by rows: soft_delete_column"),
        ("CREATE TABLE archive (LIKE p)", ", archive_to => 'archive'", "goes by rows: archive_to"),
        (
            "CREATE FUNCTION hook(regclass, jsonb) RETURNS void LANGUAGE sql AS ''",
            ", on_expire => 'hook(regclass, jsonb)'",
            "goes by rows: on_expire",
        ),
        (
            "ALTER TABLE p1 ADD PRIMARY KEY (id); CREATE TABLE child (id int CONSTRAINT points REFERENCES p1 ON DELETE CASCADE)",
            "",
            "is referenced by foreign key points of table public.child",
        ),
        (
            "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
             CREATE TRIGGER audit AFTER DELETE ON p FOR EACH ROW EXECUTE FUNCTION audit()",
            "",
            "has trigger audit",
        ),
        ("CREATE VIEW old AS SELECT * FROM p1", "", "is used by rule _RETURN on view public.old"),
    ];
    for (setup, option, reason) in cases {
        let mut db = with(TABLE);
        db.run(setup);
        db.run(&format!("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop'{option})"));
        let preview =
            db.get("SELECT plan, array_to_string(blockers, '; ') FROM ttl_preview('p') WHERE relation = 'public.p1'");
        assert!(preview.starts_with("rows by index|") && preview.contains(reason), "{reason}: {preview}");
        db.run("SELECT ttl_runner('p')");
        assert!(db.get(PARTS).starts_with("p1,"), "{reason}");
        let live = db.get("SELECT count(*) FROM p WHERE gone IS NULL");
        assert_eq!(live, "1", "{reason}: only what lives is left");
    }
}

#[test]
fn what_leaves_the_table_during_a_slow_sweep_keeps_its_rows() {
    let server = server(&[]);
    let mut db = database(&server);
    for action in ["delete", "drop", "detach"] {
        db.run("DROP TABLE IF EXISTS p, other, p1, p2, p3 CASCADE");
        db.run(TABLE);
        db.run(&format!("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => '{action}', filter => 'id > 0', max_rows_per_second => 4)"));
        db.wait_for("SELECT count(*) < 10 FROM p1", "t");
        // One that is under way comes to belong to another table, and one whose turn is yet to come to none.
        let left = db.get(
            "BEGIN; ALTER TABLE p DETACH PARTITION p2; ALTER TABLE p DETACH PARTITION p1;
             CREATE TABLE other (LIKE p) PARTITION BY RANGE (at); ALTER TABLE other ATTACH PARTITION p1 DEFAULT;
             SELECT count(*) FROM p1; COMMIT",
        );
        db.run("INSERT INTO p VALUES (99, '2023-01-01')");
        db.wait_for("SELECT count(*) FROM p WHERE id = 99", "0");
        assert_eq!(db.get("SELECT count(*) FROM p1"), left, "{action}");
        assert_eq!(db.get("SELECT count(*) FROM p2"), "10", "{action}");
    }
}

#[test]
fn a_partition_that_is_being_detached_during_the_judgement_keeps_its_rows() {
    for action in ["delete", "drop", "detach"] {
        let server = server(&["pg_ttl_index.lock_timeout=20s"]);
        let mut db = database(&server);
        db.run("SELECT ttl_stop_worker()");
        db.run(TABLE);
        db.run(&format!("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => '{action}')"));
        let mut other = db.session("postgres");
        other.run("BEGIN; ALTER TABLE p DETACH PARTITION p1");
        db.run("SELECT ttl_start_worker()");
        db.wait_for("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted OR mode = 'AccessExclusiveLock' AND pid IN (SELECT worker_pid FROM ttl_worker_status())", "t");
        other.run("SELECT pg_sleep(1.5); COMMIT");
        db.wait_for("SELECT count(*) FROM p WHERE at < now() - interval '1 day'", "0");
        assert_eq!(db.get("SELECT count(*) FROM p1"), "10", "{action}");
    }
}

#[test]
fn users_of_a_partition_that_cannot_be_dropped_keep_nobody_from_the_others() {
    let server = server(&["pg_ttl_index.lock_timeout=10s"]);
    let mut db = database(&server);
    db.run(TABLE);
    let mut reader = db.session("postgres");
    reader.run("BEGIN; SELECT count(*) FROM p1, p2");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    db.run("SET lock_timeout = '2s'");
    db.wait_for("SELECT left(last_error, 5) FROM ttl_summary", "55P03");
    for _ in 0..30 {
        db.run("INSERT INTO p VALUES (50, now())");
        std::thread::sleep(Duration::from_millis(100));
    }
    reader.run("COMMIT");
    db.wait_for(PARTS, "p3");
}

#[test]
fn a_drop_that_waits_for_the_parent_has_no_user_die_in_a_deadlock() {
    let server = server(&["pg_ttl_index.lock_timeout=10s"]);
    let mut db = database(&server);
    db.run(TABLE);
    let mut reader = db.session("postgres");
    reader.run("BEGIN; SELECT count(*) FROM p WHERE at > '2022-01-01'");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    // A worker looks for deadlocks after 50 milliseconds, and not again.
    db.wait_for(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'p'::regclass
         AND waitstart < clock_timestamp() - interval '300 milliseconds'",
        "1",
    );
    reader.run("SELECT count(*) FROM p; COMMIT");
    db.wait_for(PARTS, "p3");
}

#[test]
fn a_dependency_on_one_partition_keeps_that_one() {
    let mut db = with(TABLE);
    db.run("CREATE FUNCTION about(p1) RETURNS int LANGUAGE sql AS 'SELECT 1'; CREATE TABLE holds (old p2)");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    assert!(
        db.get("SELECT blockers FROM ttl_preview('p') WHERE relation = 'public.p1'").contains("is used by function")
    );
    assert_eq!(db.get("SELECT ttl_runner('p')"), "21");
    assert_eq!(db.get("SELECT count(*) FROM p"), "1");
    assert_eq!(db.get(PARTS), "p1,p2,p3");
}

#[test]
fn a_sub_partition_that_is_half_detached_is_left_alone() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    db.run(
        "CREATE TABLE p (id int, at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM ('2020-01-01') TO ('2021-01-01') PARTITION BY LIST (id);
         CREATE TABLE p1a PARTITION OF p1 FOR VALUES IN (1); CREATE TABLE p1b PARTITION OF p1 FOR VALUES IN (2);
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM ('2021-01-01') TO ('2100-01-01');
         INSERT INTO p VALUES (1, '2020-05-05'), (2, '2020-05-05')",
    );
    let mut reader = db.session("postgres");
    reader.run("BEGIN; SELECT count(*) FROM p");
    let mut detacher = db.session("postgres");
    detacher.run("SET lock_timeout = '300ms'");
    assert_eq!(detacher.error("ALTER TABLE p1 DETACH PARTITION p1a CONCURRENTLY").code, "55P03");
    reader.run("COMMIT");
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "1");
    assert_eq!(db.get("SELECT count(*) FROM p1a"), "1", "somebody wants to keep it");
    db.run("SELECT ttl_alter_index('p', 'at', partition_action => 'detach')");
    db.run("SELECT ttl_runner('p')");
    assert_eq!(db.get("SELECT count(*), (SELECT count(*) FROM pg_inherits WHERE inhdetachpending) FROM p1a"), "1|0");
}

#[test]
fn names_that_change_while_a_partition_waits_to_be_detached_mislead_nobody() {
    let server = server(&["pg_ttl_index.lock_timeout=10s"]);
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    db.run(TABLE);
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'detach')");
    let mut other = db.session("postgres");
    other.run("BEGIN; LOCK TABLE p IN SHARE UPDATE EXCLUSIVE MODE");
    db.run("SELECT ttl_start_worker()");
    db.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'p'::regclass", "1");
    other.run("ALTER TABLE p1 RENAME TO px; ALTER TABLE p3 RENAME TO p1; ALTER TABLE px RENAME TO p3; COMMIT");
    db.wait_for(PARTS, "p1");
    // What lives is in p1 now, and still part of the table.
    db.wait_for("SELECT count(*) FROM p", "1");
}

#[test]
fn a_table_by_the_range_of_something_else_is_swept_by_rows() {
    let mut db = with(
        "CREATE TABLE p (id int, at timestamptz, n bigint, s text) PARTITION BY RANGE (id);
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (1) TO (10); INSERT INTO p VALUES (1, '2020-01-01', 5, '2020-01-01T00:00:00Z');
         CREATE TABLE q (at timestamptz, n bigint) PARTITION BY RANGE (at);
         CREATE TABLE q1 PARTITION OF q FOR VALUES FROM ('2019-01-01') TO ('2100-01-01'); INSERT INTO q VALUES ('2020-01-01', 1000)",
    );
    for (table, column, unit) in [("p", "at", "NULL"), ("p", "n", "'s'"), ("p", "s", "NULL"), ("q", "n", "'s'")] {
        for action in ["delete", "drop"] {
            db.run(&format!(
                "SELECT ttl_create_index('{table}', '{column}', 60, unit => {unit}, partition_action => '{action}')"
            ));
            db.run(&format!("BEGIN; SELECT count(*) FROM ttl_preview('{table}')"));
            assert_eq!(db.get(&format!("SELECT ttl_runner('{table}')")), "1", "{table} {column} {action}");
            db.run("ROLLBACK");
        }
        let preview = db.get(&format!("SELECT blockers FROM ttl_preview('{table}', '{column}')"));
        assert!(preview.contains("is not one by a range of the column"), "{preview}");
        db.run(&format!("SELECT ttl_drop_index('{table}', '{column}')"));
    }
}

#[test]
fn parts_of_another_owner_are_not_dropped() {
    let mut db = with(TABLE);
    let (owner, other) = (db.role("owner"), db.role("other"));
    db.run(&format!("ALTER TABLE p OWNER TO {owner}; ALTER TABLE p1 OWNER TO {other}; ALTER TABLE p2 OWNER TO {owner}; ALTER TABLE p3 OWNER TO {owner}"));
    db.session(&owner).run(
        "SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop', index_method => 'none')",
    );
    db.run("SELECT ttl_runner('p')");
    assert_eq!(db.get(PARTS), "p1,p3");
    assert_eq!(db.get("SELECT count(*) FROM p1"), "10");

    db.run(&format!(
        "CREATE TABLE m (id int, at timestamptz) PARTITION BY LIST (id); CREATE TABLE mid PARTITION OF m DEFAULT PARTITION BY RANGE (at);
         CREATE TABLE m1 PARTITION OF mid FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
         CREATE TABLE m2 PARTITION OF mid FOR VALUES FROM ('2021-01-01') TO ('2100-01-01'); INSERT INTO m VALUES (1, '2020-05-05');
         ALTER TABLE m OWNER TO {owner}; ALTER TABLE mid OWNER TO {other}; ALTER TABLE m1 OWNER TO {owner}; ALTER TABLE m2 OWNER TO {owner}"
    ));
    db.session(&owner).run(
        "SELECT ttl_create_index('m', 'at', interval '1 day', partition_action => 'detach', index_method => 'none')",
    );
    assert_eq!(db.get("SELECT ttl_runner('m')"), "1");
    assert_eq!(db.get("SELECT count(*) FROM pg_inherits WHERE inhparent = 'mid'::regclass"), "2");
}

#[test]
fn a_range_that_does_not_say_what_expires_is_not_dropped() {
    let mut db = with(
        "SET TimeZone = 'UTC';
         CREATE TABLE n (at bigint) PARTITION BY RANGE (at);
         CREATE TABLE n1 PARTITION OF n FOR VALUES FROM (-5) TO (1000);
         CREATE TABLE n2 PARTITION OF n FOR VALUES FROM (1000) TO (2000);
         CREATE TABLE n3 PARTITION OF n FOR VALUES FROM (2000) TO (MAXVALUE); INSERT INTO n VALUES (0), (500), (1500), (2500);
         CREATE TABLE m (at timestamptz, id int) PARTITION BY RANGE (at, id);
         CREATE TABLE m1 PARTITION OF m FOR VALUES FROM ('2020-01-01', 1) TO ('2020-01-01', 9);
         CREATE TABLE m2 PARTITION OF m FOR VALUES FROM ('2021-01-01', 1) TO ('2100-01-01', 9); INSERT INTO m VALUES ('2020-01-01', 5);
         CREATE OPERATOR CLASS backwards FOR TYPE timestamptz USING btree AS
             OPERATOR 1 >, OPERATOR 2 >=, OPERATOR 3 =, OPERATOR 4 <=, OPERATOR 5 <, FUNCTION 1 upside_down(timestamptz, timestamptz);
         CREATE TABLE b (at timestamptz) PARTITION BY RANGE (at backwards);
         CREATE TABLE b1 PARTITION OF b FOR VALUES FROM ('2100-01-01') TO ('2020-01-01');
         CREATE TABLE b2 PARTITION OF b FOR VALUES FROM ('2020-01-01') TO ('2000-01-01'); INSERT INTO b VALUES (now()), ('2010-01-01')"
            .replace("CREATE OPERATOR CLASS", "CREATE FUNCTION upside_down(timestamptz, timestamptz) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT -timestamptz_cmp($1, $2)'; CREATE OPERATOR CLASS")
            .as_str(),
    );
    db.run(
        "SELECT ttl_create_index('n', 'at', 0, unit => 's', partition_action => 'drop'),
                   ttl_create_index('m', 'at', 60, partition_action => 'drop'),
                   ttl_create_index('b', 'at', 60, partition_action => 'drop')",
    );
    db.run("SELECT ttl_runner()");
    assert_eq!(db.get("SELECT string_agg(relid::text, ',') FROM pg_partition_tree('n')"), "n,n1,n3", "0 never expires");
    assert_eq!(db.get("SELECT at FROM n"), "0");
    assert_eq!(db.get("SELECT count(*) FROM pg_inherits WHERE inhparent = 'm'::regclass"), "2", "two columns");
    assert_eq!(db.get("SELECT count(*) FROM m"), "0");
    assert_eq!(db.get("SELECT count(*) FROM pg_inherits WHERE inhparent = 'b'::regclass"), "2", "another order");
    assert_eq!(db.get("SELECT count(*) FROM b"), "1", "the live one");
}

#[test]
fn a_table_without_partitions_has_none_to_drop() {
    refuses(
        "CREATE TABLE t (at timestamptz); CREATE TABLE child () INHERITS (t); CREATE TABLE p (at timestamptz) PARTITION BY RANGE (at)",
        &[
            ("ttl_create_index('t', 'at', 60, partition_action => 'drop')", "0A000"),
            ("ttl_create_index('p', 'at', 60, partition_action => 'truncate')", "22023"),
        ],
    );
}

#[test]
fn a_thousand_partitions_are_looked_through_and_dropped_in_no_time() {
    let server = server(&["max_locks_per_transaction=512"]);
    let mut db = database(&server);
    db.run("SELECT ttl_stop_worker()");
    db.run(
        "CREATE TABLE p (at timestamptz) PARTITION BY RANGE (at);
         DO $$ BEGIN FOR i IN 0..999 LOOP
             EXECUTE format('CREATE TABLE p%s PARTITION OF p FOR VALUES FROM (%L) TO (%L)', i,
                            '2020-01-01Z'::timestamptz + i * interval '1 day', '2020-01-01Z'::timestamptz + (i + 1) * interval '1 day');
         END LOOP; END $$; INSERT INTO p SELECT '2020-01-01Z'::timestamptz + i * interval '1 hour' FROM generate_series(0, 23999) i",
    );
    db.run("SELECT ttl_create_index('p', 'at', now() - '2022-01-01Z'::timestamptz, partition_action => 'drop')");
    let started = Instant::now();
    assert_eq!(db.get("SELECT count(*), sum((plan = 'drop partition')::int) FROM ttl_preview('p')"), "732|731");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    db.run("SELECT ttl_start_worker()");
    db.wait_for("SELECT count(*) FROM pg_inherits", "538");
    db.wait_for("SELECT state, total_partitions_removed FROM ttl_summary", "active|731");
    assert_eq!(db.get("SELECT min(at) >= '2022-01-01Z', count(*) BETWEEN 6400 AND 6456 FROM p"), "t|t");
}

#[test]
fn what_postgres_would_refuse_to_drop_is_named_and_not_tried() {
    let cases = [
        ("CREATE TABLE holds (old p1)", "is used by column old of table public.holds"),
        ("CREATE TABLE holds (old p1[])", "is used by column old of table public.holds"),
        (
            "CREATE SEQUENCE numbers OWNED BY p1.id; CREATE TABLE holds (n int DEFAULT nextval('numbers'))",
            "is used by default value for column n of table public.holds",
        ),
        ("CREATE DOMAIN old AS p1", "is used by type public.old"),
    ];
    for (setup, reason) in cases {
        let mut db = with(TABLE);
        // What goes with a partition keeps nobody.
        db.run(
            "CREATE SEQUENCE own OWNED BY p1.id; ALTER TABLE p1 ALTER id SET DEFAULT nextval('own'), ADD CHECK (id > 0);
             CREATE INDEX ON p (id); CREATE STATISTICS s ON id, at FROM p1",
        );
        db.run(setup);
        db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
        let blockers = "SELECT array_to_string(blockers, '; ') FROM ttl_preview('p') WHERE relation = 'public.p1'";
        let blockers = db.get(blockers);
        assert!(blockers.contains(reason), "{reason}: {blockers}");
        assert_eq!(db.get("SELECT ttl_runner('p')"), "11");
        assert_eq!(db.get(PARTS), "p1,p3");
        db.run("DROP TABLE IF EXISTS holds; DROP DOMAIN IF EXISTS old; SELECT ttl_runner('p')");
        assert_eq!(db.get(PARTS), "p3", "{reason}");
    }
}

#[test]
fn a_drop_that_is_refused_all_the_same_is_told_of_and_backs_off() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(TABLE);
    db.run(
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'nothing is dropped here'; END $$;
         CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION refuse()",
    );
    db.run("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')");
    // The summary would look into the partitions, and they would be in use.
    db.wait_for(
        "SELECT last_error_code, last_error, consecutive_failures >= 2, retry_at > last_error_at FROM ttl_index_table JOIN ttl_state ON rule_id = id",
        "P0001|nothing is dropped here|t|t",
    );
    db.wait_for("SELECT count(*) FROM p", "1");
    db.run("DROP EVENT TRIGGER refuse");
    db.wait_for(PARTS, "p3");
    db.wait_for("SELECT state, total_partitions_removed FROM ttl_summary", "active|2");
}

#[test]
fn a_partition_that_is_half_detached_is_named_whatever_the_rule_does() {
    for action in ["delete", "drop"] {
        let server = server(&[]);
        let mut db = database(&server);
        db.run("SELECT ttl_stop_worker()");
        db.run(TABLE);
        let mut reader = db.session("postgres");
        reader.run("BEGIN; SELECT count(*) FROM p");
        let mut detacher = db.session("postgres");
        detacher.run("SET lock_timeout = '300ms'");
        assert_eq!(detacher.error("ALTER TABLE p DETACH PARTITION p1 CONCURRENTLY").code, "55P03");
        reader.run("COMMIT");
        db.run(&format!("SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => '{action}')"));
        assert_eq!(
            db.get("SELECT plan, blockers FROM ttl_preview('p') WHERE relation = 'public.p1'"),
            "nothing|{\"public.p1 is being detached\"}"
        );
        db.run("SELECT ttl_runner('p')");
        assert_eq!(db.get("SELECT skipped_parts FROM ttl_summary"), "public.p1 is being detached", "{action}");
        assert_eq!(db.get("SELECT count(*) FROM p1"), "10");
        db.run("SELECT ttl_alter_index('p', 'at', partition_action => 'detach')");
        assert_eq!(
            db.get("SELECT plan, blockers FROM ttl_preview('p') WHERE relation = 'public.p1'"),
            "detach partition|{}"
        );
        db.run("SELECT ttl_runner('p')");
        assert_eq!(
            db.get("SELECT skipped_parts, (SELECT count(*) FROM pg_inherits WHERE inhdetachpending) FROM ttl_summary"),
            "|0"
        );
    }
}

#[test]
fn a_soft_delete_by_the_partition_key_is_refused_and_named() {
    let tables = "CREATE TABLE p (at timestamptz, gone timestamptz, flag bool) PARTITION BY RANGE (gone);
         CREATE TABLE e (at timestamptz, gone timestamptz) PARTITION BY LIST ((gone IS NULL));
         CREATE TABLE q (at timestamptz, gone timestamptz, id int) PARTITION BY LIST (id);
         CREATE TABLE q1 PARTITION OF q FOR VALUES IN (1) PARTITION BY RANGE (gone);
         CREATE TABLE q1d PARTITION OF q1 DEFAULT; CREATE TABLE q2 PARTITION OF q FOR VALUES IN (2)";
    refuses(
        tables,
        &[
            ("ttl_create_index('p', 'at', 60, soft_delete_column => 'gone')", "0A000"),
            ("ttl_create_index('e', 'at', 60, soft_delete_column => 'gone')", "0A000"),
            ("ttl_create_index('q', 'at', 60, soft_delete_column => 'gone')", "0A000"),
            ("ttl_create_index('q1', 'at', 60, soft_delete_column => 'gone')", "0A000"),
        ],
    );
    let mut db = with(tables);
    db.run("ALTER TABLE q DETACH PARTITION q1; SELECT ttl_create_index('q', 'at', 60, soft_delete_column => 'gone')");
    db.run("ALTER TABLE q ATTACH PARTITION q1 FOR VALUES IN (1); INSERT INTO q VALUES ('2020-01-01', NULL, 1), ('2020-01-01', NULL, 2)");
    let reason = "public.q1d is partitioned by a column that the rule updates";
    assert_eq!(
        db.get("SELECT blockers FROM ttl_preview('q') WHERE relation = 'public.q1d'"),
        format!("{{\"{reason}\"}}")
    );
    assert_eq!(db.get("SELECT ttl_runner('q')"), "1");
    assert_eq!(db.get("SELECT skipped_parts, state FROM ttl_summary"), format!("{reason}|active"));
    // As a boolean on the parent it is no key.
    db.run("SELECT ttl_create_index('p', 'at', 60, soft_delete_column => 'flag')");
}

#[test]
fn bounds_are_judged_by_value() {
    let mut db = with(
        "CREATE TABLE d (at date) PARTITION BY RANGE (at);
         CREATE TABLE d0 PARTITION OF d FOR VALUES FROM (MINVALUE) TO ('0044-03-15 BC');
         CREATE TABLE d1 PARTITION OF d FOR VALUES FROM ('0044-03-15 BC') TO ('2020-01-01');
         CREATE TABLE d2 PARTITION OF d FOR VALUES FROM ('2020-01-01') TO ('infinity');
         CREATE TABLE d3 PARTITION OF d FOR VALUES FROM ('infinity') TO (MAXVALUE);
         INSERT INTO d VALUES ('0100-01-01 BC'), ('1000-01-01'), ('2021-01-01'), (current_date + 3), ('infinity');
         CREATE DOMAIN stamp AS numeric; CREATE TABLE n (at stamp) PARTITION BY RANGE (at);
         CREATE TABLE n1 PARTITION OF n FOR VALUES FROM (0.5) TO (1000.25);
         CREATE TABLE n2 PARTITION OF n FOR VALUES FROM (1000.25) TO (1e20); INSERT INTO n VALUES (7), (5000), (9e19);
         CREATE TABLE z (at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE z1 PARTITION OF z FOR VALUES FROM ('2020-01-01 00:00:00.000001+14') TO ('2021-01-01 12:00-11');
         CREATE TABLE z2 PARTITION OF z FOR VALUES FROM ('2021-01-01 12:00-11') TO (MAXVALUE);
         INSERT INTO z VALUES ('2020-06-01'), ('2022-01-01'), (now())",
    );
    db.run(
        "SET DateStyle = 'German'; SET TimeZone = 'Asia/Kathmandu';
         SELECT ttl_create_index('d', 'at', 60, partition_action => 'drop'),
                ttl_create_index('n', 'at', 60, unit => 's', partition_action => 'drop'),
                ttl_create_index('z', 'at', 60, partition_action => 'drop'); SELECT ttl_runner()",
    );
    assert_eq!(
        db.get("SELECT string_agg(relid::text, ',') FROM unnest('{d,n,z}'::regclass[]) t, pg_partition_tree(t) WHERE isleaf"),
        "d2,d3,n2,z2"
    );
    assert_eq!(db.get("SELECT (SELECT count(*) FROM d), (SELECT count(*) FROM n), (SELECT count(*) FROM z)"), "2|1|1");
}

#[test]
fn who_asks_is_warned_of_a_drop_that_is_refused_and_keeps_the_rest() {
    let mut db = with(TABLE);
    db.run(
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'nothing is dropped here'; END $$;
         CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION refuse();
         SELECT ttl_create_index('p', 'at', interval '1 day', partition_action => 'drop')",
    );
    db.notices();
    assert_eq!(db.get("SELECT ttl_runner('p')"), "21");
    assert!(db.notices()[0].contains("partition public.p1 was not dropped: P0001: nothing is dropped here"));
    assert_eq!(db.get("SELECT count(*) FROM p"), "1");
}
