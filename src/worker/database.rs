//! The worker of a database: it stays as long as the extension is there, and gives every due rule its turn.

use super::schedule::{self, Opening};
use super::turn::{Job, Turn, Work, finish, report_broken, take_turn};
use super::{LIBRARY, TYPE, builder, helper};
use crate::catalog::{Broken, Catalog, Rule};
use crate::guc;
use crate::pg::board::{self, Role};
use crate::pg::process;
use crate::pg::transaction::{Failure, Scope, subtransaction};
use crate::rule::Ttl;
use crate::sweep::{Step, pace};
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, BackgroundWorkerStatus, DynamicBackgroundWorker};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How often an idle worker looks whether it is in somebody's way.
pub const LOOK_UP: Duration = Duration::from_secs(1);

/// Starts the worker of a database.
pub fn start(database: Oid) -> Option<DynamicBackgroundWorker> {
    let started = BackgroundWorkerBuilder::new(TYPE)
        .set_type(TYPE)
        .set_library(LIBRARY)
        .set_function("pg_ttl_index_worker_main")
        .set_argument(database.into_datum())
        .set_notify_pid(process::pid())
        .enable_spi_access()
        .set_restart_time(None)
        .load_dynamic();
    started.inspect_err(|_| log!("pg_ttl_index found no free worker slot, see max_worker_processes")).ok()
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pg_ttl_index_worker_main(argument: pg_sys::Datum) {
    process::attach_signal_handlers();
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(Oid::from(argument.value() as u32)), None);
    process::pin_worker_settings();
    if !may_stay() || board::take_slot(Role::Database).is_none() {
        return;
    }
    process::report_activity(None);
    let mut worker = Worker::default();
    loop {
        process::reload_configuration();
        if !may_stay() {
            worker.leave();
            return;
        }
        if guc::enabled() {
            worker.load_due_rules();
            worker.give_turns();
        } else {
            worker.leave();
        }
        process::report_activity(None);
        pace::watch_log();
        process::idle(worker.time_to_next_turn().min(LOOK_UP));
    }
}

/// Whether this process has any business in this database: the extension is there, sweeping was not switched off, and
/// nobody wants the database to himself.
pub fn may_stay() -> bool {
    Scope::Transaction
        .attempt(|| {
            Ok(process::has_extension() && !process::is_database_wanted() && Catalog::open()?.is_sweeping_on()?)
        })
        .unwrap_or(false)
}

/// The catalog, and the rules in it that workers may sweep, each with the state of its window.
pub fn load_rules() -> Result<(Catalog, Vec<Loaded>), Failure> {
    Scope::Transaction.attempt(|| {
        let catalog = Catalog::open()?;
        let mut loaded = Vec::new();
        for rule in catalog.rules_for_workers()? {
            loaded.push(match rule {
                Ok(rule) => with_opening(rule),
                Err(broken) => (Err(broken), None),
            });
        }
        Ok((catalog, loaded))
    })
}

type Loaded = (Result<Rule, Broken>, Option<Opening>);

/// A rule with the state of its window. A time zone that is not known any more is the rule's own problem.
fn with_opening(rule: Rule) -> Loaded {
    if rule.options.run_window.is_none() {
        return (Ok(rule), None);
    }
    match subtransaction(|| schedule::opening_of(&rule)) {
        Ok(opening) => (Ok(rule), opening),
        Err(failure) => {
            let is_known = rule.last_error.as_deref() == Some(&failure.to_string());
            let Rule { id: rule_id, version, is_due, .. } = rule;
            (Err(Broken { rule_id, version, failure, is_due, is_known, is_held: false }), None)
        }
    }
}

#[derive(Default)]
struct Worker {
    /// Rules whose turn is yet to come, in order.
    queue: VecDeque<Job>,
    /// Rules that a helper has taken over.
    helpers: HashMap<i64, DynamicBackgroundWorker>,
    /// Rules whose index is being made.
    builders: HashMap<i64, DynamicBackgroundWorker>,
    /// When the last pass over all rules began.
    loaded: Option<Instant>,
    /// When a rule with times of its own wants to be looked at before the next pass.
    early: Option<Instant>,
    /// When the sweeps of rules that have an interval of their own began.
    begun: HashMap<i64, Instant>,
}

impl Worker {
    fn time_to_next_turn(&self) -> Duration {
        let pass = self.loaded.map_or(Duration::ZERO, |loaded| guc::naptime().saturating_sub(loaded.elapsed()));
        let others = self.queue.iter().map(|job| job.not_before).chain(self.early);
        others.map(|at| at.saturating_duration_since(Instant::now())).fold(pass, Duration::min)
    }

    /// Begins a pass if it is time, or if somebody changed a rule: queues the due rules that are not under way. Between
    /// two passes, only rules with times of their own have theirs.
    fn load_due_rules(&mut self) {
        let now = Instant::now();
        self.see_builders_off();
        let is_pass = board::take_wakeup() || self.loaded.is_none_or(|loaded| now - loaded >= guc::naptime());
        if !is_pass && self.early.is_none_or(|early| now < early) {
            return;
        }
        if is_pass {
            self.loaded = Some(now);
        }
        self.early = None;
        self.report_next_turn();
        self.helpers.retain(|_, helper| !has_ended(helper));
        let (catalog, rules) = match load_rules() {
            Ok(loaded) => loaded,
            Err(failure) => {
                log!("pg_ttl_index could not read its rules: {failure}");
                return;
            }
        };
        for (rule, opening) in rules {
            let id = rule.as_ref().map_or_else(|broken| broken.rule_id, |rule| rule.id);
            if self.helpers.contains_key(&id) || self.queue.iter().any(|job| job.rule_id() == id) {
                continue;
            }
            match rule {
                Ok(rule) => {
                    if rule.pending_index.is_some() && rule.may_build {
                        self.start_builder(id);
                    }
                    if self.is_time_for(&rule, opening, is_pass) {
                        let closes_at = opening.map(|opening| opening.until);
                        let work = Work::Due(catalog.clone(), Box::new(rule));
                        self.queue.push_back(Job { work, closes_at, not_before: now, begun: None });
                    }
                }
                Err(broken) if broken.is_due => {
                    report_broken(&catalog, (id, broken.version), &broken.failure, broken.is_known)
                }
                Err(_) => {}
            }
        }
        self.report_next_turn();
    }

