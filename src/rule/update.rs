//! What a rule does to an expired row that stays: it is marked as deleted, or some of its columns are cleared. Either
//! happens once.

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
    fn unmarked(self, column: &str) -> String {
        match self {
            Self::Instant => format!("({column} IS NULL)"),
            Self::Flag => format!("({column} IS NOT TRUE)"),
        }
    }
}

/// The change of an expired row that stays.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// A soft delete: the column, quoted, and its mark.
    Mark(String, Mark),
    Clear(Vec<Cleared>),
}

/// A column that goes back to its default.
#[derive(Clone, Debug, PartialEq)]
pub struct Cleared {
    /// Quoted.
    pub column: String,
    /// A constant, in SQL.
    pub default: String,
}

impl Cleared {
    pub fn is_null(&self) -> bool {
        self.default == "NULL"
    }
}

impl Update {
    /// Returns the condition for a row that is still to be updated, in parentheses.
    pub fn outstanding(&self) -> String {
        match self {
            Self::Mark(column, mark) => mark.unmarked(column),
            Self::Clear(columns) => {
                let differs = |it: &Cleared| format!("{} IS DISTINCT FROM {}", it.column, it.default);
                format!("({})", columns.iter().map(differs).collect::<Vec<_>>().join(" OR "))
            }
        }
    }

    /// Returns the assignments of the UPDATE.
    pub fn assignments(&self) -> String {
        match self {
            Self::Mark(column, mark) => format!("{column} = {}", mark.value()),
            Self::Clear(columns) => {
                let clear = |it: &Cleared| format!("{} = {}", it.column, it.default);
                columns.iter().map(clear).collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// The word for the update in a notification.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mark(..) => "mark",
            Self::Clear(_) => "clear",
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

    #[test]
    fn columns_are_cleared_until_all_have_their_defaults() {
        let cleared = |column: &str, default: &str| Cleared { column: column.into(), default: default.into() };
        let update = Update::Clear(vec![cleared("email", "NULL"), cleared("\"No\"", "0")]);
        assert_eq!(update.outstanding(), "(email IS DISTINCT FROM NULL OR \"No\" IS DISTINCT FROM 0)");
        assert_eq!(update.assignments(), "email = NULL, \"No\" = 0");
    }
}
