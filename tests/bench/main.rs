//! `make bench`: what the extension costs, each row side by side with what it is compared with, in one run on one server.

mod foreground;
mod growth;
mod hidden;
mod partitions;
mod peers;
mod report;
mod rows;
mod shapes;

use harness::{Server, Session};
use report::say;
use std::io::Write;

const ROUNDS: usize = 9;

fn main() {
    let server = Server::start(&[
        "shared_preload_libraries=pg_ttl_index",
        "shared_buffers=1GB",
        "max_wal_size=8GB",
        "autovacuum=off",
        "synchronous_commit=off",
    ]);
    let mut setup = Session::connect(&server, "postgres", "postgres");
    setup.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
    // All, or those that are named. Only a whole run is kept.
    let named: Vec<_> = std::env::args().skip(1).collect();
    let parts = [
        // First, because the kernel goes on writing what the others have written.
        ("foreground", foreground::run as fn(&Server)),
        ("peers", peers::run),
        ("shapes", shapes::run),
        ("plans", shapes::plans),
        ("idle", shapes::idle),
        ("growth", growth::rows),
        ("workers", growth::workers),
        ("idle_rules", growth::idle_rules),
        ("extensions", peers::extensions),
        ("partitions", partitions::run),
        ("size", growth::size),
        ("rows", rows::run),
        ("hidden", hidden::run),
        ("writes", hidden::writes),
    ];
    for (name, run) in parts {
        if named.is_empty() || named.iter().any(|other| other == name) {
            run(&server);
        }
    }
    if named.is_empty() {
        report::write(ABOUT);
    }
}

const ABOUT: &str = "# Benchmarks

Written by `make bench`: every comparison is made side by side in one run. Ratios are what counts; the times are those of a small
machine with two cores, on which other things may have been going on.

Where the time goes in a sweep in order of expiry, in batches of 10,000, by a profile: 58 % deletes rows from the heap, of which 33 %
writes WAL; 24 % reads the index and looks at the rows; 4 % is code of the extension; 6 % goes into batches, which cost a tenth of
a millisecond each. One DELETE has the first two as well, so that a sweep of a table without triggers can be no faster than about
0.7 of it. Transactions of others wait at commit for the WAL that a sweep has written, as they do for one DELETE: `batch_size`,
`target_batch_time`, `max_wal_per_second` and `batch_delay` set how much that is. By default, each sweep of a worker writes at most
16 MB a second, about 100,000 rows; the parts that compare speed run without that limit. Without it, one process writes about
700 MB of WAL a second here, and two write little more.
";

/// CPU seconds that a backend has used.
fn cpu_seconds(pid: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).expect("the backend");
    let nanoseconds: f64 = stat.split(' ').next().and_then(|first| first.parse().ok()).expect("a number");
    nanoseconds / 1e9
}

/// The fastest rounds of two ways to do a thing, in two columns, and their ratio: what else the machine does makes a round
/// slower, and never faster.
fn side_by_side<M: Fn() -> [f64; 2]>(names: [&str; 2], columns: [M; 2], unit: &str) {
    let mut lines = names.map(|name| format!("{name:<34}"));
    for measure in columns {
        let rounds: Vec<[f64; 2]> = (0..ROUNDS).map(|_| measure()).collect();
        let fastest = [0, 1].map(|row| rounds.iter().map(|round| round[row]).fold(f64::INFINITY, f64::min));
        for (value, line) in fastest.iter().zip(&mut lines) {
            *line += &format!("{value:>8.3}{unit:<2} {:>5.2}x   ", value / fastest[0]);
        }
    }
    lines.into_iter().for_each(say);
}

/// Average milliseconds of a query by pgbench; `:id` in it is random.
fn latency(server: &Server, protocol: &str, sql: &str, count: u32) -> f64 {
    let script = std::env::temp_dir().join(format!("pg_ttl_index_bench_{}.sql", std::process::id()));
    let mut file = std::fs::File::create(&script).expect("a script");
    writeln!(file, "\\set id random(1, 100000)\n{sql};").expect("writing");
    let output = server
        .client_program("pgbench")
        .args(["--no-vacuum", "--transactions", &count.to_string(), "--protocol", protocol, "--file"])
        .arg(&script)
        .output()
        .expect("running pgbench");
    std::fs::remove_file(script).expect("removing the script");
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    let latency = report.split("latency average = ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
    latency.unwrap_or_else(|| panic!("{report}{}", String::from_utf8_lossy(&output.stderr)))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
