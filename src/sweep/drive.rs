//! Goes on with a sweep, for workers and for whoever sweeps by hand.

use super::{Step, Sweep};
use crate::pg::transaction::{Failure, Scope};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
use std::time::Duration;

/// What became of an attempt to go on with a sweep.
pub enum Advance {
    Went,
    /// It should wait before it tries again.
    Wait(Duration),
    Ended(Step),
}

impl Sweep {
    /// Goes on by a batch of at most `most` rows, if its window is open and nothing holds it.
    pub fn advance(&mut self, most: i64, closes_at: Option<TimestampWithTimeZone>) -> Result<Advance, Failure> {
        if closes_at.is_some_and(|at| i64::from(clock_timestamp()) >= i64::from(at)) {
            return Ok(Advance::Ended(Step::Outdated));
        }
        // What runs in the caller's transaction cannot wait for others.
        if self.scope != Scope::Subtransaction
            && let Some(wait) = self.hold()?
        {
            return Ok(Advance::Wait(wait));
        }
        match self.step(usize::try_from(most).unwrap_or(usize::MAX))? {
            Step::Removed(_) => Ok(Advance::Went),
            end => Ok(Advance::Ended(end)),
        }
    }
}
