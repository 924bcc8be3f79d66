//! A write that meets a hidden row has its effect, waits, or fails. It is never silently lost.

use crate::sweep::with;
use harness::{Database, Session, SqlError};
use std::time::{Duration, Instant};

const INSERTS: [&str; 8] = [
    "INSERT INTO t VALUES (1, now(), 'new')",
    "INSERT INTO t VALUES (1, now(), 'new') ON CONFLICT (id) DO UPDATE SET at = excluded.at, v = 'new'",
    "INSERT INTO t VALUES (1, now(), 'new') ON CONFLICT (id) DO NOTHING",
    "INSERT INTO t VALUES (1, now(), 'new') ON CONFLICT DO NOTHING",
    "MERGE INTO t USING (SELECT 1 AS id) s ON t.id = s.id WHEN MATCHED THEN UPDATE SET at = now(), v = 'new'
         WHEN NOT MATCHED THEN INSERT VALUES (s.id, now(), 'new')",
    "UPDATE t SET id = 1, v = 'new' WHERE id = 2",
    "WITH w AS (INSERT INTO t VALUES (1, now(), 'new') ON CONFLICT (id) DO UPDATE SET v = 'new', at = now() RETURNING 1) SELECT count(*) FROM w",
    // What nobody reads runs when everything else is done.
    "WITH w AS (INSERT INTO t VALUES (1, now(), 'new') ON CONFLICT DO NOTHING) SELECT 1",
];

fn table() -> Database {
    with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text);
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true);
         INSERT INTO t VALUES (1, now(), 'old'), (2, now(), 'other')",
    )
}

/// Runs a statement that has to wait for `blocker`, and what is done there meanwhile.
fn run_behind(db: &Database, mut blocker: Session, statement: &str) -> Result<String, SqlError> {
    let mut session = db.session("postgres");
    let pid = session.get("SELECT pg_backend_pid()");
    let text = statement.to_owned();
    let waiting = std::thread::spawn(move || session.try_get(&text));
    let mut observer = db.session("postgres");
    let deadline = Instant::now() + Duration::from_secs(30);
    let is_waiting = format!("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = {pid}");
    while observer.get(&is_waiting) != "t" && !waiting.is_finished() {
        assert!(Instant::now() < deadline, "it neither waits nor ends: {statement}");
        std::thread::sleep(Duration::from_millis(5));
    }
    blocker.run("COMMIT");
    waiting.join().expect("a thread")
}

#[test]
fn a_row_that_expires_meanwhile_is_as_if_deleted_meanwhile() {
    for isolation in ["read committed", "repeatable read", "serializable"] {
        for statement in INSERTS {
            let mut db = table();
            let name = db.name.clone();
            db.run(&format!("ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'"));
            let mut blocker = db.session("postgres");
            blocker.run("BEGIN; UPDATE t SET at = '2020-01-01', v = 'dead' WHERE id = 1");
            match run_behind(&db, blocker, statement) {
                Ok(_) => assert_eq!(db.get("SELECT v FROM t WHERE id = 1"), "new", "{isolation}: {statement}"),
                Err(error) => assert!(
                    isolation != "read committed" && error.code == "40001",
                    "{isolation}: {error:?} in {statement}"
                ),
            }
        }
    }
}

#[test]
fn a_row_that_comes_expired_meanwhile_is_as_if_it_never_came() {
    for statement in INSERTS {
        let mut db = table();
        db.run("DELETE FROM t WHERE id = 1");
        let mut blocker = db.session("postgres");
        blocker.run("BEGIN; INSERT INTO t VALUES (1, '2020-01-01', 'dead')");
        run_behind(&db, blocker, statement).unwrap_or_else(|error| panic!("{error:?} in {statement}"));
        assert_eq!(db.get("SELECT v FROM t WHERE id = 1"), "new", "{statement}");
    }
}

