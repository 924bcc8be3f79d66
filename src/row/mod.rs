//! One row's expiry, by primary key: told and changed by statements that run as the caller's own.

mod key;
mod statement;
mod touch;

pub use key::Key;
pub use touch::{check_touch, touched};

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::memo::Memo;
use crate::pg::plan::Plan;
use crate::pg::{access, identity};
use crate::rule::Ttl;
use key::KeyColumn;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::pg_sys::{self, Datum, Oid};
use pgrx::prelude::*;
use std::rc::Rc;

/// Under which condition a new expiry is set, as Redis has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Always,
    /// The row never expires.
    Nx,
    /// The row does expire.
    Xx,
    /// Later than it would.
    Gt,
    /// Earlier.
    Lt,
}

impl Mode {
    pub fn parse(name: &str) -> Result<Self, TtlError> {
        Ok(match name {
            "always" => Self::Always,
            "nx" => Self::Nx,
            "xx" => Self::Xx,
            "gt" => Self::Gt,
            "lt" => Self::Lt,
            _ => return Err(TtlError::Mode(name.into())),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Operation {
    Get,
    Set(Mode),
    ExpireAt(Mode),
    Touch,
    Persist,
}

/// A row: a table, the text of each column of its primary key, and which of the table's rules is meant.
pub struct Row<'a> {
    pub relid: Oid,
    pub key: Key<'a>,
    pub column: Option<&'a str>,
}

/// A statement, and the key it takes.
struct Prepared {
    plan: Plan,
    key: Vec<KeyColumn>,
    table: String,
    /// The table's owner, if the statement runs words of his: a filter, or an expression.
    code_of: Option<Oid>,
}

type MemoKey = (Oid, Option<String>, Operation);

thread_local! {
    static PREPARED: Memo<MemoKey, Prepared> = Memo::new();
}

/// Seconds until the row expires; `-1` if it never does, `-2` if it is not there or has expired.
pub fn get(row: &Row<'_>) -> Result<f64, TtlError> {
    const GONE: f64 = -2.0;
    let prepared = prepared(row, Operation::Get)?;
    let mut arguments = prepared.arguments(row, &[])?;
    // Whoever may read all of the table need not lend his rights to its owner's filter or expression.
    let (_, seconds) = match prepared.code_of {
        Some(owner) if access::may_read_all(row.relid) => {
            identity::sandboxed_as(owner, || prepared.plan.call(&mut arguments))
        }
        _ => prepared.plan.call(&mut arguments),
    };
    Ok(seconds.unwrap_or(GONE))
}

/// Has the row expire after a time.
pub fn set(row: &Row<'_>, ttl: Interval, mode: Mode) -> Result<bool, TtlError> {
    let ttl = Ttl::new(ttl.months(), ttl.days(), ttl.micros())?;
    let (months, days, micros) = ttl.fields();
    let parts = [Interval::new(months, days, 0), Interval::new(0, 0, micros)];
    let arguments: Vec<_> = parts.into_iter().flatten().filter_map(IntoDatum::into_datum).collect();
    change(row, Operation::Set(mode), &arguments)
}

/// Has the row expire at an instant.
pub fn expire_at(row: &Row<'_>, instant: TimestampWithTimeZone, mode: Mode) -> Result<bool, TtlError> {
    if instant.is_neg_infinity() || instant.is_infinity() {
        return Err(TtlError::InfiniteInstant);
    }
    change(row, Operation::ExpireAt(mode), &[Datum::from(i64::from(instant))])
}

/// Restarts the row's clock.
pub fn touch(row: &Row<'_>) -> Result<bool, TtlError> {
    change(row, Operation::Touch, &[])
}

/// Has the row never expire.
pub fn persist(row: &Row<'_>) -> Result<bool, TtlError> {
    change(row, Operation::Persist, &[])
}

fn change(row: &Row<'_>, operation: Operation, arguments: &[Datum]) -> Result<bool, TtlError> {
    let prepared = prepared(row, operation)?;
    let (changed, _) = prepared.plan.call::<f64>(&mut prepared.arguments(row, arguments)?);
    Ok(changed > 0)
}

impl Prepared {
    /// The present, the operation's own arguments, and the key.
    fn arguments(&self, row: &Row<'_>, own: &[Datum]) -> Result<Vec<Datum>, TtlError> {
        let key = row.key.texts(&self.table, &self.key)?;
        let mut arguments = vec![Datum::from(i64::from(clock_timestamp()))];
        arguments.extend_from_slice(own);
        arguments.extend(key.iter().filter_map(|text| text.as_str().into_datum()));
        Ok(arguments)
    }
}

fn prepared(row: &Row<'_>, operation: Operation) -> Result<Rc<Prepared>, TtlError> {
    PREPARED.with(|memo| {
        let name = (row.relid, row.column.map(str::to_owned), operation);
        match memo.get(&name) {
            Some(prepared) => Ok(prepared),
            None => memo.remember(&name, || {
                let catalog = Catalog::open()?;
                let rule = rule_of(&catalog, row.relid, row.column)?;
                let key = key::primary_key(&rule)?;
                let sql = statement::of(&rule, &key, operation)?;
                let has_code = rule.options.filter.is_some() || rule.attnum.is_none();
                let code_of = has_code.then_some(rule.owner);
                let mut types = vec![pg_sys::TIMESTAMPTZOID];
                types.extend_from_slice(match operation {
                    Operation::Set(_) => &[pg_sys::INTERVALOID, pg_sys::INTERVALOID],
                    Operation::ExpireAt(_) => &[pg_sys::TIMESTAMPTZOID],
                    _ => &[],
                });
                types.resize(types.len() + key.len(), pg_sys::TEXTOID);
                Ok((
                    [row.relid, catalog.relid],
                    Prepared { plan: Plan::new(&sql, &mut types), key, table: rule.table, code_of },
                ))
            }),
        }
    })
}

/// The rule that decides about a table's rows, if one is meant.
pub fn rule_of(catalog: &Catalog, relid: Oid, column: Option<&str>) -> Result<Rule, TtlError> {
    let mut rules = catalog.rules_on(relid)?;
    let table = access::relation_name(relid).ok_or(TtlError::UnknownTable(relid.to_u32()))?;
    match column {
        Some(column) => {
            let named = rules.into_iter().find(|rule| rule.name == column);
            named.ok_or_else(|| TtlError::NoRule { table, column: column.into() })
        }
        None if rules.len() > 1 => Err(TtlError::AmbiguousRule {
            columns: rules.iter().map(|rule| rule.name.as_str()).collect::<Vec<_>>().join(", "),
            table,
        }),
        None => rules.pop().ok_or(TtlError::NoRules(table)),
    }
}
