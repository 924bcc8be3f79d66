//! The engine: one rule, one cutoff, one leaf relation at a time, batch by batch.
//!
//! A sweep looks for expired rows without locking them (`scan`), and removes the places it found in batches that look
//! at every row again (`batch`). It can be left after any batch and taken up again.

mod audience;
mod batch;
pub mod build;
mod cutoff;
pub mod lag;
mod leaf;
pub mod manual;
pub mod pace;
mod partition;
pub mod preview;
mod sandbox;
mod scan;
mod statement;

use crate::archive::Archive;
use crate::catalog::{Catalog, Claim, Outcome, Rule, Trigger};
use crate::error::TtlError;
use crate::guc;
use crate::pg::board::{self, Hold, Progress};
use crate::pg::plan::Tid;
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{identity, process, spi};
use batch::{Done, Remover};
use leaf::{Leaf, Leaves};
use pace::Pace;
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
pub use sandbox::is_under_way_in;
use sandbox::{UnderWay, in_sandbox, lock_timeout};
pub use scan::FEW_BLOCKS;
use scan::Scan;
use statement::Statements;
use std::collections::VecDeque;
use std::time::Duration;

/// What a sweep has done so far.
#[derive(Debug, Default)]
pub struct Tally {
    pub rows: i64,
    /// Partitions that were dropped or detached.
    pub partitions: i64,
    pub batches: i64,
    /// Rows that could not be removed, and the last reason.
    pub blocked: i64,
    pub blocked_by: Option<Failure>,
    /// Rows that others had locked.
    pub locked: i64,
    /// What was written to the log for it.
    pub wal_bytes: i64,
    /// How many rows the planner expects, in the leaves that have more than one harvest.
    pub estimate: i64,
}

/// What a step of a sweep came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A batch removed this many rows; there may be more.
    Removed(i64),
    /// Nothing expired is left, but for what is blocked, locked or skipped.
    Finished,
    /// The rule, its table or the hour is not what it was: the sweep ends, and the next one sees the change.
    Outdated,
    /// Another session sweeps this rule.
    Busy,
    /// The rule wants no more in one sweep; the next one goes on.
    Enough,
}

pub struct Sweep {
    pub rule: Rule,
    pub tally: Tally,
    catalog: Catalog,
    scope: Scope,
    trigger: Trigger,
    started_at: TimestampWithTimeZone,
    cutoff: String,
    leaves: Leaves,
    work: Option<Work>,
    pace: Pace,
    /// What to report when everything else is done.
    late: Option<Failure>,
}

/// The leaf at hand.
struct Work {
    leaf: Leaf,
    archive: Option<Archive>,
    scan: Scan,
    statements: Statements,
    /// Prepared with the first batch, in a transaction that has the lock for it.
    remover: Option<Remover>,
    found: VecDeque<Tid>,
}

