//! Keeping rows fresh: the value that the trigger of `ttl_enable_touch` puts into an updated row.

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::memo::Memo;
use crate::pg::plan::Plan;
use crate::pg::relation;
use crate::pg::trigger::{Change, Column, NewRow};
use crate::sandbox;
use pgrx::datum::DatumWithOid;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::{self, Oid};
use std::rc::Rc;

/// The column with a row's clock, and how to restart it.
struct Touch {
    column: String,
    type_oid: Oid,
    /// Whether the column can hold every instant.
    is_plain_instant: bool,
    /// Computes the new value from the present and the current value; returns nothing for a row that never expires.
    restart: Plan,
}

thread_local! {
    static TOUCHES: Memo<(i64, Oid), Option<Touch>> = Memo::new();
}

/// Returns the row that an update writes: with its clock restarted, unless the update sets it or the row never expires.
/// A sweep's changes do not count as use of the row. A trigger whose rule is gone does nothing.
pub fn touched<'a>(update: &'a Change<'_>) -> Result<NewRow<'a>, TtlError> {
    let rule_id = update.argument().and_then(|id| id.parse().ok()).filter(|_| update.is_update());
    let rule_id = rule_id.ok_or(TtlError::NotOurTrigger)?;
    if sandbox::is_under_way_in(update.relid()) || super::is_setting(rule_id) {
        return Ok(update.row());
    }
    let touch = touch_of(rule_id, update.relid())?;
    let Some(touch) = touch.as_ref() else { return Ok(update.row()) };
    let is_meant = |column: &Column| column.type_oid == touch.type_oid && !update.sets(*column);
    let column = update.column(&touch.column).filter(is_meant);
    let Some((column, value)) = column.and_then(|column| Some((column, update.kept_value(column)?))) else {
        return Ok(update.row());
    };
    let arguments = [clock_timestamp().into(), value];
    touch.restart(&arguments).map_or_else(|| Ok(update.row()), |fresh| update.row_with(column, &fresh))
}

/// Returns how to touch a rule's rows; `None` if the rule is gone, has no clock, or does not cover the relation.
fn touch_of(rule_id: i64, relid: Oid) -> Result<Rc<Option<Touch>>, TtlError> {
    TOUCHES.with(|memo| match memo.get(&(rule_id, relid)) {
        Some(touch) => Ok(touch),
        None => memo.remember(&(rule_id, relid), || {
            // A trigger whose rule cannot be read does nothing.
            let Some(catalog) = Catalog::open_if_served()? else { return Ok((Catalog::watched()?, None)) };
            let rule = catalog.rule_with_id(rule_id)?;
            let about = vec![catalog.relid, relid, rule.as_ref().map_or(relid, |rule| rule.relid)];
            // Anyone who may create triggers on a table can give them any rule ID.
            let rule = rule.filter(|rule| relation::tree(rule.relid).contains(&relid));
            Ok((about, rule.and_then(|rule| Touch::of(&rule).ok())))
        }),
    })
}

/// Refuses a rule whose rows have no clock that can be restarted.
pub fn check_touch(rule: &Rule) -> Result<(), TtlError> {
    Touch::of(rule).map(|_| ())
}

impl Touch {
    fn of(rule: &Rule) -> Result<Self, TtlError> {
        if !rule.predicate.expiry.has_ttl() {
            return Err(TtlError::NoClock(rule.name.clone()));
        }
        // A cast would truncate a text that does not fit.
        let room = usize::try_from(rule.typmod - 4).unwrap_or(usize::MAX);
        let fits = rule.predicate.expiry.source().text_length().is_none_or(|length| length <= room);
        let fresh = rule.predicate.expiry.value_to_begin("$1").filter(|_| rule.is_writable && fits);
        let fresh = fresh.ok_or_else(|| TtlError::NotWritable(rule.name.clone()))?;
        let endless = rule.predicate.expiry.of_value("$2").is_endless();
        let sql = format!("SELECT CAST({fresh} AS {}) WHERE NOT {endless}", rule.type_name);
        let restart = Plan::new(&sql, &mut [pg_sys::TIMESTAMPTZOID, rule.type_oid]);
        let is_plain_instant = rule.type_oid == pg_sys::TIMESTAMPTZOID && rule.typmod < 0;
        Ok(Self { column: rule.name.clone(), type_oid: rule.type_oid, is_plain_instant, restart })
    }

    /// Returns the new value of the column, from the present and the current value.
    fn restart<'a>(&self, arguments: &'a [DatumWithOid<'a>; 2]) -> Option<DatumWithOid<'a>> {
        // The usual kind of column needs no SQL.
        if self.is_plain_instant {
            let micros = arguments[1].datum().map(|value| value.sans_lifetime().value() as i64);
            let is_endless = [i64::MIN, i64::MAX].map(Some).contains(&micros);
            return (!is_endless).then(|| clock_timestamp().into());
        }
        self.restart.value(arguments)
    }
}
