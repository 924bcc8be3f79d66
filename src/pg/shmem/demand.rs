//! What the launcher and the database workers tell each other: which databases want a worker, why a worker left, and
//! which databases wait for a process.

use super::{Role, SHMEM, Shared, Slot, is_preloaded, myself, set_latch};
use pgrx::pg_sys::{self, Oid};

/// How many databases can have entries at the same time. If there are more, the launcher looks into all of them.
pub(super) const DATABASES: usize = 256;

/// How long, in microseconds, a process that made way for a database is reserved for it before another one makes way.
const ANSWER: i64 = 5_000_000;

/// Why a worker exited of its own accord.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// Nothing to sweep: no extension, no rule, or sweeping is off. A session that changes this calls [`wake`].
    Resting,
    /// Other databases wait for a process. This one has work again at `due`.
    Turn { due: i64 },
}

/// The kind of process that a database waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    Worker,
    Helper,
}

#[derive(Clone, Copy, Debug)]
struct Wait {
    since: i64,
    what: For,
    /// When a process last made way for this database.
    answered_at: i64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    database: u32,
    /// Whether a session changed a rule while there was no worker.
    wanted: bool,
    left: Option<Leave>,
    wait: Option<Wait>,
    /// Whether the log already says why this database cannot be swept.
    is_told: bool,
}

impl Demand {
    fn is_over(&self) -> bool {
        !self.wanted && self.left.is_none() && self.wait.is_none() && !self.is_told
    }
}

fn now() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// Changes the entry of a database; returns `false` if there was no room for it.
fn change(shared: &mut Shared, database: u32, change: impl FnOnce(&mut Demand)) -> bool {
    let known = shared.demands.iter().position(|demand| demand.database == database);
    let Some(place) = known.or_else(|| shared.demands.iter().position(|demand| demand.database == 0)) else {
        return false;
    };
    let demand = &mut shared.demands[place];
    demand.database = database;
    change(demand);
    if demand.is_over() {
        *demand = Demand::default();
    }
    true
}

fn want(shared: &mut Shared, database: u32) {
    if !change(shared, database, |demand| demand.wanted = true) {
        shared.launcher_woken = true;
    }
}

/// Wakes the worker of this database, or the launcher to start one. A worker that is just exiting passes it on.
pub fn wake() {
    if !is_preloaded() {
        return;
    }
    let (_, database) = myself();
    let mut shared = SHMEM.exclusive();
    let is_worker = |slot: &&mut Slot| slot.pid != 0 && slot.database == database && slot.role == Role::Database;
    let pid = match shared.slots.iter_mut().find(is_worker) {
        Some(slot) => {
            slot.woken = true;
            slot.pid
        }
        None => {
            want(&mut shared, database);
            shared.launcher
        }
    };
    drop(shared);
    set_latch(pid);
}

/// Records that a worker of this database has started. The worker sees all earlier changes and is woken for later ones,
/// so call this before it looks at anything.
pub fn worker_begins() {
    if is_preloaded() {
        let (_, database) = myself();
        change(&mut SHMEM.exclusive(), database, |demand| demand.wanted = false);
    }
}

/// Updates a database's entry when its worker exits, for whatever reason.
pub(super) fn worker_leaves(shared: &mut Shared, slot: &Slot) {
    if slot.woken {
        want(shared, slot.database);
    }
    change(shared, slot.database, |demand| demand.wait = None);
    super::tasks::drop_waiting(shared, slot.database);
}

/// Records that the log says why this database cannot be swept; returns `false` if it already did.
pub fn tell_once() -> bool {
    let (_, database) = myself();
    let mut is_news = true;
    if is_preloaded() {
        change(&mut SHMEM.exclusive(), database, |demand| is_news = !std::mem::replace(&mut demand.is_told, true));
    }
    is_news
}

/// Records that this database can be swept again.
pub fn forget_told() {
    let (_, database) = myself();
    if is_preloaded() && SHMEM.share().demands.iter().any(|demand| demand.database == database && demand.is_told) {
        change(&mut SHMEM.exclusive(), database, |demand| demand.is_told = false);
    }
}

