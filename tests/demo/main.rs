//! `make demo`: a throw-away server, and a psql session in it that explains itself.

use harness::Server;
use std::path::Path;

fn main() -> std::process::ExitCode {
    println!("\nStarting a private server that goes away with this demo ...");
    let server = Server::start(&["shared_preload_libraries=pg_ttl_index"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/demo.sql");
    let status = server
        .client_program("psql")
        .env("PAGER", "")
        .args(["--no-psqlrc", "--quiet", "--echo-queries"])
        .stdin(std::fs::File::open(script).expect("the demo's script"))
        .status()
        .expect("running psql");
    println!("Stopping the server ...");
    if status.success() { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
