//! Shared memory: which processes sweep, and their progress. It exists only if the library was preloaded.

mod demand;
mod progress;
mod shares;
mod tasks;

use demand::{DATABASES, Demand};
pub use demand::{
    For, Leave, anybody_waits, forget_databases_but, forget_told, forget_wait, is_next, make_way, make_way_of_builder,
    report_leave, somebody_waits, take_leaves, tell_once, wait_for_process, waits, wake, wanted, worker_begins,
};
pub use progress::{Hold, Path, Progress, claim_building, end_builders_on, report, report_end, sweeps};
pub use shares::{
    Gain, Given, Most, Share, collect_shares, end_share, leave_shares, offer_share, owners_of_shares, report_gain,
    take_share,
};
use shares::{Offer, SHARES, orphan_shares};
pub use tasks::{
    End, Swept, Task, add_task, begin_turn, doom, drop_tasks, end_task, end_turn, give_back_tasks, has_task,
    is_in_the_way, report_busy, take_ended_tasks, take_task, tasks,
};
use tasks::{TASKS, orphan_tasks, own_owner};

use once_cell::sync::OnceCell;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use pgrx::{PGRXSharedMemory, PgLwLock, PgTryBuilder, pg_shmem_init};
use std::cell::Cell;
use std::panic::AssertUnwindSafe;

const SLOTS: usize = 128;
const SWEEPS: usize = 256;
const DUES: usize = 256;

/// The role of a process with a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The one worker that decides when the rules of its database are swept.
    #[default]
    Database,
    /// A worker for rules of one owner that may run the owner's code.
    Helper { owner: u32 },
    /// A worker that builds the index of one rule.
    Builder,
    /// A session in which a user asked for a sweep.
    Session,
}

/// When a rule with its own schedule is due.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    database: u32,
    rule_id: i64,
    at: i64,
}

/// The instants, in microseconds, until which the work of all sweeps is paid for at the configured rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Paid {
    pub rows: i64,
    pub wal: i64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Slot {
    pub pid: i32,
    pub database: u32,
    pub role: Role,
    /// A session changed a rule: do not wait for the next pass.
    woken: bool,
    pub next_pass: i64,
    /// In a helper, the current rule and its version.
    turn: Option<(i64, i64)>,
    /// When the current transaction began; 0 between transactions.
    pub busy_since: i64,
    /// Whether it was told to exit because it took too long.
    is_doomed: bool,
}

#[derive(Clone, Copy)]
struct Shared {
    launcher: i32,
    launcher_woken: bool,
    slots: [Slot; SLOTS],
    /// The running sweeps; entries without a process are free.
    sweeps: [Progress; SWEEPS],
    paid: Paid,
    dues: [Due; DUES],
    demands: [Demand; DATABASES],
    tasks: [Task; TASKS],
    shares: [Offer; SHARES],
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            launcher: 0,
            launcher_woken: false,
            slots: [Slot::default(); SLOTS],
            sweeps: [Progress::default(); SWEEPS],
            paid: Paid::default(),
            dues: [Due::default(); DUES],
            demands: [Demand::default(); DATABASES],
            tasks: [Task::default(); TASKS],
            shares: [Offer::default(); SHARES],
        }
    }
}

// SAFETY: plain data without pointers.
unsafe impl PGRXSharedMemory for Shared {}

// SAFETY: the name is unique to this lock.
static SHMEM: PgLwLock<Shared> = unsafe { PgLwLock::new(c"pg_ttl_index") };
static PRELOADED: OnceCell<()> = OnceCell::new();
/// Set once this process has arranged to clear its slot when it exits.
static LEAVING: OnceCell<()> = OnceCell::new();

/// Requests the shared memory. Call while the server preloads libraries.
pub fn init() {
    pg_shmem_init!(SHMEM);
    let _ = PRELOADED.set(());
}

pub fn is_preloaded() -> bool {
    PRELOADED.get().is_some()
}

