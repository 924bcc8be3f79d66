//! What others do: the loops that people write, under the real pg_cron; the loop of the C extension; pg_partman.

use crate::report::{bars, part, say, table};
use crate::{cpu_seconds, median};
use harness::{Server, Session};
use std::time::{Duration, Instant};

const ROWS: u32 = 1_000_000;
const ROUNDS: usize = 3;
const EXPIRED: &str = "at <= now() - interval '1 day'";

/// Fills a table, half of whose rows have expired, in order.
fn fill(session: &mut Session, rows: u32, batch: u32) {
    session.run(&format!(
        "SET client_min_messages = warning; DROP TABLE IF EXISTS t; CREATE TABLE t (id int, at timestamptz, pad text);
         INSERT INTO t SELECT i, now() - interval '2 days' + i * interval '2 days' / {rows}, repeat('x', 60)
         FROM generate_series(1, {rows}) AS i"
    ));
    session.run(&format!("SELECT ttl_create_index('t', 'at', interval '1 day', {batch})"));
    session.run("VACUUM ANALYZE t");
    session.run("CHECKPOINT");
    session.run("SELECT count(*), sum(id) FROM t");
}

/// A procedure as people write it for pg_cron: small committed batches until nothing is left.
fn batch_loop(batch: u32) -> String {
    format!(
        "CREATE OR REPLACE PROCEDURE expire() LANGUAGE plpgsql AS $$
         DECLARE removed int; BEGIN LOOP
             DELETE FROM t WHERE ctid = ANY (ARRAY(SELECT ctid FROM t WHERE {EXPIRED} LIMIT {batch}));
             GET DIAGNOSTICS removed = ROW_COUNT; COMMIT; EXIT WHEN removed = 0; END LOOP; END $$"
    )
}

/// What version 3.0.0 of the C extension does: all batches in one transaction, by a condition that no index serves.
fn c_extension(batch: u32) -> String {
    format!(
        "DO $$ DECLARE removed int; BEGIN LOOP
             DELETE FROM t WHERE ctid = ANY (ARRAY(
                 SELECT ctid FROM t WHERE at + interval '1 day' <= clock_timestamp() LIMIT {batch}));
             GET DIAGNOSTICS removed = ROW_COUNT; EXIT WHEN removed = 0; END LOOP; END $$"
    )
}

pub fn run(server: &Server) {
    part(
        "Beside what others do",
        &format!(
            "{ROWS} rows of about 100 bytes in order of expiry, half of them expired, warm cache. CPU seconds of the backend, \
             medians of {ROUNDS} rounds and their spread, and the ratio to one DELETE. The order of the ways is another in each round."
        ),
    );
    let mut ways = vec![("one `DELETE`".to_owned(), 10_000, format!("DELETE FROM t WHERE {EXPIRED}"), String::new())];
    for batch in [10_000, 1_000] {
        ways.push((format!("`ttl_sweep`, {batch} rows"), batch, "CALL ttl_sweep('t')".into(), String::new()));
        ways.push((format!("loop in a procedure, {batch} rows"), batch, "CALL expire()".into(), batch_loop(batch)));
        ways.push((format!("loop of the C extension, {batch} rows"), batch, c_extension(batch), String::new()));
    }
    let mut ratios = [Vec::new(), Vec::new()];
    for held in [false, true] {
        say(format!("\n{}\n", if held { "While an old snapshot is held:" } else { "No other session:" }));
        let mut seconds = vec![Vec::new(); ways.len()];
        for round in 0..ROUNDS {
            for turn in 0..ways.len() {
                let way = (turn + round) % ways.len();
                let (_, batch, sql, before) = &ways[way];
                // Quadratic: once is enough.
                if round > 0 && seconds[way].iter().any(|time| *time > 5.0) {
                    continue;
                }
                seconds[way].push(measure(server, *batch, before, sql, held));
            }
        }
        let medians: Vec<f64> = seconds.iter_mut().map(|times| median(times)).collect();
        let rows = ways.iter().zip(&seconds).zip(&medians).map(|(((name, ..), times), middle)| {
            let spread = format!("{:.2} to {:.2}", times[0], times[times.len() - 1]);
            vec![name.clone(), format!("{middle:.2}"), spread, format!("{:.2}", middle / medians[0])]
        });
        table(&["", "CPU s", "spread", "ratio"], &rows.collect::<Vec<_>>());
        ratios[usize::from(held)] = medians.iter().map(|middle| middle / medians[0]).collect();
    }
    // The loops of 1,000 rows would leave no room for the rest.
    let names: Vec<_> = ways[..4].iter().map(|way| way.0.replace('`', "")).collect();
    let [free, held] = ratios.map(|ratios: Vec<f64>| ratios[..4].to_vec());
    bars(
        "peers.svg",
        "CPU beside one DELETE",
        &names,
        &[("no other session", free), ("an old snapshot is held", held)],
    );
}

