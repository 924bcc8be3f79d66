//! Removing a batch, and, when it fails, finding the rows that are to blame.

use super::statement::Statements;
use crate::error::TtlError;
use crate::pg::plan::{Plan, Tid};
use crate::pg::transaction::{Failure, Scope, subtransaction};
use pgrx::PgSqlErrorCode;

/// A failing batch is halved until parts are this small; their rows are then tried one by one. So a few bad rows cost
/// a few statements each, and a batch of nothing but bad rows no more than one statement a row.
const ONE_BY_ONE: usize = 64;

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
    remove: Plan,
    count_left: Plan,
    count_unlocked: Plan,
}

impl Remover {
    pub fn new(statements: &Statements) -> Self {
        Self {
            remove: Plan::for_rows(&statements.remove()),
            count_left: Plan::for_rows(&statements.count_left()),
            count_unlocked: Plan::for_rows(&statements.count_unlocked()),
        }
    }

    fn remove_together(&self, tids: &[Tid]) -> Done {
        let removed = self.remove.change(tids);
        if removed == tids.len() {
            return Done { removed: removed as i64, ..Done::default() };
        }
        // Others have locked, updated or removed the rest, or a trigger keeps it.
        let left = self.count_left.count(tids);
        let kept = if left == 0 { 0 } else { self.count_unlocked.count(tids) };
        let blocked_by = (kept > 0).then(|| Failure {
            code: PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION,
            message: "a trigger or rule of the table keeps the row".into(),
        });
        Done { removed: removed as i64, locked: left - kept, blocked: kept, blocked_by }
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

/// Removes what is at `tids`, in as many attempts as it takes. `guarded` does what has to be done around each, and
/// returns `None` to stop.
pub fn remove(
    scope: Scope,
    tids: &[Tid],
    mut guarded: impl FnMut(&dyn Fn(&Remover) -> Done) -> Result<Option<Done>, TtlError>,
) -> Result<Done, Failure> {
    let mut total = Done::default();
    let mut parts = vec![tids];
    while let Some(part) = parts.pop() {
        match scope.attempt(|| guarded(&|remover| remover.remove_together(part))) {
            Ok(Some(done)) => total.add(done),
            Ok(None) => break,
            Err(failure) if !is_about_rows(&failure) => return Err(failure),
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
    Ok(total)
}

/// Whether leaving out some rows can help. It cannot when the statement was cancelled or could not get at the table.
fn is_about_rows(failure: &Failure) -> bool {
    !matches!(
        failure.code,
        PgSqlErrorCode::ERRCODE_QUERY_CANCELED
            | PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE
            | PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE
            | PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN
            | PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION
            | PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE
            | PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION
            | PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY
            | PgSqlErrorCode::ERRCODE_DISK_FULL
            | PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE
    )
}
