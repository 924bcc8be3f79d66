//! Whether this server comes from a point-in-time recovery.
//!
//! PostgreSQL removes `recovery.signal` when a recovery has ended, and keeps nothing by which it could be told from the promotion of a
//! standby. So the library takes a note in the data directory when the server is started with it.

use once_cell::sync::OnceCell;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const NOTE: &str = "pg_ttl_index.recovery";

/// The last recovery; set in the postmaster, and so known to all its children.
static RECOVERY: OnceCell<Option<i64>> = OnceCell::new();

/// Takes note of a recovery that is about to begin. To be called while the server preloads libraries.
pub fn init() {
    let _ = RECOVERY.set(look(&data_directory()));
}

/// The number of the server's last point-in-time recovery, if there was one.
pub fn last() -> Option<i64> {
    RECOVERY.get().copied().flatten()
}

fn data_directory() -> PathBuf {
    // SAFETY: set before libraries are loaded.
    let path = unsafe { CStr::from_ptr(pg_sys::DataDir) };
    PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes()))
}

fn look(directory: &Path) -> Option<i64> {
    // With both, the server becomes a standby.
    let is_recovering = directory.join("recovery.signal").exists() && !directory.join("standby.signal").exists();
    if !is_recovering {
        return std::fs::read_to_string(directory.join(NOTE)).ok()?.trim().parse().ok();
    }
    let number = pgrx::datum::datetime_support::clock_timestamp().into();
    if let Err(error) = write(directory, number) {
        pgrx::warning!("could not write file \"{NOTE}\": {error}");
    }
    Some(number)
}

fn write(directory: &Path, number: i64) -> std::io::Result<()> {
    let mut file = std::fs::File::create(directory.join(NOTE))?;
    writeln!(file, "{number}")?;
    file.sync_all()?;
    std::fs::File::open(directory)?.sync_all()
}
