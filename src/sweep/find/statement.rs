//! The statements that look for expired rows.

use crate::pg::planner::ENGINE_TAG;
use crate::sweep::statement::Statements;

impl Statements {
    /// The next places in the order of expiry, with all that share the last value, so that the next harvest can start
    /// strictly behind it. Those of all expired rows, unless the filter is asked.
    pub fn in_order(&self, watermark: Option<&str>, wanted: usize, is_filtered: bool) -> String {
        let Self { leaf, compared, .. } = self;
        let beyond = watermark.or(self.after.as_deref()).map(|value| self.beyond(value));
        let filter = self.filter.iter().filter(|_| is_filtered).cloned();
        let conditions = self.expired.iter().cloned().chain(filter).chain(beyond).collect::<Vec<_>>().join(" AND ");
        format!(
            "{ENGINE_TAG}SELECT ctid, {compared} FROM ONLY {leaf} WHERE {conditions}
             ORDER BY {compared} FETCH FIRST {wanted} ROWS WITH TIES"
        )
    }

    /// The same for the rows beyond a value, which is the first parameter, and as many as the second says: a plan that serves all batches.
    pub fn next_in_order(&self) -> String {
        let Self { leaf, compared, .. } = self;
        let (conditions, type_name) = (self.conditions(), self.source.type_name());
        format!(
            "{ENGINE_TAG}SELECT ctid, {compared} FROM ONLY {leaf} WHERE {conditions} AND {compared} > CAST($1 AS {type_name})
             ORDER BY {compared} FETCH FIRST ($2) ROWS WITH TIES"
        )
    }

    /// The places in a range of blocks, the last one exclusive.
    pub fn in_blocks(&self, from: u32, to: u32) -> String {
        let judgement = self.judgement(self.after.as_deref().map(|value| self.beyond(value)));
        format!("{} AND {judgement}", self.all_in_blocks(from, to))
    }

    /// The places of all rows there.
    pub fn all_in_blocks(&self, from: u32, to: u32) -> String {
        format!("{ENGINE_TAG}SELECT ctid FROM ONLY {} WHERE ctid >= '({from},0)' AND ctid < '({to},0)'", self.leaf)
    }

    /// How many rows the planner expects to go.
    pub fn estimate(&self) -> i64 {
        self.expected(&self.conditions())
    }
}