#[test]
fn a_row_that_comes_expired_behind_the_look_of_the_trigger_loses_no_write() {
    let forms = [
        INSERTS[2],
        INSERTS[3],
        INSERTS[7],
        "INSERT INTO t SELECT i, now(), 'new' FROM generate_series(1, 1500) i WHERE i <> 2 ON CONFLICT DO NOTHING",
    ];
    for statement in forms {
        let mut db = table();
        // A trigger that comes after ours waits until the other row is there.
        db.run(
            "DELETE FROM t WHERE id = 1;
             CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS
                 $$BEGIN IF NEW.id = 1 AND NEW.v = 'new' THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN NEW; END$$;
             CREATE TRIGGER \"~~waits\" BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION waits()",
        );
        let mut blocker = db.session("postgres");
        blocker.run("BEGIN; SELECT pg_advisory_xact_lock(1)");
        let mut other = db.session("postgres");
        let come = std::thread::spawn({
            let mut observer = db.session("postgres");
            move || {
                observer.wait_for("SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", "t");
                other.run("INSERT INTO t VALUES (1, '2020-01-01', 'dead')");
                blocker.run("COMMIT");
            }
        });
        let result = db.try_get(statement);
        come.join().expect("a thread");
        assert_eq!(result.map_err(|error| error.code), Err("40001".into()), "{statement}");
        db.run(statement);
        assert_eq!(db.get("SELECT v FROM t WHERE id = 1"), "new", "{statement}");
    }
}

#[test]
fn a_row_that_comes_expired_and_is_swept_at_once_loses_no_write() {
    let mut db = with(
        "CREATE FUNCTION gate(n int) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN IF n <> 0 THEN PERFORM pg_advisory_xact_lock_shared(n); END IF; RETURN true; END';
         CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, n int NOT NULL DEFAULT 0 CHECK (gate(n)));
         SELECT ttl_create_index('t', 'at', 0, hide_expired => true)",
    );
    let waits = |n: u32| {
        format!(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = {n}
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    };
    db.run("SELECT pg_advisory_lock(1), pg_advisory_lock(2)");
    for start in ["SELECT 1", "INSERT INTO t VALUES (1, now() + interval '1 hour')"] {
        db.run(&format!(
            "SELECT pg_advisory_unlock_all(), pg_advisory_lock(1), pg_advisory_lock(2); DELETE FROM t; {start}"
        ));
        let mut writer = db.session("postgres");
        let writing = std::thread::spawn(move || {
            writer.try_get("INSERT INTO t SELECT i, now() + interval '1 hour', i FROM generate_series(1, 2) i ON CONFLICT DO NOTHING")
        });
        // Row 1 was looked at, and waits; then something expired is in its way, and is swept while row 2 waits.
        db.wait_for(&waits(1), "1");
        db.run("INSERT INTO t VALUES (1, now() - interval '1 hour') ON CONFLICT (id) DO UPDATE SET at = now() - interval '1 hour'; SELECT pg_advisory_unlock(1)");
        db.wait_for(&waits(2), "1");
        assert_eq!(db.get("SELECT ttl_runner('t')"), "1", "{start}");
        db.run("SELECT pg_advisory_unlock(2)");
        let written = writing.join().expect("a thread");
        assert_eq!(written.map_err(|error| error.code), Err("40001".into()), "{start}");
    }
}

#[test]
fn a_live_row_that_is_deleted_meanwhile_was_in_the_way() {
    let mut db = with(
        "CREATE FUNCTION gate(n int) RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN IF n <> 0 THEN PERFORM pg_advisory_xact_lock_shared(n); END IF; RETURN true; END';
         CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, n int NOT NULL DEFAULT 0 CHECK (gate(n)));
         SELECT ttl_create_index('t', 'at', 0, hide_expired => true); INSERT INTO t VALUES (1, now() + interval '1 hour')",
    );
    db.run("SELECT pg_advisory_lock(2)");
    let mut writer = db.session("postgres");
    let writing = std::thread::spawn(move || {
        writer.try_get("INSERT INTO t VALUES (1, now() + interval '1 hour', 0), (2, now() + interval '1 hour', 2) ON CONFLICT DO NOTHING")
    });
    db.wait_for(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 2
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        "1",
    );
    db.run("UPDATE t SET at = at + interval '1 hour' WHERE id = 1; DELETE FROM t WHERE id = 1; SELECT pg_advisory_unlock(2)");
    assert_eq!(writing.join().expect("a thread"), Ok(String::new()));
    assert_eq!(db.get("SELECT id FROM t"), "2");
}