impl Sweep {
    /// Fixes the cutoff, and with it what this sweep is going to remove. `None` if the rule has changed since it was
    /// loaded.
    pub fn begin(catalog: &Catalog, rule: Rule, trigger: Trigger, scope: Scope) -> Result<Option<Self>, Failure> {
        let catalog = catalog.clone();
        if let Some(lacks) = &rule.lacks {
            return Err(lacks.clone());
        }
        let prepared = scope.attempt(|| {
            rule.archive.map_or(Ok(()), |archive| Archive::check_apart(archive, rule.relid))?;
            catalog.check_meaning(&rule)?;
            in_sandbox(&rule, || {
                let cutoff = cutoff::of(&rule)?;
                let leaves = leaf::find(&rule, &cutoff.literal)?;
                Ok((cutoff.literal, cutoff.present, leaves))
            })
        });
        match prepared {
            Ok((cutoff, started_at, leaves)) => {
                let (tally, pace) = (Tally::default(), Pace::default());
                Ok(Some(Self {
                    rule,
                    tally,
                    catalog,
                    scope,
                    trigger,
                    started_at,
                    cutoff,
                    leaves,
                    work: None,
                    pace,
                    late: None,
                }))
            }
            Err(_) if has_changed(&catalog, &rule, scope)? => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Removes at most one batch, of at most `limit` rows.
    pub fn step(&mut self, limit: usize) -> Result<Step, Failure> {
        let left = self.rule.options.max_rows_per_run.map_or(i64::MAX, |most| most - self.tally.rows);
        if left <= 0 {
            return Ok(Step::Enough);
        }
        self.report(None);
        let (wal_before, rows_before) = (process::wal_bytes(), self.tally.rows);
        let step = self.try_step(limit.min(usize::try_from(left).unwrap_or(usize::MAX)));
        let wal_bytes = process::wal_bytes() - wal_before;
        self.tally.wal_bytes += wal_bytes;
        // What does not wait itself, and may be rolled back, is not for others to wait for.
        if self.scope != Scope::Subtransaction {
            self.pace.spend(&self.rule, self.tally.rows - rows_before, wal_bytes);
        }
        step.or_else(|failure| {
            // What fails because names have changed under it is no fault of the rule.
            let part_is_gone = self.rule.has_children && failure.code == PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE;
            if part_is_gone || has_changed(&self.catalog, &self.rule, self.scope)? {
                return Ok(Step::Outdated);
            }
            Err(failure)
        })
    }

    fn try_step(&mut self, limit: usize) -> Result<Step, Failure> {
        loop {
            let Some(work) = &mut self.work else {
                if let Some(pending) = self.pending() {
                    return self.finalize(pending);
                }
                if let Some(part) = self.leaves.whole.pop_front() {
                    return self.remove_part(part);
                }
                let Some(leaf) = self.leaves.sweepable.pop_front() else {
                    return self.late.take().map_or(Ok(Step::Finished), Err);
                };
                match self.scope.attempt(|| begin_leaf(&self.rule, &self.cutoff, leaf))? {
                    Some(work) if self.awaits_index(&work.scan) => {}
                    Some(work) => self.work = Some(work),
                    None => return Ok(Step::Outdated),
                }
                continue;
            };
            if !work.found.is_empty() {
                return self.remove(limit);
            }
            if work.scan.is_exhausted() {
                self.work = None;
                continue;
            }
            let wanted = harvest_size(&self.rule);
            let found = self.scope.attempt(|| {
                in_sandbox(&self.rule, || {
                    if !work.leaf.is_unchanged_for_reading() {
                        return Ok(None);
                    }
                    work.scan.next(wanted, &work.leaf).map(Some)
                })
            })?;
            match found {
                Some(found) => {
                    self.tally.estimate += found.estimate;
                    work.found.extend(found.tids);
                }
                None => return Ok(Step::Outdated),
            }
        }
    }

    /// How long the next batch should wait before it asks again, if it has to.
    pub fn hold(&self) -> Result<Option<Duration>, Failure> {
        let hold = self.pace.hold(&self.catalog, self.scope)?;
        if let Some((hold, _)) = hold {
            self.report(Some(hold));
        }
        Ok(hold.map(|(_, left)| left))
    }

    fn report(&self, hold: Option<Hold>) {
        board::report(Progress {
            rule_id: self.rule.id,
            relid: self.work.as_ref().map_or(self.rule.relid, |work| work.leaf.relid).to_u32(),
            rows: self.tally.rows,
            batches: self.tally.batches,
            estimate: self.tally.estimate,
            started_at: self.started_at.into(),
            hold,
            ..Progress::default()
        });
    }

    /// Whether a worker leaves a leaf until the index that it is making is there.
    fn awaits_index(&self, scan: &Scan) -> bool {
        self.trigger == Trigger::Worker && self.rule.pending_index.is_some() && scan.is_long()
    }

    fn remove(&mut self, limit: usize) -> Result<Step, Failure> {
        let Some(work) = &mut self.work else { return Ok(Step::Finished) };
        let size = batch_size(&self.rule).min(Pace::batch_limit(&self.rule)).min(limit).min(work.found.len());
        let tids: Vec<Tid> = work.found.drain(..size).collect();
        let (rule, catalog, leaf, statements) = (&self.rule, &self.catalog, &work.leaf, &work.statements);
        let archive = work.archive.as_ref();
        let mut first = self.tally.batches == 0;
        let mut outdated = None;
        let mut done = Done::default();
        let result = batch::remove(self.scope, &tids, &mut done, |change| {
            // The tables' locks first and then the rule's, as DDL and registration take them.
            let is_unchanged = || leaf.is_unchanged_for_changing() && archive.is_none_or(Archive::is_unchanged);
            outdated = if in_sandbox(rule, || Ok(is_unchanged()))? {
                match catalog.claim(rule)? {
                    Claim::Held => None,
                    Claim::Busy => Some(Step::Busy),
                    Claim::Changed => Some(Step::Outdated),
                }
            } else {
                Some(Step::Outdated)
            };
            if outdated.is_some() {
                return Ok(None);
            }
            in_sandbox(rule, || leaf.check_cascades(rule))?;
            // Deferred triggers would otherwise fire at commit, with the rights of whoever commits. Those that the caller
            // has pending fire now, as the caller.
            spi::execute("SET CONSTRAINTS ALL IMMEDIATE", &[])?;
            let done = in_sandbox(rule, || {
                let remover = work.remover.get_or_insert_with(|| Remover::new(statements, leaf.plain_heap(rule)));
                // The table's own lock is held: what is waited for now is behind a cascade or a trigger, and blocks one
                // row, not the sweep.
                let _under_way = UnderWay::begin(leaf.relid);
                Ok(identity::with_settings(&[(c"lock_timeout", c"100ms")], || change(remover)))
            })?;
            audience::tell(rule, leaf, &done)?;
            catalog.check_meaning(rule)?;
            if done.removed > 0 {
                catalog.record_batch(rule.id, done.removed, first)?;
                first = false;
            }
            Ok(Some(done))
        });
        self.tally.rows += done.removed;
        self.tally.batches += 1;
        self.tally.blocked += done.blocked;
        self.tally.locked += done.locked;
        self.tally.blocked_by = done.blocked_by.or(self.tally.blocked_by.take());
        result?;
        Ok(outdated.unwrap_or(Step::Removed(done.removed)))
    }

    /// Writes down how the sweep ended, if there is anything to write.
    pub fn finish(self, end: &Result<Step, Failure>) -> Result<(), Failure> {
        board::report_end(self.rule.id);
        let complete = *end == Ok(Step::Finished);
        let skipped: Vec<_> =
            self.leaves.skipped.iter().map(|(leaf, reason)| format!("{} {reason}", leaf.name)).collect();
        let skipped = (!skipped.is_empty()).then(|| skipped.join("; "));
        // What was in the way the last time and still is, is no news: an idle sweep writes nothing.
        let nothing_new = self.tally.blocked == self.rule.blocked_rows
            && self.tally.locked == self.rule.locked_rows
            && skipped == self.rule.skipped_parts
            && self.tally.blocked_by.is_some() == self.rule.last_error.is_some();
        if end.is_ok() && self.tally.rows == 0 && self.tally.partitions == 0 && (nothing_new || !complete) {
            return Ok(());
        }
        self.scope.attempt(|| {
            record(
                &self.catalog,
                &Outcome {
                    rule_id: self.rule.id,
                    version: self.rule.version,
                    trigger: self.trigger,
                    started_at: self.started_at,
                    rows: self.tally.rows,
                    partitions: self.tally.partitions,
                    batches: self.tally.batches,
                    blocked_rows: self.tally.blocked,
                    locked_rows: self.tally.locked,
                    wal_bytes: self.tally.wal_bytes,
                    skipped,
                    blocked_by: self.tally.blocked_by.as_ref(),
                    failure: end.as_ref().err(),
                    complete,
                    through: complete || *end == Ok(Step::Enough),
                },
            )
        })
    }
}

/// Whether the rule is not the one that was loaded any more.
fn has_changed(catalog: &Catalog, rule: &Rule, scope: Scope) -> Result<bool, Failure> {
    scope.attempt(|| catalog.has_changed(rule))
}

/// Writes down that a rule could not even be loaded.
pub fn record_failure(
    catalog: &Catalog,
    (rule_id, version): (i64, i64),
    trigger: Trigger,
    scope: Scope,
    failure: &Failure,
) -> Result<(), Failure> {
    scope.attempt(|| {
        record(
            catalog,
            &Outcome {
                rule_id,
                version,
                trigger,
                started_at: clock_timestamp(),
                rows: 0,
                partitions: 0,
                batches: 0,
                blocked_rows: 0,
                locked_rows: 0,
                wal_bytes: 0,
                skipped: None,
                blocked_by: None,
                failure: Some(failure),
                complete: false,
                through: false,
            },
        )
    })
}

/// Waits for the rule's row no longer than for a table: somebody may hold it in a transaction that is left open.
fn record(catalog: &Catalog, outcome: &Outcome<'_>) -> Result<(), TtlError> {
    identity::with_settings(&[(c"lock_timeout", &lock_timeout())], || catalog.record_outcome(outcome))
}

/// Looks at a leaf before anything is done to it. `None` if it has changed.
fn begin_leaf(rule: &Rule, cutoff: &str, leaf: Leaf) -> Result<Option<Work>, TtlError> {
    in_sandbox(rule, || {
        let Some(leaf) = leaf.observe(rule)? else { return Ok(None) };
        let (archive, audience) = audience::open(rule, &leaf)?;
        let statements = Statements::new(rule, cutoff, &leaf.name).with_audience(audience);
        let scan = Scan::begin(rule, &leaf, statements.clone())?;
        Ok(Some(Work { leaf, archive, scan, statements, remover: None, found: VecDeque::new() }))
    })
}

fn batch_size(rule: &Rule) -> usize {
    rule.options.batch_size.unwrap_or_else(guc::batch_size).unsigned_abs() as usize
}

/// How many places of rows are looked up at once: several batches, so that finding them costs little beside removing
/// them, but never more than fits easily into memory.
fn harvest_size(rule: &Rule) -> usize {
    (10 * batch_size(rule)).clamp(10_000, 100_000)
}
