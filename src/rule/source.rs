//! The kinds of column values that rows can expire by. Everything that depends on the kind is here: which SQL is
//! compared and indexed, with which constant, and what is written to change a row's expiry.

use super::pg_type::*;
use super::sql::operation;
use super::{Invalid, Ttl};

/// The kind of value that a rule's rows expire by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    TimestampTz,
    Timestamp,
    Date,
    /// Unix time, in a type whose largest value is `largest`.
    Integer {
        unit: Unit,
        largest: i64,
    },
    Numeric(Unit),
    Text(Notation),
    /// A JSON string or number.
    Json(Notation),
    UuidV7,
    /// A ULID in a uuid column.
    Ulid,
}

/// How an instant is written as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    Rfc3339,
    Unix(Unit),
}

/// The unit of a Unix time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Millis,
    Micros,
    Nanos,
}

impl Unit {
    pub const ALL: [Self; 4] = [Self::Seconds, Self::Millis, Self::Micros, Self::Nanos];

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Millis => "ms",
            Self::Micros => "us",
            Self::Nanos => "ns",
        }
    }

    pub fn nanos(self) -> i128 {
        10_i128.pow((3 + self.digits_to_micros()) as u32)
    }

    /// Returns how many zeros turn a number of this unit into microseconds; negative where zeros are removed.
    pub fn digits_to_micros(self) -> i32 {
        match self {
            Self::Seconds => 6,
            Self::Millis => 3,
            Self::Micros => 0,
            Self::Nanos => -3,
        }
    }

    /// Converts seconds to this unit, as a `numeric`.
    fn of(self, seconds: &str) -> String {
        operation(seconds, "*", &format!("{}::numeric", 1_000_000_000 / self.nanos()))
    }
}

/// The most milliseconds that fit into the 48 bits a uuid has for them.
const MOST_MILLIS: u64 = (1 << 48) - 1;

impl Source {
    pub const ACCEPTED: &str = "timestamp with time zone, timestamp without time zone, date, smallint, integer, bigint, \
                                numeric, text, character varying, jsonb, uuid, or a domain over one of them";

    /// Returns the kind of value for a type and a unit; `None` for types that never expire.
    pub fn of_type(oid: u32, unit: Option<&str>) -> Result<Option<Self>, Invalid> {
        let number = || match unit {
            None => Err(Invalid::UnitMissing),
            Some(name) => Unit::parse(name).ok_or_else(|| Invalid::Unit(name.into())),
        };
        let notation = || unit.map_or(Ok(Notation::Rfc3339), |_| number().map(Notation::Unix));
        let source = match oid {
            TIMESTAMPTZ => Self::TimestampTz,
            TIMESTAMP => Self::Timestamp,
            DATE => Self::Date,
            INT2 => Self::Integer { unit: number()?, largest: i16::MAX.into() },
            INT4 => Self::Integer { unit: number()?, largest: i32::MAX.into() },
            INT8 => Self::Integer { unit: number()?, largest: i64::MAX },
            NUMERIC => Self::Numeric(number()?),
            TEXT | VARCHAR | BPCHAR => Self::Text(notation()?),
            JSON | JSONB => Self::Json(notation()?),
            UUID if unit == Some("ulid") => Self::Ulid,
            UUID => Self::UuidV7,
            _ => return Ok(None),
        };
        let takes_unit = !matches!(source, Self::TimestampTz | Self::Timestamp | Self::Date | Self::UuidV7);
        match unit {
            Some(unit) if !takes_unit => Err(Invalid::UnitUnused(unit.into())),
            _ => Ok(Some(source)),
        }
    }

    /// Checks that the cutoff can be expressed in the column's own unit and type, now and, where it can now, later.
    pub fn check_range(self, present_micros: i64, ttl: Ttl) -> Result<(), Invalid> {
        let (unit, largest) = match self {
            Self::Integer { unit, largest } => (unit, i128::from(largest)),
            _ => return Ok(()),
        };
        let in_units = |span: i128| (i128::from(present_micros) - span) * 1_000 / unit.nanos();
        if in_units(ttl.shortest()) > largest || in_units(ttl.longest()) < i64::MIN.into() {
            return Err(Invalid::UnitRange(unit));
        }
        Ok(())
    }

    /// Returns the SQL that is compared with the cutoff, sorted by and indexed. `functions` is the extension's schema.
    pub fn compared(self, value: &str, functions: &str) -> String {
        match self {
            Self::Text(notation) => notation.read(value, functions),
            Self::Json(notation) => notation.read(&operation(value, "#>>", "'{}'::text[]"), functions),
            _ => value.to_owned(),
        }
    }

    /// Whether the value itself is compared, in its own order.
    pub fn compares_value(self) -> bool {
        !matches!(self, Self::Text(_) | Self::Json(_))
    }

