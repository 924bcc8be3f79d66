//! What users notice of a sweep: latencies of their own transactions meanwhile.

use crate::median;
use crate::report::{bars, part, table};
use harness::{Server, Session};
use std::io::Write;
use std::process::{Child, Stdio};

const ROWS: u32 = 4_000_000;
const SECONDS: u32 = 4;
const ROUNDS: usize = 3;

pub fn run(_: &Server) {
    part(
        "Foreground",
        &format!(
            "pgbench, two clients, 400 transactions a second, each an UPDATE and two SELECTs by key on another table, for {SECONDS} \
             seconds from the begin of the sweep of {ROWS} rows, nearly all expired. Milliseconds, including the time a transaction \
             had to wait for its turn; medians of {ROUNDS} rounds."
        ),
    );
    let loop_ = "DO $$ DECLARE removed int; BEGIN LOOP
                     DELETE FROM t WHERE ctid = ANY (ARRAY(SELECT ctid FROM t WHERE at <= now() - interval '1 hour' LIMIT 10000));
                     GET DIAGNOSTICS removed = ROW_COUNT; COMMIT; EXIT WHEN removed = 0; END LOOP; END $$";
    let ways = [
        ("no sweep", None),
        ("workers at their defaults", Some("SELECT ttl_start_worker()")),
        ("one `DELETE`", Some("DELETE FROM t WHERE at <= now() - interval '1 hour'")),
        ("loop in a procedure", Some(loop_)),
    ];
    let mut rounds = [const { Vec::new() }; 4];
    for round in 0..ROUNDS {
        for turn in 0..ways.len() {
            let way = (turn + round) % ways.len();
            rounds[way].push(measure(ways[way].1));
        }
    }
    let middle = |way: usize, column: usize| {
        median(&mut rounds[way].iter().map(|measured: &[f64; 3]| measured[column]).collect::<Vec<_>>())
    };
    let row = |way: usize| {
        let late = middle(way, 1);
        let figures = [middle(way, 0), late, late / middle(0, 1)].map(|figure| format!("{figure:.2}"));
        [ways[way].0.to_owned()].into_iter().chain(figures).chain([format!("{:.0}", middle(way, 2))]).collect()
    };
    let rows: Vec<Vec<String>> = (0..ways.len()).map(row).collect();
    table(&["", "p50", "p99", "p99 ratio", "tps"], &rows);
    let names: Vec<_> = ways.iter().map(|way| way.0.replace('`', "")).collect();
    let late = (0..ways.len()).map(|way| middle(way, 1) / middle(0, 1)).collect();
    bars("foreground.svg", "99th percentile of transactions beside a sweep", &names, &[("beside no sweep", late)]);
}

fn measure(sql: Option<&str>) -> [f64; 3] {
    let server = Server::start(&[
        "shared_preload_libraries=pg_ttl_index",
        "shared_buffers=2GB",
        "max_wal_size=16GB",
        "autovacuum=off",
        "pg_ttl_index.naptime=1",
    ]);
    let mut session = Session::connect(&server, "postgres", "postgres");
    session.run(&format!(
        "CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker();
         CREATE TABLE users (id int PRIMARY KEY, n int); INSERT INTO users SELECT i, 0 FROM generate_series(1, 100000) i;
         CREATE TABLE t (id int, at timestamptz, pad text);
         INSERT INTO t SELECT i, now() - interval '2 days' + i * interval '2 days' / {ROWS}, repeat('x', 60)
         FROM generate_series(1, {ROWS}) AS i"
    ));
    session.run("SELECT ttl_create_index('t', 'at', interval '1 hour')");
    session.run("VACUUM ANALYZE");
    session.run("CHECKPOINT");
    let directory = std::env::temp_dir().join(format!("pg_ttl_index_bench_{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).expect("a directory");
    let mut users = pgbench(&server, &directory);
    if let Some(sql) = sql {
        session.run(sql);
    }
    users.wait().expect("pgbench");
    let mut latencies = Vec::new();
    for log in std::fs::read_dir(&directory)
        .expect("logs")
        .flatten()
        .filter(|file| file.path().extension().is_none_or(|e| e != "sql"))
    {
        let text = std::fs::read_to_string(log.path()).expect("a log");
        // The third column is the latency in microseconds, the schedule included.
        latencies.extend(text.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<f64>().ok()));
    }
    let _ = std::fs::remove_dir_all(&directory);
    latencies.sort_by(f64::total_cmp);
    let at = |share: f64| latencies[(latencies.len() as f64 * share) as usize] / 1e3;
    [at(0.5), at(0.99), latencies.len() as f64 / f64::from(SECONDS)]
}

fn pgbench(server: &Server, directory: &std::path::Path) -> Child {
    let script = directory.join("users.sql");
    let mut file = std::fs::File::create(&script).expect("a script");
    writeln!(
        file,
        "\\set id random(1, 100000)\nSELECT n FROM users WHERE id = :id;\nUPDATE users SET n = n + 1 WHERE id = :id;\nSELECT n FROM users WHERE id = :id;"
    )
    .expect("writing");
    server
        .client_program("pgbench")
        .current_dir(directory)
        .args([
            "--no-vacuum",
            "--protocol=prepared",
            "--client=2",
            "--rate=400",
            "--log",
            "--log-prefix=users",
            "--file",
        ])
        .arg(&script)
        .args(["--time", &SECONDS.to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("running pgbench")
}
