//! Whether this server has been through a point-in-time recovery.
//!
//! PostgreSQL removes `recovery.signal` when a recovery has ended, and then nothing distinguishes it from the promotion
//! of a standby. So the library writes a note into the data directory when the server starts with that file.

use once_cell::sync::OnceCell;
use pgrx::pg_sys;
use std::ffi::CStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const NOTE: &str = "pg_ttl_index.recovery";

/// The last recovery; set in the postmaster and inherited by its children.
static RECOVERY: OnceCell<Option<i64>> = OnceCell::new();

/// Records a recovery that is about to begin. Call while the server preloads libraries.
pub fn init() {
    let _ = RECOVERY.set(look(&data_directory()));
}

/// The number of the server's last point-in-time recovery, if any.
pub fn last() -> Option<i64> {
    RECOVERY.get().copied().flatten()
}

fn data_directory() -> PathBuf {
    // SAFETY: set before libraries are loaded.
    let path = unsafe { CStr::from_ptr(pg_sys::DataDir) };
    PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes()))
}

fn look(directory: &Path) -> Option<i64> {
    // With both files, the server becomes a standby.
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
