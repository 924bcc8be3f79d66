//! Sliding expiry: an UPDATE restarts the clock of its row.

use crate::rows::{KINDS, seconds, table};
use crate::sweep::with;
use harness::Database;

#[test]
fn an_update_restarts_the_clock_where_that_is_wished() {
    for (kind, options) in KINDS {
        let mut db = table(kind, options, "10 days");
        let left = |db: &mut Database, key: u32| seconds(db, key) / 86_400.0;
        db.run("ALTER TABLE t ADD note text; SELECT ttl_set('t', '1', '5 days'), ttl_set('t', '2', '5 days')");
        assert_eq!(db.get("SELECT ttl_enable_touch('t'), ttl_enable_touch('t', 'v')"), "t|f");
        db.run("UPDATE t SET note = 'used' WHERE id = 1");
        let days = left(&mut db, 1);
        assert!(days > 9.9 && days < 11.1, "{kind}{options}: {days}");
        db.run("UPDATE t SET note = 'used' WHERE id = 3");
        assert_eq!(seconds(&mut db, 3), -1.0, "{kind}{options}: it never expires");
        db.run("SELECT ttl_set('t', '2', '3 days')");
        assert!(left(&mut db, 2) < 4.1, "{kind}{options}: what is set stays");
        db.run("SELECT ttl_set('t', '2', '3 days'), ttl_persist('t', '2'), ttl_persist('t', '2')");
        assert_eq!(seconds(&mut db, 2), -1.0, "{kind}{options}");
        assert_eq!(db.get("SELECT ttl_disable_touch('t'), ttl_disable_touch('t')"), "t|f");
        db.run("SELECT ttl_set('t', '1', '5 days'); UPDATE t SET note = 'unnoticed'");
        assert!(left(&mut db, 1) < 6.1, "{kind}{options}");
    }
}

#[test]
fn a_table_with_sliding_expiry_can_be_changed_and_dumped_like_any_other() {
    let mut db = with(
        "CREATE TABLE t (first int, id int, at timestamptz DEFAULT now(), gone boolean, n int, PRIMARY KEY (id)) PARTITION BY HASH (id);
         CREATE TABLE t0 PARTITION OF t FOR VALUES WITH (MODULUS 1, REMAINDER 0);
         INSERT INTO t (id, at) VALUES (1, now() - interval '59 minutes'), (2, now() - interval '2 hours');
         SELECT ttl_create_index('t', 'at', interval '1 hour', soft_delete_column => 'gone'), ttl_enable_touch('t')",
    );
    db.run("ALTER TABLE t DROP COLUMN first; ALTER TABLE t RENAME at TO seen; UPDATE t SET n = 1 WHERE id = 1");
    assert_eq!(db.get("SELECT ttl_get('t', '1') > 3590"), "t");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    assert_eq!(db.get("SELECT gone, seen < now() - interval '1 hour' FROM t WHERE id = 2"), "t|t", "a sweep is no use");
    db.run("UPDATE ttl_index_table SET time_zone = 'Asia/Tokyo'; UPDATE t SET n = 3 WHERE id = 1");
    let trigger = "SELECT count(*) FROM pg_trigger WHERE tgfoid = 'ttl_touch_row'::regproc";
    assert_eq!(db.get(trigger), "2");
    db.run("ALTER TABLE t DROP COLUMN seen");
    assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
    db.run("UPDATE t SET n = 2; ALTER TABLE t ADD seen timestamptz DEFAULT '2020-01-01'; UPDATE t SET n = 4");
    assert_eq!(
        db.get("SELECT count(*) FROM t WHERE seen < '2021-01-01'"),
        "2",
        "the rule is gone, and so is the clock"
    );
    db.run("SELECT ttl_create_index('t', 'seen', interval '1 hour'), ttl_enable_touch('t')");
    assert_eq!(db.get(trigger), "2", "that of the old rule is gone");
    db.run("SELECT ttl_drop_index('t', 'seen')");
    assert_eq!(db.get(trigger), "0");
    assert_eq!(db.get("SELECT ttl_disable_touch('t')"), "f");
}

#[test]
fn a_trigger_on_a_column_of_another_type_does_no_harm() {
    let mut db = table("timestamptz", "", "1 hour");
    db.run(
        "CREATE TABLE other (v text, n int); INSERT INTO other VALUES ('x'), ('y');
         CREATE TRIGGER stolen BEFORE UPDATE ON other FOR EACH ROW EXECUTE FUNCTION ttl_touch_row('1');
         CREATE TABLE without (n int); INSERT INTO without VALUES (1);
         CREATE TRIGGER stolen BEFORE UPDATE ON without FOR EACH ROW EXECUTE FUNCTION ttl_touch_row('1')",
    );
    assert_eq!(db.get("SELECT id FROM ttl_index_table"), "1");
    db.run("UPDATE other SET n = 1; UPDATE without SET n = 2");
    assert_eq!(db.get("SELECT string_agg(v, ',') FROM other"), "x,y");
    db.run(
        "CREATE TRIGGER wrong BEFORE UPDATE ON other FOR EACH ROW EXECUTE FUNCTION ttl_touch_row();
         CREATE TRIGGER late AFTER UPDATE ON without FOR EACH ROW EXECUTE FUNCTION ttl_touch_row('1')",
    );
    assert_eq!(db.error("UPDATE other SET n = 1").code, "39P01");
    assert_eq!(db.error("UPDATE without SET n = 1").code, "39P01");
}

#[test]
fn a_clock_is_restarted_by_triggers_of_a_sweep_of_another_table() {
    let mut db = with(
        "CREATE TABLE par (id int PRIMARY KEY, at timestamptz, n int DEFAULT 0); CREATE TABLE kid (par int, at timestamptz, gone boolean);
         INSERT INTO par VALUES (1, now() - interval '50 minutes'); INSERT INTO kid VALUES (1, '2020-01-01'), (1, '2020-01-01');
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN UPDATE public.par SET n = n + 1 WHERE id = OLD.par; PERFORM public.ttl_runner(''public.par''); RETURN NULL; END';
         CREATE TRIGGER note AFTER UPDATE ON kid FOR EACH ROW EXECUTE FUNCTION note();
         SELECT ttl_create_index('par', 'at', interval '1 hour'), ttl_enable_touch('par'),
                ttl_create_index('kid', 'at', interval '1 hour', soft_delete_column => 'gone'), ttl_enable_touch('kid')",
    );
    db.run("SELECT ttl_runner('kid')");
    assert_eq!(db.get("SELECT ttl_get('par', '1') > 3500, n FROM par"), "t|2");
    assert_eq!(db.get("SELECT count(*) FROM kid WHERE gone AND at < '2021-01-01'"), "2");
}

#[test]
fn children_by_inheritance_have_no_sliding_expiry() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); CREATE TABLE u () INHERITS (t); SELECT ttl_create_index('t', 'at', 60)",
    );
    assert_eq!(db.error("SELECT ttl_enable_touch('t')").code, "0A000");
}

#[test]
fn an_update_that_names_the_column_has_the_last_word() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v int DEFAULT 0); INSERT INTO t VALUES (1, '2999-01-01'), (2, '2999-01-01');
         SELECT ttl_create_index('t', 'at', interval '1 hour'), ttl_enable_touch('t')",
    );
    db.run("UPDATE t SET at = at, v = 1 WHERE id = 1; UPDATE t SET v = 1 WHERE id = 2");
    assert_eq!(db.get("SELECT id, extract(year FROM at) = 2999 FROM t ORDER BY 1"), "1|t\n2|f");
}
