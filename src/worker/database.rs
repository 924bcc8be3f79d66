//! The worker of a database. It runs as long as the database has rules, and gives every due rule its turn. It runs no
//! user code, so user code cannot hold it up: a rule that may run some goes to a helper.

use super::builder::Builders;
use super::helpers::Helpers;
use super::schedule::{self, Opening};
use super::start::{load_rules, pin_settings};
use super::turn::{Job, SLICE, Turn, Work, finish, report_broken, take_turn};
use super::{LIBRARY, TURN, TYPE};
use crate::catalog::{Catalog, ClockChange, Rule};
use crate::error::{TtlError, Unserved};
use crate::guc;
use crate::pg::entry::worker_main;
use crate::pg::shmem::{self, Leave, Role, Swept};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{process, recovery};
use crate::rule::IndexMethod;
use crate::sweep::{Step, throttle};
use pgrx::PgSqlErrorCode;
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, DynamicBackgroundWorker};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// How often a worker checks whether it is in another session's way.
const LOOK_UP: Duration = Duration::from_secs(1);
/// How long an owner's rules go straight to a helper after one of them took long.
const SLOW_FOR: Duration = Duration::from_secs(600);
/// The shortest time between two passes, however often rules change.
const SHORTEST_GAP: Duration = Duration::from_millis(50);
/// How long this process waits before it reports again that a rule cannot be swept.
const REPORT_AGAIN: Duration = Duration::from_secs(10);
/// How often a busy worker looks after its helpers.
const SEE_TO: Duration = Duration::from_millis(100);
/// The shortest delay before a rule is checked again between two passes.
const SOON: Duration = Duration::from_millis(100);
/// How long a worker stays without rules if no other database waits for its process: the first rule may come soon.
const LINGER: Duration = Duration::from_secs(20);

/// Starts the worker of a database. Returns `None` if no process is free.
pub fn start(database: Oid) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new(TYPE)
        .set_type(TYPE)
        .set_library(LIBRARY)
        .set_function("pg_ttl_index_worker_main")
        .set_argument(database.into_datum())
        .set_notify_pid(process::pid())
        .enable_spi_access()
        .set_restart_time(None)
        .load_dynamic()
        .ok()
}

worker_main!(pg_ttl_index_worker_main, run);

fn run(argument: pg_sys::Datum) {
    process::attach_signal_handlers();
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(Oid::from(argument.value() as u32)), None);
    pin_settings(c"pg_ttl_index worker");
    shmem::worker_begins();
    match standing() {
        Standing::Wanted | Standing::Held if shmem::take_slot(Role::Database).is_some() => {}
        Standing::Idle => return shmem::report_leave(Leave::Resting),
        _ => return,
    }
    process::report_activity(None);
    let mut worker = Worker::new();
    loop {
        process::reload_configuration();
        // Take the wakeup before checking the standing: a later change wakes us again, or the launcher if we leave.
        worker.is_woken |= shmem::take_wakeup();
        match standing() {
            Standing::Wanted => {}
            Standing::Held => {
                worker.leave();
                process::report_activity(None);
                process::idle(LOOK_UP);
                continue;
            }
            standing => {
                worker.leave();
                if standing == Standing::Idle {
                    shmem::report_leave(Leave::Resting);
                }
                return;
            }
        }
        if guc::enabled() {
            worker.load_due_rules();
            worker.give_turns();
            worker.see_to_helpers();
            if let Some(leave) = worker.may_leave() {
                worker.leave();
                return shmem::report_leave(leave);
            }
        } else {
            worker.leave();
        }
        process::report_activity(None);
        throttle::watch_log();
        process::idle(worker.time_to_next_turn().min(LOOK_UP));
    }
}

/// Whether this database needs a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Wanted,
    /// There is no extension, or no version that this library serves, or sweeping was switched off.
    Idle,
    /// Nothing is swept until the clock is back.
    Held,
    /// Another session needs the database to itself, or the check failed.
    InTheWay,
}

