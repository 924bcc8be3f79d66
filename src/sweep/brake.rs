//! The brake: a sweep that would take more of its table than its rule ever has waits until somebody agrees.

use super::finish::with_patience;
use super::inspect::share;
use super::{Step, Sweep};
use crate::guc;
use crate::pg::transaction::{Failure, Scope};

/// What a rule may take beyond what somebody has agreed to: shares vary.
const SLACK: f64 = 1.1;

impl Sweep {
    /// Whether the brake may still hold the sweep.
    pub(super) fn may_be_held(&self) -> bool {
        guc::max_share_per_run().is_some() && !self.is_admitted
    }

    /// Asks before the first removal whether the sweep may take the rows that it is about to take. Returns the step that
    /// ends it if not.
    pub(super) fn admit(&mut self) -> Result<Option<Step>, Failure> {
        if self.is_admitted || self.is_share {
            return Ok(None);
        }
        let most = guc::max_share_per_run().map_or(1.0, |most| most.max(self.rule.state.largest_share * SLACK));
        if most < 1.0 {
            // Counting takes time, and runs filters.
            if self.is_aloof {
                return Ok(Some(Step::NeedsHelper));
            }
            let (catalog, rule, left) = (&self.catalog, &self.rule, self.left.as_ref());
            let share = self.scope.attempt(|| share::of(rule, left))?;
            if share > most {
                self.scope.attempt(|| with_patience(|| catalog.hold_share(rule, Some(share))))?;
                if self.scope == Scope::Transaction {
                    pgrx::warning!(
                        "TTL rule on {rule} is held: it would take {:.1} % of the table, see pg_ttl_index.max_share_per_run",
                        100.0 * share
                    );
                }
                return Ok(Some(Step::Held));
            }
        }
        // The setting allows it by now.
        if self.rule.state.was_held {
            let (catalog, rule) = (&self.catalog, &self.rule);
            self.scope.attempt(|| with_patience(|| catalog.hold_share(rule, None)))?;
        }
        self.is_admitted = true;
        Ok(None)
    }
}
