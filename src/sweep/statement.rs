//! What the SQL statements of a sweep have in common, for one rule and one leaf. The statements stand beside who runs them.

use crate::catalog::Rule;
use crate::delivery::Delivery;
use crate::pg::estimate;
use crate::pg::planner::ENGINE_TAG;
use crate::rule::Source;
use pgrx::spi::quote_literal;

/// How a statement is told which rows it is about.
#[derive(Clone, Copy)]
pub enum Which {
    /// By an array of places.
    Listed,
    /// By the first and last place of a range.
    Ranged,
    /// By a value that theirs lie beyond, and their number.
    Beyond,
}

impl Which {
    pub(super) fn condition(self) -> &'static str {
        match self {
            Self::Listed => "ctid = ANY ($1)",
            Self::Ranged => "ctid >= $1 AND ctid <= $2",
            Self::Beyond => "true",
        }
    }
}

#[derive(Clone)]
pub struct Statements {
    pub(super) leaf: String,
    pub(super) value: String,
    /// What is compared with the cutoff.
    pub(super) compared: String,
    pub(super) source: Source,
    /// What holds for a row that has expired and is not marked yet, its parts in parentheses.
    pub(super) expired: Vec<String>,
    /// What else holds for one that is to go: code of users, which may fail.
    pub(super) filter: Option<String>,
    /// The last value that is left out of a search, if there is one.
    pub(super) after: Option<String>,
    /// What is done to it, up to WHERE.
    pub(super) action: String,
    pub(super) delivery: Option<Delivery>,
}

impl Statements {
    pub fn new(rule: &Rule, cutoff: &str, leaf: &str) -> Self {
        let expired = rule.predicate.expired(cutoff);
        let action = match &rule.predicate.mark {
            None => format!("DELETE FROM ONLY {leaf}"),
            Some((column, mark)) => format!("UPDATE ONLY {leaf} SET {column} = {}", mark.value()),
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
            delivery: None,
        }
    }

    /// The same, but searches leave out values up to this one.
    pub fn searching_after(self, value: Option<String>) -> Self {
        Self { after: value, ..self }
    }

    /// What holds for a row that is to go, in a form that indexes serve.
    pub(super) fn conditions(&self) -> String {
        self.expired.iter().chain(&self.filter).cloned().collect::<Vec<_>>().join(" AND ")
    }

    /// The same, `also` included, in a form that asks the filter about expired rows alone: it may fail on others.
    pub(super) fn judgement(&self, also: Option<String>) -> String {
        let expired = self.expired.iter().cloned().chain(also).collect::<Vec<_>>().join(" AND ");
        match &self.filter {
            Some(filter) => format!("CASE WHEN {expired} THEN {filter} ELSE false END"),
            None => expired,
        }
    }

    /// The condition that a value lies behind another.
    pub(super) fn beyond(&self, value: &str) -> String {
        format!("{} > {}", self.compared, self.literal(value))
    }

    pub(super) fn literal(&self, value: &str) -> String {
        format!("{}::{}", quote_literal(value), self.source.type_name())
    }

    pub fn delivers(&self) -> bool {
        self.delivery.is_some()
    }

    /// The same for rows that somebody wants to have, or to hear of.
    pub fn with_delivery(self, delivery: Option<Delivery>) -> Self {
        Self { delivery, ..self }
    }

    pub(super) fn expected(&self, condition: &str) -> i64 {
        estimate::rows(&format!("{ENGINE_TAG}SELECT FROM ONLY {} WHERE {condition}", self.leaf))
    }

    /// Finds the places that still hold an expired row.
    pub fn look(&self, which: Which) -> String {
        format!(
            "{ENGINE_TAG}SELECT ctid FROM ONLY {} WHERE {} AND {}",
            self.leaf,
            which.condition(),
            self.has_expired()
        )
    }

    /// `IS TRUE` changes nothing about the answer, but no index matches it: the rows are to be found by their places.
    pub(super) fn has_expired(&self) -> String {
        if self.filter.is_some() {
            return format!("({}) IS TRUE", self.judgement(None));
        }
        let tests: Vec<_> = self.expired.iter().map(|condition| format!("({condition}) IS TRUE")).collect();
        tests.join(" AND ")
    }
}