    /// Returns the SQL type of the compared expression.
    pub fn type_name(self) -> &'static str {
        match self {
            Self::TimestampTz | Self::Text(_) | Self::Json(_) => "timestamptz",
            Self::Timestamp => "timestamp",
            Self::Date => "date",
            Self::Integer { .. } => "bigint",
            Self::Numeric(_) => "numeric",
            Self::UuidV7 | Self::Ulid => "uuid",
        }
    }

    /// Returns a further condition that a value must meet to expire at all.
    pub fn guard(self, value: &str, functions: &str) -> Option<String> {
        match self {
            Self::Integer { .. } => Some(operation(value, ">", "0")),
            Self::Numeric(_) => Some(operation(value, ">", "0::numeric")),
            Self::UuidV7 | Self::Ulid => Some(format!("({} IS NOT NULL)", self.instant(value, "", functions))),
            _ => None,
        }
    }

    /// Returns SQL for whether every value from `lower` (also SQL) upwards can expire, so that a whole range can be
    /// removed. `None` if a range cannot tell.
    pub fn can_expire_from(self, lower: &str) -> Option<String> {
        match self {
            Self::TimestampTz | Self::Timestamp | Self::Date => Some("true".into()),
            Self::Integer { .. } | Self::Numeric(_) => Some(format!("coalesce({lower} > 0, false)")),
            _ => None,
        }
    }

    /// Returns the largest value that has expired, given the cutoff as `instant` and as `local` time.
    pub fn bound(self, instant: &str, local: &str) -> String {
        let epoch = format!("extract(epoch FROM {instant})");
        match self {
            Self::TimestampTz | Self::Text(_) | Self::Json(_) => instant.to_owned(),
            Self::Timestamp => local.to_owned(),
            Self::Date => format!("({local})::date"),
            Self::Integer { unit, .. } => format!("pg_catalog.floor({})::bigint", unit.of(&epoch)),
            Self::Numeric(unit) => unit.of(&epoch),
            Self::UuidV7 | Self::Ulid => {
                let millis = format!("pg_catalog.floor({})", Unit::Millis.of(&epoch));
                let millis = format!("least(greatest({millis}, 0::numeric), {MOST_MILLIS}::numeric)::bigint");
                let digits = format!("pg_catalog.lpad(pg_catalog.to_hex({millis}), 12, '0'::text)");
                format!("pg_catalog.rpad({digits}, 32, 'f'::text)::uuid")
            }
        }
    }

    /// Returns the compared value as an instant; NULL for numbers that are not instants.
    pub fn instant(self, compared: &str, zone: &str, functions: &str) -> String {
        match self {
            Self::TimestampTz | Self::Text(_) | Self::Json(_) => compared.to_owned(),
            Self::Timestamp => format!("({compared} AT TIME ZONE {zone})"),
            Self::Date => format!("({compared}::timestamp AT TIME ZONE {zone})"),
            Self::Integer { unit, .. } | Self::Numeric(unit) => {
                format!("{functions}.ttl_instant({compared}::numeric, '{}')", unit.name())
            }
            Self::UuidV7 => format!("{functions}.ttl_instant({compared})"),
            Self::Ulid => format!("{functions}.ttl_instant({compared}, 'ulid')"),
        }
    }

    /// Returns the value for `instant`, or for the first instant after it that the type can represent, with `precision`
    /// fractional digits if limited. `None` if the value cannot be chosen.
    pub fn stored(self, instant: &str, zone: &str, functions: &str, precision: Option<u32>) -> Option<String> {
        let units = |unit: Unit| unit.of(&format!("extract(epoch FROM {instant})"));
        let whole = |unit: Unit| format!("greatest(pg_catalog.ceil({}), 1::numeric)::bigint", units(unit));
        Some(match self {
            Self::TimestampTz => raised(instant, precision),
            Self::Timestamp => raised(&format!("({instant} AT TIME ZONE {zone})"), precision),
            Self::Date => {
                let local = format!("({instant} AT TIME ZONE {zone})");
                let day = operation(&local, "-", "interval '1 microsecond'");
                operation(&format!("{day}::date"), "+", "1")
            }
            Self::Integer { unit, .. } => whole(unit),
            Self::Numeric(unit) => {
                let value = format!("greatest({}, 1::numeric)", units(unit));
                match precision {
                    None => value,
                    Some(digits) => {
                        let shift = format!("(10::numeric OPERATOR(pg_catalog.^) {digits}::numeric)");
                        let shifted = operation(&value, "*", &shift);
                        operation(&format!("pg_catalog.ceil({shifted})"), "/", &shift)
                    }
                }
            }
            Self::Text(Notation::Rfc3339) => format!("{functions}.ttl_rfc3339({instant})"),
            Self::Text(Notation::Unix(unit)) => format!("{}::text", whole(unit)),
            Self::Json(_) | Self::UuidV7 | Self::Ulid => return None,
        })
    }

    /// Returns the fractional digits that a type modifier allows, if it limits them.
    pub fn precision(self, typmod: i32) -> Option<u32> {
        match self {
            Self::TimestampTz | Self::Timestamp => u32::try_from(typmod).ok(),
            // The lower bits are the scale; a negative scale rounds left of the decimal point.
            Self::Numeric(_) if typmod >= 4 => u32::try_from(((typmod - 4) & 0x7ff ^ 1024) - 1024).ok(),
            _ => None,
        }
    }

    /// Returns how many characters the text of a present-day instant needs.
    pub fn text_length(self) -> Option<usize> {
        match self {
            Self::Text(Notation::Rfc3339) => Some("2026-11-16T05:00:00.000000Z".len()),
            Self::Text(Notation::Unix(unit)) => Some(10 + (9 - unit.nanos().ilog10()) as usize),
            _ => None,
        }
    }

    /// Returns a value other than NULL that never expires.
    pub fn never(self) -> Option<&'static str> {
        match self {
            Self::TimestampTz | Self::Timestamp | Self::Date => Some("'infinity'"),
            Self::Integer { .. } | Self::Numeric(_) => Some("0"),
            Self::Text(_) => Some("''"),
            Self::Json(_) | Self::UuidV7 | Self::Ulid => None,
        }
    }
}

