//! The statements about one row. `$1` is the present; the operation's own arguments and the key follow.

use super::{Mode, Operation};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::key::KeyColumn;
use crate::rule::sql;
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

/// Builds the statements. `columns` are those that the rule's filter and expression read.
pub fn of(rule: &Rule, key: &[KeyColumn], operation: Operation, columns: &[String]) -> Result<Statements, TtlError> {
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
    let row = row.join(" AND ");
    let expiry = &rule.predicate.expiry;
    let endless = rule.predicate.endless();
    let has_code = !rule.meanings.are_harmless(rule.options.filter.is_some(), rule.attnum.is_none());
    if has_code {
        rule.check_owner()?;
    }
    // The caller needs the right to read the columns that the answer reveals.
    let claim = |lock: &str| {
        let column = rule.attnum.map(|_| rule.column.clone());
        let columns: Vec<_> = column.into_iter().chain(columns.iter().map(quote_identifier)).collect();
        has_code.then(|| format!("SELECT 1, {} FROM {} WHERE {row}{lock}", columns.join(", "), rule.table))
    };
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
    let target = match operation {
        Operation::Set(_) => expiry.later(PRESENT, "$2", "$3"),
        _ => "$2".to_owned(),
    };
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
            claim: claim(" FOR NO KEY UPDATE"),
            judge: Some(format!("SELECT {is_meant} FROM {table} WHERE {row}")),
        }
    } else {
        Statements { main: format!("{update} AND {is_meant}"), claim: None, judge: None }
    })
}
