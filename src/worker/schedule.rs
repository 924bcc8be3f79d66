//! When a rule may be swept: its window and its interval.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::guc;
use crate::pg::shmem::Swept;
use crate::pg::spi;
use crate::rule::{Ttl, Window};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
use std::time::Duration;

/// Whether a window is open, and until when it stays so.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    pub is_open: bool,
    pub until: TimestampWithTimeZone,
}

/// The plan for a rule's next sweep.
pub struct Plan {
    /// Whether to sweep the rule now.
    pub is_time: bool,
    /// Time until the next sweep, if the rule has its own schedule.
    pub next: Option<Duration>,
    /// Time until the rule should be checked again without waiting for the next pass.
    pub look: Option<Duration>,
}

/// Without an index, a rule rests this many times as long as its last sweep read heaps, but no longer than this.
const REST_AFTER_READING: u32 = 20;
const LONGEST_REST: Duration = Duration::from_secs(3600);

/// Plans the next sweep of a rule. `last` is the last sweep that this process knows of, and how long ago it began: the
/// catalog says when the rule is due, but sweeps that found nothing leave no trace there.
pub fn plan(rule: &Rule, opening: Option<Opening>, is_pass: bool, last: Option<(Duration, Swept)>) -> Plan {
    let rested = last.map_or(Duration::MAX, |(ago, _)| ago);
    let (is_due, rests_for) = (rule.state.is_due, rule.state.rests_for());
    let mut next = None;
    let mut is_time = is_due && (is_pass || rested >= guc::naptime());
    // A rule that was changed is another rule.
    let read_heaps = last.filter(|(_, swept)| swept.version == rule.version).map(|(_, swept)| swept.read_heaps);
    let rest = (read_heaps.unwrap_or_default() * REST_AFTER_READING).min(LONGEST_REST);
    if rest > guc::naptime() {
        is_time &= rested >= rest;
        next = Some(if is_time { rest } else { rests_for.max(rest.saturating_sub(rested)) });
    }
    if let Some(every) = rule.options.run_every.map(Ttl::estimate) {
        is_time = is_due && rested >= every;
        next = Some(if is_time { every } else { rests_for.max(every.saturating_sub(rested)) });
    }
    if let Some(closed) = opening.filter(|opening| !opening.is_open) {
        is_time = false;
        let left = i64::from(closed.until) - i64::from(clock_timestamp());
        next = Some(Duration::from_micros(u64::try_from(left).unwrap_or(0)));
    }
    // A failed rule is retried when its time comes, not only with the next pass.
    let retry = (!is_due && !rests_for.is_zero()).then_some(rests_for);
    Plan { is_time, next, look: next.or(retry) }
}

/// Returns the current state of a rule's window; `None` if the rule has none.
pub fn opening_of(rule: &Rule) -> Result<Option<Opening>, TtlError> {
    let window = rule.options.run_window.as_ref();
    window.map(|window| opening(window, &rule.options.time_zone, clock_timestamp())).transpose()
}

/// Returns the state of a window at an instant. The server converts the instant to local time.
pub fn opening(window: &Window, zone: &str, at: TimestampWithTimeZone) -> Result<Opening, TtlError> {
    let zone = window.zone().unwrap_or(zone);
    let local = spi::read(
        "SELECT extract(isodow FROM local)::integer, floor(extract(epoch FROM local::time))::integer
         FROM (SELECT $1 AT TIME ZONE $2) AS clock (local)",
        &[at.into(), zone.into()],
        |row| Ok((row.get::<i32>(1)?.unwrap_or(1), row.get::<i32>(2)?.unwrap_or(0))),
    )?;
    let (day, second) = local.first().copied().unwrap_or((1, 0));
    let opening = window.at(day.unsigned_abs(), second.unsigned_abs());
    // An hour may be repeated or skipped in between: never go back in time.
    let until = spi::read(
        "SELECT greatest((date_trunc('second', $1 AT TIME ZONE $2) + $3 * interval '1 second') AT TIME ZONE $2,
                         date_trunc('second', $1) + interval '1 second')",
        &[at.into(), zone.into(), i64::from(opening.changes_in).into()],
        |row| row.get(1),
    )?;
    let until = until.into_iter().flatten().next().unwrap_or(at);
    Ok(Opening { is_open: opening.is_open, until })
}