/// Tells the launcher why the worker of this database is about to exit.
pub fn report_leave(leave: Leave) {
    if is_preloaded() {
        let (_, database) = myself();
        change(&mut SHMEM.exclusive(), database, |demand| demand.left = Some(leave));
    }
}

/// Returns why workers have exited since the last call, by database.
pub fn take_leaves() -> Vec<(Oid, Leave)> {
    let mut shared = SHMEM.exclusive();
    let mut left = Vec::new();
    for demand in shared.demands.iter_mut().filter(|demand| demand.database != 0) {
        left.extend(demand.left.take().map(|leave| (Oid::from(demand.database), leave)));
        if demand.is_over() {
            *demand = Demand::default();
        }
    }
    left
}

/// The databases that want a worker immediately.
pub fn wanted() -> Vec<Oid> {
    let shared = SHMEM.share();
    shared.demands.iter().filter(|demand| demand.wanted).map(|demand| Oid::from(demand.database)).collect()
}

/// Removes entries and tasks of databases that no longer exist.
pub fn forget_databases_but(databases: &[Oid]) {
    let mut shared = SHMEM.exclusive();
    let is_there = |database: u32| databases.contains(&Oid::from(database));
    for demand in shared.demands.iter_mut().filter(|demand| !is_there(demand.database)) {
        *demand = Demand::default();
    }
    for task in shared.tasks.iter_mut().filter(|task| !is_there(task.database)) {
        *task = super::Task::default();
    }
}

/// Records that a database could not get a process.
pub fn wait_for_process(database: Oid, what: For) {
    change(&mut SHMEM.exclusive(), database.to_u32(), |demand| {
        demand.wait.get_or_insert(Wait { since: now(), what, answered_at: 0 });
    });
}

/// Records that a database has got its process or no longer wants it.
pub fn forget_wait(database: Oid) {
    if is_preloaded() && waits(database).is_some() {
        change(&mut SHMEM.exclusive(), database.to_u32(), |demand| demand.wait = None);
    }
}

/// The kind of process that a database waits for, if any.
pub fn waits(database: Oid) -> Option<For> {
    is_preloaded().then_some(())?;
    let shared = SHMEM.share();
    shared.demands.iter().find(|demand| demand.database == database.to_u32())?.wait.map(|wait| wait.what)
}

/// Whether no other database has waited for a process longer than this one.
pub fn is_next(database: Oid) -> bool {
    let shared = SHMEM.share();
    let since = |demand: &Demand| demand.wait.map(|wait| wait.since);
    let own = shared.demands.iter().find(|demand| demand.database == database.to_u32()).and_then(since);
    let others = shared.demands.iter().filter(|demand| demand.database != database.to_u32());
    others.filter_map(since).min().is_none_or(|first| own.is_some_and(|own| own <= first))
}

/// Whether another database waits for a process.
pub fn somebody_waits() -> bool {
    let (_, database) = myself();
    has_waits(|demand| demand.database != database)
}

/// Whether any database waits for a process, this one included.
pub fn anybody_waits() -> bool {
    has_waits(|_| true)
}

fn has_waits(counts: impl Fn(&Demand) -> bool) -> bool {
    is_preloaded() && SHMEM.share().demands.iter().any(|demand| demand.wait.is_some() && counts(demand))
}

/// Whether this process should exit for another database that waits for one. One process at a time exits for each.
pub fn make_way() -> bool {
    let (_, database) = myself();
    answer_wait(|demand| demand.database != database)
}

/// Whether a builder should exit for any database that waits for a process, its own included.
pub fn make_way_of_builder() -> bool {
    answer_wait(|_| true)
}

/// Records that a process makes way for the database that has waited longest, unless one already has.
fn answer_wait(counts: impl Fn(&Demand) -> bool) -> bool {
    if !has_waits(&counts) {
        return false;
    }
    let now = now();
    let mut shared = SHMEM.exclusive();
    let waiting = shared.demands.iter_mut().filter(|demand| counts(demand)).filter_map(|demand| demand.wait.as_mut());
    let Some(first) = waiting.filter(|wait| wait.answered_at + ANSWER < now).min_by_key(|wait| wait.since) else {
        return false;
    };
    first.answered_at = now;
    true
}
