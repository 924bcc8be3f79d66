//! The statements about one row. `$1` is the present; the operation's own arguments and the key follow.

use super::{Mode, Operation};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::key::KeyColumn;
use crate::rule::{Expiry, sql};
use pgrx::spi::quote_identifier;

const PRESENT: &str = "$1";

/// The statements of one operation: up to three, with the same parameters.
pub struct Statements {
    pub main: String,
    /// For a rule with code of the table's owner: finds the row as the caller, and locks it if it will be changed.
    pub claim: Option<String>,
    /// Decides as the owner whether to change the row.
    pub judge: Option<String>,
}

/// Returns the condition for the row with a key.
fn is_row(key: &[KeyColumn], operation: Operation) -> String {
    let first_key = match operation {
        Operation::Get | Operation::Touch | Operation::Persist => 2,
        Operation::ExpireAt(_) => 3,
        Operation::Set(_) => 4,
    };
    let row: Vec<_> = key
        .iter()
        .zip(first_key..)
        .map(|(KeyColumn { column, data_type, equals, .. }, number)| {
            format!("{column} {equals} ${number}::{data_type}")
        })
        .collect();
    row.join(" AND ")
}

/// Returns the statement that finds a row as the caller, who needs the right to read the columns that the answer
/// reveals.
fn claim(rule: &Rule, row: &str, columns: &[String], lock: &str) -> String {
    let column = rule.attnum.map(|_| rule.column.clone());
    let columns: Vec<_> = column.into_iter().chain(columns.iter().map(quote_identifier)).collect();
    format!("SELECT 1, {} FROM {} WHERE {row}{lock}", columns.join(", "), rule.table)
}

const LOCK: &str = " FOR NO KEY UPDATE";

/// Returns the instant at which a row is to expire.
fn target(expiry: &Expiry, operation: Operation) -> Option<String> {
    match operation {
        Operation::Set(_) => Some(expiry.later(PRESENT, "$2", "$3")),
        Operation::ExpireAt(_) => Some("$2".to_owned()),
        _ => None,
    }
}

/// Builds the statement that returns the place of the rule, among several on a column, that removes a row first: as the row
/// is, or for a row that will be set, the one that needs the latest value to leave it until then. If no filter matches the
/// row, the rule that would remove it first counts.
pub fn choosing(rules: &[Rule], key: &[KeyColumn], operation: Operation, columns: &[String]) -> Statements {
    let (row, lock) = (is_row(key, operation), if operation == Operation::Get { "" } else { LOCK });
    let ends = rules.iter().enumerate().map(|(place, rule)| {
        let expiry = &rule.predicate.expiry;
        let applies = rule.predicate.filter().map_or_else(|| "true".into(), |filter| format!("{filter} IS TRUE"));
        let set_to = target(expiry, operation).and_then(|target| expiry.value_to_end(&target));
        let ends = format!("CASE WHEN NOT {} THEN {} END", expiry.is_endless(), expiry.ends());
        let (set_to, begun_now) = (set_to.unwrap_or_else(|| "NULL".into()), expiry.ends_if_begun(PRESENT));
        format!("({place}, {applies}, {set_to}, {ends}, {begun_now})")
    });
    let ends = ends.collect::<Vec<_>>().join(", ");
    let has_code = rules.iter().any(|rule| !rule.calls_nothing_of_users());
    // A row that has gone under any rule is not changed.
    let gone = rules.iter().map(|rule| rule.predicate.gone(PRESENT)).collect::<Vec<_>>().join(" OR ");
    let is_there = if operation == Operation::Get { "true".into() } else { format!("NOT ({gone})") };
    // The latest value is the latest in every time zone and unit.
    let is_text = rules[0].predicate.expiry.source().text_length().is_some();
    let order = if is_text { "c.set_to COLLATE pg_catalog.\"C\"" } else { "c.set_to" };
    let main = format!(
        "SELECT (SELECT c.place FROM (VALUES {ends}) AS c (place, applies, set_to, ends, begun_now)
                 ORDER BY c.applies DESC, {order} DESC NULLS LAST, c.ends NULLS LAST, c.begun_now, c.place LIMIT 1)
         FROM {} WHERE {row} AND {is_there}{}",
        rules[0].table,
        if has_code { "" } else { lock }
    );
    Statements { main, claim: has_code.then(|| claim(&rules[0], &row, columns, lock)), judge: None }
}

/// Builds the statements. `columns` are those that the rule's filter and expression read.
pub fn of(rule: &Rule, key: &[KeyColumn], operation: Operation, columns: &[String]) -> Result<Statements, TtlError> {
    let row = is_row(key, operation);
    let expiry = &rule.predicate.expiry;
    let endless = rule.predicate.endless();
    let has_code = !rule.calls_nothing_of_users();
    if has_code {
        rule.check_owner()?;
    }
    let claim = |lock: &str| has_code.then(|| claim(rule, &row, columns, lock));
    if operation == Operation::Get {
        let main = format!(
            "SELECT CASE WHEN {gone} THEN -2 WHEN {endless} THEN -1
                         ELSE greatest(extract(epoch FROM {left})::double precision, 0::double precision)
                    END
             FROM {table} WHERE {row}",
            gone = rule.predicate.gone(PRESENT),
            left = sql::operation(&expiry.ends(), "-", PRESENT),
            table = rule.table,
        );
        return Ok(Statements { main, claim: claim(""), judge: None });
    }
    let target = target(expiry, operation).unwrap_or_default();
    let value = match operation {
        Operation::Touch if !expiry.has_ttl() => return Err(TtlError::NoClock(rule.name.clone())),
        Operation::Touch => expiry.value_to_begin(PRESENT),
        Operation::Persist if rule.not_null => expiry.source().never().map(str::to_owned),
        Operation::Persist => expiry.source().never().map(|_| "NULL".to_owned()),
        _ => expiry.value_to_end(&target),
    };
    let value = value.filter(|_| rule.is_writable).ok_or_else(|| TtlError::NotWritable(rule.name.clone()))?;
    let mode = match operation {
        Operation::Set(mode) | Operation::ExpireAt(mode) => mode,
        _ => Mode::Always,
    };
    let condition = match mode {
        Mode::Always => "true".to_owned(),
        Mode::Nx => endless,
        Mode::Xx => format!("NOT {endless}"),
        Mode::Gt => format!("CASE WHEN {endless} THEN false ELSE {} END", sql::operation(&expiry.ends(), "<", &target)),
        Mode::Lt => format!("CASE WHEN {endless} THEN true ELSE {} END", sql::operation(&expiry.ends(), ">", &target)),
    };
    let (table, column) = (&rule.table, &rule.column);
    let is_meant = format!("NOT {} AND {condition}", rule.predicate.gone(PRESENT));
    let update = format!("UPDATE {table} SET {column} = {value} WHERE {row}");
    Ok(if has_code {
        Statements {
            main: update,
            claim: claim(LOCK),
            judge: Some(format!("SELECT {is_meant} FROM {table} WHERE {row}")),
        }
    } else {
        Statements { main: format!("{update} AND {is_meant}"), claim: None, judge: None }
    })
}
