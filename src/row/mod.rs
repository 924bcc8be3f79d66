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
use crate::pg::plan::{Plan, Scalar};
use crate::pg::{access, identity};
use crate::rule::Ttl;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::datum::{DatumWithOid, Interval, TimestampWithTimeZone};
use pgrx::pg_sys::{self, Oid};
use statement::Statements;
use std::cell::{Cell, OnceCell};
use std::collections::BTreeSet;
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

/// A row: its table, its primary key, and which of the table's rules are meant.
pub struct Row<'a> {
    pub relid: Oid,
    pub key: Key<'a>,
    pub column: Option<&'a str>,
    pub rule_name: Option<&'a str>,
}

/// The statements of the rules on a column, and how to choose the rule for a row if there are several.
struct Candidates {
    key: Vec<KeyColumn>,
    /// Nothing for a rule without a clock that could be restarted.
    each: Vec<Option<Prepared>>,
    table: String,
    column: String,
    choice: Option<Choice>,
}

/// Finds the rule that removes a row first: the number of its place among the candidates.
struct Choice {
    plan: Plan,
    /// Set if one of the rules runs code of the table's owner.
    owner: Option<Owner>,
}

/// A prepared statement about a row.
struct Prepared {
    plan: Plan,
    /// Set if the rule runs code of the table's owner.
    owner: Option<Owner>,
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

type MemoKey = (Oid, Option<String>, Option<String>, Operation);

thread_local! {
    static PREPARED: Memo<MemoKey, Candidates> = Memo::new();
}

/// Returns the seconds until the row expires; `-1` if it never does, `-2` if it does not exist or has expired.
pub fn get(row: &Row<'_>) -> Result<f64, TtlError> {
    const GONE: f64 = -2.0;
    let candidates = candidates(row, Operation::Get)?;
    let arguments = candidates.arguments(row, vec![])?;
    let Some(prepared) = candidates.choose(&arguments)? else { return Ok(GONE) };
    prepared.owner.as_ref().map_or(Ok(()), |owner| owner.check_caller(&prepared.table))?;
    let seconds = match &prepared.owner {
        // A caller who may read the whole table need not look first.
        Some(owner) if !access::may_read_all(row.relid) && !owner.finds(&arguments) => None,
        Some(owner) => owner.run(|| prepared.plan.call(&arguments)).1,
        None => as_caller(&prepared.plan, &arguments).1,
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
    let candidates = candidates(row, operation)?;
    let arguments = candidates.arguments(row, arguments)?;
    let Some(prepared) = candidates.choose(&arguments)? else { return Ok(false) };
    prepared.owner.as_ref().map_or(Ok(()), |owner| owner.check_caller(&prepared.table))?;
    // The row that is judged is the one that is changed, because it is locked.
    let may_change = |owner: &Owner| owner.finds(&arguments) && owner.allows(&arguments);
    if !prepared.owner.as_ref().is_none_or(may_change) {
        return Ok(false);
    }
    let _setting = Setting::begin(prepared.rule_id);
    let (changed, _) = as_caller::<f64>(&prepared.plan, &arguments);
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
        let claim = self.claim_plan.get_or_init(|| planned(&self.claim, &mut self.types.clone()));
        as_caller::<i32>(claim, arguments).0 > 0
    }

    fn allows(&self, arguments: &[DatumWithOid<'_>]) -> bool {
        self.judge.as_ref().is_none_or(|judge| self.run(|| judge.call(arguments)).1 == Some(true))
    }

    /// Runs the owner's code as a sweep does, so that it decides the same.
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        sandboxed(self.role, &self.time_zone, work)
    }
}

/// Plans a statement. A filter in it is as PostgreSQL printed it: its names mean the same under the pinned path alone.
fn planned(sql: &str, types: &mut [Oid]) -> Plan {
    identity::with_callers_path(|| Plan::new(sql, types))
}

/// Runs a statement as the caller.
fn as_caller<T: Scalar>(plan: &Plan, arguments: &[DatumWithOid<'_>]) -> (usize, Option<T>) {
    identity::with_callers_path(|| plan.call(arguments))
}

fn sandboxed<T>(role: Oid, time_zone: &CStr, work: impl FnOnce() -> T) -> T {
    identity::sandboxed_as(role, || identity::with_settings(&[(c"TimeZone", time_zone)], work))
}

impl Candidates {
    /// Returns the arguments: the present, the operation's own, and the key.
    fn arguments<'a>(&self, row: &Row<'_>, own: Vec<DatumWithOid<'a>>) -> Result<Vec<DatumWithOid<'a>>, TtlError> {
        let key = row.key.texts(&self.table, &self.key)?;
        let mut arguments = vec![clock_timestamp().into()];
        arguments.extend(own);
        arguments.extend(key.into_iter().map(DatumWithOid::from));
        Ok(arguments)
    }

    /// Returns the statements of the rule that removes the row first; nothing if the caller sees no such row. A row that
    /// will be changed is locked, so that another rule cannot come to be the first.
    fn choose(&self, arguments: &[DatumWithOid<'_>]) -> Result<Option<&Prepared>, TtlError> {
        let place = match &self.choice {
            None => return self.at(0).map(Some),
            Some(Choice { plan, owner }) => self.place(plan, owner.as_ref(), arguments)?,
        };
        place.map(|place| self.at(place)).transpose()
    }

    fn place(
        &self,
        plan: &Plan,
        owner: Option<&Owner>,
        arguments: &[DatumWithOid<'_>],
    ) -> Result<Option<usize>, TtlError> {
        let place = match owner {
            None => as_caller::<i32>(plan, arguments).1,
            Some(owner) => {
                owner.check_caller(&self.table)?;
                if owner.finds(arguments) { owner.run(|| plan.call::<i32>(arguments)).1 } else { None }
            }
        };
        Ok(place.and_then(|place| usize::try_from(place).ok()))
    }

    fn at(&self, place: usize) -> Result<&Prepared, TtlError> {
        let prepared = self.each.get(place).and_then(Option::as_ref);
        prepared.ok_or_else(|| TtlError::NoClock(self.column.clone()))
    }
}

fn candidates(row: &Row<'_>, operation: Operation) -> Result<Rc<Candidates>, TtlError> {
    PREPARED.with(|memo| {
        let name = (row.relid, row.column.map(str::to_owned), row.rule_name.map(str::to_owned), operation);
        match memo.get(&name) {
            Some(candidates) => Ok(candidates),
            None => memo.remember(&name, || {
                let catalog = Catalog::open()?;
                let rules = rules_on_one_column(&catalog, row.relid, row.column, row.rule_name)?;
                let key = primary(row.relid)?;
                if key.is_empty() {
                    return Err(TtlError::NoPrimaryKey(rules[0].table.clone()));
                }
                let reads = |rule: &Rule| catalog.columns_read(rule.id);
                check_classes(&rules, operation, reads)?;
                let prepare = |rule: &Rule| match prepare(rule, &key, operation, &reads(rule)?) {
                    Err(TtlError::NoClock(_)) => Ok(None),
                    prepared => prepared.map(Some),
                };
                let each = rules.iter().map(prepare).collect::<Result<_, _>>()?;
                let choice = if rules.len() > 1 {
                    let columns = rules.iter().map(reads).collect::<Result<Vec<_>, _>>()?.concat();
                    Some(choice(&rules, &key, operation, &columns))
                } else {
                    None
                };
                Ok((
                    vec![row.relid, catalog.relid],
                    Candidates { key, each, table: rules[0].table.clone(), column: rules[0].name.clone(), choice },
                ))
            }),
        }
    })
}

/// Fails if setting a row's value would decide which of several rules it falls under: the row could be gone at once.
fn check_classes(
    rules: &[Rule],
    operation: Operation,
    reads: impl Fn(&Rule) -> Result<Vec<String>, TtlError>,
) -> Result<(), TtlError> {
    if rules.len() == 1 || operation == Operation::Get {
        return Ok(());
    }
    for rule in rules.iter().filter(|rule| rule.attnum.is_some()) {
        if reads(rule)?.contains(&rule.name) {
            return Err(TtlError::ClassBySource { column: rule.name.clone(), table: rule.table.clone() });
        }
    }
    Ok(())
}

/// The types of an operation's parameters.
fn types(operation: Operation, key: &[KeyColumn]) -> Vec<Oid> {
    let mut types = vec![pg_sys::TIMESTAMPTZOID];
    types.extend_from_slice(match operation {
        Operation::Set(_) => &[pg_sys::INTERVALOID, pg_sys::INTERVALOID],
        Operation::ExpireAt(_) => &[pg_sys::TIMESTAMPTZOID],
        _ => &[],
    });
    types.resize(types.len() + key.len(), pg_sys::TEXTOID);
    types
}

/// Plans the statements of an operation by one rule.
///
/// Planning runs code, too: it evaluates constant expressions, also in index predicates. The owner's statements are
/// planned first, so that this happens as the owner.
fn prepare(rule: &Rule, key: &[KeyColumn], operation: Operation, columns: &[String]) -> Result<Prepared, TtlError> {
    let Statements { main, claim, judge } = statement::of(rule, key, operation, columns)?;
    let mut types = types(operation, key);
    let mut plan = |sql: &str| planned(sql, &mut types);
    let (role, time_zone) = (rule.owner, time_zone(rule));
    let is_get = operation == Operation::Get;
    let judge = judge.map(|judge| sandboxed(role, &time_zone, || plan(&judge)));
    let read = (claim.is_some() && is_get).then(|| sandboxed(role, &time_zone, || plan(&main)));
    let plan = read.unwrap_or_else(|| plan(&main));
    let owner = claim.map(|claim| Owner { claim, types, claim_plan: OnceCell::new(), judge, role, time_zone });
    Ok(Prepared { plan, owner, table: rule.table.clone(), rule_id: rule.id })
}

/// Plans the statement that chooses among rules on one column.
fn choice(rules: &[Rule], key: &[KeyColumn], operation: Operation, columns: &[String]) -> Choice {
    let Statements { main, claim, .. } = statement::choosing(rules, key, operation, columns);
    let mut types = types(operation, key);
    let (role, time_zone) = (rules[0].owner, time_zone(&rules[0]));
    let mut plan = || planned(&main, &mut types);
    let plan = if claim.is_some() { sandboxed(role, &time_zone, plan) } else { plan() };
    let owner = claim.map(|claim| Owner { claim, types, claim_plan: OnceCell::new(), judge: None, role, time_zone });
    Choice { plan, owner }
}

fn time_zone(rule: &Rule) -> CString {
    CString::new(rule.options.time_zone.as_str()).unwrap_or_default()
}

/// Returns the rules of a table: all, or those on a column or of a name, which is empty for a rule without one.
pub fn rules_of(
    catalog: &Catalog,
    relid: Oid,
    column: Option<&str>,
    rule_name: Option<&str>,
) -> Result<Vec<Rule>, TtlError> {
    let mut rules = catalog.rules_on(relid)?;
    rules.retain(|rule| {
        let is_named = |name: &str| rule.rule_name.as_deref().unwrap_or_default() == name;
        column.is_none_or(|column| rule.name == column) && rule_name.is_none_or(is_named)
    });
    if rules.is_empty() { Err(TtlError::no_rule(&table_name(relid)?, column, rule_name)) } else { Ok(rules) }
}

/// Returns the rules that decide about a table's rows by one column.
fn rules_on_one_column(
    catalog: &Catalog,
    relid: Oid,
    column: Option<&str>,
    rule_name: Option<&str>,
) -> Result<Vec<Rule>, TtlError> {
    let mut rules = rules_of(catalog, relid, column, rule_name)?;
    // A rule that clears columns decides only where no other does.
    if !rules.iter().all(Rule::clears) {
        rules.retain(|rule| !rule.clears());
    }
    if rules.iter().all(|rule| rule.name == rules[0].name) {
        return Ok(rules);
    }
    let columns: BTreeSet<_> = rules.iter().map(|rule| rule.name.as_str()).collect();
    let columns = columns.into_iter().collect::<Vec<_>>().join(", ");
    Err(TtlError::AmbiguousRule { columns, table: table_name(relid)? })
}

/// Returns the rule that is meant.
pub fn rule_of(catalog: &Catalog, relid: Oid, column: Option<&str>, rule_name: Option<&str>) -> Result<Rule, TtlError> {
    let mut rules = rules_on_one_column(catalog, relid, column, rule_name)?;
    match (rules.pop(), rules.is_empty()) {
        (Some(rule), true) => Ok(rule),
        (last, _) => {
            rules.extend(last);
            let names = rules.iter().map(|rule| rule.rule_name.clone());
            Err(TtlError::ambiguous_name(&table_name(relid)?, &rules[0].name, names))
        }
    }
}

fn table_name(relid: Oid) -> Result<String, TtlError> {
    access::relation_name(relid).ok_or(TtlError::UnknownTable(relid.to_u32()))
}
