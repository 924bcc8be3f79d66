//! How the cost grows: with rows, with processes, with idle rules; and what is written.

use crate::cpu_seconds;
use crate::report::{part, say, table};
use harness::{Server, Session};
use std::time::{Duration, Instant};

fn fill(session: &mut Session, rows: u32) {
    session.run(&format!(
        "SET client_min_messages = warning; DROP TABLE IF EXISTS t; CREATE TABLE t (id int, at timestamptz, pad text);
         INSERT INTO t SELECT i, now() - interval '2 days' + i * interval '2 days' / {rows}, repeat('x', 60)
         FROM generate_series(1, {rows}) AS i"
    ));
}

pub fn rows(server: &Server) {
    part(
        "Growth",
        "Half of the rows have expired. CPU seconds of one `ttl_sweep` with the default settings, and bytes of WAL a row.",
    );
    let mut session = Session::connect(server, "postgres", "postgres");
    let (mut points, mut lines) = (Vec::new(), Vec::new());
    for million in [1, 2, 4, 8] {
        fill(&mut session, million * 1_000_000);
        session.run("SELECT ttl_create_index('t', 'at', interval '1 day')");
        session.run("VACUUM ANALYZE t");
        session.run("CHECKPOINT");
        let (pid, before) = (session.get("SELECT pg_backend_pid()"), session.get("SELECT pg_current_wal_insert_lsn()"));
        let started = cpu_seconds(&pid);
        session.run("CALL ttl_sweep('t')");
        let spent = cpu_seconds(&pid) - started;
        let wal: f64 = session.get(&format!("SELECT pg_current_wal_insert_lsn() - '{before}'")).parse().expect("bytes");
        points.push((f64::from(million), spent));
        let gone = f64::from(million) * 500_000.0;
        lines.push(vec![format!("{million} million"), format!("{spent:.2}"), format!("{:.0}", wal / gone)]);
    }
    table(&["rows", "CPU s", "WAL bytes a row"], &lines);
    say(format!("\nThe cost grows with the power {:.2} of the rows.", exponent(&points)));
    session.run("DROP TABLE t");
}

/// The slope of the line that fits best through the logarithms.
fn exponent(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<_> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = logs.len() as f64;
    let mean = logs.iter().fold((0.0, 0.0), |sum, log| (sum.0 + log.0 / count, sum.1 + log.1 / count));
    let over: f64 = logs.iter().map(|log| (log.0 - mean.0) * (log.1 - mean.1)).sum();
    over / logs.iter().map(|log| (log.0 - mean.0).powi(2)).sum::<f64>()
}

/// One huge table, swept by one process and by two.
pub fn workers(_: &Server) {
    const ROWS: u32 = 10_000_000;
    part(
        "Processes",
        &format!("{ROWS} rows, all but a few expired, in one table: rows a second by the workers, one round each."),
    );
    let mut lines = Vec::new();
    let mut first = 0.0;
    for workers in [1, 2] {
        let server = Server::start(&[
            "shared_preload_libraries=pg_ttl_index",
            "shared_buffers=2GB",
            "max_wal_size=16GB",
            "autovacuum=off",
            "synchronous_commit=off",
            "pg_ttl_index.naptime=1",
            "pg_ttl_index.max_wal_per_second=0",
            &format!("pg_ttl_index.max_workers_per_table={workers}"),
        ]);
        let mut session = Session::connect(&server, "postgres", "postgres");
        session.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
        fill(&mut session, ROWS);
        session.run("SELECT ttl_create_index('t', 'at', interval '1 hour')");
        session.run("VACUUM ANALYZE t");
        session.run("CHECKPOINT");
        session.run("SELECT ttl_start_worker()");
        wait(&mut session, "SELECT count(*) > 0 FROM ttl_history");
        let rate: f64 = session
            .get("SELECT sum(rows_removed) / extract(epoch FROM max(finished_at) - min(started_at)) FROM ttl_history")
            .parse()
            .expect("a number");
        first = if workers == 1 { rate } else { first };
        lines.push(vec![workers.to_string(), format!("{rate:.0}"), format!("{:.2}", rate / first)]);
    }
    table(&["processes", "rows/s", "ratio"], &lines);
}

fn wait(session: &mut Session, condition: &str) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while session.get(condition) != "t" {
        assert!(Instant::now() < deadline, "{condition}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A thousand rules with nothing to do.
pub fn idle_rules(server: &Server) {
    part(
        "1,000 idle rules",
        "One `ttl_runner()` over all of them, the second in its session: milliseconds, and what it writes.",
    );
    let mut session = Session::connect(server, "postgres", "postgres");
    session.run(
        "DO $$ BEGIN FOR i IN 1..1000 LOOP
             EXECUTE format('CREATE TABLE idle_%s (id int, at timestamptz)', i);
             PERFORM ttl_create_index(format('idle_%s', i)::regclass, 'at', interval '1 day');
         END LOOP; END $$",
    );
    session.run("SELECT ttl_runner()");
    let before = session.get("SELECT pg_current_wal_insert_lsn()");
    let started = Instant::now();
    session.run("BEGIN; SELECT ttl_runner()");
    let spent = started.elapsed().as_secs_f64() * 1e3;
    let has_id = session.get("SELECT pg_current_xact_id_if_assigned() IS NOT NULL");
    session.run("COMMIT");
    let wal = session.get(&format!("SELECT pg_current_wal_insert_lsn() - '{before}'"));
    table(
        &["ms", "transaction ID", "bytes of WAL"],
        &[vec![format!("{spent:.0}"), has_id.replace('f', "no").replace('t', "yes"), wal]],
    );
    session.run("DO $$ BEGIN FOR i IN 1..1000 LOOP EXECUTE format('DROP TABLE idle_%s', i); END LOOP; END $$");
}

/// A table into which rows come as fast as they expire.
pub fn size(_: &Server) {
    part(
        "Steady state",
        "20,000 rows come in each of 40 steps, and those of five steps before expire, so that 100,000 live; a VACUUM after every \
         fifth step: the size of table and index after ten steps and at the end.",
    );
    let server = Server::start(&["shared_preload_libraries=pg_ttl_index", "autovacuum=off", "synchronous_commit=off"]);
    let mut session = Session::connect(&server, "postgres", "postgres");
    session.run(
        "CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker(); CREATE TABLE t (id int, at timestamptz, pad text)",
    );
    session.run("SELECT ttl_create_index('t', 'at', '1 day')");
    let sizes = "SELECT pg_relation_size('t') / 1024, pg_indexes_size('t') / 1024";
    let mut first = String::new();
    for step in 0..40 {
        let age = 60 * (40 - step);
        session.run(&format!(
            "INSERT INTO t SELECT i, now() - interval '{age} seconds', repeat('x', 60) FROM generate_series(1, 20000) i;
             SELECT ttl_alter_index('t', 'at', expire_after_seconds => {})",
            age + 270
        ));
        session.run("CALL ttl_sweep('t')");
        if step % 5 == 4 {
            session.run("VACUUM t");
        }
        if step == 9 {
            first = session.get(sizes);
        }
    }
    let row = |name: &str, sizes: String| {
        let (table, index) = sizes.split_once('|').expect("two columns");
        vec![name.to_owned(), table.to_owned(), index.to_owned()]
    };
    table(&["", "table kB", "index kB"], &[row("after 10 steps", first), row("after 40", session.get(sizes))]);
}
