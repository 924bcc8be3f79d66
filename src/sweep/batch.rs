//! Removing a batch, and, when it fails, finding the rows that are to blame.

use super::statement::{Statements, Which};
use crate::error::TtlError;
use crate::pg::plan::{Places, Plan, Tid, position};
use crate::pg::transaction::{Failure, Scope, subtransaction};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use std::cell::{Cell, OnceCell};

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
    /// What an audience gets, for each statement that removed rows.
    pub taken: Vec<Taken>,
}

/// Rows that a statement has removed, and their range, as JSON.
#[derive(Debug, Default)]
pub struct Taken {
    pub rows: Option<String>,
    pub range: Option<String>,
}

impl Done {
    fn add(&mut self, other: Self) {
        self.taken.extend(other.taken);
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
    /// The relation, if rows can be removed from its heap without asking anybody.
    plain: Option<Oid>,
    look: Prepared,
    look_in_range: Prepared,
    lock: Prepared,
    remove: Prepared,
    remove_unlocked: Prepared,
    has_audience: bool,
}

/// A statement that is planned when it is first needed: most batches need one of them.
struct Prepared {
    sql: String,
    which: Which,
    plan: OnceCell<Plan>,
}

impl Prepared {
    fn new(sql: String, which: Which) -> Self {
        Self { sql, which, plan: OnceCell::new() }
    }

    fn plan(&self) -> &Plan {
        self.plan.get_or_init(|| match self.which {
            Which::Listed => Plan::for_rows(&self.sql),
            Which::Ranged => Plan::for_range(&self.sql),
        })
    }
}

impl Remover {
    pub fn new(statements: &Statements, plain: Option<Oid>) -> Self {
        Self {
            plain,
            look: Prepared::new(statements.look(Which::Listed), Which::Listed),
            look_in_range: Prepared::new(statements.look(Which::Ranged), Which::Ranged),
            lock: Prepared::new(statements.lock(), Which::Listed),
            remove: Prepared::new(statements.remove(), Which::Listed),
            remove_unlocked: Prepared::new(statements.remove_unlocked(), Which::Listed),
            has_audience: statements.has_audience(),
        }
    }

    fn remove_together(&self, tids: &[Tid]) -> Done {
        let mut sorted = tids.to_vec();
        sorted.sort_unstable_by_key(position);
        let deleted = self.plain.map_or_else(Vec::new, |relid| self.delete_from_heap(relid, &sorted));
        let mut done = Done { removed: deleted.len() as i64, ..Done::default() };
        if deleted.len() < sorted.len() {
            let mut deleted = deleted.iter().map(position).peekable();
            sorted.retain(|tid| deleted.next_if_eq(&position(tid)).is_none());
            done.add(self.remove_with_sql(&sorted));
        }
        done
    }

    /// Where nobody has anything to say about it, rows go straight from the heap, and what is in the way of that is left.
    fn delete_from_heap(&self, relid: Oid, sorted: &[Tid]) -> Vec<Tid> {
        let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return Vec::new() };
        let blocks = (position(last).0 - position(first).0) as usize + 1;
        if sorted.len() < ROWS_PER_BLOCK * blocks {
            return self.look.plan().delete(Places::These(sorted), relid, sorted);
        }
        // As in a table that was filled in the order of time: reading it through is cheaper than going to each place.
        self.look_in_range.plan().delete(Places::Between(first, last), relid, sorted)
    }

    fn remove_with_sql(&self, tids: &[Tid]) -> Done {
        let these = Places::These(tids);
        // The usual case: every row is locked now, by us, so that changing all of them waits for nobody.
        let all_locked = self.lock.plan().run(these) == tids.len();
        let (removed, taken) = self.take(if all_locked { &self.remove } else { &self.remove_unlocked }, these);
        if removed == tids.len() {
            return Done { removed: removed as i64, taken, ..Done::default() };
        }
        // Others have locked, updated or removed the rest, or a trigger keeps it.
        let left = self.look.plan().run(these);
        let kept = if left == 0 { 0 } else { self.lock.plan().run(these) };
        let blocked_by = (kept > 0).then(|| {
            let code = PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION;
            Failure::new(code, "a trigger or rule of the table keeps the row")
        });
        Done { removed: removed as i64, locked: (left - kept) as i64, blocked: kept as i64, blocked_by, taken }
    }

    /// Removes rows by one of the statements, and takes what the audience gets.
    fn take(&self, removal: &Prepared, places: Places<'_>) -> (usize, Vec<Taken>) {
        if !self.has_audience {
            return (removal.plan().run(places), Vec::new());
        }
        let mut columns = removal.plan().row(places).into_iter();
        let mut count = || columns.next().flatten().and_then(|count| count.parse::<usize>().ok());
        let (removed, archived) = (count().unwrap_or_default(), count());
        // Never a row in neither: what a trigger kept out of the archive stays where it is.
        if archived.is_some_and(|archived| archived != removed) {
            TtlError::ArchiveRefused.raise();
        }
        let (rows, range) = (columns.next().flatten(), columns.next().flatten());
        (removed, if removed > 0 { vec![Taken { rows, range }] } else { Vec::new() })
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
    // Set while an attempt, which has all its locks, is at the rows: what fails then fails on them.
    let reached_rows = Cell::new(false);
    while let Some(part) = parts.pop() {
        reached_rows.set(false);
        let together = |remover: &Remover| {
            reached_rows.set(true);
            let done = remover.remove_together(part);
            reached_rows.set(false);
            done
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
