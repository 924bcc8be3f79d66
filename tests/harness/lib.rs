//! Private throw-away PostgreSQL servers with the extension installed, and databases in them.

mod database;
mod random;
mod server;

pub use database::{Database, Session, SqlError};
pub use random::Random;
pub use server::{Server, is_alive};

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// A PostgreSQL installation that `make` prepared, by the variable that tells where it is.
pub fn installation(variable: &str) -> PathBuf {
    let home = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: run this through make"));
    PathBuf::from(home).join("current")
}

/// A program of the PostgreSQL under test.
pub fn program(name: &str) -> PathBuf {
    installation("PG_HOME").join(name)
}

/// Puts a script of the extension, one of the fixtures, where PostgreSQL finds it.
pub fn install_script(name: &str) {
    let sharedir = run(Command::new(program("pg_config")).arg("--sharedir"));
    let target = PathBuf::from(sharedir.trim_end()).join("extension").join(name);
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo"));
    replace(&target, &std::fs::read(root.join("fixtures").join(name)).expect("a fixture"));
}

/// Puts another file in the place of the library, as an upgrade of its package does. To PostgreSQL it is another library, and
/// it does the same.
pub fn replace_library() {
    let directory = run(Command::new(program("pg_config")).arg("--pkglibdir"));
    let target = PathBuf::from(directory.trim()).join("pg_ttl_index.so");
    let mut library = std::fs::read(&target).expect("the library");
    library.push(0);
    replace(&target, &library);
}

/// Puts a file in the place of another at once. Tests may do so side by side.
fn replace(target: &Path, contents: &[u8]) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let draft = target.with_extension(format!("{}", std::process::id()));
    std::fs::write(&draft, contents).expect("writing a file");
    std::fs::rename(draft, target).expect("replacing a file");
}

/// A command that may start a server: PostgreSQL refuses root, so root becomes postgres.
pub fn unprivileged(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0);
    if is_root {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]).arg(program).current_dir("/");
        command
    } else {
        Command::new(program)
    }
}

/// Runs a command to its end and returns what it printed; a failure panics with what it said.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said).into_owned());
    assert!(output.status.success(), "{command:?} failed:\n{}", said.concat());
    String::from_utf8(output.stdout).expect("UTF-8 output")
}
