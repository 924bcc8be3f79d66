//! `make bench`: what the extension costs, each row side by side with what it is compared with, in one run on one server.

mod rows;
mod sweep;

use harness::{Server, Session};

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
    // All, or those that are named.
    let named: Vec<_> = std::env::args().skip(1).collect();
    for (name, run) in [("sweep", sweep::run as fn(&Server)), ("rows", rows::run)] {
        if named.is_empty() || named.iter().any(|other| other == name) {
            run(&server);
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// CPU seconds that a backend has used.
fn cpu_seconds(pid: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the backend");
    let fields: Vec<_> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
    let ticks: u32 = fields[11..13].iter().map(|field| field.parse::<u32>().expect("a number")).sum();
    f64::from(ticks) / 100.0
}
