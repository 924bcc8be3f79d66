//! Rows that move to another table when they expire.

use crate::bad_input::refuses;
use crate::sweep::with;
use crate::worker::{database, server, worker_pid};
use harness::Session;
use std::process::Command;

const TABLE: &str = "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz, amount numeric,
                                     twice numeric GENERATED ALWAYS AS (amount * 2) STORED, label varchar(10));
    INSERT INTO t (at, amount, label) SELECT '2020-01-01', i / 3.0, 'n' || i FROM generate_series(1, 1000) i;
    INSERT INTO t (at, amount) VALUES (now(), 1);
    CREATE TABLE archive (LIKE t INCLUDING ALL, archived_at timestamptz NOT NULL DEFAULT now(), note text)";

/// Rows that are in neither table, or in both, of those that have been there.
const LOST: &str = "SELECT (SELECT count(*) FROM t) + (SELECT count(*) FROM archive) <> 1001
                        OR EXISTS (SELECT FROM t JOIN archive USING (id))";

#[test]
fn rows_move_as_they_are_and_are_never_in_both_or_in_neither() {
    let mut db = with(TABLE);
    db.run(
        "CREATE TABLE before AS SELECT * FROM t; SELECT ttl_create_index('t', 'at', 60, 10, archive_to => 'archive')",
    );
    let mut sweeper = db.session("postgres");
    let sweeping = std::thread::spawn(move || sweeper.run("CALL ttl_sweep('t')"));
    while !sweeping.is_finished() {
        assert_eq!(db.get(LOST), "f");
    }
    sweeping.join().expect("the sweep");
    assert_eq!(db.get("SELECT count(*), count(archived_at), count(note) FROM archive"), "1000|1000|0");
    assert_eq!(
        db.get(
            "SELECT count(*) FROM (SELECT id, at, amount, twice, label FROM archive INTERSECT SELECT * FROM before) x"
        ),
        "1000"
    );
    assert_eq!(
        db.get("SELECT cleanup_mode, archive_to, total_rows_deleted FROM ttl_summary"),
        "archive|public.archive|1000"
    );
}

#[test]
fn a_crash_in_the_middle_of_a_batch_leaves_every_row_in_one_place() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(TABLE);
    db.run(
        "CREATE TABLE go (); CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN IF NEW.id = 500 AND to_regclass('public.go') IS NULL THEN PERFORM pg_sleep(60); END IF; RETURN NEW; END $$;
         CREATE TRIGGER slow BEFORE INSERT ON archive FOR EACH ROW EXECUTE FUNCTION slow(); DROP TABLE go",
    );
    let pid = worker_pid(&mut db);
    db.run("SELECT ttl_create_index('t', 'at', 60, 300, archive_to => 'archive')");
    db.wait_for("SELECT count(*) FROM archive", "300");
    db.wait_for(&format!("SELECT wait_event FROM pg_stat_activity WHERE pid = {pid}"), "PgSleep");
    assert!(Command::new("kill").args(["-9", &pid]).status().expect("kill").success());
    // The server ends all sessions and recovers.
    let mut db = Session::reconnect(&server, &db.name);
    assert_eq!(db.get(LOST), "f");
}

