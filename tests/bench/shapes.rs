//! Sweeping tables of many shapes, each beside one statement that does the same by hand; and what an idle sweep costs.

use crate::cpu_seconds;
use crate::report::{bars, part, table};
use harness::{Server, Session};

const ROWS: u32 = 500_000;
const ROUNDS: usize = 3;

/// A kind of table: what makes it, what a rule on it says, and what somebody would write without one.
struct Shape {
    name: &'static str,
    /// The place of row `i` in expiry order.
    order: &'static str,
    pad: &'static str,
    setup: &'static str,
    options: &'static str,
    by_hand: &'static str,
}

const IN_ORDER: &str = "i";
const PAD: &str = "repeat('x', 60)";
const DELETE: &str = "DELETE FROM t WHERE at <= now() - interval '1 day'";

const SHAPES: [Shape; 9] = [
    Shape { name: "in order", order: IN_ORDER, pad: PAD, setup: "", options: "", by_hand: DELETE },
    // A number without common factors with the number of rows visits each place once.
    Shape {
        name: "random order",
        order: "(i::bigint * 314159 % 500000)",
        pad: PAD,
        setup: "",
        options: "",
        by_hand: DELETE,
    },
    Shape {
        name: "filter",
        order: IN_ORDER,
        pad: PAD,
        setup: "",
        options: ", filter => 'id % 10 <> 0'",
        by_hand: "DELETE FROM t WHERE at <= now() - interval '1 day' AND id % 10 <> 0",
    },
    Shape {
        name: "3 more indexes",
        order: IN_ORDER,
        pad: PAD,
        setup: "CREATE INDEX ON t (id); CREATE INDEX ON t (pad, id); CREATE INDEX ON t ((id % 1000))",
        options: "",
        by_hand: DELETE,
    },
    Shape {
        name: "trigger",
        order: IN_ORDER,
        pad: PAD,
        setup: "CREATE OR REPLACE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
                CREATE TRIGGER b BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION nothing()",
        options: "",
        by_hand: DELETE,
    },
    Shape {
        name: "cascade",
        order: IN_ORDER,
        pad: PAD,
        setup: "ALTER TABLE t ADD PRIMARY KEY (id);
                CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE); CREATE INDEX ON child (id)",
        options: "",
        by_hand: DELETE,
    },
    Shape {
        name: "soft delete",
        order: IN_ORDER,
        pad: PAD,
        setup: "ALTER TABLE t ADD deleted timestamptz",
        options: ", soft_delete_column => 'deleted'",
        by_hand: "UPDATE t SET deleted = now() WHERE at <= now() - interval '1 day' AND deleted IS NULL",
    },
    Shape {
        name: "archive",
        order: IN_ORDER,
        pad: PAD,
        setup: "CREATE TABLE archive (LIKE t)",
        options: ", archive_to => 'archive'",
        by_hand: "WITH gone AS (DELETE FROM t WHERE at <= now() - interval '1 day' RETURNING *) INSERT INTO archive SELECT * FROM gone",
    },
    Shape {
        name: "wide (TOAST)",
        order: IN_ORDER,
        pad: "CASE WHEN i % 20 = 0 THEN (SELECT string_agg(md5((i * 100 + j)::text), '') FROM generate_series(1, 80) j) END",
        setup: "",
        options: "",
        by_hand: DELETE,
    },
];

pub fn run(server: &Server) {
    part(
        "Kinds of tables",
        &format!(
            "{ROWS} rows, 49 % of them expired, warm cache, beside one statement that does the same by hand. CPU seconds of the \
             backend, fastest of {ROUNDS} rounds, and ratios."
        ),
    );
    let (mut rows, mut ratios) = (Vec::new(), [Vec::new(), Vec::new()]);
    for shape in &SHAPES {
        let mut fastest = [f64::INFINITY; 3];
        for round in 0..ROUNDS {
            for turn in 0..3 {
                let way = (turn + round) % 3;
                fastest[way] = fastest[way].min(measure(server, shape, [None, Some(10_000), Some(1_000)][way]));
            }
        }
        let mut row = vec![shape.name.to_owned(), format!("{:.3}", fastest[0])];
        for (time, ratios) in fastest[1..].iter().zip(&mut ratios) {
            ratios.push(time / fastest[0]);
            row.extend([format!("{time:.3}"), format!("{:.2}", time / fastest[0])]);
        }
        rows.push(row);
    }
    table(&["", "by hand", "10,000 rows", "ratio", "1,000 rows", "ratio"], &rows);
    let names: Vec<_> = SHAPES.iter().map(|shape| shape.name.to_owned()).collect();
    let [large, small] = ratios;
    let series = [("batches of 10,000", large), ("batches of 1,000", small)];
    bars("kinds.svg", "CPU of a sweep beside one statement by hand", &names, &series);
}

