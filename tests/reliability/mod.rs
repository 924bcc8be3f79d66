//! Trials that try to break the promises: many times, at random, under load.

pub mod chaos;
pub mod disk;
pub mod fuzz;
pub mod isolation;
pub mod ledger;
pub mod memory;
pub mod replication;
pub mod settings;
pub mod touches;
pub mod twins;
pub mod upserts;

use harness::{Server, run};
use std::io::Write;
use std::sync::Arc;

/// What a trial has done.
pub struct Trial {
    pub name: String,
    /// How often it was tried, and what.
    pub tried: u64,
    pub what: &'static str,
    /// What was lost, shown or broken; empty if nothing was.
    pub faults: Vec<String>,
}

/// A server whose workers look every second.
pub fn server(settings: &[&str]) -> Arc<Server> {
    let mut all = vec!["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1", "synchronous_commit=off"];
    all.extend(settings);
    Arc::new(Server::start(&all))
}

/// Runs a script by pgbench until it ends, and returns how many transactions it has done.
fn pgbench(server: &Server, database: &str, script: &str, options: &[&str]) -> u64 {
    let path = std::env::temp_dir().join(format!("pg_ttl_index_{}_{database}.sql", std::process::id()));
    std::fs::File::create(&path).expect("a script").write_all(script.as_bytes()).expect("writing it");
    let report = run(server
        .client_program("pgbench")
        .args(["--no-vacuum", "--protocol=prepared", "--max-tries=1000000", "--jobs=2"])
        .args(options)
        .arg("--file")
        .arg(&path)
        .env("PGDATABASE", database));
    std::fs::remove_file(path).expect("removing the script");
    let done = report.split("transactions actually processed: ").nth(1);
    done.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok())
        .unwrap_or_else(|| panic!("pgbench said: {report}"))
}
