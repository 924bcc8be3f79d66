//! A disk that is full again and again, under load and sweeps.

use super::Trial;
use super::ledger::{Load, SOON, check, check_log, registrations, set_up};
use harness::{Random, Server, Session};
use std::path::Path;
use std::time::{Duration, Instant};

/// Fills the disk so many times; nothing where no file system may be mounted.
pub fn run(random: &mut Random, times: u64) -> Vec<Trial> {
    let name = "a full disk".to_owned();
    let settings =
        ["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1", "min_wal_size=32MB", "max_wal_size=64MB"];
    let Some(mut server) = Server::start_on_small_disk(400, &settings) else {
        return vec![Trial { name, tried: 0, what: "times: nothing may be mounted", faults: Vec::new() }];
    };
    let (mut written, mut faults) = (0, Vec::new());
    let mut session = Session::connect(&server, "postgres", "postgres");
    set_up(&mut session);
    for _ in 0..times {
        let load = Load::start(3, random, server.host());
        std::thread::sleep(Duration::from_millis(500));
        let ballast = server.host().join("ballast");
        fill(&ballast);
        std::thread::sleep(Duration::from_millis(500 + random.below(1_500)));
        std::fs::remove_file(&ballast).expect("removing a file");
        written += load.stop(&mut faults);
        if !is_back(&server) {
            server.stop();
            server.start_again();
        }
        session = Session::reconnect(&server, "postgres");
        registrations().iter().for_each(|sql| session.run(sql));
        check(&mut session, &mut faults);
    }
    let log = server.log();
    if !log.contains("No space left on device") {
        faults.push("the disk was never full".into());
    }
    // Where its write-ahead log cannot be written, PostgreSQL itself panics.
    check_log(&log.replace("PANIC:", ""), &mut faults);
    vec![
        Trial { name, tried: times, what: "times", faults },
        Trial { name: "meanwhile".into(), tried: written, what: "transactions", faults: Vec::new() },
    ]
}

/// Writes zeros until nothing more fits.
fn fill(path: &Path) {
    use std::io::Write;
    let mut file = std::fs::File::create(path).expect("a file");
    for size in [1 << 20, 1 << 12] {
        let zeros = vec![0; size];
        while file.write_all(&zeros).is_ok() {}
    }
}

/// Whether a server that may have crashed takes sessions again.
fn is_back(server: &Server) -> bool {
    let deadline = Instant::now() + SOON / 3;
    while Instant::now() < deadline {
        if Session::try_connect(server, "postgres", "postgres").is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    false
}
