//! When a rule may be swept: its window, and how often.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::guc;
use crate::pg::spi;
use crate::rule::{Ttl, Window};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
use std::time::Duration;

/// How a window stands, and until when.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    pub is_open: bool,
    pub until: TimestampWithTimeZone,
}

/// What is to be done about a rule, and when.
pub struct Plan {
    /// Whether it is to be swept now.
    pub is_time: bool,
    /// How long it is until its next sweep, if it has times of its own.
    pub next: Option<Duration>,
    /// How long it is until somebody should look at it again, if that need not wait for the next pass.
    pub look: Option<Duration>,
}

/// Plans the next sweep of a rule, whose last began so long ago in this process. The catalog says when the rule is due; sweeps that found
/// nothing left no trace there.
pub fn plan(rule: &Rule, opening: Option<Opening>, is_pass: bool, last: Option<Duration>) -> Plan {
    let rested = last.unwrap_or(Duration::MAX);
    let (is_due, rests_for) = (rule.state.is_due, rule.state.rests_for());
    let mut next = None;
    let mut is_time = is_due && (is_pass || rested >= guc::naptime());
    if let Some(every) = rule.options.run_every.map(Ttl::estimate) {
        is_time = is_due && rested >= every;
        next = Some(if is_time { every } else { rests_for.max(every.saturating_sub(rested)) });
    }
    if let Some(closed) = opening.filter(|opening| !opening.is_open) {
        is_time = false;
        let left = i64::from(closed.until) - i64::from(clock_timestamp());
        next = Some(Duration::from_micros(u64::try_from(left).unwrap_or(0)));
    }
    // One that failed is tried again when its time comes, and not only with the next pass.
    let retry = (!is_due && !rests_for.is_zero()).then_some(rests_for);
    Plan { is_time, next, look: next.or(retry) }
}

/// How the window of a rule stands now; `None` if it has none.
pub fn opening_of(rule: &Rule) -> Result<Option<Opening>, TtlError> {
    let window = rule.options.run_window.as_ref();
    window.map(|window| opening(window, &rule.options.time_zone, clock_timestamp())).transpose()
}

/// How a window stands at an instant. The server knows what time it is then in a zone.
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
    // An hour that comes twice, or not at all, may lie between: never back in time.
    let until = spi::read(
        "SELECT greatest((date_trunc('second', $1 AT TIME ZONE $2) + $3 * interval '1 second') AT TIME ZONE $2,
                         date_trunc('second', $1) + interval '1 second')",
        &[at.into(), zone.into(), i64::from(opening.changes_in).into()],
        |row| row.get(1),
    )?;
    let until = until.into_iter().flatten().next().unwrap_or(at);
    Ok(Opening { is_open: opening.is_open, until })
}