fn standing() -> Standing {
    let looked = Scope::Transaction.attempt(|| {
        if process::is_database_wanted(process::current_database()) {
            return Ok(Standing::InTheWay);
        }
        if !process::has_extension() {
            return Ok(Standing::Idle);
        }
        let catalog = match Catalog::open() {
            Err(TtlError::Unserved(reason)) => {
                tell_of_schema(&reason);
                return Ok(Standing::Idle);
            }
            opened => opened?,
        };
        shmem::forget_told();
        hold_after_recovery(&catalog)?;
        tell_of_clock(catalog.watch_clock()?);
        Ok(match catalog.is_sweeping_on()? {
            true => Standing::Wanted,
            false if catalog.is_held_by_clock()? => Standing::Held,
            false => Standing::Idle,
        })
    });
    looked.unwrap_or(Standing::InTheWay)
}

/// Logs that this database cannot be swept, once per server start.
fn tell_of_schema(reason: &Unserved) {
    if shmem::tell_once() {
        let database = process::current_database_name();
        let message = format!("pg_ttl_index does not work in database \"{database}\": {reason}");
        Failure { hint: Some(reason.hint().into()), ..Failure::new(UNSERVED, message) }.log();
    }
}

fn tell_of_clock(change: ClockChange) {
    let database = process::current_database_name();
    match change {
        ClockChange::None => {}
        ClockChange::Jumped => {
            let message = format!("pg_ttl_index does not sweep database \"{database}\": the clock has jumped ahead");
            let hint = "Set the clock back, or call ttl_start_worker() there if it is right.";
            Failure { hint: Some(hint.into()), ..Failure::new(UNSERVED, message) }.log();
        }
        ClockChange::Back => log!("pg_ttl_index sweeps database \"{database}\" again: the clock is back"),
    }
}

/// Holds sweeping after a point-in-time recovery until a user starts it: rows recovered for rescue must not vanish.
fn hold_after_recovery(catalog: &Catalog) -> Result<(), TtlError> {
    let Some(recovery) = recovery::last() else { return Ok(()) };
    if catalog.is_recovered(recovery)? && catalog.acknowledge_recovery(recovery, guc::hold_after_recovery())? {
        let database = process::current_database_name();
        let message = format!("pg_ttl_index does not sweep database \"{database}\" after a point-in-time recovery");
        let hint = "Call ttl_start_worker() there when expired rows may be removed.";
        Failure { hint: Some(hint.into()), ..Failure::new(UNSERVED, message) }.log();
    }
    Ok(())
}

const UNSERVED: PgSqlErrorCode = PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;

pub fn may_stay() -> bool {
    standing() == Standing::Wanted
}

struct Worker {
    /// Rules waiting for their turn, in order.
    queue: VecDeque<Job>,
    /// When each owner last had a turn.
    served: HashMap<Oid, Instant>,
    /// Owners whose rules go straight to a helper because one of them took long, and until when.
    slow: HashMap<Oid, Instant>,
    helpers: Helpers,
    builders: Builders,
    /// Whether a session has changed a rule since the last pass.
    is_woken: bool,
    /// When the last pass over all rules began.
    loaded: Option<Instant>,
    /// How long after `loaded` a rule change can start another pass: many changes must not prevent sweeping.
    gap: Duration,
    /// When each rule that cannot be swept may be reported again.
    reported: HashMap<i64, Instant>,
    /// When a rule with its own schedule must be checked before the next pass.
    early: Option<Instant>,
    /// The last complete sweep of each rule, and when it began.
    ended: HashMap<i64, (Instant, Swept)>,
    /// Since when the database has had no rules.
    without_rules: Option<Instant>,
    started: Instant,
    /// Whether the worker leaves to free its process for another database.
    gives_way: bool,
}

