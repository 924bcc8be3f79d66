//! The statements that search for expired rows.

use crate::pg::planner::ENGINE_TAG;
use crate::sweep::statement::{Statements, Which};

impl Statements {
    /// Selects the next TIDs in expiry order, with all that share the last value, so that the next harvest can start
    /// strictly behind it. Covers all expired rows unless `is_filtered`.
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

    /// Like [`Self::in_order`], but takes the value to start behind and the number of rows as parameters, so that one
    /// plan serves all batches.
    pub fn next_in_order(&self) -> String {
        self.next("ctid, ")
    }

    /// Like [`Self::next_in_order`], but selects values alone, for which an index that is in memory is often enough.
    pub fn next_values(&self) -> String {
        self.next("")
    }

    fn next(&self, also: &str) -> String {
        let Self { leaf, compared, .. } = self;
        format!(
            "{ENGINE_TAG}SELECT {also}{compared} FROM ONLY {leaf} WHERE {}
             ORDER BY {compared} FETCH FIRST ($2) ROWS WITH TIES",
            self.expired_of(Which::Beyond)
        )
    }

    /// Selects the TIDs of rows to remove in a range of blocks, `to` excluded.
    pub fn in_blocks(&self, from: u32, to: u32) -> String {
        let judgement = self.judgement(self.after.as_deref().map(|value| self.beyond(value)));
        format!("{} AND {judgement}", self.all_in_blocks(from, to))
    }

    /// Selects the TIDs of rows in a range of blocks, `to` excluded, that an index with this predicate has up to the
    /// cutoff, whether they are to be removed or not.
    pub fn indexed_in_blocks(&self, from: u32, to: u32, predicate: Option<&str>) -> String {
        let (rows, is_indexed) = (self.all_in_blocks(from, to), predicate.unwrap_or("true"));
        format!("{rows} AND CASE WHEN {is_indexed} THEN {} ELSE false END", self.expired[0])
    }

    /// Selects the TIDs of all rows in a range of blocks, `to` excluded.
    pub fn all_in_blocks(&self, from: u32, to: u32) -> String {
        format!("{ENGINE_TAG}SELECT ctid FROM ONLY {} WHERE ctid >= '({from},0)' AND ctid < '({to},0)'", self.leaf)
    }

    /// Returns how many rows the planner expects to be removed.
    pub fn estimate(&self) -> i64 {
        self.expected(&self.conditions())
    }
}
