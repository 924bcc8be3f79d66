//! A cancel ends what the user asked for, and an error of a user's code is never passed over in silence.

use harness::{Database, Session};

/// A table whose filter runs code whenever it is read: a literal of a composite type calls the check of its field's domain.
const TRAP: &str = "CREATE TABLE trap (at timestamptz, n int);
    CREATE TABLE mood (says text); INSERT INTO mood VALUES ('calm');
    CREATE FUNCTION moody(int) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        CASE (SELECT says FROM public.mood)
            WHEN 'slow' THEN PERFORM pg_sleep(60);
            WHEN 'cancel' THEN RAISE EXCEPTION 'I am cancelled' USING ERRCODE = 'query_canceled';
            WHEN 'fail' THEN RAISE EXCEPTION 'I fail';
            ELSE NULL;
        END CASE;
        RETURN true;
    END $$;
    CREATE DOMAIN trapped AS int CHECK (moody(VALUE)); CREATE TYPE pair AS (x trapped);
    CREATE FUNCTION x_of(pair) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1'";

const FILTER: &str = "x_of(''(1)''::pair) = n";

fn set_mood(session: &mut Session, mood: &str) {
    session.run(&format!("UPDATE mood SET says = '{mood}'"));
}

#[test]
fn a_timeout_while_a_filter_is_read_is_no_fault_of_the_filter() {
    let mut db = Database::new();
    db.run(TRAP);
    set_mood(&mut db, "slow");
    db.run("SET statement_timeout = '300ms'");
    let error = db.error(&format!("SELECT ttl_create_index('trap', 'at', 60, filter => '{FILTER}')"));
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("57014", "canceling statement due to statement timeout")
    );
}

#[test]
fn a_timeout_ends_a_run_over_all_rules() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    db.run(TRAP);
    db.run(&format!("SELECT ttl_create_index('trap', 'at', 60, filter => '{FILTER}')"));
    db.run("INSERT INTO trap VALUES ('2020-01-01', 1)");
    set_mood(&mut db, "slow");
    db.run("SET statement_timeout = '300ms'");
    assert_eq!(db.error("SELECT ttl_runner()").message, "canceling statement due to statement timeout");
    db.run("RESET statement_timeout");
    assert_eq!(db.get("SELECT last_error FROM ttl_state"), "");
}

#[test]
fn code_that_poses_as_a_cancel_is_an_error_like_any_other() {
    let mut db = Database::new();
    let owner = db.role("mallory");
    let mut session = db.session(&owner);
    session.run(TRAP);
    session.run(&format!("SELECT ttl_create_index('trap', 'at', 60, filter => '{FILTER}', index_method => 'none')"));
    set_mood(&mut session, "cancel");
    session.run("ALTER TABLE trap RENAME COLUMN n TO m");
    db.wait_for("SELECT state FROM ttl_summary", "error");
    db.run("CREATE TABLE other (x int); ALTER TABLE other RENAME TO another; DROP TABLE another");
}

#[test]
fn an_index_is_not_made_without_the_filter_that_could_not_be_read() {
    let mut db = Database::new();
    db.run(TRAP);
    db.run(&format!(
        "BEGIN; SELECT ttl_create_index('trap', 'at', 60, filter => '{FILTER}', concurrently => true);
         UPDATE mood SET says = 'fail'; COMMIT"
    ));
    db.wait_for("SELECT index_error IS NOT NULL FROM ttl_state", "t");
    assert_eq!(db.get("SELECT index_error FROM ttl_state"), "P0001: invalid filter: I fail");
    assert_eq!(db.get("SELECT count(*) FROM pg_index WHERE indrelid = 'trap'::regclass"), "0");
    set_mood(&mut db, "calm");
    db.run("SELECT ttl_alter_index('trap', 'at', batch_size => 5)");
    db.wait_for("SELECT index_state FROM ttl_summary", "valid");
    assert!(
        db.get("SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'trap'::regclass").contains("WHERE")
    );
}
