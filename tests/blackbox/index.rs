//! The index of a rule: found where one serves, made where none does, dropped only if we made it.

use crate::sweep::with;
use harness::Database;

const INDEX: &str = "SELECT index_name, index_created_by_extension FROM ttl_index_table";

#[test]
fn an_index_that_serves_is_used_and_left_alone() {
    for existing in [
        "CREATE INDEX mine ON t (at)",
        "CREATE INDEX mine ON t (at DESC NULLS LAST, n)",
        "CREATE UNIQUE INDEX mine ON t (at, n) INCLUDE (x)",
    ] {
        let mut db = with("CREATE TABLE t (at timestamptz, n int, x text)");
        db.run(existing);
        db.run("SELECT ttl_create_index('t', 'at', 60)");
        assert_eq!(db.get(INDEX), "mine|f", "{existing}");
        db.run("SELECT ttl_drop_index('t', 'at')");
        assert_eq!(db.get("SELECT to_regclass('mine')"), "mine");
    }
}

#[test]
fn an_index_that_cannot_serve_is_not_used() {
    for existing in [
        "CREATE INDEX mine ON t (n, at)",
        "CREATE INDEX mine ON t (n) INCLUDE (at)",
        "CREATE INDEX mine ON t USING brin (at)",
        "CREATE INDEX mine ON t USING hash (at)",
        "CREATE INDEX mine ON t (at) WHERE n > 0",
        "CREATE INDEX mine ON t ((at AT TIME ZONE 'UTC'))",
        "CREATE INDEX mine ON t (at); UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'mine'::regclass",
        "CREATE INDEX mine ON t (at); UPDATE pg_index SET indisready = false WHERE indexrelid = 'mine'::regclass",
        "CREATE OPERATOR CLASS backwards FOR TYPE timestamptz USING btree AS
             OPERATOR 1 >, OPERATOR 2 >=, OPERATOR 3 =, OPERATOR 4 <=, OPERATOR 5 <,
             FUNCTION 1 backwards(timestamptz, timestamptz);
         CREATE INDEX mine ON t (at backwards)",
    ] {
        let mut db = with(
            "CREATE TABLE t (at timestamptz, n int);
             CREATE FUNCTION backwards(timestamptz, timestamptz) RETURNS int IMMUTABLE STRICT LANGUAGE sql
                 AS 'SELECT timestamptz_cmp($2, $1)'",
        );
        db.run(existing);
        db.run("SELECT ttl_create_index('t', 'at', 60)");
        assert_eq!(db.get(INDEX), "idx_ttl_t_at|t", "{existing}");
        db.run("SELECT ttl_drop_index('t', 'at')");
        assert_eq!(db.get("SELECT to_regclass('mine'), to_regclass('idx_ttl_t_at')"), "mine|", "{existing}");
    }
}

#[test]
fn a_partial_index_serves_when_the_filter_implies_its_predicate() {
    let mut db = with("CREATE TABLE t (at timestamptz, n int); CREATE INDEX mine ON t (at) WHERE n > 0");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 10 AND n < 20')");
    assert_eq!(db.get(INDEX), "mine|f");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > -10')");
    assert_eq!(db.get(INDEX), "idx_ttl_t_at|t");
}

#[test]
fn a_made_index_is_partial_on_an_immutable_filter() {
    let mut db = with("CREATE TABLE t (at timestamptz, n int)");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 10')");
    let definition = db.get("SELECT indexdef FROM pg_indexes WHERE indexname = 'idx_ttl_t_at'");
    assert_eq!(definition, "CREATE INDEX idx_ttl_t_at ON public.t USING btree (at) WHERE (n > 10)");
}

#[test]
fn a_made_index_is_not_partial_on_a_stable_filter() {
    let mut db = with("CREATE TABLE t (at timestamptz, n timestamptz)");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n < now()')");
    let definition = db.get("SELECT indexdef FROM pg_indexes WHERE indexname = 'idx_ttl_t_at'");
    assert_eq!(definition, "CREATE INDEX idx_ttl_t_at ON public.t USING btree (at)");
}

