//! Upserts onto a few hot keys whose rows expire and are swept all the time: each has its effect.

use super::{Trial, pgbench, server};
use harness::Database;

/// How many keys there are, which is how many rows each statement writes.
const KEYS: u64 = 20;

const FORMS: [(&str, &str); 2] = [
    (
        "ON CONFLICT DO UPDATE",
        "INSERT INTO t SELECT k, clock_timestamp() + :ms * interval '1 ms', 1 FROM generate_series(1, 20) k
         ON CONFLICT (k) DO UPDATE SET at = excluded.at, v = t.v + 1 RETURNING k",
    ),
    (
        "ON CONFLICT DO UPDATE, one key",
        "INSERT INTO t VALUES (:k, clock_timestamp() + :ms * interval '1 ms', 1)
         ON CONFLICT (k) DO UPDATE SET at = excluded.at, v = t.v + 1 RETURNING k",
    ),
];

/// Upserts about so many rows in all.
pub fn run(wanted: u64) -> Vec<Trial> {
    let server = server(&["autovacuum_naptime=1"]);
    let mut trials = Vec::new();
    for isolation in ["read committed", "repeatable read"] {
        for (form, statement) in FORMS {
            let mut db = Database::on(&server);
            db.run(
                "CREATE EXTENSION pg_ttl_index; CREATE TABLE t (k int PRIMARY KEY, at timestamptz, v bigint) WITH (fillfactor = 50);
                 CREATE TABLE lost (n bigint); SELECT ttl_create_index('t', 'at', 0, hide_expired => true)",
            );
            let name = db.name.clone();
            db.run(&format!("ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'"));
            let expected = if form.ends_with("key") { 1 } else { KEYS };
            let script = format!(
                "\\set ms random(-3, 3)\n\\set k random(1, 5)\n
                 WITH w AS ({statement}), n AS (SELECT count(*) AS n FROM w) INSERT INTO lost SELECT {expected} - n FROM n WHERE n <> {expected};\n"
            );
            // Most of the rows under the isolation level that most use, and in statements of many.
            let share = match (isolation, expected) {
                ("read committed", KEYS) => wanted / 10 * 8,
                ("read committed", _) => wanted / 10,
                (_, KEYS) => wanted / 20,
                _ => wanted / 20,
            };
            let transactions = format!("--transactions={}", (share / expected / 6).max(50));
            let done = pgbench(&server, &db.name, &script, &["--client=6", &transactions]);
            let lost = db.get("SELECT coalesce(sum(n), 0) FROM lost");
            let mut faults = Vec::new();
            if lost != "0" {
                faults.push(format!("{form}, {isolation}: {lost} rows were not written"));
            }
            if db.get("SELECT state FROM ttl_summary") != "active" {
                faults.push(format!("{form}, {isolation}: {}", db.get("SELECT state, last_error FROM ttl_summary")));
            }
            let name = format!("{form}, {isolation}");
            trials.push(Trial { name, tried: done * expected, what: "rows upserted onto hot keys", faults });
        }
    }
    trials
}
