//! How long a row lives.

use super::{Invalid, sql};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::time::Duration;

const MICROS_PER_SECOND: i128 = 1_000_000;
const MICROS_PER_DAY: i128 = 24 * 3600 * MICROS_PER_SECOND;

/// The longest time to live: PostgreSQL's timestamps begin in 4713 BC, so a cutoff this far back still exists.
const LONGEST: i128 = 6_000 * 366 * MICROS_PER_DAY;

/// A time to live, in the three fields of a PostgreSQL interval.
///
/// Months and days are kept as they are: "1 month" ends on the same day of the next month in the rule's time zone,
/// however many seconds that takes. Zero means that the column itself holds the instant of expiry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Ttl {
    months: i32,
    days: i32,
    micros: i64,
}

impl Ttl {
    pub fn new(months: i32, days: i32, micros: i64) -> Result<Self, Invalid> {
        let ttl = Self { months, days, micros };
        if (months, days, micros) != (0, 0, 0) && ttl.shortest() <= 0 {
            return Err(Invalid::NegativeTtl(ttl));
        }
        if ttl.longest() > LONGEST {
            return Err(Invalid::TtlTooLong(ttl));
        }
        Ok(ttl)
    }

    pub fn from_seconds(seconds: i32) -> Result<Self, Invalid> {
        Self::new(0, 0, i64::from(seconds) * MICROS_PER_SECOND as i64)
    }

    pub fn fields(self) -> (i32, i32, i64) {
        (self.months, self.days, self.micros)
    }

    pub fn is_zero(self) -> bool {
        self == Self::default()
    }

    /// Whether the length is the same whenever the time begins.
    pub fn is_of_fixed_length(self) -> bool {
        (self.months, self.days) == (0, 0)
    }

    /// Returns the approximate length, with a month counted as 30 days.
    pub fn estimate(self) -> Duration {
        let micros = (i128::from(self.months) * 30 + i128::from(self.days)) * MICROS_PER_DAY + i128::from(self.micros);
        Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    }

    /// Returns SQL for the instant this long after `instant`, also SQL. `zone`, a literal, says where days begin.
    pub fn after(self, instant: &str, zone: &str) -> String {
        self.shift(instant, "+", zone)
    }

    /// Returns SQL for the instant this long before `instant`.
    pub fn before(self, instant: &str, zone: &str) -> String {
        self.shift(instant, "-", zone)
    }

    /// Shifts as PostgreSQL adds an interval to a timestamptz, whatever the session's time zone: months and days by the
    /// calendar, then the rest by the clock.
    fn shift(self, instant: &str, sign: &str, zone: &str) -> String {
        let (months, days, micros) = self.fields();
        let mut shifted = instant.to_owned();
        if !self.is_of_fixed_length() {
            let calendar = format!("interval '{months} months {days} days'");
            let local = sql::operation(&format!("({instant} AT TIME ZONE {zone})"), sign, &calendar);
            shifted = format!("({local} AT TIME ZONE {zone})");
        }
        if micros != 0 {
            shifted = sql::operation(&shifted, sign, &format!("interval '{}'", Clock(micros)));
        }
        shifted
    }

    /// Returns the fewest microseconds this can span: in the shortest months, with clocks set forward on the way.
    pub(super) fn shortest(self) -> i128 {
        let month = if self.months < 0 { 31 } else { 28 } * MICROS_PER_DAY;
        let calendar = i128::from(self.months) * month + i128::from(self.days) * MICROS_PER_DAY;
        let clock_change = if (self.months, self.days) == (0, 0) { 0 } else { MICROS_PER_DAY / 24 };
        calendar + i128::from(self.micros) - clock_change
    }

    pub(super) fn longest(self) -> i128 {
        [i128::from(self.months) * 31 * MICROS_PER_DAY, i128::from(self.days) * MICROS_PER_DAY, i128::from(self.micros)]
            .into_iter()
            .filter(|part| *part > 0)
            .sum()
    }
}