impl Worker {
    fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            served: HashMap::new(),
            slow: HashMap::new(),
            helpers: Helpers::default(),
            builders: Builders::default(),
            is_woken: false,
            loaded: None,
            gap: Duration::ZERO,
            reported: HashMap::new(),
            early: None,
            ended: HashMap::new(),
            without_rules: None,
            started: Instant::now(),
            gives_way: false,
        }
    }

    fn time_to_next_turn(&self) -> Duration {
        let rest = if self.is_woken { self.gap } else { guc::naptime() };
        let pass = self.loaded.map_or(Duration::ZERO, |loaded| rest.saturating_sub(loaded.elapsed()));
        let others = self.queue.iter().map(|job| job.not_before).chain(self.early);
        others.map(|at| at.saturating_duration_since(Instant::now())).fold(pass, Duration::min)
    }

    /// Starts a pass if it is time or if a rule was changed: queues the due rules that are not being swept already.
    /// Between two passes, it queues only rules with a schedule of their own.
    fn load_due_rules(&mut self) {
        let now = Instant::now();
        if self.builders.see_off() {
            self.look_soon();
        }
        self.is_woken |= shmem::take_wakeup();
        let rest = if self.is_woken { self.gap } else { guc::naptime() };
        let is_pass = self.loaded.is_none_or(|loaded| now - loaded >= rest);
        if !is_pass && self.early.is_none_or(|early| now < early) {
            return;
        }
        if is_pass {
            self.loaded = Some(now);
            self.is_woken = false;
        }
        self.early = None;
        self.report_next_turn();
        let (catalog, rules) = match load_rules(None) {
            Ok(loaded) => loaded,
            Err(failure) => {
                log!("pg_ttl_index could not read its rules: {failure}");
                return;
            }
        };
        self.gap = (now.elapsed() * 10).clamp(SHORTEST_GAP, guc::naptime());
        self.look_for_rules(&catalog, rules.is_empty());
        let queued: HashSet<i64> = self.queue.iter().map(|job| job.rule().id).collect();
        self.reported.retain(|_, until| *until > now);
        for (rule, opening) in rules {
            let id = rule.as_ref().map_or_else(|broken| broken.rule_id, |rule| rule.id);
            if self.helpers.have(id) || queued.contains(&id) {
                continue;
            }
            match rule {
                Ok(rule) => {
                    if rule.state.pending_index.is_some() && rule.state.may_build {
                        self.builders.start_for(&rule);
                    }
                    if self.is_time_for(&rule, opening, is_pass) {
                        let closes_at = opening.map(|opening| opening.until);
                        self.queue.push_back(Job::new(catalog.clone(), rule, closes_at));
                    }
                }
                Err(broken) if broken.is_due && !self.reported.contains_key(&id) => {
                    report_broken(&catalog, (id, broken.version), &broken.failure, broken.is_known);
                    self.reported.insert(id, now + REPORT_AGAIN);
                }
                Err(_) => {}
            }
        }
        self.report_next_turn();
    }

    /// Records since when there has been nothing to do, now or later.
    fn look_for_rules(&mut self, catalog: &Catalog, none_to_sweep: bool) {
        let has_none = none_to_sweep
            && Scope::Transaction
                .attempt(|| catalog.has_active_rules())
                .is_ok_and(|has_active_rules| !has_active_rules);
        self.without_rules = has_none.then(|| self.without_rules.unwrap_or_else(Instant::now));
    }

    fn report_next_turn(&self) {
        shmem::report_next_pass(self.next_turn());
    }

    fn next_turn(&self) -> i64 {
        i64::from(clock_timestamp()) + self.time_to_next_turn().as_micros() as i64
    }

    /// Whether to sweep a rule now. Also records when to check the rule next.
    fn is_time_for(&mut self, rule: &Rule, opening: Option<Opening>, is_pass: bool) -> bool {
        let now = Instant::now();
        let last = self.ended.get(&rule.id).map(|(begun, swept)| (now - *begun, *swept));
        let plan = schedule::plan(rule, opening, is_pass, last);
        // A rule without an index may have rested before.
        let is_over = || (rule.options.index_method == IndexMethod::None).then_some(Duration::ZERO);
        if let Some(wait) = plan.next.or_else(is_over) {
            shmem::report_due(rule.id, i64::from(clock_timestamp()) + wait.as_micros() as i64);
        }
        let look = plan.look.map(|wait| now + wait.max(SOON));
        self.early = self.early.into_iter().chain(look).min();
        plan.is_time
    }

    /// Gives every queued rule a slice. Rules that need more go to the end of the queue, behind rules that became due
    /// meanwhile.
    fn give_turns(&mut self) {
        let mut looked_up = Instant::now();
        let mut seen_to = Instant::now();
        while let Some(job) = self.next_job() {
            self.give_turn(job);
            if seen_to.elapsed() >= SEE_TO {
                seen_to = Instant::now();
                self.see_to_helpers();
            }
            process::reload_configuration();
            let is_time = looked_up.elapsed() >= LOOK_UP;
            if is_time {
                looked_up = Instant::now();
            }
            if !guc::enabled() || (is_time && !may_stay()) {
                return self.leave();
            }
            if self.is_turn_over() {
                return;
            }
            self.load_due_rules();
        }
    }

    /// Returns the next job that is ready, from the owner whose last turn is longest ago.
    fn next_job(&mut self) -> Option<Job> {
        let now = Instant::now();
        let mut first: Option<(usize, Oid, Option<Instant>)> = None;
        for (place, job) in self.queue.iter().enumerate().filter(|(_, job)| job.not_before <= now) {
            let owner = job.rule().owner;
            if first.is_some_and(|(_, of, _)| of == owner) {
                continue;
            }
            let served = self.served.get(&owner).copied();
            if first.is_none_or(|(_, _, longest)| served < longest) {
                first = Some((place, owner, served));
            }
        }
        first.and_then(|(place, ..)| self.queue.remove(place))
    }

    fn give_turn(&mut self, job: Job) {
        let (id, owner, closes_at) = (job.rule().id, job.rule().owner, job.closes_at);
        let (begun, started) = (job.begun.unwrap_or_else(Instant::now), Instant::now());
        self.served.insert(owner, started);
        self.slow.retain(|_, until| *until > started);
        if self.slow.contains_key(&owner) {
            job.abandon();
            return self.helpers.hand_over(id, owner.to_u32(), begun);
        }
        // Without shared memory there are no helpers.
        match take_turn(job, shmem::is_preloaded()) {
            Turn::Ended(swept) => self.end_sweep(id, begun, swept),
            Turn::NeedsHelper => {
                if started.elapsed() >= SLICE {
                    self.slow.insert(owner, Instant::now() + SLOW_FOR);
                }
                self.helpers.hand_over(id, owner.to_u32(), begun);
            }
            Turn::More(sweep, wait) => {
                // The rule has a backlog and other rules wait: a helper takes over from where the catalog says it is.
                let can_hand_over = !sweep.is_shared() && self.helpers.have_room();
                if wait.is_zero() && !self.queue.is_empty() && can_hand_over {
                    finish(*sweep, &Ok(Step::Outdated));
                    return self.helpers.hand_over(id, owner.to_u32(), begun);
                }
                let not_before = Instant::now() + wait;
                self.queue.push_back(Job { work: Work::Begun(sweep), closes_at, not_before, begun: Some(begun) });
            }
        }
    }

    /// Records the end of a sweep. A rule whose sweep was interrupted does not wait for its interval, unless it failed.
    fn end_sweep(&mut self, id: i64, begun: Instant, swept: Swept) {
        if swept.is_complete {
            self.ended.insert(id, (begun, swept));
        } else {
            self.ended.remove(&id);
            self.look_soon();
        }
    }

    fn see_to_helpers(&mut self) {
        for returned in self.helpers.see_to() {
            self.end_sweep(returned.rule_id, returned.begun.unwrap_or_else(Instant::now), returned.swept);
        }
    }

    /// Whether the worker has kept its process long enough while another database waits for one. If so, it leaves and
    /// queues up behind that database.
    fn is_turn_over(&mut self) -> bool {
        let is_old = self.started.elapsed() >= TURN;
        self.gives_way |= is_old && shmem::somebody_waits() && self.helpers.are_missing() && shmem::make_way();
        self.gives_way
    }

    /// Returns why the worker should leave, if its process is of more use elsewhere. An idle worker leaves a database
    /// without rules after a while, and any database if another one waits for a process.
    fn may_leave(&mut self) -> Option<Leave> {
        if self.gives_way {
            return Some(Leave::Turn { due: self.next_turn() });
        }
        let is_idle = self.queue.is_empty() && self.builders.is_empty() && self.loaded.is_some() && !self.is_woken;
        if !shmem::is_preloaded() || !is_idle {
            return None;
        }
        if let Some(since) = self.without_rules {
            return (since.elapsed() >= LINGER || shmem::somebody_waits()).then_some(Leave::Resting);
        }
        // The next worker finds the rules that wait for a helper again.
        (self.helpers.are_missing() && shmem::make_way()).then(|| Leave::Turn { due: self.next_turn() })
    }

    /// Ends all work at once: helpers may run code that never ends, and builders may be waiting for other transactions.
    fn leave(&mut self) {
        self.helpers.end_all();
        self.builders.end_all();
        self.queue.drain(..).for_each(Job::abandon);
    }

    fn look_soon(&mut self) {
        self.early = self.early.into_iter().chain([Instant::now() + LOOK_UP]).min();
    }
}
