//! A database that hides rows beside one in which they are deleted, while others change what is hidden.

use super::{Trial, server};
use harness::{Database, Random};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two schemas with the same tables: in `hidden` expired rows are there and hidden, in `gone` they are not there.
pub fn twins(mut db: Database) -> Database {
    db.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker(); CREATE SCHEMA hidden; CREATE SCHEMA gone; CREATE TABLE moment AS SELECT now() AS m");
    for schema in ["gone", "hidden"] {
        db.run(&format!(
            "SET search_path = {schema}, public;
             CREATE TABLE t (id int PRIMARY KEY, grp int, at timestamptz, label text);
             CREATE TABLE u (id int PRIMARY KEY, t int, n numeric, at timestamptz NOT NULL);
             CREATE TABLE p (id int, at timestamptz NOT NULL, n int) PARTITION BY RANGE (at);
             CREATE TABLE p_old PARTITION OF p FOR VALUES FROM (MINVALUE) TO ('2025-01-01');
             CREATE TABLE p_new (n int, at timestamptz NOT NULL, id int); ALTER TABLE p ATTACH PARTITION p_new DEFAULT;
             CREATE TABLE i (id int, at timestamptz); CREATE TABLE i_child (more text) INHERITS (i);
             CREATE TABLE plain (id int PRIMARY KEY, note text);
             INSERT INTO plain SELECT x, 'note ' || x FROM generate_series(1, 40) x;
             INSERT INTO t SELECT x, x % 7, CASE WHEN x % 11 = 0 THEN NULL WHEN x % 3 = 0 THEN m - interval '2 hours' ELSE m + interval '1 day' END,
                                  md5(x::text) FROM generate_series(1, 200) x, moment;
             INSERT INTO u SELECT x, x * 7 % 220, x / 3.0, CASE WHEN x % 4 = 0 THEN '2020-01-01'::timestamptz ELSE m END FROM generate_series(1, 300) x, moment;
             INSERT INTO p SELECT x, CASE WHEN x % 3 = 0 THEN '2020-01-01'::timestamptz WHEN x % 3 = 1 THEN m - interval '3 hours' ELSE m END, x % 5
                           FROM generate_series(1, 90) x, moment;
             INSERT INTO i SELECT x, CASE WHEN x % 2 = 0 THEN '2020-01-01'::timestamptz ELSE m END FROM generate_series(1, 20) x, moment;
             INSERT INTO i_child SELECT x, CASE WHEN x % 2 = 0 THEN '2020-01-01'::timestamptz ELSE m END, 'c' FROM generate_series(21, 40) x, moment;
             CREATE VIEW v AS SELECT t.id, t.label, u.n FROM t LEFT JOIN u ON u.t = t.id;
             CREATE FUNCTION in_sql(g int) RETURNS SETOF t STABLE LANGUAGE sql AS 'SELECT * FROM t WHERE grp = g';
             CREATE FUNCTION in_plpgsql() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM t JOIN u ON u.t = t.id); END';
             CREATE FUNCTION atomic() RETURNS TABLE (id int) STABLE LANGUAGE sql BEGIN ATOMIC SELECT t.id FROM t; END"
        ));
    }
    db.run(
        "DELETE FROM gone.t WHERE at <= now() - interval '1 hour'; DELETE FROM gone.u WHERE at <= now() - interval '1 hour';
         DELETE FROM gone.p WHERE at <= now() - interval '1 hour'; DELETE FROM gone.i WHERE at <= now() - interval '1 hour';
         SELECT ttl_create_index(x, 'at', interval '1 hour', hide_expired => true) FROM unnest('{hidden.t,hidden.u,hidden.p,hidden.i}'::regclass[]) x;
         ANALYZE",
    );
    assert_eq!(
        db.get("SET pg_ttl_index.hide_expired = off; SELECT count(*) FROM hidden.t; RESET pg_ttl_index.hide_expired"),
        "200"
    );
    db
}

/// What a session sees of statements in a schema, in a transaction that is undone.
fn seen(db: &mut Database, schema: &str, statements: &str) -> String {
    db.run(&format!("BEGIN; SET LOCAL search_path = {schema}, public"));
    let seen = db.try_get(statements).map_err(|error| (error.code, error.message));
    db.run("ROLLBACK; DEALLOCATE ALL");
    format!("{seen:?}")
}

/// Returns how the schemas differ in what statements say, if they do.
pub fn difference(db: &mut Database, statements: &str) -> Option<String> {
    let (expected, actual) = (seen(db, "gone", statements), seen(db, "hidden", statements));
    let shown = |seen: &str| seen.chars().take(300).collect::<String>();
    (actual != expected).then(|| format!("{statements}\nexpected {}\nbut got {}", shown(&expected), shown(&actual)))
}

/// Everything that a statement may have changed.
pub const ALL: &str = "; SELECT id, grp, label FROM t ORDER BY id; SELECT id, t, n FROM u ORDER BY id; SELECT id, n FROM p ORDER BY id; SELECT id FROM i ORDER BY id";

