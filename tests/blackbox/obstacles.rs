//! What is in the way of a sweep, and how it goes on all the same.

use crate::sweep::with;

#[test]
fn blocked_rows_are_counted_and_do_not_hold_up_the_others() {
    let mut db = with(
        "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz);
         CREATE TABLE child (parent int REFERENCES parent);
         INSERT INTO parent SELECT i, now() - interval '1 day' - i * interval '1 second' FROM generate_series(1, 5000) i;
         INSERT INTO child SELECT i FROM generate_series(7, 5000, 250) i",
    );
    db.run("SELECT ttl_create_index('parent', 'at', interval '1 hour', 1000)");
    assert_eq!(db.get("SELECT ttl_runner('parent')"), "4980");
    let state = "SELECT state, blocked_rows, left(last_error, 5), total_rows_deleted FROM ttl_summary";
    assert_eq!(db.get(state), "blocked|20|23503|4980");
    db.run("DELETE FROM child WHERE parent < 1000");
    assert_eq!(db.get("SELECT ttl_runner('parent')"), "4");
    assert_eq!(db.get(state), "blocked|16|23503|4984");
    db.run("DELETE FROM child; SELECT ttl_runner('parent')");
    assert_eq!(db.get(state), "active|0||5000");
}

#[test]
fn a_sweep_that_finds_nothing_new_writes_nothing() {
    let mut db = with(
        "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); CREATE TABLE child (parent int REFERENCES parent);
         INSERT INTO parent VALUES (1, '2020-01-01'); INSERT INTO child VALUES (1)",
    );
    db.run("SELECT ttl_create_index('parent', 'at', 60); SELECT ttl_runner('parent')");
    let before = db.get("SELECT count(*), max(finished_at) FROM ttl_history");
    db.run("SELECT ttl_runner('parent')");
    assert_eq!(db.get("SELECT count(*), max(finished_at) FROM ttl_history"), before);
}

#[test]
fn a_trigger_that_keeps_rows_neither_loops_nor_starves_others() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 1000) i;
         CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN IF OLD.id % 2 = 0 THEN RETURN NULL; END IF; RETURN OLD; END';
         CREATE TRIGGER keep BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION keep()",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, 10)");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "500");
    assert_eq!(db.get("SELECT state, blocked_rows FROM ttl_summary"), "blocked|500");
}

#[test]
fn rows_that_others_have_locked_are_left_and_counted() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 100) i",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, 10)");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT FROM t WHERE id IN (3, 50) FOR UPDATE");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "98");
    assert_eq!(db.get("SELECT state, locked_rows FROM ttl_summary"), "active|2");
    other.run("UPDATE t SET at = now() WHERE id = 3; COMMIT");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT id FROM t"), "3", "a row touched at the last moment lives");
}

#[test]
fn one_bad_rule_harms_no_other() {
    let mut db = with(
        "CREATE TABLE a (at timestamptz); INSERT INTO a VALUES ('2020-01-01');
         CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM FROM public.nowhere; RETURN OLD; END';
         CREATE TRIGGER broken BEFORE DELETE ON a FOR EACH ROW EXECUTE FUNCTION broken();
         CREATE TABLE b (at timestamptz); INSERT INTO b VALUES ('2020-01-01')",
    );
    db.run("SELECT ttl_create_index('a', 'at', 60), ttl_create_index('b', 'at', 60)");
    assert_eq!(db.get("SELECT ttl_runner()"), "1");
    assert_eq!(
        db.get("SELECT table_name, state, last_error, consecutive_failures FROM ttl_summary"),
        "a|error|42P01: relation \"public.nowhere\" does not exist|1\nb|active||0"
    );
    assert_eq!(db.error("SELECT ttl_runner('a')").code, "42P01", "who asks for one table gets its error");
    db.run("DROP TRIGGER broken ON a; SELECT ttl_runner('a')");
    assert_eq!(db.get("SELECT state, consecutive_failures FROM ttl_summary WHERE table_name = 'a'"), "active|0");
}

