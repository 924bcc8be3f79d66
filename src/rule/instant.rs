//! Instants in other notations than PostgreSQL's own: as text, as a number, inside a uuid.
//!
//! All are microseconds since 1970. A value that cannot be read is `None`: such a row never expires. Fractions of a
//! microsecond round up, so that no row expires early.

use super::Unit;

/// PostgreSQL's epoch, the year 2000, in microseconds since 1970.
pub const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

/// Reads a complete, exact RFC 3339 timestamp: `2026-11-16T05:00:00.25+01:00`.
///
/// A leap second is accepted only at the end of a month in UTC, and is read as the second after it.
pub fn of_rfc3339(text: &str) -> Option<i64> {
    let mut rest = text.as_bytes();
    let year = digits(&mut rest, 4)?;
    expect(&mut rest, b"-")?;
    let month = digits(&mut rest, 2)?;
    expect(&mut rest, b"-")?;
    let day = digits(&mut rest, 2)?;
    expect(&mut rest, b"Tt")?;
    let hour = digits(&mut rest, 2)?;
    expect(&mut rest, b":")?;
    let minute = digits(&mut rest, 2)?;
    expect(&mut rest, b":")?;
    let second = digits(&mut rest, 2)?;
    let fraction = match expect(&mut rest, b".") {
        Some(_) => fraction(&mut rest, 6)?,
        None => 0,
    };
    let offset = match expect(&mut rest, b"Zz+-")? {
        b'Z' | b'z' => 0,
        sign => {
            let hours = digits(&mut rest, 2)?;
            expect(&mut rest, b":")?;
            let minutes = digits(&mut rest, 2)?;
            if hours > 23 || minutes > 59 {
                return None;
            }
            (hours * 60 + minutes) * if sign == b'-' { -60 } else { 60 }
        }
    };
    let is_date = (1..=12).contains(&month) && (1..=days_in_month(year, month)).contains(&day);
    if !rest.is_empty() || !is_date || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second - offset;
    let ends_a_month = seconds.rem_euclid(86_400) == 0 && date_of(seconds.div_euclid(86_400)).2 == 1;
    (second < 60 || ends_a_month).then_some(seconds * 1_000_000 + fraction)
}

/// Writes an instant so that it can be read again. `None` for a year without four digits: RFC 3339 cannot express it.
pub fn to_rfc3339(micros: i64) -> Option<String> {
    let (seconds, fraction) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    let (year, month, day) = date_of(seconds.div_euclid(86_400));
    let second = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    (0..=9999)
        .contains(&year)
        .then(|| format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:06}Z"))
}

/// Reads a Unix time, a decimal number of units. Zero and negative numbers are not instants.
pub fn of_unix(text: &str, unit: Unit) -> Option<i64> {
    let mut rest = text.as_bytes();
    let mut whole: i64 = 0;
    while let Some(digit) = rest.first().filter(|byte| byte.is_ascii_digit()) {
        whole = whole.checked_mul(10)?.checked_add(i64::from(digit - b'0'))?;
        rest = &rest[1..];
    }
    if rest.len() == text.len() {
        return None;
    }
    // Fractional digits count down to microseconds; the rest rounds up.
    let scale = unit.digits_to_micros();
    let fraction = match expect(&mut rest, b".") {
        Some(_) => fraction(&mut rest, scale.max(0) as u32)?,
        None => 0,
    };
    if !rest.is_empty() {
        return None;
    }
    let micros = match u32::try_from(scale) {
        Ok(scale) => whole.checked_mul(10_i64.pow(scale))?.checked_add(fraction)?,
        Err(_) => {
            let nanos_per_micro = 10_i64.pow(scale.unsigned_abs());
            (whole.checked_add(fraction)?.checked_add(nanos_per_micro - 1)?) / nanos_per_micro
        }
    };
    (micros > 0).then_some(micros)
}

/// Returns the instant inside a version 7 UUID. Other versions hold none.
pub fn of_uuid_v7(uuid: &[u8; 16]) -> Option<i64> {
    let is_v7 = uuid[6] >> 4 == 7 && uuid[8] >> 6 == 0b10;
    if is_v7 { of_ulid(uuid) } else { None }
}

