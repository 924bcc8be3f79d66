//! Exactly the expired rows go, whatever the table and whatever happens meanwhile.

use harness::{Database, Random, Session};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// A random table with rows of every kind, some of them blocked by a foreign key, and a rule on it.
fn random_table(db: &mut Database, random: &mut Random) -> String {
    let column_type = random.pick(&["timestamptz", "timestamp", "date", "timestamptz(0)", "instant"]);
    let partitions = random.pick(&["", "hash", "range"]);
    let zone = random.pick(&["UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Apia"]);
    let filter =
        random.pick(&["NULL", "'n % 3 <> 0'", "'label IS NULL OR label < ''m'''", "'n < extract(year FROM now())'"]);
    let method = random.pick(&["btree", "brin", "none"]);
    let mark = random.pick(&["NULL", "NULL", "'deleted'", "'gone'"]);
    let batch = 1 + random.below(400);
    let describe = format!("{column_type} {partitions} {zone} {filter} {method} {mark} {batch}");

    db.run(&format!("SET TimeZone = '{zone}'; CREATE DOMAIN instant AS timestamptz"));
    let columns = format!("id int, at {column_type}, n int, label text, deleted timestamptz, gone boolean");
    match partitions {
        "hash" => db.run(&format!(
            "CREATE TABLE t ({columns}, PRIMARY KEY (id)) PARTITION BY HASH (id);
             CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER 0);
             CREATE TABLE t1 (extra_first int, {columns}, PRIMARY KEY (id)); ALTER TABLE t1 DROP COLUMN extra_first;
             ALTER TABLE t ATTACH PARTITION t1 FOR VALUES WITH (MODULUS 3, REMAINDER 1);
             CREATE TABLE t2 PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER 2)"
        )),
        "range" => db.run(&format!(
            "CREATE TABLE t ({columns}) PARTITION BY RANGE (at);
             CREATE TABLE t_old PARTITION OF t FOR VALUES FROM (MINVALUE) TO ((now() - interval '20 days')::date);
             CREATE TABLE t_mid PARTITION OF t FOR VALUES FROM ((now() - interval '20 days')::date) TO ((now() + interval '5 days')::date);
             CREATE TABLE t_rest PARTITION OF t DEFAULT"
        )),
        _ => db.run(&format!("CREATE TABLE t ({columns}, PRIMARY KEY (id))")),
    }
    db.run(&format!(
        "INSERT INTO t (id, at, n, label)
         SELECT i, CASE WHEN i % 17 = 0 THEN NULL WHEN i % 19 = 0 THEN 'infinity'::{column_type}
                        WHEN i % 23 = 0 THEN '-infinity'::{column_type}
                        ELSE (now() + (hashint4(i + {seed}) % 60) * interval '1 day' + (i % 24 + 0.5) * interval '1 hour')::{column_type} END,
                i % 2500, CASE WHEN i % 5 = 0 THEN NULL ELSE md5(i::text) END
         FROM generate_series(1, 2000) i",
        seed = random.below(1_000_000)
    ));
    db.run("CREATE TABLE child (id int)");
    if partitions != "range" {
        db.run(
            "INSERT INTO child SELECT id FROM t WHERE id % 97 = 0; ALTER TABLE child ADD FOREIGN KEY (id) REFERENCES t",
        );
    }
    db.run(&format!(
        "SELECT ttl_create_index('t', 'at', interval '10 days 3 hours', {batch}, {mark}, {filter}, index_method => '{method}')"
    ));
    describe
}

/// Checks the tables and their indexes with PostgreSQL's own tool.
fn check_relations(db: &mut Database, describe: &str) {
    db.run("CREATE EXTENSION amcheck");
    db.run(
        "SELECT bt_index_check(indexrelid, true) FROM pg_index JOIN pg_class c ON c.oid = indexrelid
            WHERE indrelid IN (SELECT oid FROM pg_class WHERE relname LIKE 't%' AND relkind = 'r')
              AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')",
    );
    let faults = "SELECT count(f) FROM pg_class c CROSS JOIN LATERAL verify_heapam(c.oid) AS f
                  WHERE relname LIKE 't%' AND relkind = 'r' AND relnamespace = 'public'::regnamespace";
    assert_eq!(db.get(faults), "0", "{describe}");
}

