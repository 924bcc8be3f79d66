//! Indexes that a worker makes without keeping anybody from writing.

use crate::bad_input::refuses;
use crate::sweep::with;
use crate::worker::{EXPIRED, ROWS, database, server};
use harness::{Database, Session, run};
use std::process::Command;

const STATE: &str = "SELECT index_state, hold FROM ttl_summary";
const BUILDER: &str =
    "SELECT pid FROM pg_stat_activity WHERE query LIKE 'making the index%' AND datname = current_database()";

/// A session whose open transaction the making of an index has to wait for.
fn holding(db: &Database) -> Session {
    let mut session = db.session("postgres");
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM t");
    session
}

#[test]
fn the_rule_is_there_at_once_and_nobody_waits_for_the_index() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true, filter => 'id > 0')");
    db.wait_for(STATE, "building|");
    db.wait_for("SELECT count(*) FROM ttl_progress WHERE phase = 'building'", "1");
    db.wait_for(ROWS, "0");
    db.run("SET lock_timeout = '5s'; INSERT INTO t VALUES (1, now())");
    assert_eq!(db.get(STATE), "building|");
    reader.run("COMMIT");
    db.wait_for(STATE, "valid|");
    assert_eq!(
        db.get("SELECT indexdef FROM pg_indexes WHERE tablename = 't'"),
        "CREATE INDEX idx_ttl_t_at ON public.t USING btree (at) WHERE (id > 0)"
    );
    assert_eq!(db.get("SELECT index_name, index_concurrently, state FROM ttl_summary"), "idx_ttl_t_at|t|active");
    db.run("SELECT ttl_drop_index('t', 'at')");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't'"), "0");
}

#[test]
fn a_large_table_is_left_until_its_index_is_there() {
    let server = server(&[]);
    let mut db = database(&server);
    // Seventeen thousand blocks, with a row in each.
    db.run("CREATE TABLE t (id int, at timestamptz, pad text) WITH (fillfactor = 10); ALTER TABLE t ALTER pad SET STORAGE PLAIN;
            INSERT INTO t SELECT i, '2020-01-01', repeat('x', 4500) FROM generate_series(1, 17000) i");
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for(STATE, "building|concurrently");
    let before = db.get("SELECT ttl_next_pass()");
    db.wait_for(&format!("SELECT ttl_next_pass() > '{before}'"), "t");
    assert_eq!(db.get(ROWS), "17000");
    reader.run("COMMIT");
    db.wait_for(ROWS, "0");
    assert_eq!(db.get(STATE), "valid|");
}

#[test]
fn what_a_crash_left_is_cleaned_up_and_made_again() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let _reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for(STATE, "building|");
    db.wait_for("SELECT count(*) FROM pg_index WHERE NOT indisvalid", "1");
    let leftover = db.get("SELECT indexrelid FROM pg_index WHERE NOT indisvalid");
    let pid = db.get(BUILDER);
    run(Command::new("kill").args(["-9", &pid]));
    let mut session = Session::reconnect(&server, &db.name);
    session.wait_for(STATE, "valid|");
    assert_eq!(session.get(&format!("SELECT count(*) FROM pg_class WHERE oid = {leftover}")), "0");
    assert_eq!(session.get("SELECT string_agg(indexname, ',') FROM pg_indexes WHERE tablename = 't'"), "idx_ttl_t_at");
    db.release();
}

#[test]
fn a_failure_is_shown_and_tried_again() {
    let server = server(&[]);
    let mut db = database(&server);
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    // The index runs this function, and not as somebody else.
    session.run(
        "CREATE TABLE hope (); CREATE TABLE t (id int, at timestamptz); INSERT INTO t VALUES (1, now());
         CREATE FUNCTION fragile(int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$
         BEGIN IF to_regclass('public.hope') IS NOT NULL AND pg_has_role(session_user, 'pg_read_all_data', 'USAGE') THEN
                   RAISE 'fragile as %', current_user; END IF; RETURN true; END $$",
    );
    session.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true, filter => 'fragile(id)')");
    db.wait_for(
        "SELECT state, index_state, last_error, consecutive_failures >= 2 FROM ttl_summary",
        &format!("error|invalid|P0001: fragile as {owner}|t"),
    );
    assert_eq!(server.log().matches("could not be made: P0001: fragile as").count(), 1, "it is logged once");
    db.run("DROP TABLE hope");
    db.wait_for("SELECT state, index_state FROM ttl_summary", "active|valid");
}

