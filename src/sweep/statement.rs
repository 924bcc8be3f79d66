//! Every SQL statement that looks for or removes rows, for one rule and one leaf.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::planner::MARK;
use crate::pg::spi;
use crate::rule::Source;
use pgrx::datum::Json;
use pgrx::spi::quote_literal;

/// How a statement is told which rows it is about.
#[derive(Clone, Copy)]
pub enum Which {
    /// By an array of places.
    Listed,
    /// By the first and last place of a range.
    Ranged,
}

impl Which {
    fn condition(self) -> &'static str {
        match self {
            Self::Listed => "ctid = ANY ($1)",
            Self::Ranged => "ctid >= $1 AND ctid <= $2",
        }
    }
}

#[derive(Clone)]
pub struct Statements {
    leaf: String,
    value: String,
    /// What is compared with the cutoff.
    compared: String,
    source: Source,
    /// What holds for a row that is to go, its parts in parentheses.
    conditions: Vec<String>,
    /// What is done to it, up to WHERE.
    action: String,
}

impl Statements {
    pub fn new(rule: &Rule, cutoff: &str, leaf: &str) -> Self {
        let mut conditions = rule.expiry.has_expired(cutoff);
        conditions.extend(rule.options.filter.as_ref().map(|filter| format!("({filter})")));
        conditions.extend(rule.mark.as_ref().map(|(column, mark)| mark.unmarked(column)));
        let action = match &rule.mark {
            None => format!("DELETE FROM ONLY {leaf}"),
            Some((column, mark)) => format!("UPDATE ONLY {leaf} SET {column} = {}", mark.value()),
        };
        Self {
            leaf: leaf.to_owned(),
            value: rule.column.clone(),
            compared: rule.expiry.compared(),
            source: rule.expiry.source(),
            conditions,
            action,
        }
    }

    /// The next places in the order of expiry, with all that share the last value, so that the next harvest can start
    /// strictly behind it.
    pub fn in_order(&self, watermark: Option<&str>, wanted: usize) -> String {
        let Self { leaf, compared, source, .. } = self;
        let beyond = watermark.map_or_else(String::new, |watermark| {
            format!(" AND {compared} > {}::{}", quote_literal(watermark), source.type_name())
        });
        let conditions = self.conditions.join(" AND ");
        format!(
            "{MARK}SELECT ctid, {compared} FROM ONLY {leaf} WHERE {conditions}{beyond}
             ORDER BY {compared} FETCH FIRST {wanted} ROWS WITH TIES"
        )
    }

    /// The places in a range of blocks, the last one exclusive.
    pub fn in_blocks(&self, from: u32, to: u32) -> String {
        let conditions = self.conditions.join(" AND ");
        format!(
            "{MARK}SELECT ctid FROM ONLY {} WHERE ctid >= '({from},0)' AND ctid < '({to},0)' AND {conditions}",
            self.leaf
        )
    }

    /// How many rows the planner expects to go.
    pub fn estimate(&self) -> Result<i64, TtlError> {
        let conditions = self.conditions.join(" AND ");
        let sql = format!("{MARK}EXPLAIN (FORMAT JSON) SELECT FROM ONLY {} WHERE {conditions}", self.leaf);
        let plans = spi::query(&sql, &[], |row| Ok(row.get::<Json>(1)?.map(|json| json.0)))?;
        Ok(plans.into_iter().flatten().find_map(|plan| plan.pointer("/0/Plan/Plan Rows")?.as_i64()).unwrap_or_default())
    }

    /// How many rows are to go, the first value and the bytes of those that are counted: at most one more than `most`.
    pub fn count(&self, most: i64) -> String {
        let Self { leaf, compared, .. } = self;
        let conditions = self.conditions.join(" AND ");
        format!(
            "{MARK}SELECT count(*), (array_agg(compared::text ORDER BY compared))[1], sum(bytes)
             FROM (SELECT {compared} AS compared, pg_column_size(leaf.*) AS bytes FROM ONLY {leaf} AS leaf
                   WHERE {conditions} LIMIT {most} + 1) AS counted"
        )
    }

    /// How many values are there that cannot be read, if that can happen; no more than `most` are counted.
    pub fn count_unreadable(&self, most: i64) -> Option<String> {
        let Self { leaf, compared, value, .. } = self;
        let from = format!("ONLY {leaf} WHERE {value} IS NOT NULL AND {compared} IS NULL");
        (!self.source.compares_value())
            .then(|| format!("{MARK}SELECT count(*) FROM (SELECT FROM {from} LIMIT {most}) AS unreadable"))
    }

    /// The earlier of two values, given as text.
    pub fn earlier(&self, one: &str, other: &str) -> String {
        let value = |text| format!("{}::{}", quote_literal(text), self.source.type_name());
        format!("SELECT least({}, {})::text", value(one), value(other))
    }

    /// The earliest value that is to go.
    pub fn earliest(&self) -> String {
        let Self { leaf, compared, source, .. } = self;
        let mut conditions = self.conditions.join(" AND ");
        if source.has_infinities() {
            conditions += &format!(" AND {compared} > '-infinity'::{}", source.type_name());
        }
        format!("SELECT {compared} FROM ONLY {leaf} WHERE {conditions} ORDER BY {compared} LIMIT 1")
    }

    /// Removes what is at the places given, if it has expired still, but for rows that others have locked.
    ///
    /// The row is looked at twice: when it is locked, and when it is changed. If somebody updated it since it was found,
    /// the conditions decide about the new version.
    pub fn remove_unlocked(&self) -> String {
        let expired = self.expired();
        format!(
            "{MARK}{} WHERE ctid = ANY (ARRAY (
                 SELECT ctid FROM ONLY {} WHERE ctid = ANY ($1) AND {expired} FOR UPDATE SKIP LOCKED)) AND {expired}",
            self.action, self.leaf
        )
    }

    /// Removes what is at places whose rows are locked already.
    pub fn remove(&self) -> String {
        format!("{MARK}{} WHERE {} AND {}", self.action, Which::Listed.condition(), self.expired())
    }

    /// Finds the places that still hold an expired row.
    pub fn look(&self, which: Which) -> String {
        format!("{MARK}SELECT ctid FROM ONLY {} WHERE {} AND {}", self.leaf, which.condition(), self.expired())
    }

    /// Locks those that nobody else has locked.
    pub fn lock(&self) -> String {
        format!("{} FOR UPDATE SKIP LOCKED", self.look(Which::Listed))
    }

    /// `IS TRUE` changes nothing about the answer, but no index matches it: the rows are to be found by their places.
    fn expired(&self) -> String {
        let tests: Vec<_> = self.conditions.iter().map(|condition| format!("({condition}) IS TRUE")).collect();
        tests.join(" AND ")
    }
}
