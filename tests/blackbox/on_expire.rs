//! Functions that are called with expired rows, and notifications of them.

use crate::bad_input::refuses;
use crate::sweep::with;
use crate::worker::{database, server};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, amount numeric);
    INSERT INTO t SELECT i, '2020-01-01 00:00Z'::timestamptz + i * interval '1 day', 0.10 FROM generate_series(1, 25) i;
    CREATE SEQUENCE calls; CREATE TABLE seen (call int, who text, relation regclass, rows jsonb);
    CREATE FUNCTION hook(relation regclass, rows jsonb) RETURNS void LANGUAGE sql AS
    $$ INSERT INTO public.seen VALUES (nextval('public.calls'), current_user, relation, rows) $$";

#[test]
fn a_function_is_called_once_a_batch_with_the_rows_that_go() {
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('t', 'at', 60, 10, on_expire => 'hook(regclass, jsonb)')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "25");
    assert_eq!(
        db.get("SELECT string_agg(relation || ' ' || jsonb_array_length(rows), ', ' ORDER BY call) FROM seen"),
        "t 10, t 10, t 5"
    );
    assert_eq!(
        db.get("SELECT count(DISTINCT r->'id'), min(r->>'amount') FROM seen, jsonb_array_elements(rows) r"),
        "25|0.10"
    );
    assert_eq!(db.get("SELECT on_expire FROM ttl_summary"), "public.hook");
}

#[test]
fn it_gets_softly_deleted_rows_and_those_of_every_part() {
    let mut db = with(
        "CREATE TABLE p (id int, at timestamptz, gone timestamptz) PARTITION BY LIST (id);
         CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2);
         INSERT INTO p VALUES (1, '2020-01-01'), (2, '2020-01-01'); CREATE TABLE seen (relation regclass, rows jsonb);
         CREATE FUNCTION hook(relation regclass, rows jsonb) RETURNS int LANGUAGE sql AS
         'INSERT INTO public.seen VALUES (relation, rows) RETURNING 1'",
    );
    db.run("SELECT ttl_create_index('p', 'at', 60, soft_delete_column => 'gone', on_expire => 'hook(regclass,jsonb)')");
    assert_eq!(db.get("SELECT ttl_runner('p')"), "2");
    assert_eq!(
        db.get("SELECT relation, rows->0->>'id', rows->0->>'gone' IS NOT NULL FROM seen ORDER BY 2"),
        "p|1|t\np|2|t"
    );
}

#[test]
fn a_function_that_fails_keeps_the_rows_and_is_tried_again() {
    let server = server(&[]);
    let mut db = database(&server);
    let owner = db.role("owner");
    let mut session = db.session(&owner);
    session.run(TABLE);
    session.run(
        "CREATE SEQUENCE tries; CREATE TABLE hope ();
         CREATE FUNCTION fail(relation regclass, rows jsonb) RETURNS void LANGUAGE plpgsql AS $$
         BEGIN PERFORM nextval('public.tries');
               IF to_regclass('public.hope') IS NOT NULL THEN RAISE 'not today'; END IF;
               PERFORM public.hook(relation, rows); END $$",
    );
    session.run("SELECT ttl_create_index('t', 'at', 60, on_expire => 'fail(regclass, jsonb)')");
    db.wait_for("SELECT state, last_error, blocked_rows FROM ttl_summary", "blocked|P0001: not today|25");
    assert_eq!(db.get("SELECT count(*) FROM t"), "25");
    db.run("DROP TABLE hope");
    db.wait_for("SELECT count(*) FROM t", "0");
    assert_eq!(db.get("SELECT DISTINCT who FROM seen"), owner, "it ran as the table's owner");
}

