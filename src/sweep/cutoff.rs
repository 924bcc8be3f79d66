//! The instant up to which rows have expired.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::spi;
use crate::rule::Source;
use pgrx::datum::{Interval, TimestampWithTimeZone};

/// The constant that the rule's column is compared with, as an SQL literal, and the present. To be called with the
/// rule's time zone in force: it decides where days and months end, and how a local time is read.
pub fn of(rule: &Rule) -> Result<(String, TimestampWithTimeZone), TtlError> {
    let (months, days, micros) = rule.options.expire_after.fields();
    // While the clock is being put back a local time happens twice, and PostgreSQL reads it as the second. During the
    // first, `local` would let rows expire that are read as later: it is taken back by the difference.
    let sql = format!(
        "SELECT quote_literal({value}) || '::{type_name}', present
         FROM (SELECT present, present - ($1 + $2) AS instant FROM clock_timestamp() AS present) AS clock,
              LATERAL (SELECT instant::timestamp AS local) AS wall,
              LATERAL (SELECT local - greatest(local::timestamptz - instant, interval '0') AS safe) AS bound",
        value = match rule.source {
            Source::TimestampTz => "instant",
            Source::Timestamp => "safe",
            Source::Date => "safe::date",
        },
        type_name = rule.source.type_name(),
    );
    let ttl = [Interval::new(months, 0, 0).ok().into(), Interval::new(0, days, micros).ok().into()];
    let found = spi::read(&sql, &ttl, |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?)))?;
    match found.into_iter().next() {
        Some((cutoff, Some(present))) => Ok((cutoff, present)),
        _ => Err(TtlError::Spi(pgrx::spi::Error::InvalidPosition)),
    }
}
