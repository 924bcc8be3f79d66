//! A worker that sweeps again and again does not grow.

use super::{Trial, server};
use harness::{Database, Session};

/// The memory of a process that it does not share.
pub fn kilobytes(pid: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the worker");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

pub fn run(passes: u64) -> Vec<Trial> {
    let server = server(&["pg_ttl_index.history_retention=1s"]);
    let mut db = Database::on(&server);
    db.run(
        "CREATE EXTENSION pg_ttl_index; CREATE TABLE t (id int, at timestamptz); SELECT ttl_create_index('t', 'at', 0)",
    );
    let pid = |session: &mut Session| {
        let worker = "FROM ttl_worker_status() WHERE application_name = 'pg_ttl_index worker'";
        session.wait_for(&format!("SELECT count(*) {worker}"), "1");
        session.get(&format!("SELECT worker_pid {worker}"))
    };
    let before = pid(&mut db);
    let (mut first, mut faults) = (0, Vec::new());
    for pass in 0..passes {
        // A change of the rule wakes the worker.
        db.run("INSERT INTO t VALUES (1, '2020-01-01'); UPDATE ttl_index_table SET batch_size = coalesce(batch_size, 99) + 1");
        db.wait_for_often("SELECT count(*) FROM t", "0");
        if pass == passes / 10 {
            first = kilobytes(&before);
        }
    }
    if pid(&mut db) == before {
        let last = kilobytes(&before);
        // A leak of some bytes in each pass would show.
        if last > first + 512 + passes / 50 {
            faults.push(format!("the worker has grown from {first} to {last} kB"));
        }
    } else {
        faults.push("another worker is there".into());
    }
    vec![Trial { name: "one worker".into(), tried: passes, what: "passes in the same memory", faults }]
}
