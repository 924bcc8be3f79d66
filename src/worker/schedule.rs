//! When a rule may be swept: its window, and how often.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::spi;
use crate::rule::Window;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;

/// How a window stands, and until when.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    pub is_open: bool,
    pub until: TimestampWithTimeZone,
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
