//! Telling a row's time to live, and inserting and updating rows of a table with a rule.

use crate::report::{part, say};
use crate::{cpu_seconds, latency, side_by_side};
use harness::{Server, Session};

const ROWS: u32 = 100_000;

pub fn run(server: &Server) {
    part("One row, and writing", "```");
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run(&format!(
        "DROP TABLE IF EXISTS t; CREATE TABLE t (id int PRIMARY KEY, at timestamptz DEFAULT now(), n int);
         INSERT INTO t SELECT i FROM generate_series(1, {ROWS}) i"
    ));
    session.run("VACUUM ANALYZE t");
    session.run("SELECT ttl_create_index('t', 'at', interval '1 day')");
    let by_hand = "SELECT extract(epoch FROM at + interval '1 day' - now())::float8 FROM t WHERE id = :id";
    let by_us = "SELECT ttl_get('t', (:id)::text)";
    say(format!("\nOne row's time to live by primary key, of {ROWS}: milliseconds a query by pgbench, one client.\n"));
    say(format!("{:<34}{:>14}{:>22}", "", "simple protocol", "prepared statement"));
    side_by_side(
        ["SELECT by hand", "ttl_get"],
        ["simple", "prepared"]
            .map(|protocol| move || [by_hand, by_us].map(|sql| latency(server, protocol, sql, 20_000))),
        "ms",
    );

    say("\nWriting 100000 rows: CPU time of the backend.\n");
    say(format!("{:<34}{:>14}{:>22}", "", "INSERT", "UPDATE"));
    let insert =
        |rule: &'static str| cpu_of(server, rule, "INSERT INTO w SELECT i, now() FROM generate_series(1, 100000) i");
    let update = |rule: &'static str| {
        let fill = format!("INSERT INTO w SELECT i, now() FROM generate_series(1, 100000) i; {rule}");
        cpu_of(server, Box::leak(fill.into_boxed_str()), "UPDATE w SET n = n + 1")
    };
    let (plain, ruled) = ("CREATE INDEX ON w (at)", "SELECT ttl_create_index('w', 'at', interval '1 day')");
    let (fresh, touched) =
        ("CREATE INDEX ON w (at)", "SELECT ttl_create_index('w', 'at', interval '1 day'), ttl_enable_touch('w')");
    side_by_side(
        ["with an index", "with a rule, and ttl_enable_touch"],
        [
            Box::new(move || [plain, ruled].map(insert)) as Box<dyn Fn() -> [f64; 2]>,
            Box::new(move || [fresh, touched].map(update)),
        ],
        "s",
    );
    say("```");
}

/// CPU seconds of the backend for a statement, on a table prepared so.
fn cpu_of(server: &Server, setup: &str, sql: &str) -> f64 {
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run("DROP TABLE IF EXISTS w; CREATE TABLE w (id int, at timestamptz, n int DEFAULT 0)");
    session.run(setup);
    let pid = session.get("SELECT pg_backend_pid()");
    let before = cpu_seconds(&pid);
    session.run(sql);
    cpu_seconds(&pid) - before
}
