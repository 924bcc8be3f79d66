//! Continues a sweep, for workers and manual sweeps alike.

use super::{Step, Sweep};
use crate::pg::transaction::{Failure, Scope};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
use std::time::Duration;

/// How long to wait before asking again whether other processes have swept their shares.
const SHARES_END: Duration = Duration::from_millis(20);

/// The result of an attempt to continue a sweep.
pub enum Advance {
    Went,
    /// The sweep should wait this long before it tries again.
    Wait(Duration),
    Ended(Step),
}

impl Sweep {
    /// Removes a batch of at most `most` rows, if the window is open and no rate or lag limit holds the sweep.
    pub fn advance(&mut self, most: i64, closes_at: Option<TimestampWithTimeZone>) -> Result<Advance, Failure> {
        if closes_at.is_some_and(|at| i64::from(clock_timestamp()) >= i64::from(at)) {
            return Ok(Advance::Ended(Step::Outdated));
        }
        // A sweep inside the caller's transaction cannot wait for other sweeps or standbys.
        if self.scope != Scope::Subtransaction
            && let Some(wait) = self.hold()?
        {
            return Ok(Advance::Wait(wait));
        }
        match self.step(usize::try_from(most).unwrap_or(usize::MAX))? {
            Step::Removed(_) => Ok(Advance::Went),
            Step::Waiting => Ok(Advance::Wait(SHARES_END)),
            end => Ok(Advance::Ended(end)),
        }
    }
}
