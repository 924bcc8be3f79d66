//! Rows that are touched at the instant of their expiry, while sweeps run all the time.

use super::{Trial, pgbench, server};
use harness::{Database, Server};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A way of sweeping: its plan, the options of the rule, and what makes it go that way.
struct Way {
    name: &'static str,
    scan: &'static str,
    options: &'static str,
    setup: &'static str,
}

const TRIGGER: &str = "CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
     CREATE TRIGGER watch BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION watch()";
const ARCHIVE: &str = "CREATE TABLE archive (LIKE t)";

const WAYS: [Way; 11] = [
    Way { name: "heap, by the index", scan: "index", options: "", setup: "" },
    Way { name: "heap, by blocks", scan: "blocks", options: "", setup: "" },
    Way { name: "heap, by BRIN", scan: "auto", options: ", index_method => 'brin'", setup: "" },
    Way { name: "SQL, by the index", scan: "index", options: "", setup: TRIGGER },
    Way { name: "SQL, by blocks", scan: "blocks", options: "", setup: TRIGGER },
    Way { name: "archive, by the index", scan: "index", options: ", archive_to => 'archive'", setup: ARCHIVE },
    Way { name: "archive, by blocks", scan: "blocks", options: ", archive_to => 'archive'", setup: ARCHIVE },
    Way { name: "soft delete, by the index", scan: "index", options: ", soft_delete_column => 'gone'", setup: "" },
    Way { name: "soft delete, by blocks", scan: "blocks", options: ", soft_delete_column => 'gone'", setup: "" },
    Way { name: "clear, by the index", scan: "index", options: ", clear_columns => '{v}'", setup: "" },
    Way { name: "clear, by blocks", scan: "blocks", options: ", clear_columns => '{v}'", setup: "" },
];

/// How many rows expire in a second: about as many as can be touched and swept.
const ROWS_PER_SECOND: u64 = 15_000;

/// A row that a touch finds alive lives for ever, and is in the ledger.
const TOUCH: &str = "\\set skip random(0, 40)
WITH due AS (SELECT id FROM t WHERE at BETWEEN now() - interval '30 ms' AND now() + interval '30 ms' AND gone IS NULL AND v = 'kept'
             ORDER BY at OFFSET :skip LIMIT 10),
     touched AS (UPDATE t SET at = 'infinity' WHERE id IN (SELECT id FROM due) AND at < 'infinity' AND gone IS NULL AND v = 'kept'
                 RETURNING id)
INSERT INTO ledger SELECT id FROM touched;
";

/// Touches about so many rows in each of every so many ways.
pub fn run(wanted: u64, every: usize) -> Vec<Trial> {
    let server = server(&["autovacuum_naptime=5"]);
    WAYS.iter().step_by(every).map(|way| touch(&server, way, wanted)).collect()
}

fn touch(server: &Arc<Server>, way: &Way, wanted: u64) -> Trial {
    let mut db = Database::on(server);
    db.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
    let (mut touched, mut faults) = (0, Vec::new());
    let mut rounds = 0;
    while touched < wanted && rounds < 20 {
        rounds += 1;
        // Those that are not touched in time are swept.
        let rows = (2 * (wanted - touched)).clamp(2_000, 20 * ROWS_PER_SECOND);
        let seconds = rows / ROWS_PER_SECOND + 1;
        db.run("DROP TABLE IF EXISTS t, archive, ledger; DROP FUNCTION IF EXISTS watch()");
        db.run("CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz, v text DEFAULT 'cleared'); CREATE TABLE ledger (id int)");
        if !way.setup.is_empty() {
            db.run(way.setup);
        }
        db.run(&format!(
            "INSERT INTO t SELECT i, clock_timestamp() + interval '1 second' + i * interval '{seconds} s' / {rows}, NULL, 'kept'
             FROM generate_series(1, {rows}) i ORDER BY hashint4(i);
             CREATE INDEX ON t (at); SELECT ttl_create_index('t', 'at', 0, 200{})",
            way.options
        ));
        let is_over = Arc::new(AtomicBool::new(false));
        let sweepers: Vec<_> = (0..2)
            .map(|_| {
                let (mut session, is_over) = (db.session("postgres"), Arc::clone(&is_over));
                let scan = format!("SET pg_ttl_index.debug_scan = {}", way.scan);
                std::thread::spawn(move || {
                    session.run(&scan);
                    while !is_over.load(Ordering::Relaxed) {
                        session.run("CALL ttl_sweep('t')");
                    }
                })
            })
            .collect();
        let time = format!("--time={}", seconds + 2);
        pgbench(server, &db.name, TOUCH, &["--client=3", &time]);
        is_over.store(true, Ordering::Relaxed);
        sweepers.into_iter().for_each(|sweeper| sweeper.join().expect("a sweep"));
        db.run("CALL ttl_sweep('t')");
        let live = "t.gone IS NULL AND t.v = 'kept'";
        let mut expect = |what: &str, sql: &str, expected: &str| {
            let found = db.get(sql);
            if found != expected {
                faults.push(format!("{}: {what}: {found}, not {expected}", way.name));
            }
        };
        expect(
            "touched rows that are lost",
            &format!("SELECT count(*) FROM ledger l WHERE NOT EXISTS (SELECT FROM t WHERE t.id = l.id AND {live})"),
            "0",
        );
        expect("expired rows that are left", &format!("SELECT count(*) FROM t WHERE at <= now() AND {live}"), "0");
        if way.setup == ARCHIVE {
            let rest = format!("SELECT {rows} - count(*) FROM ledger");
            let rest = db.get(&rest);
            let archived = db.get("SELECT count(*) FROM archive");
            if rest != archived {
                faults.push(format!("{}: {archived} rows are archived, not {rest}", way.name));
            }
        }
        touched += db.get("SELECT count(*) FROM ledger").parse::<u64>().expect("a count");
    }
    Trial { name: way.name.into(), tried: touched, what: "rows touched as they expired", faults }
}
