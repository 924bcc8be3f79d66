//! Removes rows batch by batch, each in its own transaction. When a batch fails, finds the rows at fault.

pub mod blocked;
mod remover;
mod statement;

use super::find::scan::{Reached, Scan};
use super::{Step, Work};
use crate::catalog::{Catalog, Claim, Rule};
use crate::delivery::{self, Archive, Taken};
use crate::error::TtlError;
use crate::guc;
use crate::pg::plan::Tid;
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{access, identity, login, origin, process, spi};
use crate::sandbox::{UnderWay, in_sandbox, is_sweeping};
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
pub use remover::Remover;
use std::ffi::CString;

/// A failing batch is halved until its parts are this small; their rows are then tried one by one. So a few bad rows
/// cost a few statements each, and a batch of only bad rows costs no more than one statement per row.
pub const ONE_BY_ONE: usize = 64;

/// The result of a batch.
#[derive(Debug, Default)]
pub struct Done {
    pub removed: i64,
    pub locked: i64,
    /// The TIDs of rows that could not be removed, and why.
    pub blocked: Vec<Tid>,
    pub blocked_by: Option<Failure>,
    /// What to deliver, for each statement that removed rows.
    pub taken: Vec<Taken>,
    /// How far a batch that found its rows itself has got.
    pub reached: Option<Reached>,
    /// Whether other sessions waited for the batch to end.
    pub is_awaited: bool,
}

impl Done {
    fn add(&mut self, other: Self) {
        self.taken.extend(other.taken);
        self.removed += other.removed;
        self.locked += other.locked;
        self.blocked.extend(other.blocked);
        self.blocked_by = other.blocked_by.or(self.blocked_by.take());
        self.reached = other.reached.or(self.reached.take());
        self.is_awaited |= other.is_awaited;
    }

    fn blocked(tid: Tid, failure: Failure) -> Self {
        Self { blocked: vec![tid], blocked_by: Some(failure), ..Self::default() }
    }
}

/// How the rows of a batch or a part of it are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The next rows are removed as they are found: at most this many, plus those that share the last value.
    AsFound(usize),
    Together,
    /// Each by itself; the removed rows are delivered together.
    OneByOne,
    /// Each is removed and delivered by itself.
    EachDelivered,
}

/// Returns the replication origin under which batches are committed. The transaction of a caller is not ours to commit.
pub fn origin_of(scope: Scope) -> Option<CString> {
    guc::replication_origin().filter(|_| scope != Scope::Subtransaction)
}

/// The part that a batch is of its sweep.
#[derive(Clone, Copy)]
pub struct Part {
    /// Whether nothing of this sweep has been recorded yet.
    pub is_first: bool,
    /// Whether other processes sweep shares of the same sweep.
    pub is_shared: bool,
    pub cutoff: Option<TimestampWithTimeZone>,
}

/// A batch that is being removed.
pub struct Batch<'a> {
    rule: &'a Rule,
    catalog: &'a Catalog,
    scope: Scope,
    work: &'a mut Work,
    part: Part,
    /// Whether an attempt holds all its locks and works on the rows: a failure then is about the rows.
    is_at_rows: bool,
    /// What the batch has done so far, even if it fails in the end.
    pub done: Done,
}

impl<'a> Batch<'a> {
    pub fn new(rule: &'a Rule, catalog: &'a Catalog, scope: Scope, work: &'a mut Work, part: Part) -> Self {
        Self { rule, catalog, scope, work, part, is_at_rows: false, done: Done::default() }
    }

    /// Removes the rows at these TIDs, in as many attempts as it takes.
    pub fn remove(&mut self, tids: &[Tid]) -> Result<Step, Failure> {
        let mut parts = vec![tids];
        while let Some(part) = parts.pop() {
            let mut result = self.attempt(part, Way::Together);
            if let Some(failure) = self.fault_of_rows(&result) {
                match part {
                    [tid] => result = Ok(Ok(Done::blocked(*tid, failure))),
                    part if part.len() > ONE_BY_ONE => {
                        let (first, second) = part.split_at(part.len() / 2);
                        parts.extend([second, first]);
                        continue;
                    }
                    part => {
                        result = self.attempt(part, Way::OneByOne);
                        if self.fault_of_rows(&result).is_some() {
                            result = self.attempt(part, Way::EachDelivered);
                        }
                    }
                }
            }
            match result? {
                Ok(done) => self.done.add(done),
                Err(end) => return Ok(end),
            }
        }
        Ok(Step::Removed(self.done.removed))
    }

