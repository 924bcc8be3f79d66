//! One server, from initdb to removal.

use crate::{program, run, unprivileged};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Keeps the server running until the pipe to it closes, which it does at the latest when our process ends, however
/// it ends; then removes all of it, unless PG_TTL_KEEP is set.
const KEEPER: &str = r#"
dir=$1; shift
trap : INT TERM
"$@" </dev/null >"$dir/log" 2>&1 &
server=$!
cat >/dev/null
kill -INT "$server" 2>/dev/null
wait "$server"
[ -n "$PG_TTL_KEEP" ] || rm -rf "$dir"
"#;

const READY_WITHIN: Duration = Duration::from_secs(60);

pub struct Server {
    directory: PathBuf,
    keeper: Child,
}

impl Server {
    /// A new cluster with these settings, reached by a socket in its own directory and by nothing else.
    pub fn start(settings: &[&str]) -> Self {
        let mut initdb = unprivileged(program("initdb"));
        let made = run(unprivileged("mktemp").args(["-d", "/tmp/pg_ttl_index.XXXXXX"]));
        let directory = PathBuf::from(made.trim_end());
        let data = directory.join("data");
        run(initdb
            .args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--pgdata"])
            .arg(&data));
        let keeper = unprivileged("sh")
            .args(["-c", KEEPER, "sh"])
            .arg(&directory)
            .arg(program("postgres"))
            .arg("-D")
            .arg(&data)
            .arg("-k")
            .arg(&directory)
            .args(["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=200"])
            .args(settings.iter().flat_map(|setting| ["-c", setting]))
            .stdin(Stdio::piped())
            .spawn()
            .expect("starting a server");
        let server = Self { directory, keeper };
        server.wait_until_ready();
        server
    }

    /// Where the socket is.
    pub fn host(&self) -> &Path {
        &self.directory
    }

    /// A client program of PostgreSQL, told how to reach this server as superuser.
    pub fn client_program(&self, name: &str) -> Command {
        let mut command = Command::new(program(name));
        command.env("PGHOST", &self.directory).env("PGUSER", "postgres").env("PGDATABASE", "postgres");
        command
    }

    fn wait_until_ready(&self) {
        let deadline = Instant::now() + READY_WITHIN;
        while !self.client_program("pg_isready").output().is_ok_and(|output| output.status.success()) {
            let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the server did not start:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
