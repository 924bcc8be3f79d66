//! The launcher. It connects to no database, and keeps one worker in every database that has rules.
//!
//! It probes unknown databases once, one after the other. After that it relies on being told: a session that changes a
//! rule wakes the worker or, where there is none, the launcher.

use super::start::has_ended;
use super::{LIBRARY, database};
use crate::guc;
use crate::pg::entry::worker_main;
use crate::pg::process;
use crate::pg::shmem::{self, For, Leave, Role};
use crate::pg::transaction::Scope;
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, DynamicBackgroundWorker};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How soon after a worker's exit another may start: leaves time for the DROP DATABASE that it made way for.
const PAUSE_AFTER_EXIT: Duration = Duration::from_secs(5);
/// How soon after a worker's start another may start if one is wanted at once: it may end at once, too.
const PAUSE_AFTER_START: Duration = Duration::from_secs(1);
/// How long a database with nothing to do is left alone if no session reports a change. Changes are reported, but a
/// superuser can also write to the catalog.
const REST: Duration = Duration::from_secs(3600);
/// How often the log says that no process is free for a database.
const SAY_AGAIN: Duration = Duration::from_secs(3600);
/// How often the launcher checks whether a worker is in another session's way.
const LOOK_UP: Duration = Duration::from_secs(1);
/// How long workers have to leave a database that another session wants to itself before they are terminated: that
/// session waits 5 seconds.
const TIME_TO_LEAVE: Duration = Duration::from_secs(2);

/// Registers the launcher while the server starts. It runs once recovery has ended; on a standby, after promotion.
pub fn register() {
    BackgroundWorkerBuilder::new("pg_ttl_index launcher")
        .set_type("pg_ttl_index launcher")
        .set_library(LIBRARY)
        .set_function("pg_ttl_index_launcher_main")
        .enable_spi_access()
        .set_restart_time(Some(Duration::from_secs(5)))
        .load();
}

/// A database as the launcher knows it.
#[derive(Default)]
struct Known {
    name: String,
    worker: Option<DynamicBackgroundWorker>,
    /// When a worker is due; `None` if the database has not been probed yet.
    due: Option<Instant>,
    started: Option<Instant>,
    /// Why the last worker left; kept until that worker is gone.
    left: Option<Leave>,
    logged: Option<Instant>,
    /// Since when another session has wanted the database to itself.
    claimed: Option<Instant>,
}

worker_main!(pg_ttl_index_launcher_main, run);

fn run(_argument: pg_sys::Datum) {
    process::attach_signal_handlers();
    BackgroundWorker::connect_worker_to_spi(None, None);
    shmem::take_launcher();
    let mut launcher = Launcher::default();
    loop {
        process::reload_configuration();
        match Scope::Transaction.attempt(|| Ok(process::databases())) {
            Ok(databases) => launcher.learn(databases),
            Err(failure) => log!("pg_ttl_index could not list databases: {}", failure.message),
        }
        launcher.clear_the_way();
        if guc::enabled() {
            launcher.start_workers();
        }
        // A worker's start or exit, or a wakeup, ends the wait.
        process::idle(launcher.time_to_next_look());
    }
}

#[derive(Default)]
struct Launcher {
    known: HashMap<Oid, Known>,
}

impl Launcher {
    /// Updates which databases exist, which workers have ended and why, and which databases want a worker.
    fn learn(&mut self, databases: Vec<(Oid, String)>) {
        let now = Instant::now();
        let oids: Vec<Oid> = databases.iter().map(|(oid, _)| *oid).collect();
        self.known.retain(|oid, _| oids.contains(oid));
        shmem::forget_databases_but(&oids);
        for (oid, name) in databases {
            self.known.entry(oid).or_default().name = name;
        }
        for (oid, leave) in shmem::take_leaves() {
            self.known.entry(oid).and_modify(|known| known.left = Some(leave));
        }
        for known in self.known.values_mut() {
            let has_ended = known.worker.as_ref().is_some_and(has_ended);
            if has_ended || (known.worker.is_none() && known.left.is_some()) {
                known.worker = None;
                known.due = Some(match known.left.take() {
                    Some(Leave::Resting) => now + REST,
                    Some(Leave::Turn { due }) => now + micros(due - i64::from(clock_timestamp())),
                    None => {
                        let rested = known.started.map_or(now, |started| started + guc::naptime());
                        rested.max(now + PAUSE_AFTER_EXIT.min(guc::naptime()))
                    }
                });
            }
        }
        // Only after handling exits: a wakeup may be newer than what a worker saw before it left.
        let everybody = shmem::take_launcher_wakeup();
        let wanted = shmem::wanted();
        for (oid, known) in &mut self.known {
            if everybody || wanted.contains(oid) {
                known.due = Some(known.started.map_or(now, |started| started + PAUSE_AFTER_START).max(now));
            }
        }
    }