#[test]
fn expired_rows_of_the_same_statement_lose_no_write() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL); SELECT ttl_create_index('t', 'at', 0, hide_expired => true);
         INSERT INTO t VALUES (100, now() + interval '1 hour'), (5, now() + interval '1 hour')",
    );
    for (id, statement) in [
        (
            11,
            "INSERT INTO t VALUES (11, now() - interval '1 hour'), (11, now() + interval '1 hour') ON CONFLICT DO NOTHING",
        ),
        (
            13,
            "WITH a AS (INSERT INTO t VALUES (13, now() - interval '1 hour') RETURNING id)
              INSERT INTO t SELECT id, now() + interval '1 hour' FROM a ON CONFLICT DO NOTHING",
        ),
        (
            5,
            "WITH u AS (UPDATE t SET at = now() - interval '1 hour' WHERE id = 5 RETURNING id)
             INSERT INTO t SELECT id, now() + interval '2 hours' FROM u ON CONFLICT DO NOTHING",
        ),
    ] {
        match db.try_get(statement) {
            Ok(_) => assert_eq!(db.get(&format!("SELECT count(*) FROM t WHERE id = {id}")), "1", "{statement}"),
            Err(error) => assert_eq!(error.code, "23505", "{statement}"),
        }
    }
}

#[test]
fn innocent_upserts_neither_fail_nor_warn() {
    let mut db = with(
        "CREATE TABLE two (id int PRIMARY KEY, e timestamptz, f timestamptz);
         CREATE TABLE latest (k int PRIMARY KEY, account int, at timestamptz);
         CREATE FUNCTION keep_latest() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN DELETE FROM public.latest WHERE account = NEW.account AND k <> NEW.k; RETURN NEW; END';
         CREATE TRIGGER keep_latest BEFORE INSERT ON latest FOR EACH ROW EXECUTE FUNCTION keep_latest();
         CREATE TABLE g (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id * 2) STORED, at timestamptz);
         SELECT ttl_create_index('two', 'e', 0, hide_expired => true), ttl_create_index('two', 'f', 0, hide_expired => true),
                ttl_create_index('latest', 'at', 0, hide_expired => true), ttl_create_index('g', 'at', 0, hide_expired => true);
         INSERT INTO two VALUES (1, now() - interval '1 hour', NULL), (2, NULL, now() - interval '1 hour')",
    );
    db.run("INSERT INTO two VALUES (1, NULL, NULL), (2, NULL, NULL) ON CONFLICT DO NOTHING");
    assert_eq!(db.get("SELECT count(*) FROM two"), "2");
    db.run("INSERT INTO latest VALUES (3, 9, now() + interval '1 day')");
    db.run("INSERT INTO latest VALUES (1, 1, now() + interval '1 day'), (2, 1, now() + interval '1 day'), (3, 9, now() + interval '1 day') ON CONFLICT DO NOTHING");
    assert_eq!(db.get("SELECT string_agg(k::text, ',' ORDER BY k) FROM latest"), "2,3");
    db.notices();
    db.run("INSERT INTO g (id, at) VALUES (2, now() - interval '1 day'); INSERT INTO g (id, at) VALUES (3, now() + interval '1 day')");
    db.run("INSERT INTO g (id, at) VALUES (2, now() + interval '1 day') ON CONFLICT DO NOTHING; UPDATE g SET id = 5 WHERE id = 3");
    assert_eq!(db.notices(), Vec::<String>::new());
}

#[test]
fn transactions_in_one_message_are_told_apart() {
    let mut db = table();
    db.run("CREATE FUNCTION zz() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN 1; END'; UPDATE t SET at = '2020-01-01' WHERE id = 1");
    for _ in 0..3 {
        let mut session = db.session("postgres");
        session.run(
            "BEGIN; DO $$ BEGIN INSERT INTO t VALUES (NULL, now(), 'x') ON CONFLICT DO NOTHING; EXCEPTION WHEN OTHERS THEN NULL; END $$; COMMIT;
             BEGIN; SELECT zz(); SAVEPOINT a; COPY t FROM PROGRAM 'echo 10000,2030-01-01,x' WITH (FORMAT csv); ROLLBACK",
        );
        session.run("SELECT 1");
    }
}