#[test]
fn partitions_get_theirs_one_by_one_and_new_ones_too() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(
        "CREATE TABLE t (id int, at timestamptz) PARTITION BY LIST (id);
         CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1);
         CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2, 3) PARTITION BY LIST (id);
         CREATE TABLE t2_2 PARTITION OF t2 FOR VALUES IN (2); INSERT INTO t VALUES (1, now()), (2, '2020-01-01')",
    );
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for("SELECT count(*) FROM pg_index WHERE NOT indisvalid", "1");
    db.run("SET lock_timeout = '5s'; INSERT INTO t VALUES (1, now()), (2, now())");
    reader.run("COMMIT");
    db.wait_for(STATE, "valid|");
    db.run("CREATE TABLE t2_3 PARTITION OF t2 FOR VALUES IN (3)");
    assert_eq!(
        db.get(
            "SELECT string_agg(relid::regclass::text, ',' ORDER BY relid::regclass::text), bool_and(indisvalid)
                FROM pg_partition_tree('idx_ttl_t_at') JOIN pg_index ON indexrelid = relid"
        ),
        "idx_ttl_t1_at,idx_ttl_t2_2_at,idx_ttl_t_at,t2_3_at_idx,t2_at_idx|t"
    );
    db.wait_for("SELECT count(*) FROM t", "3");
}

#[test]
fn rules_and_databases_can_be_dropped_while_an_index_is_being_made() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for("SELECT count(*) FROM pg_index WHERE NOT indisvalid", "1");
    let mut dropper = db.session("postgres");
    dropper.run("SET lock_timeout = '20s'");
    reader.run("COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1");
    db.run("SELECT ttl_alter_index('t', 'at', expire_after_seconds => 90)");
    dropper.run("SELECT ttl_drop_index('t', 'at')");
    reader.run("COMMIT");
    db.wait_for(&BUILDER.replace("SELECT pid", "SELECT count(*)"), "0");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't'"), "0");

    let other = database(&server);
    let mut session = other.session("postgres");
    session.run(EXPIRED);
    session.run("SELECT ttl_stop_worker()");
    session.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    // A prepared transaction would do as well: another database's session cannot hold this up, so one in it that then goes.
    session.run("SELECT ttl_start_worker()");
    drop(session);
    let name = other.name.clone();
    other.release();
    let mut admin = Session::connect(&server, "postgres", "postgres");
    admin.run(&format!("DROP DATABASE {name}"));
}

#[test]
fn what_cannot_be_built_is_refused() {
    refuses(
        "CREATE TABLE t (at timestamptz, days int)",
        &[
            ("ttl_create_index('t', 'at', 60, concurrently => true, index_method => 'none')", "22023"),
            ("ttl_create_index('t', 'at + days * interval ''1 day''', 0, concurrently => true)", "42P17"),
        ],
    );
    let mut db = with("CREATE SCHEMA closed");
    let owner = db.role("owner");
    db.run(&format!("CREATE TABLE closed.t (at timestamptz); GRANT USAGE ON SCHEMA closed TO {owner}; ALTER TABLE closed.t OWNER TO {owner}"));
    let create = "SELECT ttl_create_index('closed.t', 'at', 60, concurrently => true)";
    assert_eq!(db.session(&owner).error(create).code, "42501", "as CREATE INDEX would be");
}

#[test]
fn indexes_of_others_are_neither_dropped_nor_in_the_way() {
    let server = server(&[]);
    let mut db = database(&server);
    let long = "a_partition_with_a_name_that_is_almost_as_long_as_names_can_";
    db.run(&format!(
        "CREATE TABLE t (id int, at timestamptz) PARTITION BY LIST (id);
         CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2);
         CREATE TABLE {long}01 PARTITION OF t FOR VALUES IN (3); CREATE TABLE {long}02 PARTITION OF t FOR VALUES IN (4);
         CREATE UNIQUE INDEX idx_ttl_t1_at ON t1 (id); CREATE INDEX own ON t2 (at); CREATE TABLE idx_ttl_t_at ();
         SELECT ttl_create_index('t1', 'at', interval '1 day', filter => 'id > 0');
         INSERT INTO t SELECT i, now() FROM generate_series(1, 4) i"
    ));
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for("SELECT index_state FROM ttl_summary WHERE table_name = 't'", "valid");
    assert_eq!(
        db.get("SELECT index_state, index_name FROM ttl_summary WHERE table_name = 't1'"),
        "valid|idx_ttl_t1_at_1"
    );
    assert_eq!(db.get("SELECT indisunique FROM pg_index WHERE indexrelid = 'idx_ttl_t1_at'::regclass"), "t");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't2'"), "1", "what is there is used");
    assert_eq!(
        db.get("SELECT count(*), bool_and(indisvalid) FROM pg_partition_tree('idx_ttl_t_at_1') JOIN pg_index ON indexrelid = relid"),
        "5|t"
    );
}

