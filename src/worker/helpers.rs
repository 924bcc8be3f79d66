//! The helpers of a database: its worker starts them, hands them rules, and terminates those that do not finish.

use super::helper;
use super::start::has_ended;
use super::turn::report_broken;
use crate::catalog::{Catalog, Rule};
use crate::guc;
use crate::pg::process;
use crate::pg::shmem::{self, End, For, Role, Slot, Swept, Task};
use crate::pg::transaction::{Failure, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::prelude::*;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long a helper has to react to a timeout or cancel before it is terminated.
const GRACE: Duration = Duration::from_secs(2);
/// How long an owner's rules wait before one helper more than usual is started, if no running helper gives way.
const PATIENCE: Duration = Duration::from_secs(2);
/// A helper that has been in a transaction for this long cannot give way.
const LONG: Duration = Duration::from_secs(1);
/// How long one owner's transaction may last while another owner's rules have no process at all.
const LONGEST: Duration = Duration::from_secs(30);
/// The most helpers of one owner: one may be stuck.
const MOST_OF_AN_OWNER: usize = 2;
/// How often the log says that no process is free.
const SAY_AGAIN: Duration = Duration::from_secs(3600);

#[derive(Default)]
pub struct Helpers {
    /// Helpers that were started, with their owners.
    started: Vec<(u32, DynamicBackgroundWorker)>,
    /// When each owner last got a helper.
    served: HashMap<u32, Instant>,
    /// Rules that are not in shared memory yet, with their owners.
    backlog: Vec<(i64, u32)>,
    /// When the sweeps of rules in the backlog or with a helper began.
    begun: HashMap<i64, Instant>,
    logged: Option<Instant>,
}

/// A rule that a helper has finished with.
pub struct Returned {
    pub rule_id: i64,
    pub begun: Option<Instant>,
    pub swept: Swept,
}

impl Helpers {
    /// Whether a rule is with a helper or waits for one.
    pub fn have(&self, rule_id: i64) -> bool {
        self.begun.contains_key(&rule_id)
    }

    /// Whether there is no helper, even if rules wait for one.
    pub fn are_missing(&mut self) -> bool {
        self.present().is_empty() && self.coming().is_empty()
    }

    /// Whether a rule that the worker could sweep itself may go to a helper.
    pub fn have_room(&mut self) -> bool {
        // Without shared memory, the worker could not see what a helper does.
        shmem::is_preloaded() && self.present().len() + self.coming().len() + 1 < guc::max_workers()
    }

    pub fn hand_over(&mut self, rule_id: i64, owner: u32, begun: Instant) {
        self.begun.insert(rule_id, begun);
        self.backlog.push((rule_id, owner));
    }

    /// Looks after the helpers; must be called often. Returns the rules they have finished with.
    pub fn see_to(&mut self) -> Vec<Returned> {
        if !shmem::is_preloaded() {
            return Vec::new();
        }
        let mut returned = Vec::new();
        for (rule_id, end) in shmem::take_ended_tasks() {
            let swept = match end {
                End::Swept(swept) => swept,
                End::Lost { version, was_doomed } => {
                    record_loss(rule_id, version, was_doomed);
                    Swept::default()
                }
            };
            returned.push(Returned { rule_id, begun: self.begun.remove(&rule_id), swept });
        }
        self.end_overdue();
        self.backlog.retain(|(rule_id, owner)| !shmem::add_task(*owner, *rule_id));
        let tasks = shmem::tasks();
        // An earlier worker may have handed out rules.
        for task in &tasks {
            self.begun.entry(task.rule_id).or_insert_with(Instant::now);
        }
        let backlog = &self.backlog;
        let is_known =
            |rule_id| tasks.iter().any(|task| task.rule_id == rule_id) || backlog.iter().any(|(id, _)| *id == rule_id);
        self.begun.retain(|rule_id, _| is_known(*rule_id));
        self.start_for(&tasks);
        self.start_for_shares();
        returned
    }

    /// Starts a helper for shares of large tables that nobody has taken, if there is room.
    fn start_for_shares(&mut self) {
        for owner in shmem::owners_of_shares() {
            if self.have_room()
                && !self.coming().contains(&owner)
                && shmem::is_next(process::current_database())
                && let Some(helper) = helper::start(owner)
            {
                self.started.push((owner, helper));
            }
        }
    }

    /// Terminates all helpers at once, whatever they are doing.
    pub fn end_all(&mut self) {
        for (_, helper) in self.started.drain(..) {
            helper.terminate();
        }
        shmem::drop_tasks();
        self.backlog.clear();
        self.present().iter().for_each(|slot| process::terminate(slot.pid));
        self.begun.clear();
        shmem::forget_wait(process::current_database());
    }

    /// Returns the slots of the helpers at work.
    fn present(&self) -> Vec<Slot> {
        let database = process::current_database().to_u32();
        let is_helper = |slot: &Slot| slot.database == database && matches!(slot.role, Role::Helper { .. });
        shmem::slots().into_iter().filter(is_helper).collect()
    }

    /// Returns the owners of helpers that were started but have not begun to work.
    fn coming(&mut self) -> Vec<u32> {
        self.started.retain(|(_, helper)| !has_ended(helper));
        let present = self.present();
        let is_coming = |helper: &DynamicBackgroundWorker| {
            helper.pid().map_or(true, |pid| !present.iter().any(|slot| slot.pid == pid))
        };
        self.started.iter().filter(|(_, helper)| is_coming(helper)).map(|(owner, _)| *owner).collect()
    }

    /// Terminates helpers with an overdue batch. User code can catch the cancel of a timeout, but not a termination.
    fn end_overdue(&self) {
        let Ok(limit) = u64::try_from(guc::batch_timeout_ms()) else { return };
        if limit == 0 {
            return;
        }
        for slot in self.present() {
            if busy_for(&slot) > Duration::from_millis(limit) + GRACE {
                shmem::doom(slot.pid);
                process::terminate(slot.pid);
            }
        }
    }

    /// Starts helpers for waiting rules, first for the owner who has been without one for longest.
    fn start_for(&mut self, tasks: &[Task]) {
        let mut owners: Vec<(u32, i64)> = Vec::new();
        for task in tasks.iter().filter(|task| task.is_waiting()) {
            match owners.iter_mut().find(|(owner, _)| *owner == task.owner) {
                Some((_, since)) => *since = task.queued_at.min(*since),
                None => owners.push((task.owner, task.queued_at)),
            }
        }
        owners.sort_by_key(|(owner, since)| (self.served.get(owner).copied(), *since));
        let (mut coming, present) = (self.coming(), self.present());
        let mut is_short = false;
        for (owner, since) in owners {
            let own: Vec<_> = present.iter().filter(|slot| slot.role == Role::Helper { owner }).collect();
            let is_served = coming.contains(&owner) || own.iter().any(|slot| busy_for(slot) < LONG);
            if is_served || own.len() >= MOST_OF_AN_OWNER {
                continue;
            }
            let all_are_stuck = present.iter().all(|slot| busy_for(slot) >= LONG) && coming.is_empty();
            let has_waited = age(since) >= PATIENCE;
            if present.len() + coming.len() >= helper::most() && !(has_waited && all_are_stuck) {
                continue;
            }
            let helper = shmem::is_next(process::current_database()).then(|| helper::start(owner)).flatten();
            if helper.is_none() && has_waited && own.is_empty() {
                end_longest(&present);
            }
            match helper {
                Some(helper) => {
                    self.started.push((owner, helper));
                    self.served.insert(owner, Instant::now());
                    coming.push(owner);
                }
                None => is_short = true,
            }
        }
        let database = process::current_database();
        if is_short {
            self.say_once();
            shmem::wait_for_process(database, For::Helper);
        } else {
            shmem::forget_wait(database);
        }
    }

    fn say_once(&mut self) {
        if self.logged.is_none_or(|logged| logged.elapsed() >= SAY_AGAIN) {
            self.logged = Some(Instant::now());
            let name = Scope::Transaction.attempt(|| Ok(process::current_database_name())).unwrap_or_default();
            log!("pg_ttl_index: rules in database \"{name}\" wait for a free worker process, see max_worker_processes");
        }
    }
}

/// Terminates the helper with the longest-running transaction, if that is too long: other owners have no helper.
fn end_longest(helpers: &[Slot]) {
    if let Some(slot) = helpers.iter().max_by_key(|slot| busy_for(slot)).filter(|slot| busy_for(slot) >= LONGEST) {
        shmem::doom(slot.pid);
        process::terminate(slot.pid);
    }
}

/// Returns how long a process has been in its transaction.
fn busy_for(slot: &Slot) -> Duration {
    if slot.busy_since == 0 { Duration::ZERO } else { age(slot.busy_since) }
}

fn age(since: i64) -> Duration {
    Duration::from_micros(u64::try_from(i64::from(clock_timestamp()) - since).unwrap_or(0))
}

/// Records a failure for a rule whose helper ended while sweeping it, so that the rule backs off like any failed rule.
fn record_loss(rule_id: i64, version: i64, was_doomed: bool) {
    let failure = if was_doomed {
        let message = "the batch took too long and its worker was terminated";
        Failure::new(PgSqlErrorCode::ERRCODE_QUERY_CANCELED, message)
    } else {
        Failure::new(PgSqlErrorCode::ERRCODE_ADMIN_SHUTDOWN, "the worker that swept the rule was terminated")
    };
    let rule = Scope::Transaction.attempt(|| {
        let catalog = Catalog::open()?;
        Ok((catalog.rule_with_id(rule_id)?, catalog))
    });
    if let Ok((rule, catalog)) = rule {
        let last_error = rule.and_then(|rule: Rule| rule.state.last_error);
        report_broken(&catalog, (rule_id, version), &failure, last_error == Some(failure.to_string()));
    }
}
