//! How a soft-deleted row is told from a live one.

use super::pg_type::{BOOL, TIMESTAMP, TIMESTAMPTZ};

/// The mark that a soft delete sets on a row, once.
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

    /// Returns the value that marks a row.
    pub fn value(self) -> &'static str {
        match self {
            Self::Instant => "pg_catalog.clock_timestamp()",
            Self::Flag => "true",
        }
    }

    /// Returns the condition for a row that is not marked yet; `column` is a quoted identifier.
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
    use crate::rule::pg_type::DATE;

    #[test]
    fn a_mark_is_an_instant_or_a_flag() {
        assert_eq!(Mark::of_type(BOOL).map(|mark| mark.unmarked("gone")), Some("(gone IS NOT TRUE)".into()));
        assert_eq!(Mark::of_type(TIMESTAMP).map(|mark| mark.unmarked("gone")), Some("(gone IS NULL)".into()));
        assert_eq!(Mark::of_type(DATE), None);
    }
}
