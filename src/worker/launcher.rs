//! The launcher: connected to no database, it keeps one worker in every database that has the extension.

use super::{LIBRARY, database};
use crate::guc;
use crate::pg::transaction::Scope;
use crate::pg::{board, process};
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, BackgroundWorkerStatus, DynamicBackgroundWorker};
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How soon after a worker's end another may be started: time for a DROP DATABASE that it made way for.
const PAUSE_AFTER_EXIT: Duration = Duration::from_secs(5);

/// Registers the launcher with the server that is starting. It runs when recovery has ended, on a standby after
/// promotion.
pub fn register() {
    BackgroundWorkerBuilder::new("pg_ttl_index launcher")
        .set_type("pg_ttl_index launcher")
        .set_library(LIBRARY)
        .set_function("pg_ttl_index_launcher_main")
        .enable_spi_access()
        .set_restart_time(Some(Duration::from_secs(5)))
        .load();
}

/// What the launcher knows of a database.
struct Known {
    worker: Option<DynamicBackgroundWorker>,
    not_before: Instant,
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pg_ttl_index_launcher_main(_argument: pg_sys::Datum) {
    process::attach_signal_handlers();
    BackgroundWorker::connect_worker_to_spi(None, None);
    board::take_launcher();
    let mut known: HashMap<Oid, Known> = HashMap::new();
    loop {
        process::reload_configuration();
        match Scope::Transaction.attempt(|| Ok(process::databases())) {
            Ok(databases) => {
                known.retain(|database, _| databases.contains(database));
                for database in databases {
                    let entry = known.entry(database).or_insert(Known { worker: None, not_before: Instant::now() });
                    see_to(database, entry);
                }
            }
            Err(failure) => log!("pg_ttl_index could not list databases: {}", failure.message),
        }
        // A worker's exit and a wake-up end the wait: they may be about a database that has the extension only now.
        process::idle(guc::naptime().min(PAUSE_AFTER_EXIT));
        if board::take_launcher_wakeup() {
            known
                .values_mut()
                .filter(|known| known.worker.is_none())
                .for_each(|known| known.not_before = Instant::now());
        }
    }
}

fn see_to(database: Oid, known: &mut Known) {
    if let Some(worker) = &known.worker {
        if !matches!(worker.pid(), Err(BackgroundWorkerStatus::Stopped)) {
            return;
        }
        known.worker = None;
        known.not_before = known.not_before.max(Instant::now() + PAUSE_AFTER_EXIT.min(guc::naptime()));
    }
    // The board knows workers that an earlier launcher started.
    if !guc::enabled() || board::has_worker(database) || Instant::now() < known.not_before {
        return;
    }
    // Most workers find no extension and end at once: not more often than that is worth.
    known.not_before = Instant::now() + guc::naptime();
    known.worker = database::start(database);
}
