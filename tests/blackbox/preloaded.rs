//! Beside what people preload: whatever the order, both do their work.

use crate::reliability::trials::settings::core;
use crate::worker::database;
use harness::{Server, program, run};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

/// Libraries, what they need to be set, and the extension that goes with them.
const NEIGHBOURS: [(&str, &[&str], &str); 5] = [
    ("pg_stat_statements", &["pg_stat_statements.track=all"], "pg_stat_statements"),
    (
        "auto_explain",
        &["auto_explain.log_min_duration=0", "auto_explain.log_analyze=on", "auto_explain.log_nested_statements=on"],
        "",
    ),
    ("pg_cron", &["cron.database_name=postgres", "cron.use_background_workers=on"], ""),
    ("pg_partman_bgw", &["pg_partman_bgw.dbname=postgres", "pg_partman_bgw.interval=1"], "pg_partman"),
    ("timescaledb", &["timescaledb.telemetry_level=off"], "timescaledb"),
];

/// The libraries among these that this PostgreSQL has.
fn available() -> Vec<(&'static str, &'static [&'static str], &'static str)> {
    let directory = PathBuf::from(run(Command::new(program("pg_config")).arg("--pkglibdir")).trim());
    let (found, missing): (Vec<_>, Vec<_>) =
        NEIGHBOURS.into_iter().partition(|(library, ..)| directory.join(format!("{library}.so")).exists());
    for (library, ..) in missing {
        eprintln!("{library} cannot be had for this PostgreSQL");
    }
    found
}

/// The core of the suite, and a sweep by the worker, on a server with these libraries.
fn check(libraries: &str, settings: &[&str], extensions: &[&str]) {
    let preload = format!("shared_preload_libraries={libraries}");
    let own = [preload.as_str(), "pg_ttl_index.naptime=1", "max_worker_processes=20"];
    let server = Arc::new(Server::start(&[&own, settings].concat()));
    let mut db = database(&server);
    for extension in extensions.iter().filter(|extension| !extension.is_empty()) {
        db.run(&format!("CREATE EXTENSION {extension}"));
    }
    db.run(
        "CREATE TABLE swept (id int PRIMARY KEY, at timestamptz); INSERT INTO swept SELECT i, '2020-01-01' FROM generate_series(1, 100) i;
         CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
         CREATE TRIGGER watch BEFORE DELETE ON swept FOR EACH ROW EXECUTE FUNCTION watch();
         SELECT ttl_create_index('swept', 'at', 60)",
    );
    db.wait_for("SELECT count(*) FROM swept", "0");
    db.run("SELECT ttl_stop_worker()");
    let faults = core(&mut db, false);
    assert!(faults.is_empty(), "{libraries}: {faults:#?}");
    let log = server.log();
    assert!(!log.contains("terminated by signal") && !log.contains("XX000"), "{libraries}: {log}");
}

#[test]
fn each_neighbour_in_either_order() {
    for (library, settings, extension) in available() {
        check(&format!("pg_ttl_index,{library}"), settings, &[extension]);
        check(&format!("{library},pg_ttl_index"), settings, &[extension]);
    }
}

#[test]
fn all_neighbours_at_once() {
    let all = available();
    let mut libraries: Vec<_> = all.iter().map(|(library, ..)| *library).collect();
    let settings: Vec<_> = all.iter().flat_map(|(_, settings, _)| settings.iter().copied()).collect();
    let extensions: Vec<_> = all.iter().map(|(.., extension)| *extension).collect();
    libraries.push("pg_ttl_index");
    check(&libraries.join(","), &settings, &extensions);
    libraries.reverse();
    check(&libraries.join(","), &settings, &extensions);
}
