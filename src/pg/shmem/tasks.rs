//! The queue of rules that may run their owners' code: the database worker adds them, and each helper takes those of
//! its own owner.

use super::{Role, SHMEM, SLOTS, Shared, Slot, is_preloaded, myself, set_latch, with_own_slot};
use pgrx::pg_sys;
use std::time::Duration;

pub(super) const TASKS: usize = 512;
/// The limit for one owner in one database, so that there is room for other owners.
const TASKS_OF_AN_OWNER: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Free,
    Waiting,
    Taken,
    Ended(End),
}

/// How the sweep of a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The helper has recorded the result.
    Swept(Swept),
    /// The helper exited at this version of the rule; `was_doomed` if it was told to because it took too long.
    Lost { version: i64, was_doomed: bool },
}

/// A sweep that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The version of the rule.
    pub version: i64,
    /// Whether the sweep finished all the work.
    pub is_complete: bool,
    /// How long it read heaps for want of an index.
    pub read_heaps: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Task {
    pub(super) database: u32,
    pub owner: u32,
    pub rule_id: i64,
    /// The helper that has taken the task.
    pid: i32,
    pub queued_at: i64,
    state: State,
}

impl Task {
    pub fn is_waiting(&self) -> bool {
        self.state == State::Waiting
    }
}

fn now() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// Queues a rule of this database and wakes its owner's helpers. Returns `false` if there was no room.
pub fn add_task(owner: u32, rule_id: i64) -> bool {
    let (_, database) = myself();
    let mut shared = SHMEM.exclusive();
    if shared.tasks.iter().any(|task| task.database == database && task.rule_id == rule_id) {
        return true;
    }
    let of_owner = shared.tasks.iter().filter(|task| task.database == database && task.owner == owner).count();
    if of_owner >= TASKS_OF_AN_OWNER {
        return false;
    }
    let Some(free) = shared.tasks.iter_mut().find(|task| task.state == State::Free) else { return false };
    *free = Task { database, owner, rule_id, pid: 0, queued_at: now(), state: State::Waiting };
    let is_helper = |slot: &&Slot| slot.pid != 0 && slot.database == database && slot.role == Role::Helper { owner };
    let helpers: Vec<i32> = shared.slots.iter().filter(is_helper).map(|slot| slot.pid).collect();
    drop(shared);
    helpers.into_iter().for_each(set_latch);
    true
}

/// The rules of this database that are queued or taken by a helper.
pub fn tasks() -> Vec<Task> {
    if !is_preloaded() {
        return Vec::new();
    }
    let (_, database) = myself();
    SHMEM.share().tasks.iter().filter(|task| task.database == database).copied().collect()
}

/// Returns how tasks of this database have ended since the last call.
pub fn take_ended_tasks() -> Vec<(i64, End)> {
    if !is_preloaded() {
        return Vec::new();
    }
    let (_, database) = myself();
    let mut ended = Vec::new();
    for task in SHMEM.exclusive().tasks.iter_mut().filter(|task| task.database == database) {
        if let State::Ended(end) = task.state {
            ended.push((task.rule_id, end));
            *task = Task::default();
        }
    }
    ended
}

/// Empties the queue of this database, including tasks that helpers have taken.
pub fn drop_tasks() {
    if is_preloaded() {
        let (_, database) = myself();
        for task in SHMEM.exclusive().tasks.iter_mut().filter(|task| task.database == database) {
            *task = Task::default();
        }
    }
}

/// Removes waiting tasks: without a worker no helper is started for them. The next worker finds their rules by itself.
pub(super) fn drop_waiting(shared: &mut Shared, database: u32) {
    for task in shared.tasks.iter_mut().filter(|task| task.database == database && task.is_waiting()) {
        *task = Task::default();
    }
}

/// Requeues the tasks of a helper that has exited. The current one may be the reason, and ends as lost.
pub(super) fn orphan_tasks(shared: &mut Shared, slot: &Slot) {
    for task in shared.tasks.iter_mut().filter(|task| task.pid == slot.pid && task.state == State::Taken) {
        task.pid = 0;
        task.state = match slot.turn {
            Some((rule_id, version)) if rule_id == task.rule_id => {
                State::Ended(End::Lost { version, was_doomed: slot.is_doomed })
            }
            _ => State::Waiting,
        };
    }
}

/// The owner whose rules this process sweeps, if it is a helper.
pub(super) fn own_owner(shared: &Shared) -> Option<u32> {
    let (pid, _) = myself();
    shared.slots.iter().find(|slot| slot.pid == pid).and_then(|slot| match slot.role {
        Role::Helper { owner } => Some(owner),
        _ => None,
    })
}

/// Takes the rule that has waited longest among those of this helper's owner.
pub fn take_task() -> Option<i64> {
    let (pid, database) = myself();
    let mut shared = SHMEM.exclusive();
    let owner = own_owner(&shared)?;
    let is_for_us = |task: &&mut Task| task.database == database && task.owner == owner && task.is_waiting();
    let task = shared.tasks.iter_mut().filter(is_for_us).min_by_key(|task| task.queued_at)?;
    (task.pid, task.state) = (pid, State::Taken);
    Some(task.rule_id)
}

/// Whether a rule waits for this helper.
pub fn has_task() -> bool {
    let (_, database) = myself();
    let shared = SHMEM.share();
    let owner = own_owner(&shared);
    shared.tasks.iter().any(|task| task.database == database && Some(task.owner) == owner && task.is_waiting())
}

/// Tells the database worker that this helper is done with a rule.
pub fn end_task(rule_id: i64, swept: Swept) {
    let (pid, database) = myself();
    let mut shared = SHMEM.exclusive();
    for task in shared.tasks.iter_mut().filter(|task| task.pid == pid && task.rule_id == rule_id) {
        task.state = State::Ended(End::Swept(swept));
    }
    let worker = super::worker_of(&shared, database);
    drop(shared);
    set_latch(worker);
}

/// Returns this helper's unfinished tasks to the end of the queue.
pub fn give_back_tasks() {
    let (pid, _) = myself();
    for task in SHMEM.exclusive().tasks.iter_mut().filter(|task| task.pid == pid && task.state == State::Taken) {
        (task.pid, task.state, task.queued_at) = (0, State::Waiting, now());
    }
}

/// Whether there are already `most` helpers while rules of an owner without a helper wait.
pub fn is_in_the_way(most: usize) -> bool {
    let (_, database) = myself();
    let shared = SHMEM.share();
    let helpers: Vec<u32> = shared.slots[..SLOTS]
        .iter()
        .filter(|slot| slot.pid != 0 && slot.database == database)
        .filter_map(|slot| if let Role::Helper { owner } = slot.role { Some(owner) } else { None })
        .collect();
    let is_without = |task: &Task| task.database == database && task.is_waiting() && !helpers.contains(&task.owner);
    helpers.len() >= most && shared.tasks.iter().any(is_without)
}

/// Publishes the rule, and its version, that this process works on.
pub fn begin_turn(rule_id: i64, version: i64) {
    with_own_slot(|slot| slot.turn = Some((rule_id, version)));
}

pub fn end_turn() {
    with_own_slot(|slot| slot.turn = None);
}

/// Publishes whether this process is in a transaction, and since when.
pub fn report_busy(is_busy: bool) {
    with_own_slot(|slot| slot.busy_since = if is_busy { now() } else { 0 });
}

/// Records that a helper was told to exit because it took too long.
pub fn doom(pid: i32) {
    for slot in SHMEM.exclusive().slots.iter_mut().filter(|slot| slot.pid == pid) {
        slot.is_doomed = true;
    }
}