#[test]
fn a_soft_deleting_rule_has_an_index_of_unmarked_rows() {
    let mut db =
        with("CREATE TABLE t (at timestamptz, deleted timestamptz, gone boolean); CREATE INDEX mine ON t (at)");
    db.run("SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'deleted')");
    let definition = "SELECT indexdef FROM pg_indexes WHERE indexname = (SELECT index_name FROM ttl_index_table)";
    assert_eq!(db.get(definition), "CREATE INDEX idx_ttl_t_at ON public.t USING btree (at) WHERE (deleted IS NULL)");
    db.run("SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'gone')");
    assert_eq!(db.get(definition), "CREATE INDEX idx_ttl_t_at_1 ON public.t USING btree (at) WHERE (gone IS NOT TRUE)");
    assert_eq!(db.get("SELECT to_regclass('idx_ttl_t_at')"), "", "the index of the old definition is gone");
    db.run("CREATE INDEX unmarked ON t (at) WHERE deleted IS NULL");
    db.run("SELECT ttl_create_index('t', 'at', 60, soft_delete_column => 'deleted')");
    assert_eq!(db.get(INDEX), "unmarked|f");
}

#[test]
fn a_changed_filter_replaces_the_index_we_made() {
    let mut db = with("CREATE TABLE t (at timestamptz, n int)");
    db.run("SELECT ttl_create_index('t', 'at', 60, filter => 'n > 10')");
    db.run("SELECT ttl_alter_index('t', 'at', filter => 'n > 20')");
    assert_eq!(db.get(INDEX), "idx_ttl_t_at|t", "n > 20 implies n > 10: the index still serves");
    db.run("SELECT ttl_alter_index('t', 'at', filter => 'n > 5')");
    assert_eq!(
        db.get("SELECT count(*), min(indexdef) FROM pg_indexes WHERE tablename = 't'"),
        "1|CREATE INDEX idx_ttl_t_at_1 ON public.t USING btree (at) WHERE (n > 5)"
    );
}

#[test]
fn brin_and_none_are_methods_too() {
    let mut db = with("CREATE TABLE t (at timestamptz)");
    db.run("SELECT ttl_create_index('t', 'at', 60, index_method => 'brin')");
    assert_eq!(
        db.get("SELECT indexdef FROM pg_indexes WHERE tablename = 't'"),
        "CREATE INDEX idx_ttl_t_at ON public.t USING brin (at)"
    );
    db.run("SELECT ttl_alter_index('t', 'at', index_method => 'none')");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't'"), "0");
    assert_eq!(db.get(INDEX), "|f");
    db.run("CREATE INDEX mine ON t USING brin (at)");
    db.run("SELECT ttl_alter_index('t', 'at', index_method => 'brin')");
    assert_eq!(db.get(INDEX), "mine|f");
}

#[test]
fn a_partitioned_table_gets_a_partitioned_index() {
    let mut db = with(
        "CREATE TABLE t (at timestamptz) PARTITION BY RANGE (at);
         CREATE TABLE t1 PARTITION OF t FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
         CREATE TABLE t2 PARTITION OF t DEFAULT",
    );
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    assert_eq!(db.get("SELECT relkind FROM pg_class WHERE oid = 'idx_ttl_t_at'::regclass"), "I");
    assert_eq!(db.get("SELECT count(*) FROM pg_inherits WHERE inhparent = 'idx_ttl_t_at'::regclass"), "2");
    db.run("SELECT ttl_drop_index('t', 'at')");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename LIKE 't%'  AND schemaname = 'public' AND tablename NOT LIKE 'ttl%'"), "0");
}

#[test]
fn a_renamed_or_moved_index_is_still_ours() {
    let mut db = with("CREATE TABLE t (at timestamptz); CREATE SCHEMA elsewhere");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("ALTER INDEX idx_ttl_t_at RENAME TO \"Mine Now\"; ALTER TABLE t SET SCHEMA elsewhere");
    assert_eq!(db.get(INDEX), "Mine Now|t");
    db.run("SELECT ttl_drop_index('elsewhere.t', 'at')");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't'"), "0");
}

#[test]
fn an_index_rebuilt_under_a_new_oid_is_still_ours() {
    let mut db = with("CREATE TABLE t (at timestamptz)");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("REINDEX INDEX CONCURRENTLY idx_ttl_t_at");
    db.run("ALTER TABLE t ALTER COLUMN at TYPE timestamptz(0)");
    assert_eq!(db.get(INDEX), "idx_ttl_t_at|t");
    db.run("SELECT ttl_drop_index('t', 'at')");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't'"), "0");
}

