//! What a column can hold so that a row can expire by it.

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

    /// From the name of a base type in `pg_catalog`, as `pg_type.typname` has it.
    pub fn of_type(name: &str) -> Option<Self> {
        match name {
            "timestamptz" => Some(Self::TimestampTz),
            "timestamp" => Some(Self::Timestamp),
            "date" => Some(Self::Date),
            _ => None,
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

    pub fn of_type(name: &str) -> Option<Self> {
        match name {
            "timestamptz" | "timestamp" => Some(Self::Instant),
            "bool" => Some(Self::Flag),
            _ => None,
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
        assert_eq!(Source::of_type("timestamptz"), Some(Source::TimestampTz));
        assert_eq!(Source::of_type("date"), Some(Source::Date));
        for name in ["int8", "text", "time", "interval", "abstime"] {
            assert_eq!(Source::of_type(name), None);
        }
    }

    #[test]
    fn a_mark_is_an_instant_or_a_flag() {
        assert_eq!(Mark::of_type("bool").map(|mark| mark.unmarked("gone")), Some("(gone IS NOT TRUE)".into()));
        assert_eq!(Mark::of_type("timestamp").map(|mark| mark.unmarked("gone")), Some("(gone IS NULL)".into()));
        assert_eq!(Mark::of_type("int4"), None);
    }
}