/// Returns the instant inside a ULID: its first 48 bits are milliseconds.
pub fn of_ulid(ulid: &[u8; 16]) -> Option<i64> {
    let millis = ulid[..6].iter().fold(0, |millis, byte| millis << 8 | i64::from(*byte));
    (millis > 0).then_some(millis * 1_000)
}

/// Reads exactly this many digits.
fn digits(rest: &mut &[u8], count: usize) -> Option<i64> {
    let (digits, tail) = rest.split_at_checked(count)?;
    *rest = tail;
    digits.iter().try_fold(0, |number, byte| byte.is_ascii_digit().then(|| number * 10 + i64::from(byte - b'0')))
}

/// Reads one of these bytes.
fn expect(rest: &mut &[u8], bytes: &[u8]) -> Option<u8> {
    let (first, tail) = rest.split_first()?;
    bytes.contains(first).then(|| {
        *rest = tail;
        *first
    })
}

/// Reads one or more fractional digits, as units of `10^-scale`, rounded up.
fn fraction(rest: &mut &[u8], scale: u32) -> Option<i64> {
    let length = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, tail) = rest.split_at(length);
    *rest = tail;
    let kept = &digits[..length.min(scale as usize)];
    let number = kept.iter().fold(0, |number, byte| number * 10 + i64::from(byte - b'0'));
    let scaled = number * 10_i64.pow(scale - kept.len() as u32);
    let rounded_up = digits[kept.len()..].iter().any(|byte| *byte != b'0');
    (length > 0).then_some(scaled + i64::from(rounded_up))
}

fn days_in_month(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Counts in years that begin in March: the leap day comes last, and the days of whole months follow one formula.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year * 365 + year / 4 - year / 100 + day_of_year - 719_468
}