#[test]
fn an_archive_that_cannot_hold_every_row_is_refused() {
    refuses(
        "CREATE TABLE t (id int, at timestamptz, label varchar(10), gone timestamptz);
         CREATE TABLE lacking (id int, at timestamptz, gone timestamptz);
         CREATE TABLE narrow (id smallint, at timestamptz, label varchar(10), gone timestamptz);
         CREATE TABLE short (id int, at timestamptz, label varchar(9), gone timestamptz);
         CREATE TABLE daily (id int, at date, label text, gone timestamptz);
         CREATE TABLE needy (LIKE t, why text NOT NULL);
         CREATE TABLE good (id bigint, at timestamptz, label varchar(20), gone timestamptz, n int NOT NULL DEFAULT 0);
         CREATE TABLE exact (n bigint, q numeric, c char(5), s text, at timestamptz);
         CREATE DOMAIN cents AS numeric(10, 2); CREATE UNLOGGED TABLE passing_by (LIKE t);
         CREATE TABLE rough (n double precision, q numeric, c char(5), s text, at timestamptz);
         CREATE TABLE rounded (n bigint, q cents, c char(5), s text, at timestamptz);
         CREATE TABLE trimmed (n bigint, q numeric, c text, s text, at timestamptz);
         CREATE TABLE signed (n int, at timestamptz); CREATE TABLE unsigned (n oid, at timestamptz);
         CREATE TABLE named (n bigint, q numeric, c char(5), s name, at timestamptz);
         CREATE VIEW v AS SELECT * FROM t; CREATE TEMP TABLE passing (LIKE t); CREATE TABLE child () INHERITS (t)",
        &[
            ("ttl_create_index('t', 'at', 60, archive_to => 'lacking')", "42703"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'narrow')", "42804"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'short')", "42804"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'daily')", "42804"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'needy')", "23502"),
            ("ttl_create_index('exact', 'at', 60, archive_to => 'rough')", "42804"),
            ("ttl_create_index('exact', 'at', 60, archive_to => 'rounded')", "42804"),
            ("ttl_create_index('exact', 'at', 60, archive_to => 'trimmed')", "42804"),
            ("ttl_create_index('exact', 'at', 60, archive_to => 'named')", "42804"),
            ("ttl_create_index('signed', 'at', 60, archive_to => 'unsigned')", "42804"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'passing_by')", "0A000"),
            ("ttl_create_index('t', 'at', 60, archive_to => 't')", "22023"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'child')", "22023"),
            ("ttl_create_index('child', 'at', 60, archive_to => 't')", "22023"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'v')", "42809"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'passing')", "0A000"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'nowhere')", "42P01"),
            ("ttl_create_index('t', 'at', 60, archive_to => 4294967295::oid::regclass)", "42P01"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'pg_class')", "42501"),
            ("ttl_create_index('t', 'at', 60, archive_to => 'good', soft_delete_column => 'gone')", "22023"),
        ],
    );
}

#[test]
fn an_archive_belongs_to_the_owner_of_the_table() {
    let mut db = with("");
    let (owner, other) = (db.role("owner"), db.role("other"));
    db.session(&other).run("CREATE TABLE theirs (at timestamptz); GRANT ALL ON theirs TO PUBLIC");
    let mut session = db.session(&owner);
    session.run(
        "CREATE TABLE t (at timestamptz); CREATE TABLE mine (at timestamptz); INSERT INTO t VALUES ('2020-01-01')",
    );
    assert_eq!(session.error("SELECT ttl_create_index('t', 'at', 60, archive_to => 'theirs')").code, "42501");
    // A superuser cannot have it either: its triggers would run as the owner of the rows.
    assert_eq!(db.error("SELECT ttl_create_index('t', 'at', 60, archive_to => 'theirs')").code, "42501");
    session.run("SELECT ttl_create_index('t', 'at', 60, archive_to => 'mine')");
    db.run(&format!("ALTER TABLE mine OWNER TO {other}; GRANT ALL ON mine TO {owner}"));
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42501");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}

#[test]
fn partitions_of_an_archive_belong_to_its_owner_too() {
    let mut db = with("");
    let (owner, other) = (db.role("owner"), db.role("other"));
    db.session(&owner).run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); CREATE TABLE archive (at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE archive_1 PARTITION OF archive DEFAULT; SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive')",
    );
    db.run(&format!("ALTER TABLE archive_1 OWNER TO {other}"));
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42501");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
}

#[test]
fn an_archive_that_becomes_part_of_the_table_stops_the_rule() {
    let mut db = with(
        "CREATE TABLE t (at timestamptz); CREATE TABLE archive (LIKE t); INSERT INTO t VALUES ('2020-01-01');
         SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive'); SELECT ttl_runner('t'); ALTER TABLE archive INHERIT t",
    );
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "22023");
    assert_eq!(db.get("SELECT count(*) FROM archive"), "1");
}