    /// Removes the next rows as they are found. If that fails, the rows of the rest of the leaf are found first, then
    /// locked and removed.
    pub fn remove_next(&mut self, wanted: usize) -> Result<Step, Failure> {
        let result = self.attempt(&[], Way::AsFound(wanted));
        if self.fault_of_rows(&result).is_some() {
            self.work.is_careful = true;
            return Ok(Step::Removed(0));
        }
        match result? {
            Ok(done) => {
                self.work.scan.go_on(done.reached.as_ref(), wanted);
                self.done.add(done);
                Ok(Step::Removed(self.done.removed))
            }
            Err(end) => Ok(end),
        }
    }

    /// Returns the failure of an attempt, if fewer rows might succeed.
    fn fault_of_rows<T>(&self, result: &Result<T, Failure>) -> Option<Failure> {
        result.as_ref().err().filter(|failure| self.is_at_rows && is_about_rows(failure)).cloned()
    }

    /// Removes rows in one transaction. The inner error is a step that ends the sweep instead.
    fn attempt(&mut self, tids: &[Tid], way: Way) -> Result<Result<Done, Step>, Failure> {
        self.is_at_rows = false;
        self.scope.attempt(|| match self.obstacle()? {
            Some(end) => Ok(Err(end)),
            None => self.change(tids, way).map(Ok),
        })
    }

    /// Takes the locks: first the tables', then the rule's, in the order in which DDL and registration take them.
    fn obstacle(&self) -> Result<Option<Step>, TtlError> {
        if is_sweeping(self.rule.id) {
            return Ok(Some(Step::Busy));
        }
        let Work { leaf, archive, .. } = &*self.work;
        let is_unchanged =
            || Ok(leaf.is_unchanged_for_changing() && archive.as_ref().is_none_or(Archive::is_unchanged));
        if !in_sandbox(self.rule, is_unchanged)? {
            return Ok(Some(Step::Outdated));
        }
        Ok(match self.catalog.claim(self.rule, self.part.is_shared)? {
            Claim::Held => None,
            Claim::Busy => Some(Step::Busy),
            Claim::Changed => Some(Step::Outdated),
        })
    }

    fn change(&mut self, tids: &[Tid], way: Way) -> Result<Done, TtlError> {
        let origin = origin_of(self.scope);
        let Self { rule, catalog, work, is_at_rows, part, .. } = self;
        let Work { leaf, statements, remover, scan, owners_path, .. } = &mut **work;
        let rule = *rule;
        if leaf.must_check_changes(rule) {
            in_sandbox(rule, || leaf.check_changes(rule))?;
        }
        if let Some(origin) = origin {
            origin::commit_under(&origin);
        }
        // Deferred triggers would otherwise fire at commit, with the rights of the committing role. Those that the
        // caller has pending fire now, as the caller and under the caller's search path.
        let callers_path = access::search_path();
        identity::with_users_path(&callers_path, || spi::execute("SET CONSTRAINTS ALL IMMEDIATE", &[]))?;
        if owners_path.is_none() && leaf.removal_runs_user_code(rule) {
            *owners_path = Some(catalog.with_rights(|| login::search_path(rule.owner))?);
        }
        let done = in_sandbox(rule, || {
            let remover = remover.get_or_insert_with(|| Remover::new(statements, leaf, rule));
            let _under_way = UnderWay::begin(leaf.relid, rule.id);
            let remove = || {
                *is_at_rows = true;
                let done = remove_in(way, remover, scan, rule, tids)?;
                *is_at_rows = false;
                Ok(done)
            };
            // The table's own lock is held: any further wait is for a cascade or a trigger, and blocks one row, not the
            // sweep. Rows that are removed as they are found are not locked first, so they may be waited for, too.
            let patience = if matches!(way, Way::AsFound(_)) { c"1ms" } else { c"100ms" };
            let remove = || identity::with_settings(&[(c"lock_timeout", patience)], remove);
            match owners_path {
                Some(path) => identity::with_users_path(path, remove),
                None => remove(),
            }
        })?;
        delivery::tell(rule, &leaf.name, done.removed, part.cutoff, &done.taken)?;
        catalog.check_meaning(rule)?;
        if done.removed > 0 {
            catalog.record_batch(rule.id, done.removed, part.is_first)?;
            part.is_first = false;
        }
        Ok(Done { is_awaited: process::is_awaited(), ..done })
    }
}

fn remove_in(way: Way, remover: &Remover, scan: &Scan, rule: &Rule, tids: &[Tid]) -> Result<Done, TtlError> {
    let deliver = |done: &Done| delivery::call(rule, &done.taken);
    if way == Way::EachDelivered {
        return Ok(remover.remove_one_by_one(tids, deliver));
    }
    let done = match way {
        Way::AsFound(wanted) => remover.remove_as_found(scan, wanted),
        Way::Together => remover.remove_together(tids),
        _ => remover.remove_one_by_one(tids, |_| Ok(())),
    };
    deliver(&done).map(|()| done)
}

/// Whether leaving out some rows can help. It cannot after a cancel, when resources are short, or when code that runs
/// for every row is broken, ours included.
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