#[test]
fn after_a_sweep_exactly_the_expired_unblocked_rows_are_gone() {
    for seed in 0..25 {
        let mut random = Random(seed);
        let mut db = Database::new();
        db.run("SELECT ttl_stop_worker()");
        let scan = random.pick(&["auto", "auto", "index", "blocks"]);
        let describe = format!("{} {scan}", random_table(&mut db, &mut random));
        db.run(&format!("SET pg_ttl_index.debug_scan = {scan}"));
        let filter = db.get("SELECT coalesce(filter, 'true') FROM ttl_summary");
        let blocked = db.get("SELECT soft_delete_column IS NULL FROM ttl_summary");
        db.run(&format!(
            "CREATE TABLE expected AS SELECT id FROM t
             WHERE NOT coalesce(at::timestamptz <= now() - interval '10 days 3 hours' AND ({filter}), false)
                OR ('{blocked}' AND id IN (SELECT id FROM child))"
        ));
        if random.below(2) == 0 {
            db.run("SELECT ttl_runner('t')");
        } else {
            db.run("CALL ttl_sweep()");
        }
        let survivors = "SELECT id FROM t WHERE deleted IS NULL AND gone IS NOT TRUE";
        let differences = format!(
            "SELECT count(*) FROM (({survivors} EXCEPT TABLE expected) UNION ALL (TABLE expected EXCEPT {survivors})) AS d"
        );
        assert_eq!(db.get(&differences), "0", "seed {seed}: {describe}");
        assert_eq!(db.get("SELECT count(*) > 200 FROM expected"), "t", "seed {seed}: {describe}");
        assert_eq!(db.get("SELECT total_rows_deleted > 100 FROM ttl_summary"), "t", "seed {seed}: {describe}");
        check_relations(&mut db, &describe);
    }
}

#[test]
fn a_row_touched_while_it_is_being_swept_lives() {
    // By index and by blocks, from the heap and by SQL; rows that share a value are found by blocks.
    let trigger = "CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
                   CREATE TRIGGER watch BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION watch()";
    let ways = [
        ("btree", 1, ""),
        ("btree", 0, ""),
        ("brin", 1, ""),
        ("none", 1, ""),
        ("btree", 1, trigger),
        ("none", 0, trigger),
    ];
    for (method, apart, also) in ways {
        let mut db = Database::new();
        db.run("SELECT ttl_stop_worker()");
        db.run(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, touched boolean DEFAULT false);
             INSERT INTO t SELECT i, now() - interval '1 day' + {apart} * i * interval '1 second' FROM generate_series(1, 30000) i"
        ));
        if !also.is_empty() {
            db.run(also);
        }
        db.run(&format!("SELECT ttl_create_index('t', 'at', interval '1 hour', 500, index_method => '{method}')"));
        let begun = Arc::new(Barrier::new(3));
        let touch = |mut session: Session, from: i32| {
            let begun = Arc::clone(&begun);
            std::thread::spawn(move || {
                let mut touched = 0;
                for id in (from..=30000).step_by(7) {
                    let sql = format!(
                        "WITH u AS (UPDATE t SET at = now(), touched = true WHERE id = {id} RETURNING 1) SELECT count(*) FROM u"
                    );
                    touched += session.get(&sql).parse::<i64>().expect("a count");
                    if id == from {
                        begun.wait();
                    }
                }
                touched
            })
        };
        let writers = [touch(db.session("postgres"), 1), touch(db.session("postgres"), 3)];
        begun.wait();
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(20) && writers.iter().any(|writer| !writer.is_finished()) {
            db.run("CALL ttl_sweep('t', max_rows => 1000)");
        }
        let touched: i64 = writers.into_iter().map(|writer| writer.join().expect("a writer")).sum();
        db.run("CALL ttl_sweep('t')");
        assert_eq!(db.get("SELECT count(*), bool_and(touched) FROM t"), format!("{touched}|t"), "{method}");
        let deleted = db.get("SELECT total_rows_deleted FROM ttl_summary");
        assert_eq!(deleted, (30000 - touched).to_string(), "{method}");
        check_relations(&mut db, method);
    }
}

#[test]
fn the_cost_of_a_batch_does_not_grow_while_an_old_snapshot_is_held() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    db.run("CREATE TABLE t (at timestamptz); INSERT INTO t SELECT now() - i * interval '1 second' FROM generate_series(90000, 190000) i");
    let mut other = db.session("postgres");
    other.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1");
    db.run("SELECT ttl_create_index('t', 'at', interval '1 hour', 1000); SELECT pg_stat_reset()");
    // Counted in index entries read, not in time: each is read about once for all batches together.
    db.run("SELECT ttl_runner('t')");
    db.run("SELECT pg_stat_force_next_flush()");
    db.wait_for(
        "SELECT idx_tup_read BETWEEN 100000 AND 120000 FROM pg_stat_user_indexes WHERE indexrelname = 'idx_ttl_t_at'",
        "t",
    );
    other.run("COMMIT");
}