    fn report_next_turn(&self) {
        board::report_next_pass(i64::from(clock_timestamp()) + self.time_to_next_turn().as_micros() as i64);
    }

    /// Whether a rule is to be swept now. If it has times of its own, the next of them is taken down.
    fn is_time_for(&mut self, rule: &Rule, opening: Option<Opening>, is_pass: bool) -> bool {
        let now = Instant::now();
        // Sweeps that find nothing leave no trace in the catalog.
        let rested = self.begun.get(&rule.id).map_or(Duration::MAX, |begun| now - *begun);
        let mut next = None;
        let mut is_time = rule.is_due && (is_pass || rested >= guc::naptime());
        if let Some(every) = rule.options.run_every.map(Ttl::estimate) {
            is_time = rule.is_due && rested >= every;
            next = Some(now + if is_time { every } else { rule.rests_for.max(every.saturating_sub(rested)) });
        }
        if let Some(closed) = opening.filter(|opening| !opening.is_open) {
            is_time = false;
            let left = i64::from(closed.until) - i64::from(clock_timestamp());
            next = Some(now + Duration::from_micros(u64::try_from(left).unwrap_or(0)));
        }
        if let Some(next) = next {
            board::report_due(rule.id, i64::from(clock_timestamp()) + (next - now).as_micros() as i64);
        }
        let early = self.early.into_iter().chain(next.map(|next| next.max(now + Duration::from_millis(100))));
        self.early = early.min();
        is_time
    }

    /// Gives every queued rule a slice; those that need more go to the end of the queue, behind rules that have become
    /// due meanwhile.
    fn give_turns(&mut self) {
        let mut looked_up = Instant::now();
        while let Some(place) = self.queue.iter().position(|job| job.not_before <= Instant::now()) {
            let Some(job) = self.queue.remove(place) else { return };
            let (id, closes_at, begun) = (job.rule_id(), job.closes_at, job.begun.unwrap_or_else(Instant::now));
            let turn = take_turn(job);
            match turn {
                Turn::Ended { is_through: true } => {
                    self.begun.insert(id, begun);
                }
                // A rule whose sweep was interrupted does not rest, unless it failed.
                Turn::Ended { is_through: false } => {
                    self.begun.remove(&id);
                    self.look_soon();
                }
                Turn::More(..) => {}
            }
            if let Turn::More(sweep, wait) = turn {
                // A rule with a backlog, and others waiting: a helper takes it over from where the catalog says it is.
                let may_help = wait.is_zero() && !self.queue.is_empty();
                match may_help.then(|| self.start_helper(id)).flatten() {
                    Some(helper) => {
                        finish(*sweep, &Ok(Step::Outdated));
                        self.helpers.insert(id, helper);
                    }
                    None => {
                        let not_before = Instant::now() + wait;
                        self.queue.push_back(Job {
                            work: Work::Begun(sweep),
                            closes_at,
                            not_before,
                            begun: Some(begun),
                        });
                    }
                }
            }
            process::reload_configuration();
            let is_time = looked_up.elapsed() >= LOOK_UP;
            if is_time {
                looked_up = Instant::now();
            }
            if !guc::enabled() || (is_time && !may_stay()) {
                return self.leave();
            }
            self.load_due_rules();
        }
    }

    /// Ends what is under way. Helpers see for themselves that they are not wanted; a builder may be waiting for others.
    fn leave(&mut self) {
        for (_, builder) in self.builders.drain() {
            builder.terminate();
        }
        for job in self.queue.drain(..) {
            if let Work::Begun(sweep) = job.work {
                finish(*sweep, &Ok(Step::Outdated));
            }
        }
    }

    /// Some at a time, beside the workers that sweep: they spend most of their time waiting.
    fn start_builder(&mut self, rule_id: i64) {
        if self.builders.len() < guc::max_workers() && !self.builders.contains_key(&rule_id) {
            self.builders.extend(builder::start(rule_id).map(|builder| (rule_id, builder)));
        }
    }

    /// One that has ended may have been stopped by somebody, and still be wanted: its rule is looked at again soon.
    fn see_builders_off(&mut self) {
        let before = self.builders.len();
        self.builders.retain(|_, builder| !has_ended(builder));
        if self.builders.len() < before {
            self.look_soon();
        }
    }

    fn look_soon(&mut self) {
        self.early = self.early.into_iter().chain([Instant::now() + LOOK_UP]).min();
    }

    fn start_helper(&mut self, rule_id: i64) -> Option<DynamicBackgroundWorker> {
        self.helpers.retain(|_, helper| !has_ended(helper));
        // Without shared memory nobody could see what a helper does.
        (board::is_preloaded() && self.helpers.len() + 1 < guc::max_workers()).then(|| helper::start(rule_id)).flatten()
    }
}

fn has_ended(worker: &DynamicBackgroundWorker) -> bool {
    matches!(worker.pid(), Err(BackgroundWorkerStatus::Stopped))
}