    /// Starts workers that are due: first for the database that has waited longest, then by due time, then one to probe
    /// an unknown database.
    fn start_workers(&mut self) {
        let now = Instant::now();
        let is_looking =
            |(oid, known): (&Oid, &Known)| known.due.is_none() && known.worker.is_some() && !shmem::has_worker(*oid);
        let is_probing = self.known.iter().any(is_looking);
        let mut ready: Vec<(bool, Option<Instant>, Oid)> = self
            .known
            .iter()
            .filter(|(oid, known)| !self.has_worker(**oid, known))
            .filter(|(_, known)| known.due.map_or(!is_probing, |due| due <= now))
            .map(|(oid, known)| (known.due.is_none(), known.due, *oid))
            .collect();
        ready.sort_by_key(|(is_unknown, due, oid)| (*is_unknown, *due, oid.to_u32()));
        let mut may_probe = true;
        for (is_unknown, _, oid) in ready {
            if is_unknown && !std::mem::take(&mut may_probe) {
                break;
            }
            self.start_worker(oid);
        }
    }

    /// Whether a worker is running, starting or ending, or was started by an earlier launcher.
    fn has_worker(&self, oid: Oid, known: &Known) -> bool {
        known.worker.is_some() || shmem::has_worker(oid)
    }

    fn start_worker(&mut self, oid: Oid) {
        let Some(known) = self.known.get_mut(&oid) else { return };
        known.worker = shmem::is_next(oid).then(|| database::start(oid)).flatten();
        if known.worker.is_some() {
            known.started = Some(Instant::now());
            shmem::forget_wait(oid);
            return;
        }
        shmem::wait_for_process(oid, For::Worker);
        if known.logged.is_none_or(|logged| logged.elapsed() >= SAY_AGAIN) {
            known.logged = Some(Instant::now());
            let name = &known.name;
            log!("pg_ttl_index: database \"{name}\" waits for a free worker process, see max_worker_processes");
        }
    }

    /// Terminates workers in a database that another session wants to itself, if they do not leave on their own.
    fn clear_the_way(&mut self) {
        let now = Instant::now();
        let workers: Vec<_> = shmem::slots().into_iter().filter(|slot| slot.role != Role::Session).collect();
        for (oid, known) in &mut self.known {
            let mut here = workers.iter().filter(|slot| slot.database == oid.to_u32()).peekable();
            if here.peek().is_none() || !is_claimed(*oid) {
                known.claimed = None;
            } else if now - *known.claimed.get_or_insert(now) >= TIME_TO_LEAVE {
                here.for_each(|slot| process::terminate(slot.pid));
            }
        }
    }

    fn time_to_next_look(&self) -> Duration {
        let look_up = if shmem::slots().is_empty() { PAUSE_AFTER_EXIT } else { LOOK_UP };
        let now = Instant::now();
        let dues =
            self.known.iter().filter(|(oid, known)| !self.has_worker(**oid, known)).filter_map(|(_, known)| known.due);
        // Databases whose worker is already due wait for a process.
        let next = dues.filter(|due| *due > now).map(|due| due - now).min().unwrap_or(Duration::MAX);
        next.min(look_up).min(guc::naptime())
    }
}

fn is_claimed(database: Oid) -> bool {
    Scope::Transaction.attempt(|| Ok(process::is_database_wanted(database))).unwrap_or(false)
}

fn micros(count: i64) -> Duration {
    Duration::from_micros(u64::try_from(count).unwrap_or(0))
}
