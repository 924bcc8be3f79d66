//! The instant up to which rows have expired.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::spi;
use pgrx::datum::TimestampWithTimeZone;

pub struct Cutoff {
    /// The constant that the rule's values are compared with, in SQL.
    pub literal: String,
    pub instant: Option<TimestampWithTimeZone>,
    /// When the cutoff was computed.
    pub present: TimestampWithTimeZone,
}

/// Returns the cutoff of a rule as of now.
pub fn of(rule: &Rule) -> Result<Cutoff, TtlError> {
    let sql = rule.predicate.expiry.cutoff("clock_timestamp()");
    let found = spi::read(&sql, &[], |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?, row.get(3)?)))?;
    match found.into_iter().next() {
        Some((literal, instant, Some(present))) => Ok(Cutoff { literal, instant, present }),
        _ => Err(TtlError::Spi(pgrx::spi::Error::InvalidPosition)),
    }
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use crate::pg::spi;
    use crate::rule::{Expiry, Source, Ttl, Unit};
    use pgrx::datum::Interval;
    use pgrx::{Spi, pg_test};

    /// The cutoff in New York, where clocks change at 2:00 on 8 March and 1 November 2026.
    fn cutoff(source: Source, present: &str, ttl: &str) -> String {
        Spi::run("SET TimeZone = 'America/New_York'; SET DateStyle = 'ISO, YMD'").unwrap();
        let ttl = Spi::get_one::<Interval>(&format!("SELECT interval '{ttl}'")).unwrap().unwrap();
        let ttl = Ttl::new(ttl.months(), ttl.days(), ttl.micros()).unwrap();
        let sql = Expiry::new(source, "v".into(), ttl, "America/New_York", "public")
            .cutoff(&format!("timestamptz '{present}'"));
        // The rule's time zone counts, not the session's.
        let [elsewhere, here] = ["Asia/Tokyo", "America/New_York"].map(|session| {
            Spi::run(&format!("SET TimeZone = '{session}'")).unwrap();
            spi::read(&sql, &[], |row| row.get::<String>(1)).unwrap().remove(0).unwrap()
        });
        assert_eq!(Spi::get_one(&format!("SELECT {elsewhere} = {here}")), Ok(Some(true)));
        here
    }

    #[pg_test]
    fn numbers_and_uuids_have_a_cutoff_in_their_own_unit() {
        let (present, ttl) = ("2026-11-16 05:00:00.987654Z", "1 hour");
        let integer = |unit| Source::Integer { unit, largest: i64::MAX };
        assert_eq!(cutoff(integer(Unit::Seconds), present, ttl), "'1794801600'::bigint");
        assert_eq!(cutoff(integer(Unit::Nanos), present, ttl), "'1794801600987654000'::bigint");
        assert_eq!(cutoff(integer(Unit::Seconds), "1969-12-31 23:00:00.5Z", "0"), "'-3600'::bigint", "rounded down");
        assert_eq!(cutoff(Source::Numeric(Unit::Millis), present, ttl), "'1794801600987.654000'::numeric");
        assert_eq!(cutoff(Source::UuidV7, present, ttl), "'01a1e283-09db-ffff-ffff-ffffffffffff'::uuid");
        assert_eq!(cutoff(Source::Ulid, present, "70 years"), "'00000000-0000-ffff-ffff-ffffffffffff'::uuid");
    }

    #[pg_test]
    fn an_hour_is_an_hour_when_clocks_are_put_forward() {
        // At 3:10 a row written at 1:50 is 20 minutes old.
        assert_eq!(cutoff(Source::Timestamp, "2026-03-08 03:10-04", "1 hour"), "'2026-03-08 01:10:00'::timestamp");
    }

    #[pg_test]
    fn a_local_time_that_happens_twice_is_the_second() {
        let (first, second) = ("2026-11-01 05:40Z", "2026-11-01 06:40Z");
        assert_eq!(cutoff(Source::Timestamp, first, "0"), "'2026-11-01 00:40:00'::timestamp", "1:40 is yet to come");
        assert_eq!(cutoff(Source::Timestamp, second, "0"), "'2026-11-01 01:40:00'::timestamp");
    }

    #[pg_test]
    fn days_and_months_end_in_the_time_zone() {
        assert_eq!(
            cutoff(Source::TimestampTz, "2026-03-08 12:00-04", "1 day"),
            "'2026-03-07 12:00:00-05'::timestamptz"
        );
        assert_eq!(
            cutoff(Source::TimestampTz, "2026-03-31 12:00-04", "1 month"),
            "'2026-02-28 12:00:00-05'::timestamptz"
        );
        assert_eq!(
            cutoff(Source::Date, "2026-03-09 03:00Z", "1 day"),
            "'2026-03-07'::date",
            "it is still the 8th there"
        );
    }
}