/// Takes a slot for this process until it exits. Returns `None` if no slot is free, or if the process would be the
/// second worker of its database. Without shared memory, returns `Some`.
pub fn take_slot(role: Role) -> Option<()> {
    if !is_preloaded() {
        return Some(());
    }
    let (pid, database) = myself();
    let mut shared = SHMEM.exclusive();
    let is_there = |slot: &&mut Slot| slot.pid != 0 && slot.database == database && slot.role == role;
    if role == Role::Database
        && let Some(other) = shared.slots.iter_mut().find(is_there)
    {
        // The other worker may be about to exit: then it passes the wakeup on to the launcher.
        other.woken = true;
        return None;
    }
    if !shared.slots.iter().any(|slot| slot.pid == pid) {
        // Sessions can do without a slot: they must not take the slots that workers need.
        let are_few = || shared.slots.iter().filter(|slot| slot.pid == 0).count() <= SLOTS / 2;
        if role == Role::Session && are_few() {
            return None;
        }
        let free = shared.slots.iter_mut().find(|slot| slot.pid == 0)?;
        *free = Slot { pid, database, role, ..Slot::default() };
        let launcher = shared.launcher;
        drop(shared);
        // SAFETY: the callback takes no argument and touches shared memory that outlives every process. It also runs
        // when the process is terminated; if it is killed, the server restarts with new shared memory.
        LEAVING.get_or_init(|| unsafe { pg_sys::before_shmem_exit(Some(leave), pg_sys::Datum::from(0)) });
        if role == Role::Database {
            forget_wait(Oid::from(database));
            set_latch(launcher);
        }
    }
    Some(())
}

#[pg_guard]
unsafe extern "C-unwind" fn leave(_code: i32, _argument: pg_sys::Datum) {
    let (pid, _) = myself();
    let mut shared = SHMEM.exclusive();
    if shared.launcher == pid {
        shared.launcher = 0;
    }
    let mut told = 0;
    for place in 0..SLOTS {
        let slot = shared.slots[place];
        if slot.pid != pid {
            continue;
        }
        shared.slots[place] = Slot::default();
        orphan_shares(&mut shared, &slot);
        match slot.role {
            Role::Database => {
                demand::worker_leaves(&mut shared, &slot);
                told = shared.launcher;
            }
            Role::Helper { .. } => {
                orphan_tasks(&mut shared, &slot);
                told = worker_of(&shared, slot.database);
            }
            Role::Builder | Role::Session => {}
        }
    }
    forget_sweeps(&mut shared, pid);
    drop(shared);
    set_latch(told);
}

/// This process and its database.
fn myself() -> (i32, u32) {
    // SAFETY: backend-local values.
    unsafe { (pg_sys::MyProcPid, pg_sys::MyDatabaseId.to_u32()) }
}

/// Returns the PID of a database's worker, or 0.
fn worker_of(shared: &Shared, database: u32) -> i32 {
    let is_it = |slot: &&Slot| slot.pid != 0 && slot.database == database && slot.role == Role::Database;
    shared.slots.iter().find(is_it).map_or(0, |slot| slot.pid)
}

fn set_latch(pid: i32) {
    // SAFETY: a process entry stays in place when its process exits; setting the latch of a process that reuses it does
    // no harm.
    unsafe {
        let process = if pid == 0 { std::ptr::null_mut() } else { pg_sys::BackendPidGetProc(pid) };
        if !process.is_null() {
            pg_sys::SetLatch(&mut (*process).procLatch);
        }
    }
}

fn forget_sweeps(shared: &mut Shared, pid: i32) {
    for sweep in shared.sweeps.iter_mut().filter(|sweep| sweep.pid == pid) {
        *sweep = Progress::default();
    }
}

/// Makes this process the launcher.
pub fn take_launcher() {
    // SAFETY: as in `take_slot`.
    unsafe {
        SHMEM.exclusive().launcher = pg_sys::MyProcPid;
        pg_sys::before_shmem_exit(Some(leave), pg_sys::Datum::from(0));
    }
}

fn with_own_slot<T>(change: impl FnOnce(&mut Slot) -> T) -> Option<T> {
    is_preloaded().then_some(())?;
    let (pid, _) = myself();
    SHMEM.exclusive().slots.iter_mut().find(|slot| slot.pid == pid).map(change)
}