/// A random query over the twins' tables.
pub fn random_query(random: &mut Random) -> String {
    let tables = ["t", "u", "p", "i", "plain", "v", "(SELECT * FROM t WHERE grp < 4)", "in_sql(2)", "p_new"];
    let mut from = format!("{} a", random.pick(&tables));
    let joins = random.below(3);
    for alias in ["b", "c"].iter().take(joins as usize) {
        let join = random.pick(&["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"]);
        let on = random.pick(&["a.id", "a.id + 1"]);
        from += &format!(" {join} {} {alias} ON {on} = {alias}.id", random.pick(&tables));
    }
    let condition = match random.below(8) {
        0 => format!("a.id < {}", random.below(200)),
        1 => format!("a.id IN (SELECT id FROM {})", random.pick(&["t", "u", "i"])),
        2 => format!("NOT EXISTS (SELECT FROM {} x WHERE x.id = a.id)", random.pick(&["t", "u", "p"])),
        3 => format!("a.id = (SELECT max(id) FROM {} x WHERE x.id < a.id + 2)", random.pick(&["t", "u"])),
        4 => "a.id % 2 = 0 OR a.id IS NULL".to_owned(),
        5 => format!("a.id > ALL (SELECT id FROM u WHERE n < {})", random.below(5)),
        6 => "a.id::text LIKE '1%'".to_owned(),
        _ => "true".to_owned(),
    };
    let target = random.pick(&["a.id", "count(*), sum(a.id)", "a.id % 5, count(*)", "DISTINCT a.id % 9"]);
    let group = if target.starts_with("a.id % 5") { " GROUP BY 1" } else { "" };
    let select = format!("SELECT {target} FROM {from} WHERE {condition}{group}");
    match random.below(8) {
        0 => format!("WITH x AS ({select}) SELECT * FROM x ORDER BY 1"),
        1 => format!("{select} UNION ALL {select} ORDER BY 1"),
        2 => format!("UPDATE t SET label = 'x' WHERE id IN (SELECT a.id FROM {from} WHERE {condition}){ALL}"),
        3 => format!("DELETE FROM u WHERE id IN (SELECT a.id FROM {from} WHERE {condition}){ALL}"),
        4 => format!(
            "INSERT INTO t SELECT DISTINCT a.id % 50 + 1, 1, now(), 'new' FROM {from} WHERE {condition} ON CONFLICT (id) DO UPDATE SET label = 'both'{ALL}"
        ),
        _ => format!("{select} ORDER BY 1"),
    }
}

/// What others do to rows that nobody sees: they come, change and go, and what anybody sees stays as it is.
const CHURN: [&str; 6] = [
    "UPDATE t SET label = md5(random()::text), grp = (random() * 9)::int WHERE id = $k",
    "DELETE FROM t WHERE id = $k",
    "INSERT INTO t VALUES ($k, 5, '2020-01-01', 'x') ON CONFLICT DO NOTHING",
    "UPDATE u SET n = n + 1 WHERE id = 4 * $k",
    "INSERT INTO p VALUES ($k, '2020-01-01', 1)",
    "SELECT ttl_runner('p')",
];

/// Compares so many random queries while two sessions churn.
pub fn run(random: &mut Random, queries: u64) -> Vec<Trial> {
    let server = server(&[]);
    let mut db = twins(Database::on(&server));
    let is_over = Arc::new(AtomicBool::new(false));
    let churners: Vec<_> = (0..2)
        .map(|_| {
            let (mut session, is_over) = (db.session("postgres"), Arc::clone(&is_over));
            let mut random = Random(random.below(u64::MAX));
            session.run("SET search_path = hidden, public; SET pg_ttl_index.hide_expired = off");
            std::thread::spawn(move || {
                let mut changes = 0;
                while !is_over.load(Ordering::Relaxed) {
                    // Keys of rows that have expired.
                    let key = 3 * (1 + random.below(10));
                    session.run(&random.pick(&CHURN).replace("$k", &key.to_string()));
                    changes += 1;
                }
                changes
            })
        })
        .collect();
    let mut faults = Vec::new();
    let mut tried = 0;
    while tried < queries && faults.len() < 5 {
        tried += 1;
        let query = random_query(random);
        // A write that meets a row of which others change what nobody sees may fail so, and is tried again.
        let mut attempts = (0..10).map(|_| difference(&mut db, &query));
        let settled = attempts.find(|found| !found.as_ref().is_some_and(|found| found.contains("\"40001\"")));
        faults.extend(settled.unwrap_or_else(|| Some(format!("{query}: 40001 ten times"))));
    }
    is_over.store(true, Ordering::Relaxed);
    let changes: u64 = churners.into_iter().map(|churner| churner.join().expect("a session")).sum();
    let trial = |name: &str, tried, what, faults| Trial { name: name.into(), tried, what, faults };
    vec![
        trial("a hidden table and its twin", tried, "random queries", faults),
        trial("meanwhile", changes, "changes of hidden rows", Vec::new()),
    ]
}
