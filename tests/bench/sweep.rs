//! Sweeping, beside a plain DELETE.

use crate::cpu_seconds;
use harness::{Server, Session};

const ROWS: u32 = 1_000_000;
const ROUNDS: usize = 5;

pub fn run(server: &Server) {
    println!("{ROWS} rows of about 100 bytes, half of them expired, warm cache.");
    println!("CPU time of the backend, and relative to one DELETE in the same round: medians of {ROUNDS} rounds.\n");
    println!("{:<34}{:>14}{:>22}", "", "no snapshot", "old snapshot held");
    let variants = [
        ("DELETE FROM t WHERE at <= cutoff", "DELETE FROM t WHERE at <= now() - interval '1 day'".to_owned()),
        ("CALL ttl_sweep, batches of 10000", sweep(10_000)),
        ("CALL ttl_sweep, batches of 1000", sweep(1_000)),
    ];
    // Round by round, so that what else the machine does falls on all alike.
    let mut seconds = vec![[const { Vec::new() }; 2]; variants.len()];
    let mut ratios = seconds.clone();
    for _ in 0..ROUNDS {
        for (column, held) in [false, true].into_iter().enumerate() {
            let times: Vec<f64> = variants.iter().map(|(_, sql)| measure(server, sql, held)).collect();
            for (row, time) in times.iter().enumerate() {
                seconds[row][column].push(*time);
                ratios[row][column].push(time / times[0]);
            }
        }
    }
    for (row, (name, _)) in variants.iter().enumerate() {
        let mut line = format!("{name:<34}");
        for column in 0..2 {
            line +=
                &format!("{:>9.2}s {:>5.2}x   ", median(&mut seconds[row][column]), median(&mut ratios[row][column]));
        }
        println!("{line}");
    }
}

fn sweep(batch: u32) -> String {
    format!("CALL ttl_sweep('t'); -- {batch}")
}

/// CPU seconds of the backend for the statement on a fresh table.
fn measure(server: &Server, sql: &str, old_snapshot: bool) -> f64 {
    let batch = sql.rsplit_once("-- ").map_or("10000", |(_, batch)| batch);
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run(&format!(
        "DROP TABLE IF EXISTS t; CREATE TABLE t (id int, at timestamptz, pad text);
         INSERT INTO t SELECT i, now() - interval '2 days' + i * interval '2 days' / {ROWS}, repeat('x', 60)
         FROM generate_series(1, {ROWS}) AS i"
    ));
    session.run(&format!("SELECT ttl_create_index('t', 'at', interval '1 day', {batch})"));
    session.run("VACUUM ANALYZE t");
    session.run("CHECKPOINT");
    session.run("SELECT count(*), sum(id) FROM t");
    let mut other = Session::connect(server, "postgres", "postgres");
    if old_snapshot {
        other.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1");
    }
    let pid = session.get("SELECT pg_backend_pid()");
    let before = cpu_seconds(&pid);
    session.run(sql);
    let spent = cpu_seconds(&pid) - before;
    let left: u32 = session.get("SELECT count(*) FROM t").parse().expect("a count");
    assert!(left <= ROWS / 2 + 1000, "{left} rows are left");
    spent
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
