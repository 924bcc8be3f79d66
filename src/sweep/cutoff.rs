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
    let ttl = [Interval::new(months, 0, 0).ok().into(), Interval::new(0, days, micros).ok().into()];
    let sql = query(rule.source, "clock_timestamp()");
    let found = spi::read(&sql, &ttl, |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?)))?;
    match found.into_iter().next() {
        Some((cutoff, Some(present))) => Ok((cutoff, present)),
        _ => Err(TtlError::Spi(pgrx::spi::Error::InvalidPosition)),
    }
}

/// Subtracts a TTL, the sum of its parameters, from the present.
///
/// While the clock is being put back a local time happens twice, and PostgreSQL reads it as the second. During the first,
/// `local` would let rows expire that are read as later: it is taken back by the difference.
fn query(source: Source, present: &str) -> String {
    format!(
        "SELECT quote_literal({value}) || '::{type_name}', present
         FROM (SELECT present, present - ($1 + $2) AS instant FROM (SELECT {present} AS present) AS once) AS clock,
              LATERAL (SELECT instant::timestamp AS local) AS wall,
              LATERAL (SELECT local - greatest(local::timestamptz - instant, interval '0') AS safe) AS bound",
        value = match source {
            Source::TimestampTz => "instant",
            Source::Timestamp => "safe",
            Source::Date => "safe::date",
        },
        type_name = source.type_name(),
    )
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use super::{Interval, Source, query};
    use crate::pg::spi;
    use pgrx::{Spi, pg_test};

    /// The cutoff in New York, where clocks change at 2:00 on 8 March and 1 November 2026.
    fn cutoff(source: Source, present: &str, ttl: &str) -> String {
        Spi::run("SET TimeZone = 'America/New_York'; SET DateStyle = 'ISO, YMD'").unwrap();
        let ttl = Spi::get_one::<Interval>(&format!("SELECT interval '{ttl}'")).unwrap();
        let sql = query(source, &format!("timestamptz '{present}'"));
        let args = [ttl.into(), Interval::new(0, 0, 0).ok().into()];
        spi::read(&sql, &args, |row| row.get::<String>(1)).unwrap().remove(0).unwrap()
    }

    #[pg_test]
    fn an_hour_is_an_hour_when_clocks_are_put_forward() {
        // At 3:10 a row written at 1:50 is 20 minutes old.
        assert_eq!(cutoff(Source::Timestamp, "2026-03-08 03:10", "1 hour"), "'2026-03-08 01:10:00'::timestamp");
    }

    #[pg_test]
    fn a_local_time_that_happens_twice_is_the_second() {
        let (first, second) = ("2026-11-01 05:40Z", "2026-11-01 06:40Z");
        assert_eq!(cutoff(Source::Timestamp, first, "0"), "'2026-11-01 00:40:00'::timestamp", "1:40 is yet to come");
        assert_eq!(cutoff(Source::Timestamp, second, "0"), "'2026-11-01 01:40:00'::timestamp");
    }

    #[pg_test]
    fn days_and_months_end_in_the_time_zone() {
        assert_eq!(cutoff(Source::TimestampTz, "2026-03-08 12:00", "1 day"), "'2026-03-07 12:00:00-05'::timestamptz");
        assert_eq!(cutoff(Source::TimestampTz, "2026-03-31 12:00", "1 month"), "'2026-02-28 12:00:00-05'::timestamptz");
        assert_eq!(
            cutoff(Source::Date, "2026-03-09 03:00Z", "1 day"),
            "'2026-03-07'::date",
            "it is still the 8th there"
        );
    }
}