#[test]
fn names_that_change_during_a_sweep_never_lead_it_to_other_rows() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    // Swapping the two columns makes every row look expired under the old name.
    db.run(
        "CREATE TABLE t (id int, at timestamptz, other timestamptz);
            INSERT INTO t SELECT i, now() - interval '2 hours', now() FROM generate_series(1, 20000) i;
            INSERT INTO t SELECT i, now(), now() - interval '2 hours' FROM generate_series(20001, 40000) i",
    );
    db.run("SELECT ttl_create_index('t', 'at', interval '1 hour', 10)");
    let mut sweeper = db.session("postgres");
    let sweeping = std::thread::spawn(move || sweeper.run("CALL ttl_sweep('t')"));
    db.wait_for("SELECT count(*) BETWEEN 20001 AND 39990 FROM t", "t");
    db.run(
        "BEGIN; ALTER TABLE t RENAME COLUMN at TO swap; ALTER TABLE t RENAME COLUMN other TO at;
            ALTER TABLE t RENAME COLUMN swap TO other; COMMIT",
    );
    sweeping.join().expect("the sweep");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE id > 20000"), "20000", "no live row was touched");
    assert_eq!(db.get("SELECT column_name FROM ttl_summary"), "other");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT count(*), min(id) FROM t"), "20000|20001");
}

#[test]
fn a_part_that_has_another_name_by_now_is_not_mistaken_for_the_table_that_has_its_old_one() {
    let mut db = Database::new();
    db.run(
        "SELECT ttl_stop_worker();
         CREATE TABLE t (id int, at timestamptz) PARTITION BY LIST (id);
         CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2);
         CREATE TABLE bystander (id int, at timestamptz);
         INSERT INTO t SELECT 1 + i % 2, '2020-01-01' FROM generate_series(1, 20000) i; INSERT INTO bystander VALUES (1, '2020-01-01');
         SELECT ttl_create_index('t', 'at', 60, 10)",
    );
    let mut sweeper = db.session("postgres");
    let sweeping = std::thread::spawn(move || sweeper.run("CALL ttl_sweep('t')"));
    db.wait_for("SELECT count(*) BETWEEN 1 AND 9990 FROM t1", "t");
    db.run("BEGIN; ALTER TABLE t2 RENAME TO t3; ALTER TABLE bystander RENAME TO t2; COMMIT; BEGIN; LOCK TABLE t2");
    sweeping.join().expect("a sweep that waits for no stranger's table");
    db.run("COMMIT");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(db.get("SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM t2)"), "0|1");
}

#[test]
fn a_row_that_moves_to_another_partition_while_it_is_locked_does_not_fail_the_sweep() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    // Rows are locked before they are removed, because a trigger watches.
    db.run(
        "CREATE TABLE t (id int, at timestamptz, part int) PARTITION BY LIST (part);
         CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2);
         CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
         CREATE TRIGGER watch BEFORE DELETE ON t1 FOR EACH ROW EXECUTE FUNCTION watch();
         INSERT INTO t SELECT i, now() - interval '1 day', 1 FROM generate_series(1, 3000) i;
         SELECT ttl_create_index('t', 'at', interval '1 hour', 300, index_method => 'none')",
    );
    let mut session = db.session("postgres");
    let mover = std::thread::spawn(move || {
        // Back and forth, alive in the end.
        for id in (1..=3000).rev() {
            session.run(&format!("UPDATE t SET part = 2 WHERE id = {id} AND id % 3 = 0"));
            session.run(&format!("UPDATE t SET at = now(), part = 1 WHERE id = {id} AND id % 3 = 0"));
        }
    });
    while !mover.is_finished() {
        db.run("CALL ttl_sweep('t')");
        assert_eq!(db.get("SELECT coalesce(max(error), '') FROM ttl_history"), "");
    }
    mover.join().expect("no update failed");
    db.run("CALL ttl_sweep('t')");
    assert_eq!(
        db.get(
            "SELECT count(*) FILTER (WHERE at < now() - interval '1 hour'), count(*) FILTER (WHERE id % 3 <> 0) FROM t"
        ),
        "0|0"
    );
    assert_eq!(db.get("SELECT state, last_error FROM ttl_summary"), "active|");
}