/// Returns year, month and day: the inverse of `days_since_1970`.
fn date_of(days_since_1970: i64) -> (i64, i64, i64) {
    let days = days_since_1970 + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let january_or_february = month >= 10;
    (
        era * 400 + year + i64::from(january_or_february),
        if january_or_february { month - 9 } else { month + 3 },
        day_of_month,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::{Timestamp, civil::Date, tz::Offset};
    use proptest::prelude::*;

    #[test]
    fn offsets_fractions_and_lower_case_are_read() {
        let noon = Some(1_767_268_800_000_000);
        assert_eq!(of_rfc3339("2026-01-01T12:00:00Z"), noon);
        assert_eq!(of_rfc3339("2026-01-01t12:00:00z"), noon);
        assert_eq!(of_rfc3339("2026-01-01T17:30:00.000+05:30"), noon);
        assert_eq!(of_rfc3339("2025-12-31T22:00:00-14:00"), noon);
        assert_eq!(of_rfc3339("2026-01-01T12:00:00-00:00"), noon, "an unknown offset is a known instant");
        assert_eq!(of_rfc3339("2026-01-01T12:00:00.5Z"), noon.map(|noon| noon + 500_000));
        assert_eq!(of_rfc3339("2026-01-01T12:00:00.0000001Z"), noon.map(|noon| noon + 1), "rounded up");
        assert_eq!(of_rfc3339("0000-01-01T00:00:00Z"), Some(-62_167_219_200_000_000));
    }

    #[test]
    fn a_leap_second_is_at_the_end_of_a_month_in_utc() {
        let new_year = of_rfc3339("2017-01-01T00:00:00Z");
        assert_eq!(of_rfc3339("2016-12-31T23:59:60Z"), new_year);
        assert_eq!(of_rfc3339("2016-12-31T15:59:60-08:00"), new_year);
        assert_eq!(of_rfc3339("2016-12-30T23:59:60Z"), None);
        assert_eq!(of_rfc3339("2016-12-31T23:58:60Z"), None);
        assert_eq!(of_rfc3339("2016-12-31T23:59:61Z"), None);
    }

    #[test]
    fn anything_else_is_not_an_instant() {
        for text in [
            "",
            "never",
            "2026-01-01",
            "2026-01-01 12:00:00Z",
            "2026-01-01T12:00:00",
            "2026-01-01T12:00Z",
            "2026-1-1T12:00:00Z",
            "2026-02-29T12:00:00Z",
            "2026-13-01T12:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T12:00:00.Z",
            "2026-01-01T12:00:00+0100",
            "2026-01-01T12:00:00+24:00",
            " 2026-01-01T12:00:00Z",
            "2026-01-01T12:00:00Z ",
            "+026-01-01T12:00:00Z",
            "２０２６-01-01T12:00:00Z",
        ] {
            assert_eq!(of_rfc3339(text), None, "{text}");
        }
    }

    #[test]
    fn unix_times_have_a_unit_and_are_positive() {
        assert_eq!(of_unix("1700000000", Unit::Seconds), Some(1_700_000_000_000_000));
        assert_eq!(of_unix("1700000000.25", Unit::Seconds), Some(1_700_000_000_250_000));
        assert_eq!(of_unix("1700000000123", Unit::Millis), Some(1_700_000_000_123_000));
        assert_eq!(of_unix("1700000000000001", Unit::Micros), Some(1_700_000_000_000_001));
        assert_eq!(of_unix("1700000000000001", Unit::Nanos), Some(1_700_000_000_001), "rounded up");
        for text in ["0", "0.0", "-1", "", ".5", "5.", "1e9", "1 ", "99999999999999999999", "9223372036854775807"] {
            assert_eq!(of_unix(text, Unit::Seconds), None, "{text}");
        }
    }

    #[test]
    fn only_version_7_of_the_usual_variant_holds_an_instant() {
        let v7 = 0x018b_cfe5_6800_7000_8000_0000_0000_0000_u128;
        assert_eq!(of_uuid_v7(&v7.to_be_bytes()), Some(1_700_000_000_000_000));
        assert_eq!(of_uuid_v7(&(v7 ^ 0x3000 << 64).to_be_bytes()), None, "version 4");
        assert_eq!(of_uuid_v7(&(v7 ^ 0x8000 << 48).to_be_bytes()), None, "another variant");
        assert_eq!(of_ulid(&(v7 ^ 0x3000 << 64).to_be_bytes()), Some(1_700_000_000_000_000));
        assert_eq!(of_ulid(&0_u128.to_be_bytes()), None);
    }

    proptest! {
        #[test]
        fn agrees_with_jiff_on_what_jiff_writes(
            micros in -62_000_000_000_000_000_i64..=253_000_000_000_000_000, minutes in -1439_i32..=1439,
        ) {
            let timestamp = Timestamp::from_microsecond(micros).expect("in range");
            let offset = Offset::from_seconds(minutes * 60).expect("in range");
            prop_assert_eq!(of_rfc3339(&timestamp.display_with_offset(offset).to_string()), Some(micros));
        }

        #[test]
        fn knows_the_days_that_jiff_knows(year in 0_i16..=9999, month in 0_i8..=13, day in 0_i8..=32) {
            let theirs = Date::new(year, month, day).ok().map(|date| {
                date.to_zoned(jiff::tz::TimeZone::UTC).expect("in range").timestamp().as_microsecond()
            });
            prop_assert_eq!(of_rfc3339(&format!("{year:04}-{month:02}-{day:02}T00:00:00Z")), theirs);
        }

        #[test]
        fn what_is_written_can_be_read(micros: i64, near in -62_000_000_000_000_000_i64..=253_000_000_000_000_000) {
            for micros in [micros, near] {
                prop_assert!(to_rfc3339(micros).is_none_or(|text| of_rfc3339(&text) == Some(micros)));
            }
            prop_assert!(to_rfc3339(near).is_some());
        }

        #[test]
        fn never_panics(text: String, near in "[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:.]{0,20}[Zz+-]?[0-9:]{0,5}") {
            of_rfc3339(&text);
            of_rfc3339(&near);
            for unit in Unit::ALL {
                of_unix(&text, unit);
                of_unix(&near, unit);
            }
        }

        #[test]
        fn a_unix_time_is_its_number_of_units(number in 1_i64..=9_000_000_000) {
            for unit in Unit::ALL {
                let nanos = i128::from(number) * unit.nanos();
                prop_assert_eq!(of_unix(&number.to_string(), unit).map(i128::from), Some((nanos + 999) / 1000));
            }
        }
    }
}