#[test]
fn triggers_of_the_archive_run_as_its_owner() {
    let server = server(&[]);
    let mut db = database(&server);
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run(
        "CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01'); CREATE TABLE archive (at timestamptz, who text);
         CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS
         'BEGIN NEW.who := current_user; RETURN NEW; END';
         CREATE TRIGGER who BEFORE INSERT ON archive FOR EACH ROW EXECUTE FUNCTION who();
         SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive')",
    );
    session.wait_for("SELECT who FROM archive", &owner);
}

#[test]
fn ddl_on_the_archive_in_the_middle_of_a_sweep_stops_the_rule_and_loses_nothing() {
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('t', 'at', 60, 1, archive_to => 'archive')");
    let mut sweeper = db.session("postgres");
    let sweeping = std::thread::spawn(move || sweeper.try_get("CALL ttl_sweep('t')"));
    db.wait_for("SELECT count(*) > 10 FROM archive", "t");
    db.run("ALTER TABLE archive DROP COLUMN label");
    let _ = sweeping.join().expect("the sweep");
    let moved = db.get("SELECT count(*) FROM archive");
    assert_ne!(moved, "1000", "the sweep went on");
    let error = db.error("SELECT ttl_runner('t')");
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("42703", "archive table public.archive lacks column \"label\"")
    );
    db.run("SELECT ttl_runner()");
    assert_eq!(db.get("SELECT state, last_error LIKE '42703: archive table%' FROM ttl_summary"), "error|t");
    assert_eq!(db.get(LOST), "f");
    db.run("ALTER TABLE archive ADD label text");
    assert_eq!(db.get(&format!("SELECT ttl_runner('t') = 1000 - {moved}")), "t");
    assert_eq!(db.get("SELECT state FROM ttl_summary"), "active");
    assert_eq!(db.get(LOST), "f");
}

#[test]
fn an_archive_is_followed_through_renames_and_its_loss_stops_the_rule() {
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive'); CREATE SCHEMA attic");
    db.run("ALTER TABLE archive RENAME TO \"Old rows\"; ALTER TABLE \"Old rows\" SET SCHEMA attic; CREATE TABLE archive (LIKE t)");
    assert_eq!(db.get("SELECT archive_to FROM ttl_summary"), "attic.\"Old rows\"");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1000");
    assert_eq!(db.get("SELECT count(*) FROM attic.\"Old rows\""), "1000");
    db.run("INSERT INTO t (at) VALUES ('2020-01-01'); DROP TABLE attic.\"Old rows\"; CREATE TABLE attic.\"Old rows\" (LIKE t)");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42P01");
    assert_eq!(db.get("SELECT count(*) FROM t"), "2");
    db.run("SELECT ttl_alter_index('t', 'at', archive_to => 'archive')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn every_partition_and_child_is_archived_or_stops_the_rule() {
    let mut db = with(
        "CREATE TABLE p (id int, at timestamptz) PARTITION BY HASH (id);
         CREATE TABLE p0 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE p1 (at timestamptz, dropped int, id int); ALTER TABLE p1 DROP COLUMN dropped;
         ALTER TABLE p ATTACH PARTITION p1 FOR VALUES WITH (MODULUS 2, REMAINDER 1);
         INSERT INTO p SELECT i, '2020-01-01' FROM generate_series(1, 100) i;
         CREATE TABLE archive (id int, at timestamptz) PARTITION BY RANGE (id);
         CREATE TABLE archive_1 PARTITION OF archive FOR VALUES FROM (0) TO (50);
         CREATE TABLE archive_2 PARTITION OF archive DEFAULT",
    );
    db.run("SELECT ttl_create_index('p', 'at', 60, archive_to => 'archive')");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "100");
    assert_eq!(db.get("SELECT count(*), count(DISTINCT id), count(DISTINCT tableoid) FROM archive"), "100|100|2");

    db.run("CREATE TABLE parent (at timestamptz); CREATE TABLE child (more int) INHERITS (parent); CREATE TABLE small (at timestamptz);
            INSERT INTO child VALUES ('2020-01-01', 7)");
    db.run("SELECT ttl_create_index('parent', 'at', 60, archive_to => 'small')");
    assert_eq!(db.error("SELECT ttl_runner('parent')").code, "42703");
    assert_eq!(db.get("SELECT more FROM child"), "7");
}

#[test]
fn a_row_that_the_archive_does_not_take_stays_and_holds_up_no_other() {
    let mut db = with(TABLE);
    db.run(
        "CREATE FUNCTION choosy() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN IF NEW.id = 7 THEN RETURN NULL; END IF; IF NEW.id = 8 THEN RAISE 'not this one'; END IF; RETURN NEW; END $$;
         CREATE TRIGGER choosy BEFORE INSERT ON archive FOR EACH ROW EXECUTE FUNCTION choosy()",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "998");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "7,8,1001");
    assert_eq!(db.get("SELECT state, blocked_rows FROM ttl_summary"), "blocked|2");
    assert_eq!(db.get(LOST), "f");
}

#[test]
fn a_hidden_row_keeps_its_key_until_it_is_archived() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); CREATE TABLE archive (LIKE t); INSERT INTO t VALUES (1, '2020-01-01')",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, hide_expired => true, archive_to => 'archive')");
    assert_eq!(db.get("SELECT count(*) FROM t"), "0");
    assert_eq!(db.error("INSERT INTO t VALUES (1, now())").code, "23505");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    db.run("INSERT INTO t VALUES (1, now())");
    assert_eq!(db.get("SELECT count(*) FROM archive"), "1");
}