thread_local! {
    /// The account of this process, used without shared memory.
    static OWN_PAID: Cell<Paid> = const { Cell::new(Paid { rows: 0, wal: 0 }) };
}

/// Until when past work is still being paid for.
pub fn paid() -> Paid {
    if is_preloaded() { SHMEM.share().paid } else { OWN_PAID.get() }
}

/// If past work is paid for, pays for a batch before it begins. Returns whether it did.
pub fn pay_in_advance(now: i64, rows: i64) -> bool {
    let pay = |paid: &mut Paid| {
        let is_free = paid.rows <= now;
        if is_free {
            paid.rows = now + rows;
        }
        is_free
    };
    if is_preloaded() {
        return pay(&mut SHMEM.exclusive().paid);
    }
    let mut paid = OWN_PAID.get();
    let is_free = pay(&mut paid);
    OWN_PAID.set(paid);
    is_free
}

/// Adds the cost of a batch, in microseconds from `now` on.
pub fn pay(now: i64, rows: i64, wal: i64) {
    let add = |paid: Paid| Paid { rows: paid.rows.max(now) + rows, wal: paid.wal.max(now) + wal };
    if is_preloaded() {
        let mut shared = SHMEM.exclusive();
        shared.paid = add(shared.paid);
    } else {
        OWN_PAID.set(add(OWN_PAID.get()));
    }
}

/// Runs `work` with a slot for a sweep in a user's session; releases the slot however `work` ends.
pub fn with_session_slot<T>(work: impl FnOnce() -> T) -> T {
    take_slot(Role::Session);
    let work = AssertUnwindSafe(work);
    PgTryBuilder::new(move || {
        let work = work;
        (work.0)()
    })
    .finally(|| {
        let ended = with_own_slot(|slot| {
            let is_session = slot.role == Role::Session;
            is_session.then(|| std::mem::take(slot).pid)
        });
        if let Some(pid) = ended.flatten() {
            forget_sweeps(&mut SHMEM.exclusive(), pid);
        }
    })
    .execute()
}

/// Publishes when a rule is due next, if there is room.
pub fn report_due(rule_id: i64, at: i64) {
    if !is_preloaded() {
        return;
    }
    let (_, database) = myself();
    let mut shared = SHMEM.exclusive();
    let is_it = |due: &Due| due.database == database && due.rule_id == rule_id;
    // Entries that are long past belong to dropped rules.
    let is_over = |due: &Due| due.at < at - 24 * 3600 * 1_000_000;
    let place = shared.dues.iter().position(is_it).or_else(|| shared.dues.iter().position(is_over));
    if let Some(place) = place {
        shared.dues[place] = Due { database, rule_id, at };
    }
}

/// When a rule of this database is due next, if it has its own schedule.
pub fn due(rule_id: i64) -> Option<i64> {
    let (_, database) = myself();
    let is_it = |due: &&Due| due.database == database && due.rule_id == rule_id;
    is_preloaded().then(|| SHMEM.share().dues.iter().find(is_it).map(|due| due.at)).flatten()
}

pub fn report_next_pass(at: i64) {
    with_own_slot(|slot| slot.next_pass = at);
}

/// Whether this process was woken since the last call.
pub fn take_wakeup() -> bool {
    with_own_slot(|slot| std::mem::take(&mut slot.woken)).unwrap_or_default()
}

/// Whether the launcher was woken since the last call for a database that there was no room to record.
pub fn take_launcher_wakeup() -> bool {
    std::mem::take(&mut SHMEM.exclusive().launcher_woken)
}

/// The slots in use.
pub fn slots() -> Vec<Slot> {
    if !is_preloaded() {
        return Vec::new();
    }
    SHMEM.share().slots.iter().filter(|slot| slot.pid != 0).copied().collect()
}

pub fn has_worker(database: Oid) -> bool {
    slots().iter().any(|slot| slot.database == database.to_u32() && slot.role == Role::Database)
}
