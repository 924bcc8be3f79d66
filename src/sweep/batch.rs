//! Removing a batch, and, when it fails, finding the rows that are to blame.

use super::statement::{Statements, Which};
use crate::error::TtlError;
use crate::pg::identity;
use crate::pg::plan::{Places, Plan, Tid, position};
use crate::pg::transaction::{Failure, Scope, subtransaction};
use pgrx::PgSqlErrorCode;
use std::cell::Cell;

/// A failing batch is halved until parts are this small; their rows are then tried one by one. So a few bad rows cost
/// a few statements each, and a batch of nothing but bad rows no more than one statement a row.
const ONE_BY_ONE: usize = 64;

/// A range of blocks is worth reading as a whole if it holds at least this many rows of the batch for each block.
const ROWS_PER_BLOCK: usize = 4;

/// What became of a batch.
#[derive(Debug, Default)]
pub struct Done {
    pub removed: i64,
    pub locked: i64,
    pub blocked: i64,
    pub blocked_by: Option<Failure>,
}

impl Done {
    fn add(&mut self, other: Self) {
        self.removed += other.removed;
        self.locked += other.locked;
        self.blocked += other.blocked;
        self.blocked_by = other.blocked_by.or(self.blocked_by.take());
    }

    fn blocked(failure: Failure) -> Self {
        Self { blocked: 1, blocked_by: Some(failure), ..Self::default() }
    }
}

pub struct Remover {
    remove_unlocked: Plan,
    look: Plan,
    lock: Plan,
    remove: Plan,
    lock_range: Plan,
    remove_range: Plan,
}

impl Remover {
    pub fn new(statements: &Statements) -> Self {
        Self {
            remove_unlocked: Plan::for_rows(&statements.remove_unlocked()),
            look: Plan::for_rows(&statements.look(Which::Listed)),
            lock: Plan::for_rows(&statements.lock(Which::Listed)),
            remove: Plan::for_rows(&statements.remove(Which::Listed)),
            lock_range: Plan::for_range(&statements.lock(Which::Ranged)),
            remove_range: Plan::for_range(&statements.remove(Which::Ranged)),
        }
    }

    fn remove_together(&self, tids: &[Tid]) -> Done {
        let removed = self.remove_range(tids).unwrap_or_else(|| self.remove_listed(tids));
        if removed == tids.len() {
            return Done { removed: removed as i64, ..Done::default() };
        }
        // Others have locked, updated or removed the rest, or a trigger keeps it.
        let left = self.look.run(Places::These(tids));
        let kept = if left == 0 { 0 } else { self.lock.run(Places::These(tids)) };
        let blocked_by = (kept > 0).then(|| {
            let code = PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION;
            Failure::new(code, "a trigger or rule of the table keeps the row")
        });
        Done { removed: removed as i64, locked: (left - kept) as i64, blocked: kept as i64, blocked_by }
    }

    fn remove_listed(&self, tids: &[Tid]) -> usize {
        // The usual case: every row is locked now, by us, so that changing all of them waits for nobody.
        if self.lock.run(Places::These(tids)) == tids.len() {
            self.remove.run(Places::These(tids))
        } else {
            self.remove_unlocked.run(Places::These(tids))
        }
    }

    /// Where the batch is all that has expired in a range of blocks, as in a table that was filled in the order of
    /// time, reading the range is much cheaper than going to each place. `None` if it is not, or if others have locked
    /// some of it.
    fn remove_range(&self, tids: &[Tid]) -> Option<usize> {
        let mut sorted: Vec<_> = tids.iter().map(position).collect();
        sorted.sort_unstable();
        let first = tids.iter().find(|tid| Some(&position(tid)) == sorted.first())?;
        let last = tids.iter().find(|tid| Some(&position(tid)) == sorted.last())?;
        let blocks = (position(last).0 - position(first).0) as usize + 1;
        if tids.len() < ROWS_PER_BLOCK * blocks {
            return None;
        }
        let range = Places::Between(first, last);
        if !self.lock_range.find(range, 0).tids.iter().map(position).eq(sorted) {
            return None;
        }
        // What we locked is what we came for. Another expired row in the range could only be one that somebody else has
        // locked: then this does not wait, and the places are gone to one by one.
        let settings = [(c"lock_timeout", c"1ms")];
        match subtransaction(|| Ok(identity::with_settings(&settings, || self.remove_range.run(range)))) {
            Err(failure) if failure.code == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE => None,
            Err(failure) => failure.raise(),
            Ok(removed) => Some(removed),
        }
    }

    fn remove_one_by_one(&self, tids: &[Tid]) -> Done {
        let mut total = Done::default();
        for tid in tids {
            let done = subtransaction(|| Ok(self.remove_together(&[*tid])));
            total.add(done.unwrap_or_else(Done::blocked));
        }
        total
    }
}

/// Removes what is at `tids`, in as many attempts as it takes, and adds up what they did, also those before a failure.
/// `guarded` does what has to be done around each, and returns `None` to stop.
pub fn remove(
    scope: Scope,
    tids: &[Tid],
    total: &mut Done,
    mut guarded: impl FnMut(&dyn Fn(&Remover) -> Done) -> Result<Option<Done>, TtlError>,
) -> Result<(), Failure> {
    let mut parts = vec![tids];
    // Set once an attempt has all its locks: what fails then fails on the rows.
    let reached_rows = Cell::new(false);
    while let Some(part) = parts.pop() {
        reached_rows.set(false);
        let together = |remover: &Remover| {
            reached_rows.set(true);
            remover.remove_together(part)
        };
        match scope.attempt(|| guarded(&together)) {
            Ok(Some(done)) => total.add(done),
            Ok(None) => break,
            Err(failure) if !reached_rows.get() || !is_about_rows(&failure) => return Err(failure),
            Err(_) if part.len() > ONE_BY_ONE => {
                let (first, second) = part.split_at(part.len() / 2);
                parts.extend([second, first]);
            }
            Err(failure) if part.len() == 1 => total.add(Done::blocked(failure)),
            Err(_) => match scope.attempt(|| guarded(&|remover| remover.remove_one_by_one(part)))? {
                Some(done) => total.add(done),
                None => break,
            },
        }
    }
    Ok(())
}

/// Whether leaving out some rows can help. It cannot when somebody cancelled, when resources are short, or when the code
/// that runs for every row is broken.
fn is_about_rows(failure: &Failure) -> bool {
    !failure.is_cancel
        && !matches!(
            failure.code,
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE
                | PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN
                | PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION
                | PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION
                | PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY
                | PgSqlErrorCode::ERRCODE_DISK_FULL
                | PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE
                | PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED
        )
}
