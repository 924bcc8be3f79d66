//! Every SQL statement that looks for or removes rows, for one rule and one leaf.

use crate::catalog::Rule;

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
    column: String,
    type_name: &'static str,
    /// What holds for a row that is to go, its parts in parentheses.
    conditions: Vec<String>,
    /// What is done to it, up to WHERE.
    action: String,
}

impl Statements {
    pub fn new(rule: &Rule, cutoff: &str, leaf: &str) -> Self {
        let mut conditions = vec![format!("({} <= {cutoff})", rule.column)];
        conditions.extend(rule.options.filter.as_ref().map(|filter| format!("({filter})")));
        conditions.extend(rule.mark.as_ref().map(|(column, mark)| mark.unmarked(column)));
        let action = match &rule.mark {
            None => format!("DELETE FROM ONLY {leaf}"),
            Some((column, mark)) => format!("UPDATE ONLY {leaf} SET {column} = {}", mark.value()),
        };
        Self {
            leaf: leaf.to_owned(),
            column: rule.column.clone(),
            type_name: rule.source.type_name(),
            conditions,
            action,
        }
    }

    /// The next places in the order of expiry, with all that share the last value, so that the next harvest can start
    /// strictly behind it.
    pub fn in_order(&self, watermark: Option<&str>, wanted: usize) -> String {
        let Self { leaf, column, type_name, .. } = self;
        let beyond = watermark.map_or_else(String::new, |watermark| {
            format!(" AND {column} > {}::{type_name}", pgrx::spi::quote_literal(watermark))
        });
        let conditions = self.conditions.join(" AND ");
        format!(
            "SELECT ctid, {column} FROM ONLY {leaf} WHERE {conditions}{beyond}
             ORDER BY {column} FETCH FIRST {wanted} ROWS WITH TIES"
        )
    }

    /// The places in a range of blocks, the last one exclusive.
    pub fn in_blocks(&self, from: u32, to: u32) -> String {
        let conditions = self.conditions.join(" AND ");
        format!("SELECT ctid FROM ONLY {} WHERE ctid >= '({from},0)' AND ctid < '({to},0)' AND {conditions}", self.leaf)
    }

    /// Asks the planner how many rows there are to go.
    pub fn explain(&self) -> String {
        format!("EXPLAIN (FORMAT JSON) SELECT FROM ONLY {} WHERE {}", self.leaf, self.conditions.join(" AND "))
    }

    /// The earliest value that is to go.
    pub fn earliest(&self) -> String {
        let Self { leaf, column, type_name, .. } = self;
        let conditions = self.conditions.join(" AND ");
        format!("SELECT min({column}) FROM ONLY {leaf} WHERE {conditions} AND {column} > '-infinity'::{type_name}")
    }

    /// Removes what is at the places given, if it has expired still, but for rows that others have locked.
    ///
    /// The row is looked at twice: when it is locked, and when it is changed. If somebody updated it since it was found,
    /// the conditions decide about the new version.
    pub fn remove_unlocked(&self) -> String {
        let expired = self.expired();
        format!(
            "{} WHERE ctid = ANY (ARRAY (
                 SELECT ctid FROM ONLY {} WHERE ctid = ANY ($1) AND {expired} FOR UPDATE SKIP LOCKED)) AND {expired}",
            self.action, self.leaf
        )
    }

    /// Removes what is at places whose rows are locked already.
    pub fn remove(&self) -> String {
        format!("{} WHERE {} AND {}", self.action, Which::Listed.condition(), self.expired())
    }

    /// Finds the places that still hold an expired row.
    pub fn look(&self, which: Which) -> String {
        format!("SELECT ctid FROM ONLY {} WHERE {} AND {}", self.leaf, which.condition(), self.expired())
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