#[test]
fn a_users_index_that_takes_the_name_of_a_dropped_one_is_not_ours() {
    let mut db = with("CREATE TABLE t (at timestamptz)");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("DROP INDEX idx_ttl_t_at");
    assert_eq!(db.get(INDEX), "|f");
    db.run("CREATE INDEX idx_ttl_t_at ON t (at); SELECT ttl_drop_index('t', 'at')");
    assert_eq!(db.get("SELECT to_regclass('idx_ttl_t_at')"), "idx_ttl_t_at");
}

#[test]
fn registering_again_brings_back_a_dropped_index() {
    let mut db = with("CREATE TABLE t (at timestamptz)");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.run("DROP INDEX idx_ttl_t_at; SELECT ttl_create_index('t', 'at', 60)");
    assert_eq!(db.get(INDEX), "idx_ttl_t_at|t");
}

#[test]
fn names_of_made_indexes_never_collide() {
    let mut db = with(
        "CREATE TABLE a_b (c timestamptz); CREATE TABLE a (b_c timestamptz); CREATE TABLE z (at timestamptz);
         CREATE SEQUENCE idx_ttl_z_at; CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.a_b (c timestamptz)",
    );
    db.run(
        "SELECT ttl_create_index('a_b', 'c', 60), ttl_create_index('a', 'b_c', 60), ttl_create_index('z', 'at', 60),
                   ttl_create_index('elsewhere.a_b', 'c', 60)",
    );
    assert_eq!(
        db.get("SELECT schema_name, index_name FROM ttl_index_table ORDER BY id"),
        "public|idx_ttl_a_b_c\npublic|idx_ttl_a_b_c_1\npublic|idx_ttl_z_at_1\nelsewhere|idx_ttl_a_b_c"
    );
}

#[test]
fn a_rule_on_a_partition_can_be_dropped_when_its_index_is_the_parents_too() {
    let mut db = Database::new();
    db.run("CREATE TABLE p (at timestamptz) PARTITION BY RANGE (at); CREATE TABLE p1 PARTITION OF p DEFAULT");
    db.run("SELECT ttl_create_index('p1', 'at', 60)");
    db.run("SELECT ttl_create_index('p', 'at', 60)");
    assert_eq!(db.get("SELECT ttl_drop_index('p1', 'at'), ttl_drop_index('p', 'at')"), "t|t");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename IN ('p', 'p1')"), "0");
}

#[test]
fn a_rule_whose_index_was_dropped_says_so_and_goes_on() {
    let mut db = with(
        "CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60); INSERT INTO t VALUES ('2020-01-01')",
    );
    db.run("DROP INDEX idx_ttl_t_at");
    let state = "SELECT state, index_state, index_name, left(last_error, 36) FROM ttl_summary";
    assert_eq!(db.get(state), "error|missing||42704: the index of the TTL rule was");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "1");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    assert_eq!(db.get(state), "active|valid|idx_ttl_t_at|");
    db.run("SELECT ttl_create_index('t', 'at', 60, index_method => 'none')");
    assert_eq!(db.get(state), "active|none||");
}

#[test]
fn an_index_that_was_rebuilt_and_then_renamed_goes_with_its_rule() {
    let mut db = Database::new();
    db.run("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    db.run("REINDEX INDEX CONCURRENTLY idx_ttl_t_at");
    // A pass of the worker, which a change of any rule wakes.
    db.run("CREATE TABLE other (at timestamptz); SELECT ttl_create_index('other', 'at', 60)");
    db.wait_for("SELECT index_relid = 'idx_ttl_t_at'::regclass FROM ttl_binding WHERE relid = 't'::regclass", "t");
    db.run("ALTER INDEX idx_ttl_t_at RENAME TO renamed");
    assert_eq!(db.get("SELECT index_name, index_state FROM ttl_summary WHERE table_name = 't'"), "renamed|valid");
    db.run("SELECT ttl_drop_index('t', 'at')");
    assert_eq!(db.get("SELECT count(*) FROM pg_indexes WHERE tablename = 't'"), "0");
}
