//! Ends a sweep and records its outcome.

use super::{Step, Sweep};
use crate::catalog::{Catalog, Initiator, Outcome};
use crate::error::TtlError;
use crate::pg::transaction::{Failure, Scope, lock_timeout};
use crate::pg::{identity, shmem};
use pgrx::datum::datetime_support::clock_timestamp;

impl Sweep {
    /// Records how the sweep ended, if there is anything to record.
    pub fn finish(mut self, end: &Result<Step, Failure>) -> Result<(), Failure> {
        shmem::report_end(self.rule.id);
        if self.gave_away {
            self.add_gains(shmem::leave_shares(self.rule.id));
        }
        if self.is_share {
            return Ok(());
        }
        let complete = *end == Ok(Step::Finished);
        let skipped: Vec<_> =
            self.leaves.skipped.iter().map(|(leaf, reason)| format!("{} {reason}", leaf.name)).collect();
        let skipped = (!skipped.is_empty()).then(|| skipped.join("; "));
        // Obstacles that the last sweep already recorded are no news: an idle sweep writes nothing.
        let left_blocked = self.left.is_some();
        let same_blocked = if left_blocked {
            self.tally.blocked == 0
        } else {
            self.tally.blocked == self.rule.state.blocked_rows
                && self.tally.blocked_by.is_some() == self.rule.state.last_error.is_some()
        };
        let nothing_new = same_blocked
            && self.tally.locked == self.rule.state.locked_rows
            && skipped == self.rule.state.skipped_parts;
        let is_idle = self.tally.rows == 0 && self.tally.partitions == 0 && (nothing_new || !complete);
        // In expiry order, every row before a blocked one was tried, even if those behind it were not.
        let has_tried_before = complete || (self.is_ordered && *end == Ok(Step::Enough));
        let is_news = end.is_err() || !is_idle;
        let outcome = Outcome {
            rule_id: self.rule.id,
            version: self.rule.version,
            initiator: self.initiator,
            started_at: self.started_at,
            rows: self.tally.rows,
            partitions: self.tally.partitions,
            batches: self.tally.batches,
            blocked_rows: self.tally.blocked,
            left_blocked,
            adds_blocked: left_blocked && has_tried_before,
            locked_rows: self.tally.locked,
            wal_bytes: self.tally.wal_bytes,
            paths: &self.tally.paths,
            skipped,
            blocked_by: self.tally.blocked_by.as_ref(),
            failure: end.as_ref().err(),
            complete,
            is_whole: complete || *end == Ok(Step::Enough),
        };
        let recorded = || {
            if has_tried_before && (self.tally.blocked > 0 || (!left_blocked && self.rule.state.blocked.is_some())) {
                self.scope.attempt(|| with_patience(|| self.remember_blocked(!is_idle)))?;
            }
            if is_news { self.scope.attempt(|| record(&self.catalog, &outcome)) } else { Ok(()) }
        };
        recorded().or_else(|failure| {
            // Others may hold the rule's row. What was done belongs in the history all the same.
            if is_news {
                self.scope.attempt(|| self.catalog.record_history(&outcome))?;
            }
            Err(failure)
        })
    }
}

/// Records that a rule could not even be loaded.
pub fn record_failure(
    catalog: &Catalog,
    (rule_id, version): (i64, i64),
    initiator: Initiator,
    scope: Scope,
    failure: &Failure,
) -> Result<(), Failure> {
    scope.attempt(|| {
        // Do not wait for an owner who keeps a failing rule locked.
        if initiator == Initiator::Worker && !catalog.is_free(rule_id)? {
            return Ok(());
        }
        let outcome = Outcome {
            rule_id,
            version,
            initiator,
            started_at: clock_timestamp(),
            rows: 0,
            partitions: 0,
            batches: 0,
            blocked_rows: 0,
            left_blocked: false,
            adds_blocked: false,
            locked_rows: 0,
            wal_bytes: 0,
            paths: &[],
            skipped: None,
            blocked_by: None,
            failure: Some(failure),
            complete: false,
            is_whole: false,
        };
        record(catalog, &outcome)
    })
}

/// Waits for the rule's row no longer than for a table: a transaction left open may hold it.
pub(super) fn with_patience<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, TtlError> {
    identity::with_settings(&[(c"lock_timeout", &lock_timeout())], work)
}

fn record(catalog: &Catalog, outcome: &Outcome<'_>) -> Result<(), TtlError> {
    // A worker does not wait for an owner who keeps a failing rule locked: other rules have their turn.
    let is_failing = outcome.initiator == Initiator::Worker && outcome.failure.is_some();
    let patience = if is_failing { c"50ms".to_owned() } else { lock_timeout() };
    identity::with_settings(&[(c"lock_timeout", &patience)], || catalog.record_outcome(outcome))
}