#[test]
fn keys_behind_generated_columns_and_late_triggers_lose_no_write() {
    let mut db = with(
        "CREATE TABLE p (k int, kind text, g boolean GENERATED ALWAYS AS (kind = 'a') STORED, at timestamptz NOT NULL);
         CREATE UNIQUE INDEX ON p (k) WHERE g;
         CREATE TABLE e (k int, g text GENERATED ALWAYS AS (k || 'X') STORED, at timestamptz NOT NULL); CREATE UNIQUE INDEX ON e (lower(g));
         CREATE TABLE r (k int4range, kind text, g boolean GENERATED ALWAYS AS (kind = 'a') STORED, at timestamptz NOT NULL,
                         EXCLUDE USING gist (k WITH &&) WHERE (g));
         CREATE TABLE late (k text PRIMARY KEY, at timestamptz NOT NULL);
         CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.k := lower(NEW.k); RETURN NEW; END';
         CREATE TRIGGER \"élargir\" BEFORE INSERT ON late FOR EACH ROW EXECUTE FUNCTION low();
         SELECT ttl_create_index(name::regclass, 'at', 0, hide_expired => true) FROM unnest('{p,e,r,late}'::text[]) AS name",
    );
    for (table, row, count) in [
        ("p (k, kind, at)", "(1, 'a', $)", "SELECT count(*) FROM p"),
        ("e (k, at)", "(1, $)", "SELECT count(*) FROM e"),
        ("r (k, kind, at)", "('[1,5]', 'a', $)", "SELECT count(*) FROM r"),
    ] {
        for clause in ["", " ON CONFLICT DO NOTHING"] {
            db.run(&format!("INSERT INTO {table} VALUES {}", row.replace('$', "now() - interval '1 hour'")));
            db.run(&format!("INSERT INTO {table} VALUES {}{clause}", row.replace('$', "now() + interval '1 hour'")));
            assert_eq!(db.get(count), "1", "{table}{clause}");
            db.run(&format!("DELETE FROM {}", table.split(' ').next().unwrap_or_default()));
        }
    }
    db.run("INSERT INTO late VALUES ('a', now() - interval '1 hour')");
    assert_eq!(
        db.error("INSERT INTO late VALUES ('A', now() + interval '1 hour') ON CONFLICT DO NOTHING").code,
        "40001"
    );
    db.run("INSERT INTO late VALUES ('B', now() + interval '1 hour') ON CONFLICT DO NOTHING");
    assert_eq!(db.get("SELECT k FROM late"), "b");
}

#[test]
fn a_live_row_that_is_only_changed_meanwhile_is_in_the_way_as_ever() {
    for (statement, expected) in [
        (INSERTS[0], "23505"),
        (INSERTS[1], "new"),
        (INSERTS[2], "touched"),
        (INSERTS[3], "touched"),
        (INSERTS[5], "23505"),
    ] {
        let mut db = table();
        let mut blocker = db.session("postgres");
        blocker.run("BEGIN; UPDATE t SET at = now(), v = 'touched' WHERE id = 1");
        match run_behind(&db, blocker, statement) {
            Ok(_) => assert_eq!(db.get("SELECT v FROM t WHERE id = 1"), expected, "{statement}"),
            Err(error) => assert_eq!(error.code, expected, "{statement}"),
        }
    }
}

#[test]
fn a_hidden_row_that_stays_fails_the_write_whatever_its_form() {
    for setup in [
        "SELECT ttl_create_index('t', 'at', 60, hide_expired => true, soft_delete_column => 'gone')",
        "SELECT ttl_create_index('t', 'at', 60, hide_expired => true, notify_channel => 'gone')",
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER keep BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION keep();
         SELECT ttl_create_index('t', 'at', 60, hide_expired => true)",
    ] {
        let mut db = with(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text, gone timestamptz);
             INSERT INTO t VALUES (1, '2020-01-01', 'dead'), (2, now(), 'other')",
        );
        db.run(setup);
        for statement in INSERTS {
            assert_eq!(db.error(statement).code, "23505", "{setup}: {statement}");
        }
        assert_eq!(db.get("SET pg_ttl_index.hide_expired = off; SELECT v FROM t WHERE id = 1"), "dead");
    }
}

#[test]
fn overlapping_spans_and_nulls_that_are_not_distinct_are_freed_too() {
    let mut db = with(
        "CREATE TABLE span (during int4range, at timestamptz, v text, EXCLUDE USING gist (during WITH &&));
         INSERT INTO span VALUES ('[1,5]', '2020-01-01', 'dead'), ('[6,9]', '2020-01-01', 'dead'), ('[20,29]', now(), 'live');
         SELECT ttl_create_index('span', 'at', 60, hide_expired => true);
         CREATE TABLE n (a int, at timestamptz, v text); INSERT INTO n VALUES (NULL, '2020-01-01', 'dead')",
    );
    db.run("INSERT INTO span VALUES ('[3,7]', now(), 'new')");
    assert_eq!(db.error("INSERT INTO span VALUES ('[8,21]', now(), 'new')").code, "23P01");
    assert_eq!(db.get("SELECT during, v FROM span ORDER BY 1"), "[3,8)|new\n[20,30)|live");
    if db.get("SELECT current_setting('server_version_num')::int >= 150000") == "t" {
        db.run("CREATE UNIQUE INDEX ON n (a) NULLS NOT DISTINCT; SELECT ttl_create_index('n', 'at', 60, hide_expired => true)");
        db.run("INSERT INTO n VALUES (NULL, now(), 'new') ON CONFLICT DO NOTHING");
        assert_eq!(db.get("SELECT v FROM n"), "new");
        assert_eq!(db.error("INSERT INTO n VALUES (NULL, now(), 'newer')").code, "23505");
    }
}