#[test]
fn blocked_rows_are_not_told_of() {
    let mut db = with(TABLE);
    db.run("CREATE TABLE child (t int REFERENCES t); INSERT INTO child VALUES (3), (20)");
    db.run("SELECT ttl_create_index('t', 'at', 60, on_expire => 'hook(regclass, jsonb)')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "23");
    assert_eq!(
        db.get("SELECT count(*), count(DISTINCT r), bool_or(r->'id' IN ('3', '20')) FROM seen, jsonb_array_elements(rows) r"),
        "23|23|f"
    );
}

#[test]
fn a_function_is_followed_and_its_loss_stops_the_rule() {
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('t', 'at', 60, on_expire => 'hook(regclass, jsonb)'); CREATE SCHEMA other");
    db.run("ALTER FUNCTION hook RENAME TO \"a hook\"; ALTER FUNCTION \"a hook\" SET SCHEMA other");
    assert_eq!(db.get("SELECT on_expire FROM ttl_summary"), "other.\"a hook\"");
    db.run("DROP FUNCTION other.\"a hook\"");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42883");
    db.run("CREATE FUNCTION other.\"a hook\"(regclass, jsonb) RETURNS void LANGUAGE sql AS ''");
    assert_eq!(db.error("SELECT ttl_runner('t')").code, "42883", "another one of the name is another one");
    assert_eq!(db.get("SELECT count(*) FROM t"), "25");
    db.run("SELECT ttl_alter_index('t', 'at', on_expire => 'other.\"a hook\"(regclass, jsonb)')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "25");
}

#[test]
fn a_function_that_cannot_be_called_is_refused() {
    refuses(
        "CREATE TABLE t (at timestamptz);
         CREATE FUNCTION one(jsonb) RETURNS void LANGUAGE sql AS '';
         CREATE FUNCTION other(regclass, json) RETURNS void LANGUAGE sql AS '';
         CREATE PROCEDURE proc(regclass, jsonb) LANGUAGE sql AS ''",
        &[
            ("ttl_create_index('t', 'at', 60, on_expire => 'one(jsonb)')", "42P13"),
            ("ttl_create_index('t', 'at', 60, on_expire => 'other(regclass, json)')", "42P13"),
            ("ttl_create_index('t', 'at', 60, on_expire => 'proc(regclass, jsonb)')", "42P13"),
            ("ttl_create_index('t', 'at', 60, on_expire => 'nothing(regclass, jsonb)')", "42883"),
            ("ttl_create_index('t', 'at', 60, on_expire => 4294967295::oid::regprocedure)", "42883"),
            ("ttl_create_index('t', 'at', 60, notify_channel => '')", "22023"),
            ("ttl_create_index('t', 'at', 60, notify_channel => repeat('x', 64))", "22023"),
        ],
    );
    let mut db = with(
        "CREATE FUNCTION secret(regclass, jsonb) RETURNS void LANGUAGE sql AS ''; REVOKE ALL ON FUNCTION secret FROM PUBLIC",
    );
    let owner = db.role("owner");
    db.session(&owner).run("CREATE TABLE theirs (at timestamptz)");
    let create = "SELECT ttl_create_index('theirs', 'at', 60, on_expire => 'secret(regclass, jsonb)')";
    assert_eq!(db.error(create).code, "42501", "whoever registers it, it is called as the owner");
}

#[test]
fn a_channel_hears_of_every_batch() {
    let mut db = with(TABLE);
    let mut listener = db.session("postgres");
    listener.run("LISTEN \"Gone rows\"");
    db.run("SELECT ttl_create_index('t', 'at', 60, 20, notify_channel => 'Gone rows')");
    db.run("SET TimeZone = 'Asia/Tokyo'");
    db.run("CALL ttl_sweep('t')");
    let mut heard = |path: &str| {
        let payload = listener.notification().replace('\'', "''");
        db.get(&format!("SELECT {path} FROM (SELECT '{payload}'::jsonb) AS n (n)"))
    };
    let facts = "n->>'table', n->>'rule', n->>'relation', n->>'action', n->>'count', n#>>'{range,first_key,id}', n#>>'{range,last_key,id}'";
    assert_eq!(heard(facts), "public.t|at|public.t|delete|20|1|20");
    let times = "(n#>>'{range,oldest}')::timestamptz = '2020-01-22 00:00Z', (n#>>'{range,newest}')::timestamptz = '2020-01-26 00:00Z', n->>'count'";
    assert_eq!(heard(times), "t|t|5");
}

#[test]
fn a_key_too_long_for_a_notification_is_left_out_of_it() {
    let mut db = with("CREATE TABLE t (id text, at timestamptz); INSERT INTO t VALUES ('x', '2020-01-01')");
    db.run("INSERT INTO t SELECT string_agg(md5(i::text), ''), '2020-01-01' FROM generate_series(1, 400) i; ALTER TABLE t ADD n int DEFAULT 1");
    db.run("ALTER TABLE t ALTER id SET STORAGE EXTERNAL; LISTEN gone");
    db.run("SELECT ttl_create_index('t', 'at', 60, notify_channel => 'gone')");
    db.run("SELECT ttl_runner('t')");
    assert!(db.notification().contains("\"count\":2"));
}

#[test]
fn an_endless_message_or_expression_harms_nobody() {
    let mut db = with(
        "CREATE TABLE t (id int, at timestamptz); INSERT INTO t VALUES (1, '2020-01-01');
         CREATE FUNCTION scream(regclass, jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE '%', repeat('x', 5000000); END $$",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, on_expire => 'scream(regclass, jsonb)', hide_expired => true)");
    db.run("SELECT ttl_runner()");
    assert_eq!(db.get("SELECT state, length(last_error) < 1100 FROM ttl_summary"), "blocked|t");
    assert_eq!(db.get("SELECT max(length(error)) < 1100 FROM ttl_history"), "t");
    let terms = vec!["interval '1 second'"; 400].join(" + ");
    db.run(&format!(
        "CREATE TABLE u (at timestamp); INSERT INTO u VALUES ('2020-01-01'); LISTEN gone;
                     SELECT ttl_create_index('u', $$at + ({terms})$$, 60, notify_channel => 'gone')"
    ));
    assert_eq!(db.get("SELECT ttl_runner('u')"), "1");
    assert!(db.notification().contains("\"count\":1"));
}

#[test]
fn what_is_hidden_stays_so_when_the_function_or_archive_is_gone() {
    let mut db = with(TABLE);
    db.run("CREATE TABLE archive (LIKE t); SELECT ttl_create_index('t', 'at', 60, on_expire => 'hook(regclass, jsonb)', hide_expired => true)");
    db.run("DROP FUNCTION hook");
    assert_eq!(db.session("postgres").get("SELECT count(*) FROM t"), "0");
    assert_eq!(db.get("SELECT ttl_get('t', '1')"), "-2");
    assert!(
        db.get("SELECT blockers FROM ttl_preview('t')")
            .contains("function public.hook(regclass, jsonb) does not exist")
    );
    db.run("SELECT ttl_create_index('t', 'at', 60, archive_to => 'archive', hide_expired => true); DROP TABLE archive");
    assert_eq!(db.session("postgres").get("SELECT count(*) FROM t"), "0");
}

#[test]
fn a_row_that_the_function_fails_on_keeps_no_other() {
    for size in [10, 25] {
        let mut db = with(TABLE);
        db.run(
            "CREATE FUNCTION picky(relation regclass, rows jsonb) RETURNS void LANGUAGE plpgsql AS $$
             BEGIN IF rows @> '[{\"id\": 7}]' OR rows @> '[{\"id\": 22}]' THEN RAISE 'not this one'; END IF;
                   PERFORM public.hook(relation, rows); END $$",
        );
        db.run(&format!("SELECT ttl_create_index('t', 'at', 60, {size}, on_expire => 'picky(regclass, jsonb)', notify_channel => 'gone'); LISTEN gone"));
        assert_eq!(db.get("SELECT ttl_runner('t')"), "23");
        assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "7,22");
        assert_eq!(db.get("SELECT state, blocked_rows, last_error FROM ttl_summary"), "blocked|2|P0001: not this one");
        assert_eq!(db.get("SELECT count(*), count(DISTINCT r->'id') FROM seen, jsonb_array_elements(rows) r"), "23|23");
        let told = if size == 10 { 9 } else { 23 };
        assert!(db.notification().contains(&format!("\"count\":{told}")), "one notification for what went of a batch");
    }
}