/// Raises a timestamp so that a column with fewer fractional digits does not round it down.
fn raised(timestamp: &str, digits: Option<u32>) -> String {
    match digits {
        None | Some(6..) => timestamp.to_owned(),
        Some(digits) => {
            let less_than_half = 5 * 10_u32.pow(5 - digits) - 1;
            operation(timestamp, "+", &format!("interval '0:00:00.{less_than_half:06}'"))
        }
    }
}

impl Notation {
    fn read(self, text: &str, functions: &str) -> String {
        match self {
            Self::Rfc3339 => format!("{functions}.ttl_instant({text}::text)"),
            Self::Unix(unit) => format!("{functions}.ttl_instant({text}::text, '{}'::text)", unit.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_need_a_unit_and_instants_refuse_one() {
        assert_eq!(Source::of_type(TIMESTAMPTZ, None), Ok(Some(Source::TimestampTz)));
        assert_eq!(Source::of_type(INT8, None), Err(Invalid::UnitMissing));
        assert_eq!(Source::of_type(INT8, Some("h")), Err(Invalid::Unit("h".into())));
        assert_eq!(Source::of_type(DATE, Some("s")), Err(Invalid::UnitUnused("s".into())));
        assert_eq!(Source::of_type(NUMERIC, Some("ns")), Ok(Some(Source::Numeric(Unit::Nanos))));
    }

    #[test]
    fn text_is_rfc_3339_unless_it_has_a_unit() {
        assert_eq!(Source::of_type(TEXT, None), Ok(Some(Source::Text(Notation::Rfc3339))));
        assert_eq!(Source::of_type(JSONB, Some("ms")), Ok(Some(Source::Json(Notation::Unix(Unit::Millis)))));
    }

    #[test]
    fn a_uuid_is_version_7_unless_it_is_said_to_be_a_ulid() {
        assert_eq!(Source::of_type(UUID, None), Ok(Some(Source::UuidV7)));
        assert_eq!(Source::of_type(UUID, Some("ulid")), Ok(Some(Source::Ulid)));
        assert_eq!(Source::of_type(UUID, Some("s")), Err(Invalid::UnitUnused("s".into())));
    }

    #[test]
    fn other_types_do_not_expire() {
        let (time, bytea) = (1083, 17);
        for other in [BOOL, time, bytea] {
            assert_eq!(Source::of_type(other, None), Ok(None));
        }
    }

    #[test]
    fn a_unit_that_the_type_has_no_room_for_is_refused() {
        let present = 1_800_000_000_000_000;
        let check = |oid, unit: &str, seconds| {
            let source = Source::of_type(oid, Some(unit)).expect("a source").expect("a source");
            source.check_range(present, Ttl::from_seconds(seconds).expect("a TTL"))
        };
        assert_eq!(check(INT4, "s", 60), Ok(()));
        assert_eq!(check(INT4, "ms", 60), Err(Invalid::UnitRange(Unit::Millis)));
        assert_eq!(check(INT2, "s", 60), Err(Invalid::UnitRange(Unit::Seconds)));
        assert_eq!(check(INT2, "s", 1_799_990_000), Ok(()), "the cutoff is in 1970");
        assert_eq!(check(INT8, "ns", 60), Ok(()));
        let nanos = Source::Integer { unit: Unit::Nanos, largest: i64::MAX };
        let long = Ttl::new(12 * 5000, 0, 0).expect("a TTL");
        assert_eq!(nanos.check_range(present, long), Err(Invalid::UnitRange(Unit::Nanos)));
    }
}