/// Statements beside somebody who lets row 1 expire, or in a twin of the table deletes it.
const BESIDE: [&str; 16] = [
    "INSERT INTO t VALUES (1, 1, now(), 'new')",
    "INSERT INTO t VALUES (9, 1, now(), 'other key')",
    "INSERT INTO t VALUES (5, 5, now(), 'a'), (1, 1, now(), 'b'), (6, 6, now(), 'c')",
    "INSERT INTO t VALUES (1, 1, now(), 'new') ON CONFLICT (id) DO UPDATE SET v = t.v || '+' || excluded.v",
    "INSERT INTO t VALUES (9, 1, now(), 'new') ON CONFLICT (k) DO UPDATE SET v = t.v || '+' || excluded.v",
    "INSERT INTO t VALUES (1, 7, now(), 'new'), (2, 8, now(), 'new') ON CONFLICT (id) DO UPDATE SET v = t.v || '+' || excluded.v, k = excluded.k",
    "INSERT INTO t VALUES (1, 1, now(), 'new'), (2, 2, now(), 'new'), (7, 7, now(), 'new') ON CONFLICT DO NOTHING",
    "INSERT INTO t VALUES (9, 1, now(), 'new') ON CONFLICT (k) DO NOTHING",
    "INSERT INTO t SELECT id, k, now(), 'copied' FROM t WHERE id <= 2 ON CONFLICT (id) DO UPDATE SET v = excluded.v",
    "MERGE INTO t USING (VALUES (1), (2), (8)) s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET v = 'matched' WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.id, now(), 'merged')",
    "UPDATE t SET id = 1 WHERE id = 2",
    "UPDATE t SET k = 1 WHERE id = 2",
    "UPDATE t SET v = 'updated' WHERE id IN (1, 2)",
    "DELETE FROM t WHERE id IN (1, 2)",
    "SELECT id, k, v FROM t WHERE id = 1 FOR UPDATE",
    "WITH w AS (DELETE FROM t WHERE id = 2 RETURNING *) INSERT INTO t SELECT 1, 1, now(), v FROM w",
];

#[test]
fn beside_concurrent_writers_hidden_rows_are_as_if_deleted() {
    for isolation in ["read committed", "repeatable read"] {
        let mut db = with("CREATE SCHEMA gone; CREATE SCHEMA hidden");
        for statement in BESIDE {
            let mut outcomes = Vec::new();
            for (schema, change) in [
                ("gone", "DELETE FROM t WHERE id = 1"),
                ("hidden", "UPDATE t SET at = '2020-01-01', v = 'dead' WHERE id = 1"),
            ] {
                let name = db.name.clone();
                db.run(&format!(
                    "DROP TABLE IF EXISTS {schema}.t; CREATE TABLE {schema}.t (id int PRIMARY KEY, k int UNIQUE, at timestamptz, v text);
                     INSERT INTO {schema}.t SELECT i, i, now(), 'old' FROM generate_series(1, 3) i;
                     ALTER DATABASE {name} SET search_path = {schema}, public;
                     ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'"
                ));
                if schema == "hidden" {
                    db.run("SELECT ttl_create_index('hidden.t', 'at', interval '1 hour', hide_expired => true)");
                }
                let mut blocker = db.session("postgres");
                blocker.run(&format!("BEGIN; {change}"));
                let result = run_behind(&db, blocker, statement).map_err(|error| error.code);
                outcomes.push((result, db.get(&format!("SELECT id, k, v FROM {schema}.t ORDER BY id"))));
            }
            let is_refused = outcomes[1].0 == Err("40001".into());
            assert!(
                outcomes[0] == outcomes[1] || (isolation != "read committed" && is_refused),
                "{isolation}: {statement}\n{outcomes:?}"
            );
        }
    }
}