#[test]
fn one_session_sweeps_a_rule_at_a_time() {
    let mut db = with("CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01')");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT ttl_runner('t')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    other.run("INSERT INTO t VALUES ('2020-01-01'); ROLLBACK");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn a_rule_whose_filter_lost_a_column_deletes_nothing() {
    let mut db = with("CREATE TABLE t (at timestamptz, n int, m int); INSERT INTO t VALUES ('2020-01-01', 1, 1)");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 0', index_method => 'none')");
    db.run("ALTER TABLE t DROP COLUMN n; ALTER TABLE t RENAME COLUMN m TO n");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42703");
    db.run("SELECT ttl_runner()");
    assert_eq!(db.get("SELECT count(*) FROM t"), "1");
    assert_eq!(db.get("SELECT last_error FROM ttl_summary"), "42703: column \"n\" of the filter was dropped");
}

#[test]
fn an_error_that_pretends_to_be_a_cancel_blocks_its_row_and_nothing_else() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 100) i;
         CREATE FUNCTION pretend() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN IF OLD.id = 50 THEN RAISE EXCEPTION ''no'' USING ERRCODE = ''query_canceled''; END IF; RETURN OLD; END';
         CREATE TRIGGER pretend BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION pretend()",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    assert_eq!(db.get("SELECT ttl_runner()"), "99");
    assert_eq!(db.get("SELECT state, blocked_rows FROM ttl_summary"), "blocked|1");
}

#[test]
fn a_cascade_that_waits_for_a_lock_blocks_its_row_and_not_the_sweep() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE);
         INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 100) i; INSERT INTO child VALUES (7)",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT FROM child FOR UPDATE");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "99");
    other.run("ROLLBACK");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn a_rule_that_somebody_is_changing_is_left_for_later() {
    let mut db = with("CREATE TABLE t (at timestamptz); INSERT INTO t VALUES ('2020-01-01')");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    let mut other = db.session("postgres");
    other.run("BEGIN; SELECT ttl_pause('t')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0", "and nobody waits");
    other.run("ROLLBACK");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
}

#[test]
fn thousands_of_blocked_rows_are_gone_through_once_each() {
    let mut db = with(
        "CREATE TABLE parent (id int PRIMARY KEY, at timestamptz); CREATE TABLE child (parent int REFERENCES parent);
         INSERT INTO parent SELECT i, '2020-01-01' FROM generate_series(1, 6000) i;
         INSERT INTO child SELECT i FROM generate_series(1, 6000) i WHERE i % 2 = 0; CREATE INDEX ON child (parent)",
    );
    db.run("SELECT ttl_create_index('parent', 'at', 60)");
    db.run("CALL ttl_sweep('parent')");
    assert_eq!(db.get("SELECT blocked_rows, total_rows_deleted FROM ttl_summary"), "3000|3000");
}

#[test]
fn whoever_has_a_say_about_a_delete_is_asked() {
    let mut db = with(
        "CREATE TABLE rewritten (id int, at timestamptz); INSERT INTO rewritten VALUES (1, '2020-01-01');
         CREATE RULE keep AS ON DELETE TO rewritten DO INSTEAD NOTHING;
         CREATE TABLE published (id int, at timestamptz); INSERT INTO published VALUES (1, '2020-01-01');
         CREATE PUBLICATION p FOR TABLE published;
         CREATE TABLE kept (id int, at timestamptz); INSERT INTO kept VALUES (1, '2020-01-01');
         REVOKE DELETE ON kept FROM postgres",
    );
    let owner = db.role("owner");
    db.run(&format!("ALTER TABLE kept OWNER TO {owner}; REVOKE DELETE ON kept FROM {owner}"));
    db.run("SELECT ttl_create_index(t, 'at', 60) FROM unnest('{rewritten,published,kept}'::regclass[]) t");
    db.run("SELECT ttl_runner()");
    assert_eq!(
        db.get(
            "SELECT string_agg(table_name || ' ' || left(last_error, 5), ', ' ORDER BY table_name) FROM ttl_summary"
        ),
        "kept 42501, published 55000, rewritten 09000"
    );
    assert_eq!(
        db.get(
            "SELECT (SELECT count(*) FROM rewritten) + (SELECT count(*) FROM published) + (SELECT count(*) FROM kept)"
        ),
        "3"
    );
}

#[test]
fn rows_that_the_caller_has_locked_or_changed_go_too() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 100) i",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("BEGIN; SELECT FROM t WHERE id <= 10 FOR UPDATE; UPDATE t SET at = '2021-01-01' WHERE id BETWEEN 5 AND 15");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "100");
    db.run("COMMIT");
    assert_eq!(db.get("SELECT count(*) FROM t"), "0");
}
