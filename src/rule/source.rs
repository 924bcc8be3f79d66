//! What a column can hold so that a row can expire by it, or be marked by it.

/// `pg_type.oid` of PostgreSQL's own types, the same in every database.
const BOOL: u32 = 16;
const DATE: u32 = 1082;
const TIMESTAMP: u32 = 1114;
const TIMESTAMPTZ: u32 = 1184;

/// The kind of value a rule compares with its cutoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    TimestampTz,
    Timestamp,
    Date,
}

impl Source {
    pub const ACCEPTED: &str =
        "timestamp with time zone, timestamp without time zone, date, or a domain over one of them";

    pub fn of_type(oid: u32) -> Option<Self> {
        match oid {
            TIMESTAMPTZ => Some(Self::TimestampTz),
            TIMESTAMP => Some(Self::Timestamp),
            DATE => Some(Self::Date),
            _ => None,
        }
    }

    /// The SQL name of the type.
    pub fn type_name(self) -> &'static str {
        match self {
            Self::TimestampTz => "timestamptz",
            Self::Timestamp => "timestamp",
            Self::Date => "date",
        }
    }
}

/// How a soft delete marks a row, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The instant of the sweep, in a column that is NULL until then.
    Instant,
    /// `true`, in a column that is false or NULL until then.
    Flag,
}

impl Mark {
    pub const ACCEPTED: &str = "timestamp with time zone, timestamp without time zone or boolean";

    pub fn of_type(oid: u32) -> Option<Self> {
        match oid {
            TIMESTAMPTZ | TIMESTAMP => Some(Self::Instant),
            BOOL => Some(Self::Flag),
            _ => None,
        }
    }

    /// The value that marks a row.
    pub fn value(self) -> &'static str {
        match self {
            Self::Instant => "pg_catalog.clock_timestamp()",
            Self::Flag => "true",
        }
    }

    /// The condition under which a row is not yet marked; `column` is a quoted identifier.
    pub fn unmarked(self, column: &str) -> String {
        match self {
            Self::Instant => format!("({column} IS NULL)"),
            Self::Flag => format!("({column} IS NOT TRUE)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_instants_and_dates_expire() {
        assert_eq!(Source::of_type(TIMESTAMPTZ), Some(Source::TimestampTz));
        assert_eq!(Source::of_type(DATE), Some(Source::Date));
        let (int8, text, time) = (20, 25, 1083);
        for other in [int8, text, time, BOOL] {
            assert_eq!(Source::of_type(other), None);
        }
    }

    #[test]
    fn a_mark_is_an_instant_or_a_flag() {
        assert_eq!(Mark::of_type(BOOL).map(|mark| mark.unmarked("gone")), Some("(gone IS NOT TRUE)".into()));
        assert_eq!(Mark::of_type(TIMESTAMP).map(|mark| mark.unmarked("gone")), Some("(gone IS NULL)".into()));
        assert_eq!(Mark::of_type(DATE), None);
    }
}
