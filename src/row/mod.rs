//! One row's expiry, by primary key. The statements that read or change it run as the caller; a rule's filter and
//! expression run as the table's owner.

mod key;
mod statement;
mod touch;

pub use key::Key;
pub use touch::{check_touch, touched};

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::key::{KeyColumn, primary};
use crate::pg::memo::Memo;
use crate::pg::plan::Plan;
use crate::pg::{access, identity};
use crate::rule::Ttl;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::datum::{DatumWithOid, Interval, TimestampWithTimeZone};
use pgrx::pg_sys::{self, Oid};
use statement::Statements;
use std::cell::{Cell, OnceCell};
use std::ffi::{CStr, CString};
use std::rc::Rc;

/// The condition for setting a new expiry, as in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Always,
    /// Only if the row never expires.
    Nx,
    /// Only if the row does expire.
    Xx,
    /// Only if the new expiry is later.
    Gt,
    /// Only if the new expiry is earlier.
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

/// A row: its table, its primary key, and which of the table's rules is meant.
pub struct Row<'a> {
    pub relid: Oid,
    pub key: Key<'a>,
    pub column: Option<&'a str>,
}

/// A prepared statement and the key it takes.
struct Prepared {
    plan: Plan,
    /// Set if the rule runs code of the table's owner.
    owner: Option<Owner>,
    key: Vec<KeyColumn>,
    table: String,
    rule_id: i64,
}

/// The owner's part of an operation. A filter or an expression is the owner's code, so it runs with the owner's rights.
/// Whether the row exists and may be changed is decided with the caller's rights.
struct Owner {
    role: Oid,
    time_zone: CString,
    /// Finds the row as the caller, and locks it if it will be changed. Planned on first use.
    claim: String,
    types: Vec<Oid>,
    claim_plan: OnceCell<Plan>,
    /// Decides whether to change the row; `None` if the row is only read.
    judge: Option<Plan>,
}

type MemoKey = (Oid, Option<String>, Operation);

thread_local! {
    static PREPARED: Memo<MemoKey, Prepared> = Memo::new();
}

/// Returns the seconds until the row expires; `-1` if it never does, `-2` if it does not exist or has expired.
pub fn get(row: &Row<'_>) -> Result<f64, TtlError> {
    const GONE: f64 = -2.0;
    let prepared = prepared(row, Operation::Get)?;
    let arguments = prepared.arguments(row, vec![])?;
    prepared.owner.as_ref().map_or(Ok(()), |owner| owner.check_caller(&prepared.table))?;
    let seconds = match &prepared.owner {
        // A caller who may read the whole table need not look first.
        Some(owner) if !access::may_read_all(row.relid) && !owner.finds(&arguments) => None,
        Some(owner) => owner.run(|| prepared.plan.call(&arguments)).1,
        None => prepared.plan.call(&arguments).1,
    };
    Ok(seconds.unwrap_or(GONE))
}

/// Makes the row expire after a time.
pub fn set(row: &Row<'_>, ttl: Interval, mode: Mode) -> Result<bool, TtlError> {
    let ttl = Ttl::new(ttl.months(), ttl.days(), ttl.micros())?;
    let (months, days, micros) = ttl.fields();
    let parts = [Interval::new(months, days, 0), Interval::new(0, 0, micros)];
    let arguments = parts.into_iter().flatten().map(DatumWithOid::from).collect();
    change(row, Operation::Set(mode), arguments)
}

/// Makes the row expire at an instant.
pub fn expire_at(row: &Row<'_>, instant: TimestampWithTimeZone, mode: Mode) -> Result<bool, TtlError> {
    if instant.is_neg_infinity() || instant.is_infinity() {
        return Err(TtlError::InfiniteInstant);
    }
    change(row, Operation::ExpireAt(mode), vec![instant.into()])
}

/// Restarts the row's clock.
pub fn touch(row: &Row<'_>) -> Result<bool, TtlError> {
    change(row, Operation::Touch, vec![])
}

/// Makes the row never expire.
pub fn persist(row: &Row<'_>) -> Result<bool, TtlError> {
    change(row, Operation::Persist, vec![])
}

