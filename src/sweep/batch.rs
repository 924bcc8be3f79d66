//! Removing a batch, and, when it fails, finding the rows that are to blame.

use super::leaf::Leaf;
use super::statement::{Statements, Which};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::chain;
use crate::pg::plan::{Places, Plan, Tid, position};
use crate::pg::transaction::{Failure, Scope, subtransaction};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use std::cell::{Cell, OnceCell};
use std::collections::HashSet;

/// A failing batch is halved until parts are this small; their rows are then tried one by one. So a few bad rows cost
/// a few statements each, and a batch of nothing but bad rows no more than one statement a row.
pub const ONE_BY_ONE: usize = 64;

/// A range of blocks is worth reading as a whole if it holds at least this many rows of the batch for each block.
const ROWS_PER_BLOCK: usize = 4;

/// What became of a batch.
#[derive(Debug, Default)]
pub struct Done {
    pub removed: i64,
    pub locked: i64,
    /// Where rows are that could not be removed, and why.
    pub blocked: Vec<Tid>,
    pub blocked_by: Option<Failure>,
    /// What an delivery gets, for each statement that removed rows.
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
        self.blocked.extend(other.blocked);
        self.blocked_by = other.blocked_by.or(self.blocked_by.take());
    }

    fn blocked(tid: Tid, failure: Failure) -> Self {
        Self { blocked: vec![tid], blocked_by: Some(failure), ..Self::default() }
    }
}

/// Hands over what an delivery gets; raises its error if it refuses.
pub type Call<'a> = &'a dyn Fn(&[Taken]);

pub struct Remover {
    relid: Oid,
    /// The relation, if rows can be removed from its heap without asking anybody.
    plain: Option<Oid>,
    look: Prepared,
    look_in_range: Prepared,
    lock: Prepared,
    remove: Prepared,
    delivers: bool,
    /// Whether somebody can have a removed row be as it was before, as a trigger can a mark.
    can_be_undone: bool,
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
    pub fn new(statements: &Statements, leaf: &Leaf, rule: &Rule) -> Self {
        Self {
            relid: leaf.relid,
            plain: leaf.plain_heap(rule),
            look: Prepared::new(statements.look(Which::Listed), Which::Listed),
            look_in_range: Prepared::new(statements.look(Which::Ranged), Which::Ranged),
            lock: Prepared::new(statements.lock(), Which::Listed),
            remove: Prepared::new(statements.remove(), Which::Listed),
            delivers: statements.delivers(),
            can_be_undone: leaf.can_undo(rule),
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
        // These are locked now, by us: changing them waits for nobody, and whatever becomes of them is the doing of this transaction.
        let ours = self.lock.plan().find(Places::These(tids), 0).tids;
        let (mut removed, taken) =
            if ours.is_empty() { (0, Vec::new()) } else { self.take(&self.remove, Places::These(&ours)) };
        let mut locked = 0;
        if ours.len() < tids.len() {
            // Others have locked the rest, or they have updated or removed it, and then it is not there any more.
            let held: HashSet<_> = ours.iter().map(position).collect();
            let others: Vec<_> = tids.iter().filter(|tid| !held.contains(&position(tid))).copied().collect();
            locked = self.look.plan().run(Places::These(&others)) as i64;
        }
        let mut blocked = Vec::new();
        if removed < ours.len() || self.can_be_undone {
            // A trigger or rule may have kept a row, changed it, or taken its mark back: what has expired still is blocked, wherever
            // its latest version lies.
            blocked = self.look.plan().find(Places::These(&chain::latest(self.relid, &ours)), 0).tids;
            let most = ours.len().saturating_sub(blocked.len());
            // Nobody is told of a row that is not gone: the batch is divided.
            if removed > most && self.delivers {
                kept().raise();
            }
            removed = removed.min(most);
        }
        let blocked_by = (!blocked.is_empty()).then(kept);
        Done { removed: removed as i64, locked, blocked, blocked_by, taken }
    }

    /// Removes rows by one of the statements, and takes what the delivery gets.
    fn take(&self, removal: &Prepared, places: Places<'_>) -> (usize, Vec<Taken>) {
        if !self.delivers {
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

    /// Removes rows each by itself, and hands each over by itself if that is asked for.
    fn remove_one_by_one(&self, tids: &[Tid], call: Option<Call<'_>>) -> Done {
        let mut total = Done::default();
        for tid in tids {
            let done = subtransaction(|| {
                let done = self.remove_together(&[*tid]);
                call.inspect(|call| call(&done.taken));
                Ok(done)
            });
            total.add(done.unwrap_or_else(|failure| {
                if is_about_rows(&failure) { Done::blocked(*tid, failure) } else { failure.raise() }
            }));
        }
        total
    }
}

fn kept() -> Failure {
    let code = PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION;
    Failure::new(code, "a trigger or rule of the table keeps the row")
}

/// Removes what is at `tids`, in as many attempts as it takes, and adds up what they did, also those before a failure.
/// `guarded` does what has to be done around each, and returns `None` to stop.
pub fn remove(
    scope: Scope,
    tids: &[Tid],
    total: &mut Done,
    mut guarded: impl FnMut(&dyn Fn(&Remover, Call<'_>) -> Done) -> Result<Option<Done>, TtlError>,
) -> Result<(), Failure> {
    let mut parts = vec![tids];
    // Set while an attempt, which has all its locks, is at the rows: what fails then fails on them.
    let reached_rows = Cell::new(false);
    let mut attempt = |work: &dyn Fn(&Remover, Call<'_>) -> Done| {
        reached_rows.set(false);
        let tracked = |remover: &Remover, call: Call<'_>| {
            reached_rows.set(true);
            let done = work(remover, call);
            reached_rows.set(false);
            done
        };
        scope.attempt(|| guarded(&tracked)).map_err(|failure| {
            let may_divide = reached_rows.get() && is_about_rows(&failure);
            (failure, may_divide)
        })
    };
    while let Some(part) = parts.pop() {
        let together = |remover: &Remover, call: Call<'_>| {
            let done = remover.remove_together(part);
            call(&done.taken);
            done
        };
        let one_by_one = |remover: &Remover, call: Call<'_>| {
            let done = remover.remove_one_by_one(part, None);
            call(&done.taken);
            done
        };
        let each_told = |remover: &Remover, call: Call<'_>| remover.remove_one_by_one(part, Some(call));
        let done = match (attempt(&together), part) {
            (Err((failure, true)), [tid]) => Some(Done::blocked(*tid, failure)),
            (Err((_, true)), part) if part.len() > ONE_BY_ONE => {
                let (first, second) = part.split_at(part.len() / 2);
                parts.extend([second, first]);
                continue;
            }
            // What is left of them goes together, unless the delivery does not take it.
            (Err((_, true)), _) => match attempt(&one_by_one) {
                Err((_, true)) => attempt(&each_told).map_err(|(failure, _)| failure)?,
                done => done.map_err(|(failure, _)| failure)?,
            },
            (done, _) => done.map_err(|(failure, _)| failure)?,
        };
        match done {
            Some(done) => total.add(done),
            None => break,
        }
    }
    Ok(())
}

/// Whether leaving out some rows can help. It cannot when somebody cancelled, when resources are short, or when the code
/// that runs for every row is broken, ours included.
pub fn is_about_rows(failure: &Failure) -> bool {
    !failure.is_cancel
        && !failure.is_bug
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bug_of_ours_is_no_fault_of_a_row() {
        let failure = Failure::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "user code can raise this, too");
        assert!(is_about_rows(&failure));
        assert!(!is_about_rows(&Failure { is_bug: true, ..failure }));
    }
}
