//! The engine: one rule, one cutoff, one leaf relation at a time, batch by batch.
//!
//! A sweep searches for expired rows without locking them (`find`), and removes the rows it found in batches that
//! recheck every row (`remove`). It can stop after any batch and continue later.

mod brake;
mod drive;
mod find;
mod finish;
pub mod inspect;
pub mod manual;
mod partition;
mod remove;
mod share;
mod size;
mod statement;
pub mod throttle;

use crate::catalog::{Blocked, Catalog, Initiator, Rule};
use crate::delivery::{self, Archive};
use crate::error::TtlError;
use crate::guc;
use crate::pg::plan::Tid;
use crate::pg::shmem::{self, Hold, Path, Progress, Share};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{clock, origin, process};
use crate::rule::IndexMethod;
use crate::sandbox::in_sandbox;
pub use drive::Advance;
use find::cutoff;
use find::leaf::{self, Leaf, Leaves};
use find::resummarize::resummarize;
use find::scan::Scan;
pub use finish::record_failure;
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use remove::{Batch, Part, Remover, blocked};
use size::Size;
use statement::Statements;
use std::collections::VecDeque;
use std::ffi::CString;
use std::ops::Range;
use std::time::{Duration, Instant};
use throttle::Throttle;

/// How long a step searches before it ends without having found rows.
const LONGEST_SEARCH: Duration = Duration::from_millis(500);

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
    /// Rows that other sessions had locked.
    pub locked: i64,
    /// WAL that the sweep has written.
    pub wal_bytes: i64,
    /// How long the sweep has searched heaps block by block.
    pub read_heaps: Duration,
    /// How the sweep went through its leaves, each way once.
    pub paths: Vec<Path>,
    /// How many rows the planner expects, in leaves that take more than one harvest.
    pub estimate: i64,
}

/// The result of a step of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A batch removed this many rows; there may be more.
    Removed(i64),
    /// No expired rows are left, except blocked, locked or skipped ones.
    Finished,
    /// The rule or its table has changed, or its window has closed: the sweep ends, and the next one sees the change.
    Outdated,
    /// Another session sweeps this rule.
    Busy,
    /// The sweep has reached the rule's row limit; the next sweep continues.
    Enough,
    /// The sweep would take more of its table than its rule ever has: the rule waits until somebody agrees.
    Held,
    /// Other processes are still sweeping their shares.
    Waiting,
    /// The next step may run user code, or takes time that other rules would have to wait, and this sweep may do
    /// neither.
    NeedsHelper,
}

pub struct Sweep {
    pub rule: Rule,
    pub tally: Tally,
    catalog: Catalog,
    scope: Scope,
    initiator: Initiator,
    started_at: TimestampWithTimeZone,
    cutoff: String,
    cutoff_at: Option<TimestampWithTimeZone>,
    leaves: Leaves,
    work: Option<Work>,
    size: Size,
    pace: Throttle,
    /// Known blocked rows, which this sweep leaves alone.
    left: Option<Blocked>,
    /// The last value among the rows that this sweep could not remove.
    blocked_up_to: Option<String>,
    /// Whether this sweep went through its rows in expiry order, and in one relation only.
    is_ordered: bool,
    /// The failure to report when everything else is done.
    deferred_failure: Option<Failure>,
    /// Whether this sweep ends before user code would run.
    is_aloof: bool,
    /// Whether the sweep may take the rows that it takes.
    is_admitted: bool,
    /// The replication origin that is there.
    origin: Option<CString>,
    /// The only blocks to sweep in the next leaf.
    range: Option<Range<u32>>,
    /// Whether this is the sweep of a share, which another process records.
    is_share: bool,
    /// Whether other processes have shares of this sweep, and the shares that have come back.
    gave_away: bool,
    returned: Vec<Share>,
}

/// The leaf that is being swept.
struct Work {
    leaf: Leaf,
    archive: Option<Archive>,
    scan: Scan,
    statements: Statements,
    /// Prepared by the first batch, in a transaction that holds the leaf's lock.
    remover: Option<Remover>,
    /// The search path for user code: the one that the owner gets on login, read by the first batch that runs some.
    owners_path: Option<CString>,
    found: VecDeque<Tid>,
    /// Whether rows are found first and removed later, because removing them as they are found has failed.
    is_careful: bool,
}

