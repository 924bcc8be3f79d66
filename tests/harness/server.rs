//! One server, from initdb to removal.

use crate::{installation, run, unprivileged};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Keeps the server running until the pipe to it closes, which it does at the latest when our process ends, however
/// it ends; then removes all of it, unless it is to be started again or PG_TTL_KEEP is set.
const KEEPER: &str = r#"
dir=$1; shift
trap : INT TERM
"$@" </dev/null >>"$dir/log" 2>&1 &
server=$!
cat >/dev/null
kill -INT "$server" 2>/dev/null
wait "$server"
[ -e "$dir/stopped" ] || [ -n "$PG_TTL_KEEP" ] || rm -rf "$dir" 2>/dev/null
"#;

const READY_WITHIN: Duration = Duration::from_secs(60);

pub struct Server {
    /// Where its programs are.
    programs: PathBuf,
    directory: PathBuf,
    settings: Vec<String>,
    environment: Vec<(String, String)>,
    keeper: Child,
    /// Whether the directory is a file system of its own.
    is_mounted: bool,
}

impl Server {
    /// A new cluster with these settings, reached by a socket in its own directory and by nothing else.
    pub fn start(settings: &[&str]) -> Self {
        Self::start_of(installation("PG_HOME"), settings)
    }

    /// The same, with these environment variables.
    pub fn start_in(environment: &[(&str, &str)], settings: &[&str]) -> Self {
        let programs = installation("PG_HOME");
        let directory = new_cluster(&programs, &[]);
        let environment = environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Self::run_in(programs, directory, settings.iter().map(|setting| (*setting).into()).collect(), environment)
    }