#[test]
fn a_type_that_is_cut_in_the_middle_of_a_sweep_cuts_nothing() {
    let mut db = with(TABLE);
    db.run("ALTER TABLE archive DROP COLUMN twice; ALTER TABLE t DROP COLUMN twice; SELECT ttl_create_index('t', 'at', 60, 1, archive_to => 'archive')");
    let mut sweeper = db.session("postgres");
    let sweeping = std::thread::spawn(move || sweeper.try_get("CALL ttl_sweep('t')"));
    db.wait_for("SELECT count(*) > 10 FROM archive", "t");
    let moved =
        db.get("BEGIN; ALTER TABLE archive ALTER amount TYPE numeric(20, 0); SELECT count(*) FROM archive; COMMIT");
    let _ = sweeping.join().expect("the sweep");
    assert_eq!(db.get("SELECT count(*) FROM archive"), moved);
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42804");
}

#[test]
fn archives_in_a_circle_are_refused() {
    let tables = "CREATE TABLE a (id int, at timestamptz); CREATE TABLE b (LIKE a); CREATE TABLE c (LIKE a) PARTITION BY LIST (id);
         CREATE TABLE c1 PARTITION OF c DEFAULT; SELECT ttl_create_index('a', 'at', 60, archive_to => 'b'),
         ttl_create_index('b', 'at', 120, archive_to => 'c')";
    let mut db = with(tables);
    for call in [
        "ttl_create_index('c', 'at', 180, archive_to => 'a')",
        "ttl_create_index('c1', 'at', 180, archive_to => 'a')",
        "ttl_create_index('c', 'at', 180, archive_to => 'b')",
        "ttl_alter_index('b', 'at', archive_to => 'a')",
    ] {
        let error = db.error(&format!("SELECT {call}"));
        assert_eq!(error.code, "22023", "{call}");
        assert!(error.message.contains("would come back"), "{error:?}");
    }
    assert_eq!(db.get("SELECT string_agg(archive_to, ',' ORDER BY id) FROM ttl_index_table"), "public.b,public.c");
    // One that was written by hand, as a restore does, moves nothing.
    db.run("SELECT ttl_create_index('c', 'at', 180); UPDATE ttl_index_table SET archive_to = 'public.a' WHERE table_name = 'c'");
    db.run("INSERT INTO a VALUES (1, '2020-01-01')");
    assert_eq!(db.error("SELECT ttl_runner('a')").code, "22023");
    assert_eq!(db.get("SELECT count(*) FROM a"), "1");
    // A chain has an end.
    db.run("SELECT ttl_drop_index('c', 'at'); SELECT ttl_runner('a'), ttl_runner('b')");
    assert_eq!(db.get("SELECT count(*) FROM c"), "1");
}