impl Work {
    /// Whether batches after the first probably remove their rows as they find them.
    fn is_quick(&self, rule: &Rule) -> bool {
        let is_removed_by_one = || self.scan.is_ordered() && !self.leaf.must_lock(rule);
        !self.is_careful && (!self.leaf.removal_runs_user_code(rule) || is_removed_by_one())
    }

    /// Whether the next rows can be removed as they are found.
    fn goes_on(&self) -> bool {
        !self.is_careful
            && self.found.is_empty()
            && self.scan.next_rows().is_some()
            && self.remover.as_ref().is_some_and(|remover| remover.can_remove_as_found(&self.scan))
    }
}

/// The result of looking at a leaf.
enum Begun {
    Work(Box<Work>),
    /// The leaf has changed.
    Outdated,
    NeedsHelper,
}

impl Sweep {
    /// Fixes the cutoff, and with it the rows that this sweep will remove. Returns `None` if the rule has changed since
    /// it was loaded. An aloof sweep ends with [`Step::NeedsHelper`] before user code would run.
    pub fn begin(
        catalog: &Catalog,
        rule: Rule,
        initiator: Initiator,
        scope: Scope,
        is_aloof: bool,
    ) -> Result<Option<Self>, Failure> {
        let catalog = catalog.clone();
        if let Some(missing) = &rule.missing {
            return Err(missing.clone());
        }
        if clock::has_jumped(guc::max_clock_jump()) {
            // A worker is about to notice, too.
            return if initiator == Initiator::Worker { Ok(None) } else { Err(TtlError::ClockJumped.into()) };
        }
        let prepared = scope.attempt(|| {
            rule.archive.map_or(Ok(()), |archive| Archive::check_apart(archive, rule.relid))?;
            catalog.check_meaning(&rule)?;
            rule.archive.map_or(Ok(()), |archive| Archive::check_end(&catalog, archive, rule.relid, Some(rule.id)))?;
            let left = blocked::known(&catalog, &rule, initiator)?;
            in_sandbox(&rule, || {
                let cutoff = cutoff::of(&rule)?;
                let leaves = leaf::find(&rule, &cutoff.literal, is_aloof)?;
                Ok((cutoff, leaves, left))
            })
        });
        match prepared {
            Ok((cutoff, leaves, left)) => {
                let (size, tally, pace) = (Size::of(&rule), Tally::default(), Throttle::default());
                Ok(Some(Self {
                    rule,
                    tally,
                    catalog,
                    scope,
                    initiator,
                    started_at: cutoff.present,
                    cutoff: cutoff.literal,
                    cutoff_at: cutoff.instant,
                    leaves,
                    work: None,
                    size,
                    pace,
                    left,
                    blocked_up_to: None,
                    is_ordered: false,
                    deferred_failure: None,
                    is_aloof,
                    is_admitted: false,
                    origin: None,
                    range: None,
                    is_share: false,
                    gave_away: false,
                    returned: Vec::new(),
                }))
            }
            Err(failure) if failure.needs_time => Err(failure),
            Err(_) if has_changed(&catalog, &rule, scope)? => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Returns how long the sweep has read heaps because its rule is to have no index.
    pub fn read_heaps(&self) -> Duration {
        let is_without_index = self.rule.options.index_method == IndexMethod::None;
        if is_without_index { self.tally.read_heaps } else { Duration::ZERO }
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
        // A sweep that does not wait itself, and may be rolled back, must not make other sweeps wait.
        if self.scope != Scope::Subtransaction {
            self.pace.spend(&self.rule, self.scope, self.tally.rows - rows_before, wal_bytes);
        }
        step.or_else(|failure| {
            if failure.needs_time {
                return Ok(Step::NeedsHelper);
            }
            // A failure because names changed in the meantime is not the rule's fault.
            let part_is_gone = self.rule.has_children && failure.code == PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE;
            // Who changes the rule waits for the batches of all who share it, and those for each other's counts.
            let is_shared = self.is_share || self.gave_away;
            let is_about_to_change = is_shared && failure.code == PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED;
            if part_is_gone || is_about_to_change || has_changed(&self.catalog, &self.rule, self.scope)? {
                return Ok(Step::Outdated);
            }
            Err(failure)
        })
    }

    fn try_step(&mut self, limit: usize) -> Result<Step, Failure> {
        let started = Instant::now();
        loop {
            let Some(work) = &mut self.work else {
                match self.begin_next()? {
                    Some(step) => return Ok(step),
                    None => continue,
                }
            };
            // A batch that finds its rows itself may have some more than were asked for, which a limit does not allow.
            let is_unlimited = limit >= 2 * self.size.rows();
            if !work.found.is_empty() || (is_unlimited && work.goes_on()) {
                if self.is_aloof && work.leaf.removal_runs_user_code(&self.rule) {
                    return Ok(Step::NeedsHelper);
                }
                return match self.admit()? {
                    Some(end) => Ok(end),
                    None => self.remove(limit),
                };
            }
            if work.scan.is_exhausted() {
                self.resummarize()?;
                self.work = None;
                continue;
            }
            let is_by_blocks = work.scan.path() == Path::Blocks;
            let harvested_from = Instant::now();
            let Some(found) = self.harvest()? else { return Ok(Step::Outdated) };
            if is_by_blocks {
                self.tally.read_heaps += harvested_from.elapsed();
            }
            self.tally.estimate += found.estimate;
            self.is_ordered &= self.work.as_ref().is_some_and(|work| !work.scan.is_by_blocks());
            self.add_blocked(&found.poisoned, found.poisoned_by)?;
            if let Some(work) = &mut self.work {
                work.found.extend(found.tids);
            }
            // A large table without expired rows takes many searches: other rules have their turn in between.
            if self.work.as_ref().is_some_and(|work| work.found.is_empty()) && started.elapsed() >= LONGEST_SEARCH {
                return Ok(Step::Removed(0));
            }
        }
    }

    /// Begins the next leaf. Returns what the sweep has done instead, or what it needs.
    fn begin_next(&mut self) -> Result<Option<Step>, Failure> {
        // Deciding about whole partitions calls functions in their constraints.
        if self.is_aloof && (self.leaves.are_undecided || !self.leaves.pending.is_empty()) {
            return Ok(Some(Step::NeedsHelper));
        }
        if let Some(pending) = self.leaves.pending.pop() {
            return self.finalize(pending).map(Some);
        }
        if !self.leaves.whole.is_empty()
            && let Some(end) = self.admit()?
        {
            return Ok(Some(end));
        }
        if let Some(part) = self.leaves.whole.pop_front() {
            return self.remove_part(part).map(Some);
        }
        if self.leaves.sweepable.is_empty() && self.awaits_shares()? {
            return Ok(Some(Step::Waiting));
        }
        let next = self.leaves.sweepable.pop_front();
        let Some(leaf) = next.map_or_else(|| self.next_returned(), |leaf| Ok(Some(leaf)))? else {
            return self.deferred_failure.take().map_or(Ok(Some(Step::Finished)), Err);
        };
        let after = blocked::value(&self.rule, self.left.as_ref().and_then(|left| left.up_to.as_deref()));
        let range = self.range.take();
        match self.scope.attempt(|| begin_leaf(&self.rule, &self.cutoff, leaf, after, self.is_aloof))? {
            Begun::Work(work) if self.awaits_index(&work.scan) => Ok(None),
            Begun::Work(mut work) => {
                work.scan.restrict(range, self.can_share(&work.leaf));
                self.is_ordered = work.scan.is_ordered() && !self.rule.has_children;
                self.work = Some(*work);
                Ok(None)
            }
            Begun::Outdated => Ok(Some(Step::Outdated)),
            Begun::NeedsHelper => Ok(Some(Step::NeedsHelper)),
        }
    }

    /// Has the BRIN index of a leaf, which was swept by it, rule out more blocks next time. Inside the caller's
    /// transaction, the locks for that would be held too long.
    fn resummarize(&mut self) -> Result<(), Failure> {
        let Some(Work { scan, leaf, statements, .. }) = &mut self.work else { return Ok(()) };
        let Some(unpruned) = scan.take_unpruned().filter(|_| self.scope != Scope::Subtransaction) else {
            return Ok(());
        };
        let rule = &self.rule;
        let summarized = self.scope.attempt(|| {
            in_sandbox(rule, || match leaf.is_unchanged_for_reading() {
                true => resummarize(leaf, statements, &unpruned),
                false => Ok(()),
            })
        });
        match summarized {
            Err(failure) if failure.is_cancel || failure.is_bug => Err(failure),
            // Sweeps do without: they read more.
            _ => Ok(()),
        }
    }

    /// Returns how long the next batch should wait before it asks again, if it has to wait.
    pub fn hold(&self) -> Result<Option<Duration>, Failure> {
        let hold = self.pace.hold(&self.rule, &self.catalog, self.scope)?;
        if let Some((hold, _)) = hold {
            self.report(Some(hold));
        }
        Ok(hold.map(|(_, left)| left))
    }

    fn report(&self, hold: Option<Hold>) {
        shmem::report(Progress {
            rule_id: self.rule.id,
            relid: self.work.as_ref().map_or(self.rule.relid, |work| work.leaf.relid).to_u32(),
            rows: self.tally.rows,
            batches: self.tally.batches,
            estimate: self.tally.estimate,
            started_at: self.started_at.into(),
            path: self.work.as_ref().map(|work| work.scan.path()),
            is_share: self.is_share,
            hold,
            ..Progress::default()
        });
    }

    /// Whether a worker leaves a leaf until the rule's pending index is built.
    fn awaits_index(&self, scan: &Scan) -> bool {
        self.initiator == Initiator::Worker && self.rule.state.pending_index.is_some() && scan.is_long()
    }

    /// Makes the replication origin under which batches are committed, if there is to be one. That is a transaction of its
    /// own, because others wait for it.
    fn make_origin(&mut self) -> Result<(), Failure> {
        let origin = remove::origin_of(self.scope);
        if let Some(name) = origin.as_ref().filter(|_| origin != self.origin) {
            self.scope.attempt(|| {
                origin::make(name);
                Ok(())
            })?;
        }
        self.origin = origin;
        Ok(())
    }

    fn remove(&mut self, limit: usize) -> Result<Step, Failure> {
        self.make_origin()?;
        let Some(work) = &mut self.work else { return Ok(Step::Finished) };
        let size = self.size.rows().min(Throttle::batch_limit(&self.rule)).min(limit);
        let (started, wal_before) = (Instant::now(), process::wal_bytes());
        let tids: Vec<Tid> = work.found.drain(..size.min(work.found.len())).collect();
        let is_shared = self.is_share || self.gave_away;
        let is_first = self.tally.batches == 0 && !self.is_share;
        let part = Part { is_first, is_shared, cutoff: self.cutoff_at };
        let mut batch = Batch::new(&self.rule, &self.catalog, self.scope, work, part);
        let result = if tids.is_empty() { batch.remove_next(size) } else { batch.remove(&tids) };
        let done = batch.done;
        let worth = Throttle::time_of_wal(self.scope, process::wal_bytes() - wal_before);
        self.size.learn(done.removed.unsigned_abs() as usize, started.elapsed().max(worth), done.is_awaited);
        let path = work.scan.path();
        if !self.tally.paths.contains(&path) {
            self.tally.paths.push(path);
        }
        self.tally.rows += done.removed;
        let found_nothing = done.reached.as_ref().is_some_and(|reached| reached.seen == 0);
        self.tally.batches += i64::from(!found_nothing);
        self.tally.locked += done.locked;
        self.add_blocked(&done.blocked, done.blocked_by)?;
        result
    }
}

/// Whether the rule has changed since it was loaded.
fn has_changed(catalog: &Catalog, rule: &Rule, scope: Scope) -> Result<bool, Failure> {
    scope.attempt(|| catalog.has_changed(rule))
}

/// Looks at a leaf before anything in it is changed.
fn begin_leaf(rule: &Rule, cutoff: &str, leaf: Leaf, after: Option<String>, is_aloof: bool) -> Result<Begun, TtlError> {
    in_sandbox(rule, || {
        let Some(leaf) = leaf.observe(rule)? else { return Ok(Begun::Outdated) };
        if is_aloof && leaf.search_runs_user_code(rule) {
            return Ok(Begun::NeedsHelper);
        }
        let (archive, delivery) = delivery::open(rule, leaf.relid)?;
        let statements = Statements::new(rule, cutoff, &leaf.name).with_delivery(delivery).searching_after(after);
        let scan = Scan::begin(rule, &leaf, cutoff, statements.clone())?;
        Ok(Begun::Work(Box::new(Work {
            leaf,
            archive,
            scan,
            statements,
            remover: None,
            owners_path: None,
            found: VecDeque::new(),
            is_careful: false,
        })))
    })
}