    /// The same, on a file system of its own of so many megabytes. `None` if nothing may be mounted here.
    pub fn start_on_small_disk(megabytes: u32, settings: &[&str]) -> Option<Self> {
        let programs = installation("PG_HOME");
        let directory = new_directory();
        let options = format!("size={megabytes}m,uid={}", run(unprivileged("id").arg("-u")).trim());
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&directory).output();
        if !mount.is_ok_and(|output| output.status.success()) {
            let _ = std::fs::remove_dir(&directory);
            return None;
        }
        make_cluster(&programs, &directory, &[]);
        let settings = settings.iter().map(|setting| (*setting).into()).collect();
        let mut server = Self::run(programs, directory, settings);
        server.is_mounted = true;
        Some(server)
    }

    /// The same, of another PostgreSQL.
    pub fn start_of(programs: PathBuf, settings: &[&str]) -> Self {
        let directory = new_cluster(&programs, &[]);
        Self::run(programs, directory, settings.iter().map(|setting| (*setting).to_owned()).collect())
    }

    /// A server of the PostgreSQL under test with what this one has, which is stopped; with the same settings.
    pub fn upgrade(&self) -> Self {
        let programs = installation("PG_HOME");
        let controldata = run(Command::new(self.programs.join("pg_controldata")).arg(self.directory.join("data")));
        let has_checksums =
            !controldata.lines().any(|line| line.starts_with("Data page checksum version") && line.ends_with(" 0"));
        let is_18 = run(Command::new(programs.join("postgres")).arg("--version")).contains(") 18");
        let checksums: &[&str] = match (has_checksums, is_18) {
            (true, _) => &["--data-checksums"],
            (false, true) => &["--no-data-checksums"],
            (false, false) => &[],
        };
        let directory = new_cluster(&programs, checksums);
        let options: Vec<_> = self.settings.iter().map(|setting| format!("-c {setting}")).collect();
        let mut upgrade = unprivileged(programs.join("pg_upgrade"));
        run(upgrade
            .current_dir(&directory)
            .args(["--username=postgres", "--old-options", &options.join(" "), "--new-options", &options.join(" ")])
            .arg("--old-bindir")
            .arg(&self.programs)
            .arg("--new-bindir")
            .arg(&programs)
            .arg("--old-datadir")
            .arg(self.directory.join("data"))
            .arg("--new-datadir")
            .arg(directory.join("data"))
            .arg("--socketdir")
            .arg(&directory));
        Self::run(programs, directory, self.settings.clone())
    }

    /// A standby that follows this server, with the same settings.
    pub fn start_standby(&self) -> Self {
        Self::run(self.programs.clone(), self.back_up(&["--write-recovery-conf"]), self.settings.clone())
    }

    /// A server that begins with a point-in-time recovery of a backup of this one, with the same settings and these.
    pub fn start_recovered(&self, settings: &[&str]) -> Self {
        let directory = self.back_up(&["--wal-method=stream"]);
        run(unprivileged("touch").arg(directory.join("data/recovery.signal")));
        let target = ["restore_command=false", "recovery_target=immediate", "recovery_target_action=promote"];
        let own = settings.iter().chain(&target).map(|setting| (*setting).to_owned());
        Self::run(self.programs.clone(), directory, self.settings.iter().cloned().chain(own).collect())
    }

    /// A new directory with a backup of this server.
    fn back_up(&self, options: &[&str]) -> PathBuf {
        let directory = new_directory();
        run(unprivileged(self.programs.join("pg_basebackup"))
            .args(["--username=postgres", "--checkpoint=fast", "--no-sync", "--host"])
            .arg(&self.directory)
            .args(options)
            .arg("--pgdata")
            .arg(directory.join("data")));
        directory
    }

    /// Stops the server, fast; tells how long that took.
    pub fn stop(&mut self) -> Duration {
        std::fs::write(self.directory.join("stopped"), "").expect("marking the server as stopped");
        let started = Instant::now();
        drop(self.keeper.stdin.take());
        self.keeper.wait().expect("stopping the server");
        started.elapsed()
    }

    /// Starts it again after `stop`.
    pub fn start_again(&mut self) {
        std::fs::remove_file(self.directory.join("stopped")).expect("a stopped server");
        self.keeper = keeper(&self.programs, &self.directory, &self.settings, &self.environment);
        self.wait_until_ready();
    }

    /// Ends the server as a crash of its machine would. It can be started again, or rejoin.
    pub fn crash(&mut self) {
        let pidfile =
            std::fs::read_to_string(self.directory.join("data/postmaster.pid")).expect("the postmaster's pid");
        let postmaster = pidfile.lines().next().expect("a pid").to_owned();
        let children = Command::new("pgrep").args(["-P", &postmaster]).output().expect("its processes");
        let processes = format!("{postmaster}\n{}", String::from_utf8_lossy(&children.stdout));
        let _ = Command::new("kill").arg("-KILL").args(processes.lines()).output();
        let deadline = Instant::now() + READY_WITHIN;
        while processes.lines().any(is_alive) {
            assert!(Instant::now() < deadline, "killed processes are still there");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.stop();
    }

    /// Makes it a standby of the server that was promoted in its place, and starts it.
    pub fn rejoin(&mut self, primary: &Self) {
        let source = format!("host={} user=postgres dbname=postgres", primary.directory.display());
        run(unprivileged(self.programs.join("pg_rewind"))
            .args(["--no-sync", "--write-recovery-conf", "--source-server", &source, "--target-pgdata"])
            .arg(self.directory.join("data")));
        self.start_again();
    }

    /// Has it start with another setting the next time.
    pub fn set(&mut self, setting: &str) {
        self.settings.push(setting.to_owned());
    }

    /// What the server has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).expect("the log")
    }

    /// Changes a setting for good and has it read.
    pub fn configure(&self, name: &str, value: &str) {
        let sql = format!("ALTER SYSTEM SET {name} = {value}");
        run(self.client_program("psql").args(["-q", "-c", &sql, "-c", "SELECT pg_reload_conf()"]));
    }

    /// Where the socket is.
    pub fn host(&self) -> &Path {
        &self.directory
    }

    /// A client program of PostgreSQL, told how to reach this server as superuser.
    pub fn client_program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command.env("PGHOST", &self.directory).env("PGUSER", "postgres").env("PGDATABASE", "postgres");
        command
    }

    fn run(programs: PathBuf, directory: PathBuf, settings: Vec<String>) -> Self {
        Self::run_in(programs, directory, settings, Vec::new())
    }

    fn run_in(
        programs: PathBuf,
        directory: PathBuf,
        settings: Vec<String>,
        environment: Vec<(String, String)>,
    ) -> Self {
        let keeper = keeper(&programs, &directory, &settings, &environment);
        let server = Self { programs, directory, settings, environment, keeper, is_mounted: false };
        server.wait_until_ready();
        server
    }

    fn wait_until_ready(&self) {
        let deadline = Instant::now() + READY_WITHIN;
        while !self.client_program("pg_isready").output().is_ok_and(|output| output.status.success()) {
            assert!(Instant::now() < deadline, "the server did not start:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.directory.join("stopped"));
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
        if self.is_mounted {
            let _ = Command::new("umount").arg("--lazy").arg(&self.directory).output();
        }
        if std::env::var_os("PG_TTL_KEEP").is_none() {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

/// Whether a process is there and not a zombie.
pub fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

fn new_directory() -> PathBuf {
    PathBuf::from(run(unprivileged("mktemp").args(["-d", "/tmp/pg_ttl_index.XXXXXX"])).trim_end())
}

fn new_cluster(programs: &Path, options: &[&str]) -> PathBuf {
    let directory = new_directory();
    make_cluster(programs, &directory, options);
    directory
}

fn make_cluster(programs: &Path, directory: &Path, options: &[&str]) {
    run(unprivileged(programs.join("initdb"))
        .args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--pgdata"])
        .arg(directory.join("data"))
        .args(options));
}

fn keeper(programs: &Path, directory: &Path, settings: &[String], environment: &[(String, String)]) -> Child {
    // Settings for every server of a run.
    let more = std::env::var("PG_TTL_SETTINGS").unwrap_or_default();
    unprivileged("env")
        .args(environment.iter().map(|(name, value)| format!("{name}={value}")))
        .args(["sh", "-c", KEEPER, "sh"])
        .arg(directory)
        .arg(programs.join("postgres"))
        .arg("-D")
        .arg(directory.join("data"))
        .arg("-k")
        .arg(directory)
        .args([
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
            "-c",
            "max_connections=200",
            "-c",
            "log_line_prefix=%m [%p] %e ",
        ])
        .args(settings.iter().flat_map(|setting| ["-c", setting.as_str()]))
        .args(more.split_whitespace().flat_map(|setting| ["-c", setting]))
        .stdin(Stdio::piped())
        .spawn()
        .expect("starting a server")
}
