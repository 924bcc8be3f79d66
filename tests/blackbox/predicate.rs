//! What is swept, hidden, previewed and told of one row are the same rows.

use harness::Database;
use harness::Random;

/// A rule on a random table of a few hundred rows: by a column of some type, with or without filter and mark.
fn random_rule(db: &mut Database, random: &mut Random) -> String {
    let column = random.pick(&["timestamptz", "timestamptz NOT NULL", "timestamp", "date", "bigint", "text"]);
    let value = match column {
        "bigint" => "(extract(epoch FROM w) * 1000)::bigint",
        "text" => "ttl_rfc3339(w)",
        "timestamp" => "w AT TIME ZONE 'UTC'",
        "date" => "w::date",
        _ => "w",
    };
    let missing = if column.ends_with("NOT NULL") { "" } else { "WHEN i % 11 = 0 THEN NULL" };
    let unit = if column == "bigint" { ", unit => 'ms'" } else { "" };
    let filter =
        random.pick(&["", ", filter => 'n > 2'", ", filter => 'n IS NOT NULL AND n <> 3'", ", filter => 'n IS NULL'"]);
    let mark = random.pick(&["", "", ", soft_delete_column => 'gone'", ", soft_delete_column => 'flag'"]);
    let index = random.pick(&["", ", index_method => 'none'", ", index_method => 'brin'"]);
    db.run(&format!(
        "SET timezone = 'UTC'; DROP TABLE IF EXISTS t;
         CREATE TABLE t (id int PRIMARY KEY, at {column}, n int, gone timestamptz, flag boolean);
         INSERT INTO t SELECT i, CASE {missing} ELSE {value} END, nullif(i % 5, 4)
         FROM generate_series(1, 400) i, LATERAL (SELECT now() + (i - 200) * interval '1 hour' AS w) AS clock",
        missing = if missing.is_empty() { "WHEN false THEN NULL" } else { missing },
    ));
    let options = format!("{unit}{filter}{mark}{index}");
    db.run(&format!(
        "SELECT ttl_create_index('t', 'at', interval '2 days'{options}, hide_expired => true, time_zone => 'UTC')"
    ));
    format!("{column}{options}")
}

#[test]
fn every_form_of_the_predicate_means_the_same_rows() {
    let mut db = Database::new();
    db.run("SELECT ttl_stop_worker()");
    for seed in 1..=40 {
        let rule = random_rule(&mut db, &mut Random(seed));
        db.run("SET pg_ttl_index.hide_expired = off; CREATE TEMP TABLE all_rows AS SELECT id FROM t; SET pg_ttl_index.hide_expired = on");
        let hidden =
            db.get("SELECT string_agg(id::text, ' ' ORDER BY id) FROM all_rows WHERE id NOT IN (SELECT id FROM t)");
        let told = db.get("SELECT string_agg(id::text, ' ' ORDER BY id) FROM all_rows WHERE ttl_get('t', id) = -2");
        let previewed = db.get("SELECT expired_rows FROM ttl_preview('t')");
        assert_eq!(told, hidden, "seed {seed}: {rule}");
        assert_eq!(previewed, hidden.split_whitespace().count().to_string(), "seed {seed}: {rule}");
        assert!(hidden.split_whitespace().count() > 5, "seed {seed}: {rule}");
        db.run("SELECT ttl_runner('t'); SET pg_ttl_index.hide_expired = off");
        let swept = db.get(
            "SELECT string_agg(a.id::text, ' ' ORDER BY a.id) FROM all_rows a LEFT JOIN t USING (id)
             WHERE t.id IS NULL OR t.gone IS NOT NULL OR t.flag",
        );
        assert_eq!(swept, hidden, "seed {seed}: {rule}");
        db.run("SET pg_ttl_index.hide_expired = on; DROP TABLE all_rows");
    }
}
