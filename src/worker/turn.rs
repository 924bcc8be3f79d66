//! A rule's turn: how far its sweep goes before the next rule has its turn.

use crate::catalog::{Catalog, Initiator, Rule};
use crate::guc;
use crate::pg::process;
use crate::pg::shmem::Swept;
use crate::pg::transaction::{Failure, Hurry, Scope};
use crate::sweep::{Advance, Step, Sweep, record_failure};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::prelude::*;
use std::time::{Duration, Instant};

/// How long a rule is swept before the next rule has its turn.
pub const SLICE: Duration = Duration::from_secs(1);

/// How long a rule is swept in its turn before other processes may take shares of it.
const SHARE_AFTER: Duration = Duration::from_millis(300);

/// A rule in the queue.
pub struct Job {
    pub work: Work,
    /// When the rule's window closes.
    pub closes_at: Option<TimestampWithTimeZone>,
    pub not_before: Instant,
    /// When the rule's sweep began.
    pub begun: Option<Instant>,
}

/// The result of a turn.
pub enum Turn {
    /// The sweep needs another turn after this wait.
    More(Box<Sweep>, Duration),
    Ended(Swept),
    /// The next step may run user code or take long, so it needs a helper.
    NeedsHelper,
}

pub enum Work {
    Due(Catalog, Box<Rule>),
    Begun(Box<Sweep>),
}

impl Job {
    pub fn new(catalog: Catalog, rule: Rule, closes_at: Option<TimestampWithTimeZone>) -> Self {
        Self { work: Work::Due(catalog, Box::new(rule)), closes_at, not_before: Instant::now(), begun: None }
    }

    pub fn rule(&self) -> &Rule {
        match &self.work {
            Work::Due(_, rule) => rule,
            Work::Begun(sweep) => &sweep.rule,
        }
    }

    /// Ends the sweep, if it has begun.
    pub fn abandon(self) {
        if let Work::Begun(sweep) = self.work {
            finish(*sweep, &Ok(Step::Outdated));
        }
    }
}

/// Sweeps for one slice. An aloof process neither runs user code nor waits for other sessions.
pub fn take_turn(job: Job, is_aloof: bool) -> Turn {
    let _hurry = is_aloof.then(Hurry::begin);
    let interrupted = Turn::Ended(Swept::default());
    let mut sweep = match job.work {
        Work::Begun(sweep) => sweep,
        Work::Due(catalog, rule) => {
            let (id, known_error) = ((rule.id, rule.version), rule.state.last_error.clone());
            match Sweep::begin(&catalog, *rule, Initiator::Worker, Scope::Transaction, is_aloof) {
                Ok(Some(sweep)) => Box::new(sweep),
                Ok(None) => return interrupted,
                Err(failure) if failure.needs_time => return Turn::NeedsHelper,
                Err(failure) => {
                    report_broken(&catalog, id, &failure, known_error.as_deref() == Some(&failure.to_string()));
                    return interrupted;
                }
            }
        }
    };
    process::report_activity(Some(&format!("sweeping {}", sweep.rule)));
    let (started, mut is_shared) = (Instant::now(), false);
    while started.elapsed() < SLICE {
        match sweep.advance(i64::MAX, job.closes_at) {
            Ok(Advance::Went) => {
                process::reload_configuration();
                if !guc::enabled() {
                    break;
                }
                if !guc::batch_delay().is_zero() {
                    process::idle(guc::batch_delay());
                }
                if !is_shared && started.elapsed() >= SHARE_AFTER {
                    is_shared = true;
                    sweep.share();
                }
            }
            Ok(Advance::Wait(wait)) => return Turn::More(sweep, wait),
            Ok(Advance::Ended(end)) => {
                let is_complete = matches!(end, Step::Finished | Step::Enough);
                let swept = Swept { version: sweep.rule.version, is_complete, read_heaps: sweep.read_heaps() };
                finish(*sweep, &Ok(end));
                if end == Step::NeedsHelper {
                    return Turn::NeedsHelper;
                }
                return Turn::Ended(swept);
            }
            Err(failure) => {
                finish(*sweep, &Err(failure));
                return interrupted;
            }
        }
    }
    Turn::More(sweep, Duration::ZERO)
}

/// Ends a sweep, and logs its error unless the catalog already has it.
pub fn finish(sweep: Sweep, end: &Result<Step, Failure>) {
    let (name, known_error) = (sweep.rule.to_string(), sweep.rule.state.last_error.clone());
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
pub fn report_broken(catalog: &Catalog, rule: (i64, i64), failure: &Failure, is_known: bool) {
    if !is_known {
        log!("TTL rule {} failed: {failure}", rule.0);
    }
    if let Err(failure) = record_failure(catalog, rule, Initiator::Worker, Scope::Transaction, failure) {
        log!("TTL rule {}: its failure could not be recorded: {failure}", rule.0);
    }
}