/// Microseconds as hours, minutes and seconds, which PostgreSQL reads exactly.
struct Clock(i64);

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let (micros, second) = (self.0.unsigned_abs(), MICROS_PER_SECOND as u64);
        let seconds = micros / second;
        write!(f, "{sign}{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)?;
        match micros % second {
            0 => Ok(()),
            fraction => write!(f, ".{fraction:06}"),
        }
    }
}

impl fmt::Display for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let mut push = |count: i128, unit: &str| {
            if count != 0 {
                parts.push(format!("{count} {unit}{}", if count.abs() == 1 { "" } else { "s" }));
            }
        };
        let micros = i128::from(self.micros);
        push(self.months.into(), "month");
        push(self.days.into(), "day");
        push(micros / (3600 * MICROS_PER_SECOND), "hour");
        push(micros / (60 * MICROS_PER_SECOND) % 60, "minute");
        push(micros / MICROS_PER_SECOND % 60, "second");
        push(micros % MICROS_PER_SECOND, "microsecond");
        if parts.is_empty() { f.write_str("0 seconds") } else { f.write_str(&parts.join(" ")) }
    }
}

impl Serialize for Ttl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Reads what `Display` writes, and intervals as PostgreSQL prints them in its verbose style.
impl TryFrom<String> for Ttl {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let unreadable = || format!("\"{text}\" is not a time to live");
        let verbose = text.trim_start_matches('@').trim();
        let (fields, sign) = verbose.strip_suffix("ago").map_or((verbose, 1), |fields| (fields, -1));
        let words: Vec<_> = fields.split_whitespace().collect();
        let (mut months, mut days, mut micros) = (0_i64, 0_i64, 0_i64);
        for pair in words.chunks(2).filter(|pair| *pair != ["0"]) {
            let [number, unit] = pair else { return Err(unreadable()) };
            let count = |scale: i64| number.parse::<i64>().ok()?.checked_mul(scale * sign);
            let (field, count) = match unit.trim_end_matches('s') {
                "year" => (&mut months, count(12)),
                "mon" | "month" => (&mut months, count(1)),
                "day" => (&mut days, count(1)),
                "hour" => (&mut micros, count(3_600_000_000)),
                "min" | "minute" => (&mut micros, count(60_000_000)),
                "sec" | "second" => (&mut micros, seconds(number).and_then(|micros| micros.checked_mul(sign))),
                "microsecond" => (&mut micros, count(1)),
                _ => return Err(unreadable()),
            };
            *field = count.and_then(|count| field.checked_add(count)).ok_or_else(unreadable)?;
        }
        let narrow = |field| i32::try_from(field).map_err(|_| unreadable());
        Self::new(narrow(months)?, narrow(days)?, micros).map_err(|invalid| invalid.to_string())
    }
}

