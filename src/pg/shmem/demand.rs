//! What the launcher and the workers of databases tell each other: where a worker is wanted, why one left, and who waits for
//! a process.

use super::{Role, SHMEM, Shared, Slot, is_preloaded, myself, set_latch};
use pgrx::pg_sys::{self, Oid};

/// Databases that there is something to tell about at the same time. For others the launcher looks everywhere.
pub(super) const DATABASES: usize = 256;

/// How long a process that was given up for somebody is kept for them before another is.
const ANSWER: i64 = 5_000_000;

/// Why a worker left of its own accord.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// There is nothing to sweep: no extension, no rule, or sweeping is switched off. Whoever changes that wakes.
    Resting,
    /// Others wait for a process. It has work again at this instant.
    Turn { due: i64 },
}

/// What a database waits for a process for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    Worker,
    Helper,
}

#[derive(Clone, Copy, Debug)]
struct Wait {
    since: i64,
    what: For,
    /// When somebody last made way for it.
    answered_at: i64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    database: u32,
    /// Somebody changed a rule while no worker was there.
    wanted: bool,
    left: Option<Leave>,
    wait: Option<Wait>,
    /// Whether the log has told why it cannot be swept.
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

/// Changes the demand of a database; tells whether there was room for it.
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

/// Wakes the worker of this database, or else the launcher, which then starts one. One that is just leaving passes it on.
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

/// Takes down that a worker of this database has started. What is changed from now on it sees, or is told of anew: so this is
/// to be called before it looks at anything.
pub fn worker_begins() {
    if is_preloaded() {
        let (_, database) = myself();
        change(&mut SHMEM.exclusive(), database, |demand| demand.wanted = false);
    }
}

/// What becomes of the demand of a database when its worker exits, in whatever way.
pub(super) fn worker_leaves(shared: &mut Shared, slot: &Slot) {
    if slot.woken {
        want(shared, slot.database);
    }
    change(shared, slot.database, |demand| demand.wait = None);
    super::tasks::drop_waiting(shared, slot.database);
}

/// Takes down that the log tells why this database cannot be swept; returns `false` if it did before.
pub fn tell_once() -> bool {
    let (_, database) = myself();
    let mut is_news = true;
    if is_preloaded() {
        change(&mut SHMEM.exclusive(), database, |demand| is_news = !std::mem::replace(&mut demand.is_told, true));
    }
    is_news
}

/// Takes down that it can be.
pub fn forget_told() {
    let (_, database) = myself();
    if is_preloaded() && SHMEM.share().demands.iter().any(|demand| demand.database == database && demand.is_told) {
        change(&mut SHMEM.exclusive(), database, |demand| demand.is_told = false);
    }
}

/// Tells the launcher why the worker of this database is about to leave.
pub fn report_leave(leave: Leave) {
    if is_preloaded() {
        let (_, database) = myself();
        change(&mut SHMEM.exclusive(), database, |demand| demand.left = Some(leave));
    }
}

/// Why workers have left since the last call, by database.
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

/// The databases that want a worker at once.
pub fn wanted() -> Vec<Oid> {
    let shared = SHMEM.share();
    shared.demands.iter().filter(|demand| demand.wanted).map(|demand| Oid::from(demand.database)).collect()
}

/// Forgets what was said of databases that are not there any more.
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

/// Shows that a database could not get a process.
pub fn wait_for_process(database: Oid, what: For) {
    change(&mut SHMEM.exclusive(), database.to_u32(), |demand| {
        demand.wait.get_or_insert(Wait { since: now(), what, answered_at: 0 });
    });
}

/// Shows that it has one, or wants it no more.
pub fn forget_wait(database: Oid) {
    if is_preloaded() && waits(database).is_some() {
        change(&mut SHMEM.exclusive(), database.to_u32(), |demand| demand.wait = None);
    }
}

/// What a database waits for a process for.
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

/// Whether this process should leave for another database that waits for one. For each that waits, one at a time does.
pub fn make_way() -> bool {
    let (_, database) = myself();
    answer_wait(|demand| demand.database != database)
}

/// Whether a builder should end for any database that waits for a process, its own included.
pub fn make_way_of_builder() -> bool {
    answer_wait(|_| true)
}

/// Takes down that somebody makes way for the one that has waited longest, if nobody has.
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
