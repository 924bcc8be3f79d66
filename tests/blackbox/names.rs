//! Names that need care.

use harness::Database;

#[test]
fn any_name_postgres_accepts_works_through_all_calls() {
    let long = "ü".repeat(31);
    for name in [
        "Mixed Case",
        "with \"quotes\"",
        "dotted.name",
        "it's",
        "x'); DROP TABLE ttl_index_table; --",
        "select",
        "back\\slash $1 %s {}",
        "表格",
        long.as_str(),
        &"a".repeat(63),
    ] {
        let mut db = Database::new();
        let identifier = format!("\"{}\"", name.replace('"', "\"\""));
        let table = format!("{}", format_args!("{identifier}.{identifier}")).replace('\'', "''");
        let literal = name.replace('\'', "''");
        db.run(&format!("CREATE SCHEMA {identifier}"));
        db.run(&format!(
            "CREATE TABLE {identifier}.{identifier} ({identifier} timestamptz, \"{}mark\" timestamptz)",
            name.chars().take(5).collect::<String>().replace('"', "\"\"")
        ));
        let mark = format!("{}mark", name.chars().take(5).collect::<String>()).replace('\'', "''");
        db.run(&format!("SELECT ttl_create_index('{table}', '{literal}', 60, NULL, '{mark}', filter => $f${identifier} IS NOT NULL$f$)"));
        assert_eq!(
            db.get("SELECT schema_name, table_name, column_name FROM ttl_summary"),
            format!("{name}|{name}|{name}")
        );
        let valid = "SELECT i.indisvalid, octet_length(c.relname) <= 63, c.relname = t.index_name
                     FROM ttl_index_table t JOIN pg_index i ON i.indrelid = to_regclass(format('%I.%I', schema_name, table_name))
                     JOIN pg_class c ON c.oid = i.indexrelid";
        assert_eq!(db.get(valid), "t|t|t", "{name}");
        db.run(&format!("SELECT ttl_alter_index('{table}', '{literal}', batch_size => 7)"));
        assert_eq!(db.get(&format!("SELECT ttl_pause('{table}', '{literal}'), ttl_resume('{table}')")), "1|1");
        db.run(&format!("ALTER TABLE {identifier}.{identifier} RENAME COLUMN {identifier} TO plain"));
        assert_eq!(db.get("SELECT filter FROM ttl_summary"), "(plain IS NOT NULL)", "{name}");
        assert_eq!(db.get(&format!("SELECT ttl_drop_index('{table}', 'plain')")), "t");
        assert_eq!(db.get("SELECT count(*) FROM ttl_index_table"), "0");
        assert_eq!(db.get("SELECT count(*) FROM pg_class WHERE relname LIKE 'idx\\_ttl%'"), "0", "{name}");
    }
}

#[test]
fn long_names_are_shortened_as_postgres_does_it() {
    let mut db = Database::new();
    let (table, column) = ("t".repeat(63), "c".repeat(63));
    db.run(&format!("CREATE TABLE {table} ({column} timestamptz, {}x timestamptz)", "c".repeat(62)));
    db.run(&format!(
        "SELECT ttl_create_index('{table}', '{column}', 60), ttl_create_index('{table}', '{}x', 60)",
        "c".repeat(62)
    ));
    let names = db.get("SELECT index_name FROM ttl_index_table ORDER BY id");
    let [first, second] = names.lines().collect::<Vec<_>>()[..] else { panic!("{names}") };
    assert_eq!(first, format!("idx_ttl_{}_{}", "t".repeat(23), "c".repeat(31)));
    assert_eq!(second, format!("idx_ttl_{}_{}_1", "t".repeat(22), "c".repeat(30)));
}

#[test]
fn a_table_resolves_in_the_callers_search_path() {
    let mut db = Database::new();
    db.run("CREATE SCHEMA app; CREATE TABLE app.t (at timestamptz); CREATE TABLE public.t (at timestamptz)");
    db.run("SET search_path = app; SELECT public.ttl_create_index('t', 'at', 60)");
    assert_eq!(db.get("SELECT schema_name FROM public.ttl_index_table"), "app");
}