/// Converts seconds with up to six fractional digits to microseconds.
fn seconds(number: &str) -> Option<i64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: i64 = format!("{fraction:0<6}").parse().ok().filter(|_| fraction.len() <= 6)?;
    let fraction = if whole.starts_with('-') { -digits } else { digits };
    whole.parse::<i64>().ok()?.checked_mul(1_000_000)?.checked_add(fraction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_postgres_prints() {
        let read = |text: &str| Ttl::try_from(text.to_owned()).map(Ttl::fields);
        assert_eq!(read("@ 1 year 2 mons -3 days 4 hours 5 mins 6.7 secs"), Ok((14, -3, 14_706_700_000)));
        assert_eq!(read("@ 1 day -0.5 secs"), Ok((0, 1, -500_000)));
        assert_eq!(read("@ 0"), Ok((0, 0, 0)));
        assert!(read("@ 1 day ago").is_err_and(|message| message.contains("must not be negative")));
        for text in ["1", "day", "1 fortnight", "1.5 days", "1 sec 2", "99999999999 mons", "1.2345678 secs"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn zero_is_allowed_and_means_the_column_holds_the_expiry() {
        assert_eq!(Ttl::from_seconds(0).map(Ttl::fields), Ok((0, 0, 0)));
    }

    #[test]
    fn negative_is_refused_in_every_field() {
        for (months, days, micros) in [(-1, 0, 0), (0, -1, 0), (0, 0, -1)] {
            assert!(matches!(Ttl::new(months, days, micros), Err(Invalid::NegativeTtl(_))));
        }
    }

    #[test]
    fn a_mix_of_signs_is_judged_by_the_shortest_span_it_can_have() {
        assert!(Ttl::new(0, 1, -3_600_000_000).is_ok(), "a day less an hour");
        assert!(Ttl::new(1, -27, 0).is_ok(), "a month less 27 days is a positive span even in February");
        assert!(Ttl::new(1, -28, 0).is_err(), "a month less 28 days may be nothing");
    }

    #[test]
    fn months_stay_months() {
        assert_eq!(Ttl::new(1, 0, 0).map(Ttl::fields), Ok((1, 0, 0)));
        assert_ne!(Ttl::new(1, 0, 0), Ttl::new(0, 30, 0));
    }

    #[test]
    fn a_cutoff_before_the_first_timestamp_is_refused() {
        assert!(matches!(Ttl::new(12 * 7000, 0, 0), Err(Invalid::TtlTooLong(_))));
        assert!(matches!(Ttl::new(i32::MAX, i32::MAX, i64::MAX), Err(Invalid::TtlTooLong(_))));
        assert!(Ttl::new(12 * 5000, 0, 0).is_ok());
    }

    #[test]
    fn calendar_units_are_shifted_in_the_time_zone_and_the_rest_by_the_clock() {
        let shifted = |months, days, micros| Ttl::new(months, days, micros).map(|ttl| ttl.before("t", "'UTC'"));
        assert_eq!(shifted(0, 0, 0), Ok("t".into()));
        assert_eq!(shifted(0, 0, 3_661_000_001), Ok("(t OPERATOR(pg_catalog.-) interval '1:01:01.000001')".into()));
        let days = "(((t AT TIME ZONE 'UTC') OPERATOR(pg_catalog.-) interval '0 months 2 days') AT TIME ZONE 'UTC')";
        assert_eq!(shifted(0, 2, 0), Ok(days.into()));
        assert_eq!(shifted(0, 2, -1_000_000), Ok(format!("({days} OPERATOR(pg_catalog.-) interval '-0:00:01')")));
    }

    #[test]
    fn reads_as_a_postgres_user_would_write_it() {
        assert_eq!(Ttl::new(1, 2, 5_400_000_000).map(|t| t.to_string()), Ok("1 month 2 days 1 hour 30 minutes".into()));
        assert_eq!(Ttl::from_seconds(0).map(|t| t.to_string()), Ok("0 seconds".into()));
    }

    proptest! {
        #[test]
        fn never_panics_and_never_accepts_a_negative_total(months: i32, days: i32, micros: i64) {
            if let Ok(ttl) = Ttl::new(months, days, micros) {
                prop_assert!(ttl.shortest() >= 0);
                prop_assert!(ttl.longest() <= LONGEST);
            }
        }

        #[test]
        fn what_is_written_can_be_read(months in 0..60_000, days in 0..3_000, micros in 0..i64::MAX / 64) {
            if let Ok(ttl) = Ttl::new(months, days, micros) {
                prop_assert_eq!(Ttl::try_from(ttl.to_string()), Ok(ttl));
            }
        }

        #[test]
        fn whole_seconds_are_exact(seconds in 0..=i32::MAX) {
            prop_assert_eq!(Ttl::from_seconds(seconds).map(Ttl::fields), Ok((0, 0, i64::from(seconds) * 1_000_000)));
        }
    }
}
