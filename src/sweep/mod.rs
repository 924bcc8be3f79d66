//! The engine: one rule, one cutoff, one leaf relation at a time, batch by batch.
//!
//! A sweep looks for expired rows without locking them (`scan`), and removes the places it found in batches that look
//! at every row again (`batch`). It can be left after any batch and taken up again.

mod batch;
mod cutoff;
pub mod lag;
mod leaf;
pub mod manual;
pub mod preview;
mod scan;
mod statement;

use crate::catalog::{Catalog, Claim, Outcome, Rule, Trigger};
use crate::error::TtlError;
use crate::guc;
use crate::pg::board::{self, Progress};
use crate::pg::plan::Tid;
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{identity, process, spi};
use batch::{Done, Remover};
use leaf::{Leaf, Leaves};
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::Oid;
use scan::Scan;
use statement::Statements;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::CString;

/// What a sweep has done so far.
#[derive(Debug, Default)]
pub struct Tally {
    pub rows: i64,
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
    /// The rule, or its table, is not what it was: the sweep ends, and the next one sees the change.
    Outdated,
    /// Another session sweeps this rule.
    Busy,
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
}

/// The leaf at hand.
struct Work {
    leaf: Leaf,
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
        let prepared = scope.attempt(|| {
            in_sandbox(&rule, || {
                let cutoff = cutoff::of(&rule)?;
                let leaves = leaf::find(&rule, &cutoff.literal)?;
                Ok((cutoff.literal, cutoff.present, leaves))
            })
        });
        match prepared {
            Ok((cutoff, started_at, leaves)) => {
                let tally = Tally::default();
                Ok(Some(Self { rule, tally, catalog, scope, trigger, started_at, cutoff, leaves, work: None }))
            }
            Err(_) if has_changed(&catalog, &rule, scope)? => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Removes at most one batch, of at most `limit` rows.
    pub fn step(&mut self, limit: usize) -> Result<Step, Failure> {
        self.report();
        let wal_before = process::wal_bytes();
        let step = self.try_step(limit);
        self.tally.wal_bytes += process::wal_bytes() - wal_before;
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
                let Some(leaf) = self.leaves.sweepable.pop_front() else { return Ok(Step::Finished) };
                match self.scope.attempt(|| begin_leaf(&self.rule, &self.cutoff, leaf))? {
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

    fn report(&self) {
        board::report(Some(Progress {
            rule_id: self.rule.id,
            relid: self.work.as_ref().map_or(self.rule.relid, |work| work.leaf.relid).to_u32(),
            rows: self.tally.rows,
            batches: self.tally.batches,
            estimate: self.tally.estimate,
            started_at: self.started_at.into(),
        }));
    }

    fn remove(&mut self, limit: usize) -> Result<Step, Failure> {
        let Some(work) = &mut self.work else { return Ok(Step::Finished) };
        let size = batch_size(&self.rule).min(limit).min(work.found.len());
        let tids: Vec<Tid> = work.found.drain(..size).collect();
        let (rule, catalog, leaf, statements) = (&self.rule, &self.catalog, &work.leaf, &work.statements);
        let mut first = self.tally.batches == 0;
        let mut outdated = None;
        let mut done = Done::default();
        let result = batch::remove(self.scope, &tids, &mut done, |change| {
            // The table's lock first and then the rule's, as DDL and registration take them.
            outdated = if in_sandbox(rule, || Ok(leaf.is_unchanged_for_changing()))? {
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
        board::report(None);
        let complete = *end == Ok(Step::Finished);
        let skipped = (!self.leaves.skipped.is_empty()).then(|| self.leaves.skipped.join("; "));
        // What was in the way the last time and still is, is no news: an idle sweep writes nothing.
        let nothing_new = self.tally.blocked == self.rule.blocked_rows
            && self.tally.locked == self.rule.locked_rows
            && skipped == self.rule.skipped_parts
            && self.tally.blocked_by.is_some() == self.rule.last_error.is_some();
        if end.is_ok() && self.tally.rows == 0 && (nothing_new || !complete) {
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
                    batches: self.tally.batches,
                    blocked_rows: self.tally.blocked,
                    locked_rows: self.tally.locked,
                    wal_bytes: self.tally.wal_bytes,
                    skipped,
                    blocked_by: self.tally.blocked_by.as_ref(),
                    failure: end.as_ref().err(),
                    complete,
                },
            )
        })
    }
}

thread_local! {
    static UNDER_WAY: Cell<Option<Oid>> = const { Cell::new(None) };
}

/// Whether what happens to the rows of a relation now is a sweep's doing.
pub fn is_under_way_in(relid: Oid) -> bool {
    UNDER_WAY.get() == Some(relid)
}

/// True to its name while it is there, also when it goes because of an error. Triggers may begin another.
struct UnderWay {
    outer: Option<Oid>,
}

impl UnderWay {
    fn begin(relid: Oid) -> Self {
        Self { outer: UNDER_WAY.replace(Some(relid)) }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.set(self.outer);
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
                batches: 0,
                blocked_rows: 0,
                locked_rows: 0,
                wal_bytes: 0,
                skipped: None,
                blocked_by: None,
                failure: Some(failure),
                complete: false,
            },
        )
    })
}

/// Waits for the rule's row no longer than for a table: somebody may hold it in a transaction that is left open.
fn record(catalog: &Catalog, outcome: &Outcome<'_>) -> Result<(), TtlError> {
    identity::with_settings(&[(c"lock_timeout", &lock_timeout())], || catalog.record_outcome(outcome))
}

/// As PostgreSQL's setting of the name takes it.
fn lock_timeout() -> CString {
    CString::new(guc::lock_timeout().as_millis().to_string()).unwrap_or_default()
}

/// Looks at a leaf before anything is done to it. `None` if it has changed.
fn begin_leaf(rule: &Rule, cutoff: &str, leaf: Leaf) -> Result<Option<Work>, TtlError> {
    in_sandbox(rule, || {
        let Some(leaf) = leaf.observe(rule)? else { return Ok(None) };
        let statements = Statements::new(rule, cutoff, &leaf.name);
        let scan = Scan::begin(rule, &leaf, statements.clone())?;
        Ok(Some(Work { leaf, scan, statements, remover: None, found: VecDeque::new() }))
    })
}

/// Runs `work` as the table's owner, under settings that no database or role can have changed.
fn in_sandbox<T>(rule: &Rule, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, TtlError> {
    let time_zone = CString::new(rule.options.time_zone.as_str()).unwrap_or_default();
    let lock_timeout = lock_timeout();
    let settings = [
        (c"TimeZone", time_zone.as_c_str()),
        (c"DateStyle", c"ISO, YMD"),
        (c"IntervalStyle", c"postgres"),
        (c"lock_timeout", lock_timeout.as_c_str()),
        (c"session_replication_role", c"origin"),
        (c"row_security", c"on"),
        (c"enable_indexscan", c"on"),
        (c"enable_tidscan", c"on"),
        (c"max_parallel_workers_per_gather", c"0"),
        (c"jit", c"off"),
    ];
    identity::sandboxed_as(rule.owner, || identity::with_settings(&settings, work))
}

fn batch_size(rule: &Rule) -> usize {
    rule.options.batch_size.unwrap_or_else(guc::batch_size).unsigned_abs() as usize
}

/// How many places of rows are looked up at once: several batches, so that finding them costs little beside removing
/// them, but never more than fits easily into memory.
fn harvest_size(rule: &Rule) -> usize {
    (10 * batch_size(rule)).clamp(10_000, 100_000)
}
