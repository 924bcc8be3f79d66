//! `make demo`: a throw-away server, and a session in it that explains itself.

use harness::{Server, Session};
use std::path::Path;
use std::time::{Duration, Instant};

fn main() {
    println!("\nStarting a private server that goes away with this demo ...");
    let mut server = Server::start(&[
        "shared_preload_libraries=pg_ttl_index",
        "pg_ttl_index.naptime=1s",
        "pg_ttl_index.batch_delay=80ms",
    ]);
    psql(&server, "rules.sql");
    watch_sessions_go(&server);
    psql(&server, "rest.sql");
    watch_token_go(&server);

    println!("\n--- The server restarts, and sweeping goes on by itself --------------------------");
    server.stop();
    server.start_again();
    let mut session = Session::connect(&server, "postgres", "postgres");
    session
        .run("INSERT INTO tokens SELECT 'stale ' || i, now() - interval '1 hour' FROM generate_series(1, 1000) AS i");
    println!("1000 expired tokens inserted after the restart; nobody called anything ...");
    session.wait_for("SELECT count(*) FROM tokens", "1");
    println!("... and only this one is left: {}", session.get("SELECT token FROM tokens"));
    println!("\nStopping the server, and removing it.");
}

fn psql(server: &Server, script: &str) {
    // From the directory that `make` is in: one build may serve several checkouts.
    let path = Path::new("tests/demo").join(script);
    let status = server
        .client_program("psql")
        .env("PAGER", "")
        .args(["--no-psqlrc", "--quiet", "--echo-queries"])
        .stdin(std::fs::File::open(path).expect("the demo's script"))
        .status()
        .expect("running psql");
    assert!(status.success(), "psql failed");
}

fn watch_sessions_go(server: &Server) {
    println!("\n--- Meanwhile the worker removes them, 4000 in a transaction ----------------------");
    let mut session = Session::connect(server, "postgres", "postgres");
    let started = Instant::now();
    loop {
        let left = session.get("SELECT count(*) FROM sessions");
        let progress = session
            .get("SELECT rows_removed || ' removed, ' || round(rows_per_second) || ' a second' FROM ttl_progress");
        println!("{:5.1}s   {left} sessions   {progress}", started.elapsed().as_secs_f32());
        if left == "100000" || started.elapsed() > Duration::from_secs(60) {
            break;
        }
        std::thread::sleep(Duration::from_millis(400));
    }
}

fn watch_token_go(server: &Server) {
    let mut session = Session::connect(server, "postgres", "postgres");
    let started = Instant::now();
    let mut shown = String::new();
    loop {
        let tokens = session.get("SELECT string_agg(token, ', ' ORDER BY token) FROM tokens");
        if tokens != shown {
            println!("{:5.1}s   tokens: {tokens}", started.elapsed().as_secs_f32());
            shown = tokens;
        }
        if shown == "for ever" || started.elapsed() > Duration::from_secs(30) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