#[test]
fn the_owner_is_never_kept_waiting_by_the_making_of_an_index() {
    let server = server(&["pg_ttl_index.naptime=1h"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for("SELECT count(*) FROM pg_index WHERE NOT indisvalid", "1");
    db.run("SET lock_timeout = '5s'; SELECT ttl_pause('t')");
    db.wait_for(&BUILDER.replace("SELECT pid", "SELECT count(*)"), "0");
    db.run("SELECT ttl_resume('t')");
    db.wait_for(&BUILDER.replace("SELECT pid", "SELECT count(*)"), "1");
    reader.run("COMMIT");
    db.wait_for(STATE, "valid|");
}

#[test]
fn a_rule_that_goes_leaves_no_index_behind() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(
        "CREATE TABLE t (id int, at timestamptz) PARTITION BY LIST (id);
         CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)",
    );
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for("SELECT count(*) FROM pg_index WHERE NOT indisvalid", "1");
    db.run("SELECT ttl_drop_index('t', 'at')");
    reader.run("COMMIT");
    db.wait_for(&BUILDER.replace("SELECT pid", "SELECT count(*)"), "0");
    assert_eq!(db.get("SELECT count(*) FROM pg_index WHERE indisvalid AND indrelid IN ('t'::regclass, 't1'::regclass, 't2'::regclass)"), "0");
}

#[test]
fn a_rule_that_is_altered_meanwhile_gets_the_index_it_needs_then() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("UPDATE t SET at = now()");
    let mut reader = holding(&db);
    db.run("SELECT ttl_create_index('t', 'at', 60, concurrently => true)");
    db.wait_for("SELECT count(*) FROM pg_index WHERE NOT indisvalid", "1");
    db.run("SELECT ttl_alter_index('t', 'at', filter => 'id > 5')");
    reader.run("COMMIT");
    db.wait_for(STATE, "valid|");
    assert_eq!(
        db.get("SELECT indexdef FROM pg_indexes WHERE tablename = 't'"),
        "CREATE INDEX idx_ttl_t_at ON public.t USING btree (at) WHERE (id > 5)"
    );
}

#[test]
fn making_an_index_and_sweeping_rest_each_for_its_own_reasons() {
    let server = server(&[]);
    let mut db = database(&server);
    let owner = db.role("owner");
    db.run("CREATE SCHEMA app");
    db.run(&format!("GRANT ALL ON SCHEMA app TO {owner}"));
    db.session(&owner).run(
        "CREATE TABLE app.t (at timestamptz); INSERT INTO app.t VALUES ('2020-01-01');
         SELECT ttl_create_index('app.t', 'at', 60, index_method => 'none', run_every => interval '1 day')",
    );
    db.wait_for("SELECT total_rows_deleted FROM ttl_summary", "1");
    // The rule is not due for a day, but its index is wanted now.
    db.session(&owner).run("SELECT ttl_alter_index('app.t', 'at', index_method => 'btree', concurrently => true)");
    db.wait_for("SELECT index_state FROM ttl_summary", "valid");

    db.session(&owner).run("CREATE TABLE app.u (at timestamptz)");
    db.run("SELECT ttl_stop_worker()");
    db.session(&owner).run("SELECT ttl_create_index('app.u', 'at', 60, concurrently => true)");
    db.run(&format!("REVOKE CREATE ON SCHEMA app FROM {owner}; SELECT ttl_start_worker()"));
    let failures = "SELECT consecutive_failures >= 3, left(last_error, 5) FROM ttl_summary WHERE table_name = 'u'";
    db.wait_for(failures, "t|42501");
    // It is tried again in 16 seconds or so, but rows go all the while.
    for _ in 0..3 {
        db.run("INSERT INTO app.u VALUES ('2020-01-01')");
        db.wait_for("SELECT count(*) FROM app.u", "0");
    }
    assert_eq!(db.get(failures), "t|42501");
}
