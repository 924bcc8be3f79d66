//! Triggers that run when the catalog is written, and after DDL. Declared in `sql/follow.sql`.

use crate::catalog::Catalog;
use crate::error::TtlError;
use crate::pg::entry::c_function;
use crate::pg::{event, process, shmem};
use crate::registry;
use pgrx::AllocatedByRust;
use pgrx::datum::datetime_support::now;
use pgrx::heap_tuple::PgHeapTuple;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

/// The result of a trigger. Errors are raised, because one that a trigger returns loses its SQLSTATE.
type Answer<'a> = Result<Option<PgHeapTuple<'a, AllocatedByRust>>, std::convert::Infallible>;

/// Counts a change of a rule's definition.
#[pg_trigger]
pub fn ttl_count_version<'a>(trigger: &'a PgTrigger<'a>) -> Answer<'a> {
    answer(|| {
        let (old, new) = trigger.old().zip(trigger.new()).ok_or(TtlError::NotOurTrigger)?;
        let version = old.get_by_name::<i64>("version").ok().flatten().unwrap_or_default();
        let mut new = new.into_owned();
        // Rows may no longer be blocked under the new definition.
        let set = new
            .set_by_name("version", version + 1)
            .and_then(|()| new.set_by_name("updated_at", now()))
            .and_then(|()| new.set_by_name("blocked_retry_at", None::<TimestampWithTimeZone>))
            .and_then(|()| new.set_by_name("blocked_tries", 0));
        set.map_err(|_| TtlError::NotOurTrigger)?;
        process::at_commit(shmem::wake);
        Catalog::open()?.forget_rule(id_of(&new)?)?;
        Ok(Some(new))
    })
}

/// Makes every session forget a rule that is being dropped, and drops the rule that purges for it.
#[pg_trigger]
pub fn ttl_tell_of_drop<'a>(trigger: &'a PgTrigger<'a>) -> Answer<'a> {
    answer(|| {
        let old = trigger.old().ok_or(TtlError::NotOurTrigger)?.into_owned();
        let (catalog, id) = (Catalog::open()?, id_of(&old)?);
        catalog.forget_rule(id)?;
        // A rule that purges has no other that purges for it.
        if old.get_by_name::<i64>("purges").ok().flatten().is_none() {
            catalog.remove_purges(id)?;
        }
        Ok(Some(old))
    })
}

/// Takes in a rule written by a role without rights on the catalog, as in a restore: only what was checked is stored.
#[pg_trigger]
pub fn ttl_take_in<'a>(trigger: &'a PgTrigger<'a>) -> Answer<'a> {
    answer(|| {
        let new = trigger.new().ok_or(TtlError::NotOurTrigger)?.into_owned();
        let catalog = Catalog::open()?;
        if catalog.is_callers() {
            return Ok(Some(new));
        }
        if catalog.relid == trigger.relid().map_err(|_| TtlError::NotOurTrigger)? {
            registry::restore(&catalog.row_as_json(new)?)?;
        } else {
            warning!("sweeping stays on: use ttl_stop_worker() to switch it off");
        }
        Ok(None)
    })
}

/// Binds a rule when it is written.
#[pg_trigger]
pub fn ttl_bind<'a>(trigger: &'a PgTrigger<'a>) -> Answer<'a> {
    answer(|| {
        let new = trigger.new().ok_or(TtlError::NotOurTrigger)?.into_owned();
        let (catalog, id) = (Catalog::open()?, id_of(&new)?);
        match trigger.old() {
            None => catalog.bind_written(id)?,
            Some(old) => catalog.check_written(id, mark_of(&old.into_owned()) != mark_of(&new))?,
        }
        Ok(None)
    })
}

/// Binds the rules that an upgrade of the schema has written. Called by the upgrade script.
#[pg_extern]
fn ttl_adopt() -> Result<(), ErrorReport> {
    Ok(Catalog::open()?.adopt()?)
}

fn answer<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, std::convert::Infallible> {
    Ok(work().unwrap_or_else(|error| error.raise()))
}

fn mark_of(row: &PgHeapTuple<'_, AllocatedByRust>) -> Option<String> {
    row.get_by_name("soft_delete_column").ok().flatten()
}

fn id_of(row: &PgHeapTuple<'_, AllocatedByRust>) -> Result<i64, TtlError> {
    row.get_by_name::<i64>("id").ok().flatten().ok_or(TtlError::NotOurTrigger)
}

c_function!(
    /// The event trigger that follows DDL.
    ttl_follow_ddl,
    pg_finfo_ttl_follow_ddl,
    pg_sys::FunctionCallInfo,
    |call| event::answer(call, |event| match Catalog::open_if_served()? {
        Some(catalog) => catalog.follow(event),
        // The extension is being created or dropped, or this library does not serve it.
        None => Ok(()),
    })
);
