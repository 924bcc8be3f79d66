//! The common parts of a sweep's SQL statements, for one rule and one leaf. Each statement is defined beside its user.

use crate::catalog::Rule;
use crate::delivery::Delivery;
use crate::pg::estimate;
use crate::pg::planner::ENGINE_TAG;
use crate::rule::Source;
use pgrx::spi::quote_literal;

/// How the parameters of a statement select rows.
#[derive(Clone, Copy)]
pub enum Which {
    /// By an array of TIDs.
    Listed,
    /// By the first and last TID of a range.
    Ranged,
    /// By a value that theirs must lie beyond, and a row count.
    Beyond,
    /// By a value that theirs must lie beyond, and the last of them.
    Within,
}

#[derive(Clone)]
pub struct Statements {
    pub(super) leaf: String,
    pub(super) value: String,
    /// The expression that is compared with the cutoff.
    pub(super) compared: String,
    pub(super) source: Source,
    /// The conditions for a row that has expired and is not marked or cleared yet, each in parentheses.
    pub(super) expired: Vec<String>,
    /// The further condition for a row to be removed: user code, which may fail.
    pub(super) filter: Option<String>,
    /// The value up to which searches skip rows, if any.
    pub(super) after: Option<String>,
    /// The DELETE or UPDATE, up to its WHERE.
    pub(super) action: String,
    /// Whether rows are delivered as they were before.
    pub(super) delivers_before: bool,
    pub(super) delivery: Option<Delivery>,
}

impl Statements {
    pub fn new(rule: &Rule, cutoff: &str, leaf: &str) -> Self {
        let expired = rule.predicate.expired(cutoff);
        let action = match &rule.predicate.update {
            None => format!("DELETE FROM ONLY {leaf}"),
            Some(update) => format!("UPDATE ONLY {leaf} SET {}", update.assignments()),
        };
        Self {
            leaf: leaf.to_owned(),
            value: rule.column.clone(),
            compared: rule.predicate.expiry.compared(),
            source: rule.predicate.expiry.source(),
            expired,
            filter: rule.predicate.filter(),
            after: None,
            action,
            delivers_before: rule.clears(),
            delivery: None,
        }
    }

    /// Makes searches skip values up to this one.
    pub fn searching_after(self, value: Option<String>) -> Self {
        Self { after: value, ..self }
    }

    /// The condition for a row to be removed, in a form that an index can serve.
    pub(super) fn conditions(&self) -> String {
        self.expired.iter().chain(&self.filter).cloned().collect::<Vec<_>>().join(" AND ")
    }

    /// The condition for a row to be removed, and `also`, in a form that evaluates the filter on expired rows only: it
    /// may fail on others.
    pub(super) fn judgement(&self, also: Option<String>) -> String {
        let expired = self.expired.iter().cloned().chain(also).collect::<Vec<_>>().join(" AND ");
        match &self.filter {
            Some(filter) => format!("CASE WHEN {expired} THEN {filter} ELSE false END"),
            None => expired,
        }
    }

    /// The condition that a row's value lies beyond this one.
    pub(super) fn beyond(&self, value: &str) -> String {
        format!("{} > {}", self.compared, self.literal(value))
    }

    pub(super) fn literal(&self, value: &str) -> String {
        format!("{}::{}", quote_literal(value), self.source.type_name())
    }

    pub fn delivers(&self) -> bool {
        self.delivery.is_some()
    }

    /// Makes the statements return removed rows for their delivery.
    pub fn with_delivery(self, delivery: Option<Delivery>) -> Self {
        Self { delivery, ..self }
    }

    pub(super) fn expected(&self, condition: &str) -> i64 {
        estimate::rows(&format!("{ENGINE_TAG}SELECT FROM ONLY {} WHERE {condition}", self.leaf))
    }

    /// Selects the TIDs that still hold an expired row.
    pub fn look(&self, which: Which) -> String {
        format!("{ENGINE_TAG}SELECT ctid FROM ONLY {} WHERE {}", self.leaf, self.expired_of(which))
    }

    /// The condition for one of the rows that the parameters select to be removed. By value, an index finds the rows; by
    /// TID, none may.
    pub(super) fn expired_of(&self, which: Which) -> String {
        let (compared, type_name) = (&self.compared, self.source.type_name());
        let beyond = || format!("{} AND {compared} > CAST($1 AS {type_name})", self.conditions());
        match which {
            Which::Listed => format!("ctid = ANY ($1) AND {}", self.has_expired()),
            Which::Ranged => format!("ctid >= $1 AND ctid <= $2 AND {}", self.has_expired()),
            Which::Beyond => beyond(),
            Which::Within => format!("{} AND {compared} <= CAST($2 AS {type_name})", beyond()),
        }
    }

    /// `IS TRUE` does not change the result, but no index matches it: the rows must be found by TID.
    fn has_expired(&self) -> String {
        if self.filter.is_some() {
            return format!("({}) IS TRUE", self.judgement(None));
        }
        let tests: Vec<_> = self.expired.iter().map(|condition| format!("({condition}) IS TRUE")).collect();
        tests.join(" AND ")
    }
}
