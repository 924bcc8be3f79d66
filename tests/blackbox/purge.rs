//! Soft deletion first, removal later.

use crate::bad_input::refuses;
use crate::sweep::with;

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, kind text DEFAULT 'a', gone timestamptz, flag boolean);
    INSERT INTO t (id, at) SELECT i, '2020-01-01' FROM generate_series(1, 10) i; INSERT INTO t (id, at) VALUES (11, now())";

#[test]
fn a_softly_deleted_row_is_removed_when_its_time_is_over() {
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('t', 'at', interval '1 day', soft_delete_column => 'gone', purge_after => interval '30 days')");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "10", "marked");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "0");
    assert_eq!(db.get("SELECT count(*), count(gone) FROM t"), "11|10");
    db.run("UPDATE t SET gone = gone - interval '31 days' WHERE id <= 4; UPDATE t SET gone = NULL, at = now() WHERE id = 1");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "3", "what was brought back lives");
    assert_eq!(db.get("SELECT string_agg(id::text, ',' ORDER BY id) FROM t"), "1,5,6,7,8,9,10,11");
    assert_eq!(
        db.get("SELECT column_name, cleanup_mode, expire_after, purge_after, total_rows_deleted, index_state FROM ttl_summary"),
        "at|soft_delete|1 day|30 days|10|valid\ngone|purge|30 days||3|valid"
    );
    assert_eq!(db.get("SELECT plan FROM ttl_preview('t', 'gone')"), "rows by index");
}

#[test]
fn a_filter_holds_for_the_purge_too_and_rows_are_archived_then() {
    let mut db = with(TABLE);
    db.run("CREATE TABLE archive (LIKE t); UPDATE t SET kind = 'b' WHERE id = 2; UPDATE t SET gone = '2021-01-01' WHERE id <= 2");
    db.run(
        "SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone', purge_after => interval '1 day',
                                 filter => $$kind = 'a'$$, archive_to => 'archive')",
    );
    assert_eq!(db.get("SELECT ttl_runner('t')"), "9", "eight are marked, and one that has been is archived");
    assert_eq!(db.get("SELECT string_agg(id::text, ',') FROM archive"), "1");
    assert_eq!(db.get("SELECT count(*) FROM t WHERE id = 2"), "1");
}

#[test]
fn the_purge_comes_changes_pauses_and_goes_with_its_rule() {
    let mut db = with(TABLE);
    let purge = "SELECT column_name, expire_after, active, filter FROM ttl_summary WHERE cleanup_mode = 'purge'";
    let create =
        "SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone', purge_after => interval '1 day')";
    db.run(create);
    assert_eq!(db.get(purge), "gone|1 day|t|");
    db.run("SELECT ttl_alter_index('t', 'at', purge_after => interval '2 days', filter => 'id > 0')");
    assert_eq!(db.get(purge), "gone|2 days|t|(id > 0)");
    assert_eq!(db.get("SELECT ttl_pause('t', 'at')"), "2");
    assert_eq!(db.get(purge), "gone|2 days|f|(id > 0)");
    db.run("SELECT ttl_alter_index('t', 'at', reset => '{purge_after}')");
    db.run("SELECT ttl_alter_index('t', 'at', purge_after => interval '2 days')");
    assert_eq!(db.get(purge), "gone|2 days|f|(id > 0)", "it rests while its rule does");
    assert_eq!(db.get("SELECT ttl_resume('t')"), "2");
    for call in ["ttl_drop_index('t', 'gone')", "ttl_alter_index('t', 'gone', 5)", "ttl_create_index('t', 'gone', 5)"] {
        assert_eq!(
            db.error(&format!("SELECT {}", call.replace(", 5)", ", expire_after_seconds => 5)"))).code,
            "55000",
            "{call}"
        );
    }
    db.run("ALTER TABLE t ADD gone2 timestamptz; SELECT ttl_alter_index('t', 'at', soft_delete_column => 'gone2')");
    assert_eq!(db.get(purge), "gone2|2 days|t|(id > 0)");
    db.run("ALTER TABLE t RENAME gone2 TO left_at");
    assert_eq!(db.get(purge), "left_at|2 days|t|(id > 0)");
    db.run("SELECT ttl_alter_index('t', 'at', reset => '{purge_after}')");
    assert_eq!(db.get(purge), "");
    db.run(create);
    assert!(db.get("SELECT count(*) FROM pg_index WHERE indrelid = 't'::regclass") == "3");
    db.run("SELECT ttl_drop_index('t', 'at')");
    assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
    assert_eq!(db.get("SELECT count(*) FROM pg_index WHERE indrelid = 't'::regclass"), "1", "both indexes went too");
}

#[test]
fn what_cannot_be_purged_is_refused() {
    refuses(
        TABLE,
        &[
            ("ttl_create_index('t', 'at', 60, purge_after => interval '1 day')", "22023"),
            ("ttl_create_index('t', 'at', 60, soft_delete_column => 'flag', purge_after => interval '1 day')", "42804"),
            (
                "ttl_create_index('t', 'at', 60, soft_delete_column => 'gone', purge_after => interval '-1 day')",
                "22023",
            ),
            (
                "ttl_create_index('t', 'at', 60, soft_delete_column => 'gone', purge_after => interval '1 day', filter => 'gone IS NULL')",
                "22023",
            ),
        ],
    );
    let mut db = with(TABLE);
    db.run("SELECT ttl_create_index('t', 'gone', 60)");
    let create =
        "SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone', purge_after => interval '1 day')";
    assert_eq!(db.error(create).code, "42710");
    assert_eq!(db.get("SELECT column_name FROM ttl_summary"), "gone");
}
