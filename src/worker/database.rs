//! The worker of a database: it stays as long as the extension is there, and gives every due rule its turn.

use super::{LIBRARY, TYPE, helper};
use crate::catalog::{Broken, Catalog, Rule, Trigger};
use crate::guc;
use crate::pg::board::{self, Role};
use crate::pg::process;
use crate::pg::transaction::{Failure, Scope};
use crate::sweep::{Step, Sweep, record_failure};
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, BackgroundWorkerStatus, DynamicBackgroundWorker};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How long a rule is swept before the next one has its turn.
const SLICE: Duration = Duration::from_secs(1);

/// How often an idle worker looks whether it is in somebody's way.
const LOOK_UP: Duration = Duration::from_secs(1);

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
    let mut worker = Worker { queue: VecDeque::new(), helpers: HashMap::new(), loaded: None };
    loop {
        process::reload_configuration();
        if !may_stay() {
            return;
        }
        if guc::enabled() {
            worker.load_due_rules();
            worker.give_turns();
        } else {
            worker.queue.clear();
        }
        process::report_activity(None);
        process::idle(worker.time_to_next_pass().min(LOOK_UP));
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

/// The catalog, and the rules in it that workers may sweep.
pub fn load_rules() -> Result<(Catalog, Vec<Result<Rule, Broken>>), Failure> {
    Scope::Transaction.attempt(|| {
        let catalog = Catalog::open()?;
        let rules = catalog.rules_for_workers()?;
        Ok((catalog, rules))
    })
}

struct Worker {
    /// Rules whose turn is yet to come, in order.
    queue: VecDeque<Job>,
    /// Rules that a helper has taken over.
    helpers: HashMap<i64, DynamicBackgroundWorker>,
    /// When the last pass began.
    loaded: Option<Instant>,
}

enum Job {
    Due(Catalog, Box<Rule>),
    Begun(Box<Sweep>),
}

impl Job {
    fn rule_id(&self) -> i64 {
        match self {
            Self::Due(_, rule) => rule.id,
            Self::Begun(sweep) => sweep.rule.id,
        }
    }
}

impl Worker {
    fn time_to_next_pass(&self) -> Duration {
        self.loaded.map_or(Duration::ZERO, |loaded| guc::naptime().saturating_sub(loaded.elapsed()))
    }

    /// Begins a pass if it is time, or if somebody changed a rule: queues the due rules that are not under way.
    fn load_due_rules(&mut self) {
        if !board::take_wakeup() && !self.time_to_next_pass().is_zero() {
            return;
        }
        self.loaded = Some(Instant::now());
        board::report_next_pass(i64::from(clock_timestamp()) + guc::naptime().as_micros() as i64);
        self.helpers.retain(|_, helper| !matches!(helper.pid(), Err(BackgroundWorkerStatus::Stopped)));
        let (catalog, rules) = match load_rules() {
            Ok(loaded) => loaded,
            Err(failure) => {
                log!("pg_ttl_index could not read its rules: {failure}");
                return;
            }
        };
        for rule in rules {
            let id = rule.as_ref().map_or_else(|broken| broken.rule_id, |rule| rule.id);
            if self.helpers.contains_key(&id) || self.queue.iter().any(|job| job.rule_id() == id) {
                continue;
            }
            match rule {
                Ok(rule) if rule.is_due => self.queue.push_back(Job::Due(catalog.clone(), Box::new(rule))),
                Ok(_) => {}
                Err(broken) if broken.is_due => {
                    report_broken(&catalog, (id, broken.version), &broken.failure, broken.is_known)
                }
                Err(_) => {}
            }
        }
    }

    /// Gives every queued rule a slice; those that need more go to the end of the queue, behind rules that have become
    /// due meanwhile.
    fn give_turns(&mut self) {
        let mut looked_up = Instant::now();
        while let Some(job) = self.queue.pop_front() {
            if let Some(unfinished) = take_turn(job) {
                let id = unfinished.rule.id;
                // A rule with a backlog, and others waiting: a helper takes it over from where the catalog says it is.
                let helper = if self.queue.is_empty() { None } else { self.start_helper(id) };
                match helper {
                    Some(helper) => {
                        finish(*unfinished, &Ok(Step::Outdated));
                        self.helpers.insert(id, helper);
                    }
                    None => self.queue.push_back(Job::Begun(unfinished)),
                }
            }
            process::reload_configuration();
            let is_time = looked_up.elapsed() >= LOOK_UP;
            if is_time {
                looked_up = Instant::now();
            }
            if !guc::enabled() || (is_time && !may_stay()) {
                for job in self.queue.drain(..) {
                    if let Job::Begun(sweep) = job {
                        finish(*sweep, &Ok(Step::Outdated));
                    }
                }
                return;
            }
            self.load_due_rules();
        }
    }

    fn start_helper(&mut self, rule_id: i64) -> Option<DynamicBackgroundWorker> {
        self.helpers.retain(|_, helper| !matches!(helper.pid(), Err(BackgroundWorkerStatus::Stopped)));
        // Without shared memory nobody could see what a helper does.
        (board::is_preloaded() && self.helpers.len() + 1 < guc::max_workers()).then(|| helper::start(rule_id)).flatten()
    }
}

/// Sweeps for a slice; returns the sweep if it needs another.
fn take_turn(job: Job) -> Option<Box<Sweep>> {
    let mut sweep = match job {
        Job::Begun(sweep) => sweep,
        Job::Due(catalog, rule) => {
            let (id, known_error) = ((rule.id, rule.version), rule.last_error.clone());
            match Sweep::begin(&catalog, *rule, Trigger::Worker, Scope::Transaction) {
                Ok(Some(sweep)) => Box::new(sweep),
                Ok(None) => return None,
                Err(failure) => {
                    report_broken(&catalog, id, &failure, known_error.as_deref() == Some(&failure.to_string()));
                    return None;
                }
            }
        }
    };
    process::report_activity(Some(&format!("sweeping {}", sweep.rule)));
    let started = Instant::now();
    while started.elapsed() < SLICE {
        match sweep.step(usize::MAX) {
            Ok(Step::Removed(_)) => {
                process::reload_configuration();
                if !guc::enabled() {
                    return Some(sweep);
                }
                if !guc::batch_delay().is_zero() {
                    process::idle(guc::batch_delay());
                }
            }
            end => {
                finish(*sweep, &end);
                return None;
            }
        }
    }
    Some(sweep)
}

/// Ends a sweep, and logs an error that the catalog did not have before.
pub fn finish(sweep: Sweep, end: &Result<Step, Failure>) {
    let (name, known_error) = (sweep.rule.to_string(), sweep.rule.last_error.clone());
    if let Err(failure) = end
        && known_error.as_deref() != Some(&failure.to_string())
    {
        log!("TTL rule on {name} failed: {failure}");
    }
    if let Err(failure) = sweep.finish(end) {
        log!("TTL rule on {name}: the outcome of a sweep could not be recorded: {failure}");
    }
}

/// Records the error of a rule that could not be swept at all, and logs it once.
fn report_broken(catalog: &Catalog, rule: (i64, i64), failure: &Failure, is_known: bool) {
    if !is_known {
        log!("TTL rule {} failed: {failure}", rule.0);
    }
    if let Err(failure) = record_failure(catalog, rule, Trigger::Worker, Scope::Transaction, failure) {
        log!("TTL rule {}: its failure could not be recorded: {failure}", rule.0);
    }
}