fn measure(server: &Server, batch: u32, before: &str, sql: &str, held: bool) -> f64 {
    let mut session = Session::connect(server, "postgres", "postgres");
    fill(&mut session, ROWS, batch);
    if !before.is_empty() {
        session.run(before);
    }
    let mut other = Session::connect(server, "postgres", "postgres");
    if held {
        other.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1");
    }
    let pid = session.get("SELECT pg_backend_pid()");
    let started = cpu_seconds(&pid);
    session.run(sql);
    let spent = cpu_seconds(&pid) - started;
    let left: u32 = session.get("SELECT count(*) FROM t").parse().expect("a count");
    assert!(left <= ROWS / 2 + 1000, "{left} rows are left by {sql}");
    spent
}

/// The same loop under the real pg_cron, and whole partitions under the real pg_partman.
pub fn extensions(_: &Server) {
    if !has("pg_cron") || !has("pg_partman") {
        return say(
            "\npg_cron and pg_partman are not installed for this PostgreSQL: `.ci/peers` installs them from Debian.",
        );
    }
    let mut server = Server::start(&[
        "shared_preload_libraries=pg_ttl_index, pg_cron",
        "shared_buffers=1GB",
        "max_wal_size=8GB",
        "autovacuum=off",
        "synchronous_commit=off",
        "max_worker_processes=16",
        "pg_ttl_index.max_wal_per_second=0",
    ]);
    server.stop();
    server.set(&format!("cron.host={}", server.host().display()));
    server.start_again();
    let mut session = Session::connect(&server, "postgres", "postgres");
    session.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker(); CREATE EXTENSION pg_cron");
    part(
        "pg_cron and pg_partman",
        &format!(
            "On the clock, one round. {ROWS} rows, half of them expired, in batches of 10,000: by our worker, and by the loop above \
             as a job of pg_cron. Then 10 partitions of 100,000 rows that have all expired: by our worker, and by pg_partman's \
             `run_maintenance`. Waiting for the job or the worker to begin does not count."
        ),
    );
    let mut rows = Vec::new();
    fill(&mut session, ROWS, 10_000);
    session.run("SELECT ttl_start_worker()");
    while session.get("SELECT count(*) > 0 FROM ttl_history") != "t" {
        std::thread::sleep(Duration::from_millis(100));
    }
    let ours =
        session.get("SELECT extract(epoch FROM last_duration)::numeric(10,3) FROM ttl_summary WHERE table_name = 't'");
    rows.push(vec!["worker, rows".to_owned(), ours]);
    session.run("SELECT ttl_stop_worker()");
    fill(&mut session, ROWS, 10_000);
    session.run(&batch_loop(10_000));
    session.run("SELECT cron.schedule('expire', '* * * * *', 'CALL expire()')");
    let deadline = Instant::now() + Duration::from_secs(130);
    let done = "SELECT count(*) > 0 FROM cron.job_run_details WHERE status = 'succeeded'";
    while session.get(done) != "t" {
        assert!(Instant::now() < deadline, "{}", session.get("SELECT json_agg(d) FROM cron.job_run_details d"));
        std::thread::sleep(Duration::from_millis(200));
    }
    let theirs = "SELECT extract(epoch FROM end_time - start_time)::numeric(10,3) FROM cron.job_run_details ORDER BY runid LIMIT 1";
    rows.push(vec!["pg_cron, rows".to_owned(), session.get(theirs)]);
    session.run("SELECT cron.unschedule('expire')");
    rows.extend(partitions(&mut session));
    table(&["", "seconds"], &rows);
}

fn has(extension: &str) -> bool {
    let sharedir = harness::run(std::process::Command::new(harness::program("pg_config")).arg("--sharedir"));
    std::path::Path::new(sharedir.trim()).join(format!("extension/{extension}.control")).exists()
}

fn partitions(session: &mut Session) -> Vec<Vec<String>> {
    session.run("SET client_min_messages = warning; CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman");
    let mut fill = |table: &str| {
        session.run(&format!(
            "CREATE TABLE {table} (id int, at timestamptz NOT NULL, pad text) PARTITION BY RANGE (at);
             SELECT partman.create_parent('public.{table}', 'at', 'native', 'daily',
                        p_start_partition := (now() - interval '11 days')::text, p_premake := 1);
             INSERT INTO {table} SELECT i, now() - interval '11 days' + i % 10 * interval '1 day', repeat('x', 60)
             FROM generate_series(1, 1000000) i"
        ));
        session.run("CHECKPOINT");
    };
    fill("public_p");
    fill("public_q");
    session.run("UPDATE partman.part_config SET retention = '5 days', retention_keep_table = false WHERE parent_table = 'public.public_p'");
    let mut time = |sql: &str| {
        let started = Instant::now();
        session.run(sql);
        format!("{:.3}", started.elapsed().as_secs_f64())
    };
    let theirs = time("SELECT partman.run_maintenance('public.public_p')");
    time("SELECT ttl_create_index('public_q', 'at', interval '5 days', partition_action => 'drop')");
    let ours = time("CALL ttl_sweep('public_q')");
    vec![vec!["`ttl_sweep`, whole partitions".into(), ours], vec!["pg_partman, whole partitions".into(), theirs]]
}
