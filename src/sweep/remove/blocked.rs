//! Rows that cannot be removed. Their position is remembered, so that sweeps leave them alone until they are due again.
//!
//! Only the last of their values is remembered. A completed sweep has tried everything up to it, so rows left there are
//! blocked or arrived late; both wait until they are due, and cost nothing meanwhile.

use super::is_about_rows;
use crate::catalog::{Blocked, Catalog, Initiator, Rule};
use crate::error::TtlError;
use crate::pg::plan::{Plan, Rows, Tid};
use crate::pg::relation::tree;
use crate::pg::transaction::Failure;
use crate::sandbox::in_sandbox;
use crate::sweep::find::scan::{Care, Harvest};
use crate::sweep::{Sweep, Work};
use pgrx::PgSqlErrorCode;

/// Returns the blocked rows that a worker's sweep leaves alone, or `None` if it should try all rows.
pub fn known(catalog: &Catalog, rule: &Rule, initiator: Initiator) -> Result<Option<Blocked>, TtlError> {
    let blocked = rule.state.blocked.as_ref().filter(|blocked| blocked.rests && initiator == Initiator::Worker);
    let Some(blocked) = blocked else { return Ok(None) };
    Ok((digest(catalog, rule)? == blocked.under).then(|| blocked.clone()))
}

/// Returns a digest that changes when anything that may block rows changes.
fn digest(catalog: &Catalog, rule: &Rule) -> Result<Option<String>, TtlError> {
    let relids = [Some(rule.relid), rule.archive].into_iter().flatten().flat_map(tree).collect();
    catalog.digest_of_obstacles(rule, relids)
}

/// Returns the remembered value, if it has the type that the rule compares now.
pub fn value(rule: &Rule, up_to: Option<&str>) -> Option<String> {
    let (type_name, value) = up_to?.split_once(' ')?;
    (type_name == rule.predicate.expiry.source().type_name()).then(|| value.to_owned())
}

impl Sweep {
    /// Searches for the next rows. If the filter or the expression fails on one, searches again with more care.
    pub(in crate::sweep) fn harvest(&mut self) -> Result<Option<Harvest>, Failure> {
        let care = if self.left.is_some() { Care::Blocks } else { Care::Rows };
        let (rule, scope, size) = (&self.rule, self.scope, &self.size);
        let Some(work) = &mut self.work else { return Ok(None) };
        // If later batches find their rows themselves, one batch is enough here.
        let wanted = if work.is_quick(rule) { size.rows() } else { size.of_harvest() };
        let Work { scan, leaf, .. } = work;
        let mut search = |care| {
            scope.attempt(|| {
                in_sandbox(rule, || {
                    if !leaf.is_unchanged_for_reading() {
                        return Ok(None);
                    }
                    scan.next(wanted, leaf, care).map(Some)
                })
            })
        };
        match search(Care::None) {
            Err(failure) if is_about_rows(&failure) && failure.code != PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE => {
                search(care)
            }
            found => found,
        }
    }

    /// Counts rows that could not be removed, and keeps the last of their values.
    pub(in crate::sweep) fn add_blocked(&mut self, tids: &[Tid], failure: Option<Failure>) -> Result<(), Failure> {
        self.tally.blocked += tids.len() as i64;
        self.tally.blocked_by = failure.or(self.tally.blocked_by.take());
        let Some(work) = self.work.as_ref().filter(|_| !tids.is_empty()) else { return Ok(()) };
        let (rule, statement) = (&self.rule, work.statements.last_value(self.blocked_up_to.as_deref()));
        let last = self.scope.attempt(|| {
            in_sandbox(rule, || {
                // The statement names columns, which may have been renamed; the sweep is about to notice.
                if !work.leaf.is_unchanged_for_reading() {
                    return Ok(None);
                }
                Ok(Plan::for_rows(&statement).row(Rows::Listed(tids)).into_iter().next().flatten())
            })
        });
        match last {
            Ok(last) => self.blocked_up_to = last.or(self.blocked_up_to.take()),
            // The value of one of the rows cannot be computed.
            Err(failure) if is_about_rows(&failure) => {}
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    /// Records where blocked rows are, and when to retry them all. `is_news` means that the sweep has more to record.
    pub(in crate::sweep) fn remember_blocked(&self, is_news: bool) -> Result<(), TtlError> {
        let (catalog, rule) = (&self.catalog, &self.rule);
        let up_to =
            self.blocked_up_to.as_ref().map(|value| format!("{} {value}", rule.predicate.expiry.source().type_name()));
        match &self.left {
            Some(_) => up_to.map_or(Ok(()), |up_to| catalog.add_blocked(rule, &up_to)),
            None if self.tally.blocked > 0 && (is_news || self.initiator == Initiator::Worker) => {
                let blocked = Blocked { rests: true, up_to, under: digest(catalog, rule)? };
                catalog.rest_blocked(rule, &blocked, self.tally.locked > 0)
            }
            None if self.tally.blocked == 0 && rule.state.blocked.is_some() => catalog.forget_blocked(rule),
            None => Ok(()),
        }
    }
}