/// Some clients let rows on few keys expire, others write them; who writes and is told of success has written.
#[test]
fn no_upsert_on_a_hot_key_is_lost() {
    let mut db = with("CREATE TABLE t (id int PRIMARY KEY, other int UNIQUE, at timestamptz, v bigint)");
    db.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true)");
    let writers: Vec<_> = (0..4)
        .map(|client| {
            let mut session = db.session("postgres");
            std::thread::spawn(move || {
                let (mut written, mut lost, mut errors) = (0, 0, Vec::new());
                let until = Instant::now() + Duration::from_secs(4);
                while Instant::now() < until {
                    written += 1;
                    let key = (written * 7 + client) % 3;
                    let result = session.try_get(&format!(
                        "INSERT INTO t VALUES ({key}, {key}, now(), {written}) ON CONFLICT (id) DO UPDATE SET at = now(), v = {written} RETURNING id"
                    ));
                    match result {
                        Ok(rows) => lost += i32::from(rows.is_empty()),
                        Err(error) if error.code == "40001" => {}
                        // PostgreSQL fails so on a key that is not named, when two insert the same row at once, without any rule too.
                        Err(error) if error.code == "23505" && error.message.contains("t_other_key") => {}
                        Err(error) => errors.push(error),
                    }
                }
                (written, lost, errors)
            })
        })
        .collect();
    let expirers: Vec<_> = (0..3)
        .map(|client| {
            let mut session = db.session("postgres");
            std::thread::spawn(move || {
                let (mut round, until) = (client, Instant::now() + Duration::from_secs(4));
                while Instant::now() < until {
                    round += 1;
                    session.run(&format!("UPDATE t SET at = '2020-01-01' WHERE id = {}", round % 3));
                }
            })
        })
        .collect();
    expirers.into_iter().for_each(|thread| thread.join().expect("a thread"));
    for thread in writers {
        let (written, lost, errors) = thread.join().expect("a thread");
        assert!(written > 20, "{written}");
        assert_eq!(lost, 0, "of {written}");
        assert!(errors.is_empty(), "{errors:?}");
    }
}

#[test]
fn keys_that_triggers_and_generated_columns_make_are_seen_too() {
    let mut db = with(
        "CREATE TABLE g (id int PRIMARY KEY, a text, low text UNIQUE GENERATED ALWAYS AS (lower(a)) STORED, at timestamptz);
         CREATE TABLE k (key text PRIMARY KEY, at timestamptz);
         CREATE FUNCTION make() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.key := lower(NEW.key); RETURN NEW; END';
         CREATE TRIGGER zz_make BEFORE INSERT ON k FOR EACH ROW EXECUTE FUNCTION make();
         SELECT ttl_create_index('g', 'at', 60, hide_expired => true), ttl_create_index('k', 'at', 60, hide_expired => true);
         INSERT INTO g VALUES (1, 'H', DEFAULT, '2020-01-01'); INSERT INTO k VALUES ('h', '2020-01-01')",
    );
    db.run("INSERT INTO g VALUES (2, 'h', DEFAULT, now()) ON CONFLICT DO NOTHING; INSERT INTO k VALUES ('H', now()) ON CONFLICT DO NOTHING");
    assert_eq!(db.get("SELECT id, low FROM g; SELECT key FROM k"), "2|h\nh");
    db.run("INSERT INTO g VALUES (3, 'X', DEFAULT, now()); UPDATE g SET at = '2020-01-01' WHERE id = 3");
    db.run("UPDATE g SET a = 'x' WHERE id = 2");
    assert_eq!(db.get("SELECT id, low FROM g"), "2|x");
}

#[test]
fn an_error_inside_a_statement_does_not_make_it_forget_what_it_is() {
    let mut db = table();
    db.run(
        "CREATE TABLE other (id int NOT NULL);
         CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN BEGIN INSERT INTO public.other VALUES (NULL); EXCEPTION WHEN OTHERS THEN NULL; END; RETURN NEW; END';
         CREATE TRIGGER fails BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fails()",
    );
    let mut blocker = db.session("postgres");
    blocker.run("BEGIN; UPDATE t SET at = '2020-01-01', v = 'dead' WHERE id = 1");
    run_behind(
        &db,
        blocker,
        "INSERT INTO t SELECT i, now(), 'new' FROM (VALUES (5), (1)) x (i) ON CONFLICT DO NOTHING",
    )
    .expect("a write");
    assert_eq!(db.get("SELECT v FROM t WHERE id = 1"), "new");
    db.run(
        "DROP TRIGGER fails ON t; INSERT INTO t VALUES (7, '2020-01-01', 'a'), (7, now(), 'b') ON CONFLICT DO NOTHING",
    );
}
