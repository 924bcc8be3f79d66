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
use std::cell::Cell;
use std::ffi::CString;
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
    rule_id: i64,
    code: OwnersCode,
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
    let (_, seconds) = prepared.code.run(row.relid, || prepared.plan.call(&mut arguments));
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
    let mut arguments = prepared.arguments(row, arguments)?;
    let _setting = Setting::begin(prepared.rule_id);
    let (changed, _) = prepared.code.in_time_zone(|| prepared.plan.call::<f64>(&mut arguments));
    Ok(changed > 0)
}

thread_local! {
    static SETTING: Cell<Option<i64>> = const { Cell::new(None) };
}

/// Whether this session is just giving a row of the rule another expiry: then that is the one it gets.
pub fn is_setting(rule_id: i64) -> bool {
    SETTING.get() == Some(rule_id)
}

/// True to its name while it is there, also when it goes because of an error.
struct Setting {
    outer: Option<i64>,
}

impl Setting {
    fn begin(rule_id: i64) -> Self {
        Self { outer: SETTING.replace(Some(rule_id)) }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        SETTING.set(self.outer);
    }
}

/// What a statement runs that the table's owner wrote: a filter, or an expression.
struct OwnersCode(Option<(Oid, CString)>);

impl OwnersCode {
    fn of(rule: &Rule) -> Self {
        let has_code = rule.options.filter.is_some() || rule.attnum.is_none();
        Self(has_code.then(|| (rule.owner, CString::new(rule.options.time_zone.as_str()).unwrap_or_default())))
    }

    /// Reads a row, or plans to. Whoever may read all of the table need not lend his rights to its owner's code.
    fn run<T>(&self, relid: Oid, work: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some((owner, _)) if access::may_read_all(relid) => {
                identity::sandboxed_as(*owner, || self.in_time_zone(work))
            }
            _ => self.in_time_zone(work),
        }
    }

    /// The code decides as it does in a sweep.
    fn in_time_zone<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some((_, zone)) => identity::with_pinned_values(|| identity::with_settings(&[(c"TimeZone", zone)], work)),
            None => work(),
        }
    }
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
                let code = OwnersCode::of(&rule);
                let mut types = vec![pg_sys::TIMESTAMPTZOID];
                types.extend_from_slice(match operation {
                    Operation::Set(_) => &[pg_sys::INTERVALOID, pg_sys::INTERVALOID],
                    Operation::ExpireAt(_) => &[pg_sys::TIMESTAMPTZOID],
                    _ => &[],
                });
                types.resize(types.len() + key.len(), pg_sys::TEXTOID);
                // Planning runs code, too: what it can tell from constants alone.
                let plan = match operation {
                    Operation::Get => code.run(row.relid, || Plan::new(&sql, &mut types)),
                    _ => code.in_time_zone(|| Plan::new(&sql, &mut types)),
                };
                let prepared = Prepared { plan, key, table: rule.table, rule_id: rule.id, code };
                Ok((vec![row.relid, catalog.relid], prepared))
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