fn change(row: &Row<'_>, operation: Operation, arguments: Vec<DatumWithOid<'_>>) -> Result<bool, TtlError> {
    let prepared = prepared(row, operation)?;
    let arguments = prepared.arguments(row, arguments)?;
    prepared.owner.as_ref().map_or(Ok(()), |owner| owner.check_caller(&prepared.table))?;
    // The row that is judged is the one that is changed, because it is locked.
    let may_change = |owner: &Owner| owner.finds(&arguments) && owner.allows(&arguments);
    if !prepared.owner.as_ref().is_none_or(may_change) {
        return Ok(false);
    }
    let _setting = Setting::begin(prepared.rule_id);
    let (changed, _) = prepared.plan.call::<f64>(&arguments);
    Ok(changed > 0)
}

thread_local! {
    static SETTING: Cell<Option<i64>> = const { Cell::new(None) };
}

/// Whether this session is setting the expiry of a row of the rule: the touch trigger then leaves the value alone.
pub fn is_setting(rule_id: i64) -> bool {
    SETTING.get() == Some(rule_id)
}

/// A guard: `is_setting` holds while it lives, and no longer once an error drops it.
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

impl Owner {
    /// Refuses to run the owner's code in another role's session, where it may be compiled for that role's search path.
    fn check_caller(&self, table: &str) -> Result<(), TtlError> {
        if access::is_member_of(self.role) { Ok(()) } else { Err(TtlError::OwnersCode(table.to_owned())) }
    }

    /// Whether the caller sees the row.
    fn finds(&self, arguments: &[DatumWithOid<'_>]) -> bool {
        let claim = self.claim_plan.get_or_init(|| Plan::new(&self.claim, &mut self.types.clone()));
        claim.call::<i32>(arguments).0 > 0
    }

    fn allows(&self, arguments: &[DatumWithOid<'_>]) -> bool {
        self.judge.as_ref().is_none_or(|judge| self.run(|| judge.call(arguments)).1 == Some(true))
    }

    /// Runs the owner's code as a sweep does, so that it decides the same.
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        sandboxed(self.role, &self.time_zone, work)
    }
}

fn sandboxed<T>(role: Oid, time_zone: &CStr, work: impl FnOnce() -> T) -> T {
    identity::sandboxed_as(role, || identity::with_settings(&[(c"TimeZone", time_zone)], work))
}

impl Prepared {
    /// Returns the arguments: the present, the operation's own, and the key.
    fn arguments<'a>(&self, row: &Row<'_>, own: Vec<DatumWithOid<'a>>) -> Result<Vec<DatumWithOid<'a>>, TtlError> {
        let key = row.key.texts(&self.table, &self.key)?;
        let mut arguments = vec![clock_timestamp().into()];
        arguments.extend(own);
        arguments.extend(key.into_iter().map(DatumWithOid::from));
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
                let key = primary(rule.relid)?;
                if key.is_empty() {
                    return Err(TtlError::NoPrimaryKey(rule.table));
                }
                let Statements { main, claim, judge } =
                    statement::of(&rule, &key, operation, &catalog.columns_read(rule.id)?)?;
                let mut types = vec![pg_sys::TIMESTAMPTZOID];
                types.extend_from_slice(match operation {
                    Operation::Set(_) => &[pg_sys::INTERVALOID, pg_sys::INTERVALOID],
                    Operation::ExpireAt(_) => &[pg_sys::TIMESTAMPTZOID],
                    _ => &[],
                });
                types.resize(types.len() + key.len(), pg_sys::TEXTOID);
                let mut plan = |sql: &str| Plan::new(sql, &mut types);
                let (role, time_zone) = (rule.owner, CString::new(rule.options.time_zone.as_str()).unwrap_or_default());
                // Planning runs code, too: it evaluates constant expressions, also in index predicates. The owner's
                // statements are planned first, so that this happens as the owner.
                let is_get = operation == Operation::Get;
                let judge = judge.map(|judge| sandboxed(role, &time_zone, || plan(&judge)));
                let read = (claim.is_some() && is_get).then(|| sandboxed(role, &time_zone, || plan(&main)));
                let plan = read.unwrap_or_else(|| plan(&main));
                let claim_plan = OnceCell::new();
                let owner = claim.map(|claim| Owner { claim, types, claim_plan, judge, role, time_zone });
                let prepared = Prepared { plan, owner, key, table: rule.table, rule_id: rule.id };
                Ok((vec![row.relid, catalog.relid], prepared))
            }),
        }
    })
}

/// Returns the rule that decides about a table's rows: the one named by `column`, or the only one.
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
