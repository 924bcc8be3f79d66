//! The statements that count what has expired.

use crate::pg::planner::ENGINE_TAG;
use crate::sweep::statement::Statements;

/// Which rows are read to tell how many would be removed.
#[derive(Clone, Copy)]
pub enum Look {
    /// At most `most` rows, in the order of an index, which may be partial on the filter.
    InOrder { most: i64, is_partial: bool },
    /// All rows, until `most` are found.
    Whole { most: i64 },
    /// The rows in a sample of the blocks.
    Sample { percent: f64 },
}

fn sample(percent: f64) -> String {
    format!("TABLESAMPLE SYSTEM ({percent}) REPEATABLE (1)")
}

impl Statements {
    /// Returns how many rows the planner expects to have expired, regardless of the filter.
    pub fn estimate_expired(&self) -> i64 {
        self.expected(&self.expired[0])
    }

    /// Counts the rows read and those of them that would be removed, with the first value and the bytes of the latter.
    pub fn count(&self, look: Look) -> String {
        let Self { leaf, compared, .. } = self;
        let (all, judgement) = (self.conditions(), self.judgement(None));
        let (sample, condition, rest) = match look {
            // The other conditions are checked afterwards: a filter that matches no row must not make this read the
            // whole index.
            Look::InOrder { most, is_partial: false } => {
                let condition = format!("WHERE {} ORDER BY {compared} LIMIT {most}", self.expired[0]);
                (String::new(), condition, format!("({judgement}) IS TRUE"))
            }
            Look::InOrder { most, is_partial: true } => {
                (String::new(), format!("WHERE {all} ORDER BY {compared} LIMIT {most}"), "true".into())
            }
            Look::Whole { most } => (String::new(), format!("WHERE {judgement} LIMIT {most}"), "true".into()),
            Look::Sample { percent } => (sample(percent), String::new(), format!("({judgement}) IS TRUE")),
        };
        format!(
            "{ENGINE_TAG}SELECT count(*), count(*) FILTER (WHERE goes),
                          (array_agg(compared::text ORDER BY compared) FILTER (WHERE goes))[1], sum(bytes) FILTER (WHERE goes)
             FROM (SELECT {compared} AS compared, pg_column_size(leaf.*) AS bytes, {rest} AS goes
                   FROM ONLY {leaf} AS leaf {sample} {condition}) AS seen"
        )
    }

    /// Counts the rows that would be removed, and all rows, between two TIDs.
    pub fn share(&self) -> String {
        let goes = self.judgement(self.after.as_deref().map(|value| self.beyond(value)));
        format!(
            "{ENGINE_TAG}SELECT count(*) FILTER (WHERE ({goes}) IS TRUE), count(*) FROM ONLY {} WHERE ctid >= $1 AND ctid <= $2",
            self.leaf
        )
    }

    /// Counts all rows or a sample of them, and the unreadable values if there can be any.
    pub fn count_all(&self, percent: Option<f64>) -> String {
        let Self { leaf, compared, value, .. } = self;
        let sample = percent.map_or_else(String::new, sample);
        let unreadable = if self.source.compares_value() {
            "NULL::bigint".into()
        } else {
            format!("count(*) FILTER (WHERE {value} IS NOT NULL AND {compared} IS NULL)")
        };
        format!("{ENGINE_TAG}SELECT count(*), {unreadable} FROM ONLY {leaf} AS leaf {sample}")
    }
}
