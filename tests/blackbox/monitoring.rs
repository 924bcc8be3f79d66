//! Metrics, as the exporters and the Prometheus of the distribution see them: `make test-monitoring`.

use crate::sweep::with;
use crate::worker::database;
use harness::{Server, run};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A program that ends with the test.
struct Program(Child);

impl Program {
    fn start(name: &str, configure: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let mut command = Command::new(programs().join(name));
        configure(&mut command).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap_or_else(|error| panic!("{name}: {error}")))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where `make` has put them.
fn programs() -> PathBuf {
    PathBuf::from(std::env::var("CACHE").expect("CACHE is not set: run this through make")).join("monitoring/usr/bin")
}

/// The configuration that users are given.
fn config(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../monitoring").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(config(name)).expect("a configuration")
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a socket").local_addr().expect("its address").port()
}

/// The body of what a local web server answers; empty while it does not.
fn get(port: u16, path: &str) -> String {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return String::new() };
    let mut answer = String::new();
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut answer));
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()
}

/// Waits until a page has all of these; a line has them if it has all parts between the stars.
fn wait_for(port: u16, path: &str, wanted: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let page = get(port, path);
        let has = |pattern: &&str| page.lines().any(|line| pattern.split('*').all(|part| line.contains(part)));
        let missing: Vec<_> = wanted.iter().filter(|pattern| !has(pattern)).collect();
        if missing.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "no {missing:?} in {page}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Rules in every state.
const RULES: &str = "CREATE TABLE fine (at timestamptz); CREATE TABLE paused (LIKE fine); CREATE TABLE stuck (id int PRIMARY KEY, at timestamptz);
     CREATE TABLE needs (id int REFERENCES stuck); CREATE TABLE large (LIKE fine); CREATE TABLE typed (LIKE fine);
     INSERT INTO fine SELECT '2020-01-01' FROM generate_series(1, 7); INSERT INTO fine VALUES (now()); INSERT INTO paused VALUES ('2020-01-01');
     INSERT INTO stuck VALUES (1, '2020-01-01'), (2, now()); INSERT INTO needs VALUES (1);
     INSERT INTO large SELECT '2020-01-01' FROM generate_series(1, 1000); ANALYZE;
     SELECT ttl_create_index('fine', 'at', 60, rule_name => 'by \"name\"'), ttl_create_index('paused', 'at', 60, active => false),
            ttl_create_index('stuck', 'at', 60), ttl_create_index('large', 'at', 60), ttl_create_index('typed', 'at', 60)";

#[test]
#[ignore = "needs Prometheus and its exporters: make test-monitoring"]
fn exporters_tell_of_rules_in_every_state_and_an_alert_fires() {
    let server = Arc::new(Server::start(&[
        "shared_preload_libraries=pg_ttl_index",
        "pg_ttl_index.naptime=1",
        "pg_ttl_index.max_share_per_run=0.9",
    ]));
    let mut db = database(&server);
    let monitor = db.role("monitor");
    db.run(&format!("GRANT pg_monitor TO {monitor}"));
    db.run(RULES);
    db.run("ALTER TABLE typed ALTER at TYPE timestamp");
    db.wait_for(
        "SELECT string_agg(table_name || ' ' || state, ', ' ORDER BY table_name) FROM ttl_summary",
        "fine active, large held, paused paused, stuck blocked, typed error",
    );
    let expected = [
        "pg_ttl_index_rule_removed_rows{*table_name=\"fine\"*} 7",
        "pg_ttl_index_rule_lag_seconds{*table_name=\"stuck\"*} ",
        "pg_ttl_index_rule_blocked_rows{*table_name=\"stuck\"*} 1",
        "pg_ttl_index_rule_state_info{*state=\"active\"*table_name=\"fine\"*} 1",
        "pg_ttl_index_rule_state_info{*hold=\"max_share_per_run\"*state=\"held\"*table_name=\"large\"*} 1",
        "pg_ttl_index_rule_state_info{*state=\"paused\"*table_name=\"paused\"*} 1",
        "pg_ttl_index_rule_state_info{*state=\"error\"*table_name=\"typed\"*} 1",
        "pg_ttl_index_database_workers{*} 1",
        "pg_ttl_index_database_active_rules{*} 4",
    ];
    let (exporter, sql_exporter, prometheus) = (free_port(), free_port(), free_port());
    let host = server.host().display();
    let _exporter = Program::start("prometheus-postgres-exporter", |command| {
        command
            .arg(format!("--web.listen-address=127.0.0.1:{exporter}"))
            .arg(format!("--extend.query-path={}", config("postgres_exporter.yaml").display()))
            .env("DATA_SOURCE_NAME", format!("user={monitor} host={host} dbname={}", db.name))
    });
    wait_for(exporter, "/metrics", &expected);
    // The other exporter has the same numbers, under names of its own.
    let directory = std::env::temp_dir().join(format!("pg_ttl_index_monitoring_{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let connection = format!("postgres://{monitor}@/{}?host={host}&sslmode=disable", db.name);
    let own = read("sql_exporter.yml")
        .replace("postgres://monitor@localhost/app?sslmode=disable", &connection)
        .replace("interval: 30s", "interval: 1s");
    std::fs::write(directory.join("sql_exporter.yml"), own).expect("a file");
    let _sql_exporter = Program::start("prometheus-sql-exporter", |command| {
        command
            .arg(format!("-web.listen-address=127.0.0.1:{sql_exporter}"))
            .arg("-config.file")
            .arg(directory.join("sql_exporter.yml"))
    });
    wait_for(sql_exporter, "/metrics", &["sql_pg_ttl_index_rule{col=\"removed_rows\"*table_name=\"fine\"*} 7"]);
    // Alerts as users have them, but at once.
    let at_once: Vec<_> =
        read("alerts.yml").lines().filter(|line| !line.trim().starts_with("for:")).map(str::to_owned).collect();
    std::fs::write(directory.join("alerts.yml"), at_once.join("\n")).expect("a file");
    std::fs::write(directory.join("rules.yml"), read("rules.yml")).expect("a file");
    let own = read("prometheus.yml")
        .replace("localhost:9187", &format!("127.0.0.1:{exporter}"))
        .replace("localhost:9237", &format!("127.0.0.1:{sql_exporter}"));
    let fast = "global: {scrape_interval: 1s, evaluation_interval: 1s}\n";
    std::fs::write(directory.join("prometheus.yml"), format!("{fast}{own}")).expect("a file");
    let _prometheus = Program::start("prometheus", |command| {
        command
            .arg(format!("--config.file={}", directory.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{prometheus}"))
    });
    let firing = |alert: &str, table: &str| format!("\"alertname\":\"{alert}\"*\"table_name\":\"{table}\"");
    wait_for(
        prometheus,
        "/api/v1/alerts",
        &[&firing("TtlFailing", "typed"), &firing("TtlBlocked", "stuck"), &firing("TtlHeld", "large")],
    );
    // By both exporters, under the same name.
    let same = "/api/v1/query?query=count(pg_ttl_index_rule_removed_rows%7Btable_name%3D%22fine%22%7D)";
    wait_for(prometheus, same, &["\"2\"]"]);
    assert!(!get(prometheus, "/api/v1/alerts").contains("TtlNoWorker"));
    // Broken on purpose.
    db.run("SELECT ttl_stop_worker()");
    wait_for(prometheus, "/api/v1/alerts", &["\"alertname\":\"TtlSwitchedOff\""]);
    let _ = std::fs::remove_dir_all(&directory);
}

#[test]
#[ignore = "needs promtool: make test-monitoring"]
fn alerts_fire_for_what_they_are_about_and_for_nothing_else() {
    let promtool = programs().join("promtool");
    run(Command::new(&promtool).args(["check", "rules"]).args([config("alerts.yml"), config("rules.yml")]));
    run(Command::new(&promtool).args(["test", "rules"]).arg(config("alerts_test.yml")));
    run(Command::new(&promtool).args(["check", "config"]).arg(config("prometheus.yml")));
}

/// The names of metrics that a text uses.
fn names(text: &str) -> BTreeSet<String> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words =
        text.split(|c| !part(c)).filter(|word| word.starts_with("pg_ttl_index_") || word.starts_with("pg_ttl_index:"));
    words.map(str::to_owned).collect()
}

/// The metrics that postgres_exporter makes of its queries, and the queries.
fn exported() -> (BTreeSet<String>, Vec<String>) {
    let (mut names, mut queries, mut space) = (BTreeSet::new(), Vec::<String>::new(), String::new());
    let mut is_query = false;
    for line in read("postgres_exporter.yaml").lines().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_suffix(':').filter(|name| name.starts_with("pg_")) {
            space = name.to_owned();
        } else if let Some((column, _)) = line.split_once(": {usage: ").filter(|(_, usage)| !usage.starts_with("LABEL"))
        {
            names.insert(format!("{space}_{}", column.trim().trim_start_matches("- ")));
        } else if is_query && line.starts_with("    ") && !line.trim().starts_with('-') {
            *queries.last_mut().expect("a query") += line;
        }
        is_query = (is_query || line.trim() == "query: |") && line.trim() != "metrics:";
        if line.trim() == "query: |" {
            queries.push(String::new());
        }
    }
    (names, queries)
}

#[test]
fn queries_run_and_alerts_rules_and_board_use_what_they_return() {
    let (metrics, queries) = exported();
    assert!(metrics.len() > 10 && queries.len() == 4, "{metrics:?} {queries:?}");
    let mut db = with("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    for query in queries {
        db.run(&query);
    }
    let records: BTreeSet<_> =
        read("rules.yml").lines().filter_map(|line| Some(line.split_once("record: ")?.1.to_owned())).collect();
    for file in ["alerts.yml", "rules.yml", "board.json"] {
        let used = names(&read(file));
        assert!(used.len() > 3, "{file}");
        let unknown: Vec<_> = used.iter().filter(|name| !metrics.contains(*name) && !records.contains(*name)).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
    }
}

#[test]
fn the_board_is_what_its_script_writes() {
    let directory = std::env::temp_dir().join(format!("pg_ttl_index_board_{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    std::fs::copy(config("board.py"), directory.join("board.py")).expect("a script");
    run(Command::new("python3").arg(directory.join("board.py")));
    let written = std::fs::read_to_string(directory.join("board.json")).expect("a board");
    let _ = std::fs::remove_dir_all(&directory);
    assert_eq!(written, read("board.json"));
}