/// Each plan of ours on a heap in order and on one in random order.
pub fn plans(server: &Server) {
    part(
        "Plans",
        &format!(
            "The same tables in batches of 10,000, by each plan (`pg_ttl_index.debug_scan`) beside one DELETE. CPU, fastest of \
             {ROUNDS} rounds."
        ),
    );
    const PLANS: [(&str, &str); 4] =
        [("chosen", "auto"), ("by the index", "index"), ("by blocks", "blocks"), ("by blocks, BRIN", "auto")];
    let (mut rows, mut ratios) = (Vec::new(), vec![Vec::new(); PLANS.len()]);
    for shape in &SHAPES[..2] {
        let mut fastest = [f64::INFINITY; 1 + PLANS.len()];
        for round in 0..ROUNDS {
            for turn in 0..fastest.len() {
                let way = (turn + round) % fastest.len();
                let plan = way.checked_sub(1).map(|plan| PLANS[plan]);
                let options =
                    if plan.is_some_and(|plan| plan.0.contains("BRIN")) { ", index_method => 'brin'" } else { "" };
                let shape = Shape { options, ..*shape };
                let seconds = measure_under(server, &shape, plan.map(|_| 10_000), plan.map_or("auto", |plan| plan.1));
                fastest[way] = fastest[way].min(seconds);
            }
        }
        let mut row = vec![shape.name.to_owned(), format!("{:.3}", fastest[0])];
        for (time, ratios) in fastest[1..].iter().zip(&mut ratios) {
            ratios.push(time / fastest[0]);
            row.push(format!("{:.2}", time / fastest[0]));
        }
        rows.push(row);
    }
    let columns: Vec<_> = ["", "one `DELETE`, s"].into_iter().chain(PLANS.map(|plan| plan.0)).collect();
    table(&columns, &rows);
    let names: Vec<_> = SHAPES[..2].iter().map(|shape| shape.name.to_owned()).collect();
    let series: Vec<_> = PLANS.iter().map(|plan| plan.0).zip(ratios).collect();
    bars("plans.svg", "CPU of each plan beside one DELETE", &names, &series);
}

/// CPU seconds of the backend for a sweep in batches of this size, or for the statement by hand, on a new table.
fn measure(server: &Server, shape: &Shape, batch: Option<u32>) -> f64 {
    measure_under(server, shape, batch, "auto")
}

fn measure_under(server: &Server, shape: &Shape, batch: Option<u32>, plan: &str) -> f64 {
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run(&format!("SET pg_ttl_index.debug_scan = {plan}"));
    let Shape { order, pad, setup, options, by_hand, .. } = shape;
    session.run(&format!(
        "SET client_min_messages = warning;
         DROP TABLE IF EXISTS t, child, archive CASCADE; CREATE TABLE t (id int, at timestamptz, pad text);
         INSERT INTO t SELECT i, now() - interval '1 day' + ({order} - {ROWS} * 0.49) * interval '1 second', {pad}
         FROM generate_series(1, {ROWS}) AS i"
    ));
    if !setup.is_empty() {
        session.run(setup);
    }
    // The statement by hand has the same index.
    session.run(&format!("SELECT ttl_create_index('t', 'at', interval '1 day', {}{options})", batch.unwrap_or(10_000)));
    session.run("VACUUM ANALYZE t");
    session.run("CHECKPOINT");
    session.run("SELECT count(*), sum(id), sum(length(pad)) FROM t");
    let pid = session.get("SELECT pg_backend_pid()");
    let before = cpu_seconds(&pid);
    session.run(if batch.is_some() { "CALL ttl_sweep('t')" } else { by_hand });
    let spent = cpu_seconds(&pid) - before;
    if batch.is_some() {
        let gone: u32 = session
            .get("SELECT rows_deleted_last_run FROM ttl_summary WHERE table_name = 't'")
            .parse()
            .expect("a count");
        assert!(gone > ROWS / 5 * 2, "{}: {gone} rows are gone", shape.name);
    }
    spent
}

/// An idle sweep by BRIN beside one without an index, which reads the heap.
pub fn idle(server: &Server) {
    const ROWS: u32 = 5_000_000;
    part(
        "An idle sweep",
        &format!("{ROWS} rows, none of them expired: milliseconds, fastest of {ROUNDS}, beside reading the heap."),
    );
    let mut rows = Vec::new();
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run(&format!(
        "SET client_min_messages = warning;
         DROP TABLE IF EXISTS t CASCADE; CREATE TABLE t (id int, at timestamptz, pad text);
         INSERT INTO t SELECT i, now() + i * interval '1 second', repeat('x', 60) FROM generate_series(1, {ROWS}) AS i"
    ));
    session.run("VACUUM ANALYZE t");
    let mut heap = f64::INFINITY;
    for method in ["none", "brin", "btree"] {
        session.run(&format!("SELECT ttl_create_index('t', 'at', interval '1 day', index_method => '{method}')"));
        let mut fastest = f64::INFINITY;
        for _ in 0..=ROUNDS {
            let started = std::time::Instant::now();
            session.run("CALL ttl_sweep('t')");
            fastest = fastest.min(started.elapsed().as_secs_f64() * 1e3);
        }
        heap = heap.min(if method == "none" { fastest } else { heap });
        rows.push(vec![format!("`{method}`"), format!("{fastest:.2}"), format!("{:.3}", fastest / heap)]);
    }
    table(&["index_method", "ms", "ratio"], &rows);
}
