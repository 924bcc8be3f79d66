//! Registering, changing and removing rules.

use crate::catalog::Catalog;
use crate::error::TtlError;
use crate::pg::access::refuse_if_read_only;
use crate::pg::names::{Regclass, Regprocedure};
use crate::pg::span::interval_of_text;
use crate::rule::{Given, IndexMethod, Invalid, PartitionAction, Ttl, Window};
use crate::{guc, registry};
use pgrx::datum::Interval;
use pgrx::iter::TableIterator;
use pgrx::pg_sys::Oid;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

/// Defines a function with its own arguments and all options, so that the options are listed once. The body gets the
/// options that were given.
macro_rules! with_options {
    ($(#[$($attribute:tt)*])* fn $name:ident($($own:tt)*) ($($last:tt)*) |$given:ident| $body:block) => {
        $(#[$($attribute)*])*
        #[allow(clippy::too_many_arguments)]
        fn $name(
            $($own)*
            batch_size: default!(Option<i32>, "NULL"),
            soft_delete_column: default!(Option<String>, "NULL"),
            filter: default!(Option<String>, "NULL"),
            time_zone: default!(Option<String>, "NULL"),
            unit: default!(Option<String>, "NULL"),
            index_method: default!(Option<&str>, "NULL"),
            concurrently: default!(Option<bool>, "NULL"),
            hide_expired: default!(Option<bool>, "NULL"),
            purge_after: default!(Option<Interval>, "NULL"),
            archive_to: default!(Option<Regclass>, "NULL"),
            on_expire: default!(Option<Regprocedure>, "NULL"),
            notify_channel: default!(Option<String>, "NULL"),
            clear_columns: default!(Option<Vec<Option<String>>>, "NULL"),
            emit_message: default!(Option<bool>, "NULL"),
            partition_action: default!(Option<&str>, "NULL"),
            run_every: default!(Option<Interval>, "NULL"),
            run_window: default!(Option<&str>, "NULL"),
            max_rows_per_second: default!(Option<i32>, "NULL"),
            max_rows_per_run: default!(Option<i64>, "NULL"),
            $($last)*
        ) -> Result<bool, ErrorReport> {
            let read = || {
                Ok::<_, TtlError>(Given {
                    expire_after: None,
                    batch_size,
                    soft_delete_column,
                    filter,
                    time_zone,
                    unit,
                    index_method: index_method.map(IndexMethod::parse).transpose()?,
                    concurrently,
                    hide_expired,
                    purge_after: purge_after.map(|span| span_of("purge_after", span)).transpose()?,
                    archive_to: archive_to.map(registry::table_name).transpose()?,
                    on_expire: on_expire.map(registry::function_name).transpose()?,
                    notify_channel,
                    emit_message,
                    clear_columns: clear_columns.map(column_names).transpose()?,
                    partition_action: partition_action.map(PartitionAction::parse).transpose()?,
                    run_every: run_every.map(|span| span_of("run_every", span)).transpose()?,
                    run_window: run_window.map(Window::parse).transpose()?,
                    max_rows_per_second,
                    max_rows_per_run,
                })
            };
            let $given = read()?;
            $body
        }
    };
}

with_options! {
    /// Registers a rule whose time to live is a number of seconds.
    #[pg_extern(name = "ttl_create_index")]
    fn ttl_create_index_seconds(
        table_name: Option<Regclass>,
        column_name: Option<&str>,
        expire_after_seconds: Option<i32>,
    ) (active: default!(Option<bool>, "NULL"), rule_name: default!(Option<&str>, "NULL"),) |given| {
        let expire_after = expire_after_seconds.map(ttl_of_seconds).transpose()?;
        create((table_name, column_name, rule_name), Given { expire_after, ..given }, active)
    }
}

with_options! {
    /// Registers a rule whose time to live is an interval. Months and days are kept as such.
    #[pg_extern(name = "ttl_create_index")]
    fn ttl_create_index_interval(
        table_name: Option<Regclass>,
        column_name: Option<&str>,
        expire_after: Option<Interval>,
    ) (active: default!(Option<bool>, "NULL"), rule_name: default!(Option<&str>, "NULL"),) |given| {
        let expire_after = expire_after.map(ttl_of_interval).transpose()?;
        create((table_name, column_name, rule_name), Given { expire_after, ..given }, active)
    }
}

with_options! {
    /// Registers a rule whose time to live is text, an interval or a number of seconds: untyped literals and parameters
    /// resolve to this one.
    #[pg_extern(name = "ttl_create_index")]
    fn ttl_create_index_text(
        table_name: Option<Regclass>,
        column_name: Option<&str>,
        expire_after: Option<&str>,
    ) (active: default!(Option<bool>, "NULL"), rule_name: default!(Option<&str>, "NULL"),) |given| {
        let expire_after = expire_after.map(interval_of_text).transpose()?.map(ttl_of_interval).transpose()?;
        create((table_name, column_name, rule_name), Given { expire_after, ..given }, active)
    }
}

with_options! {
    /// Changes the options that are given; `reset` names the options to set back to their defaults.
    #[pg_extern]
    fn ttl_alter_index(
        table_name: Option<Regclass>,
        column_name: Option<&str>,
        expire_after: default!(Option<Interval>, "NULL"),
        expire_after_seconds: default!(Option<i32>, "NULL"),
        reset: default!(Option<Vec<Option<String>>>, "NULL"),
    ) (rule_name: default!(Option<&str>, "NULL"),) |given| {
        refuse_if_read_only("ttl_alter_index()");
        let expire_after = match (expire_after, expire_after_seconds) {
            (Some(_), Some(_)) => return Err(TtlError::TwoExpiries.into()),
            (Some(interval), None) => Some(ttl_of_interval(interval)?),
            (None, Some(seconds)) => Some(ttl_of_seconds(seconds)?),
            (None, None) => None,
        };
        let given = Given { expire_after, ..given };
        let reset: Option<Vec<_>> = reset.unwrap_or_default().into_iter().collect();
        let reset = reset.ok_or(TtlError::from(Invalid::Missing("an option to reset")))?;
        registry::alter(table(table_name)?, column(column_name)?, rule_name, given, &reset)?;
        Ok(true)
    }
}

/// Removes a rule. Returns `false` if there was none.
#[pg_extern]
fn ttl_drop_index(
    table_name: Option<Regclass>,
    column_name: Option<&str>,
    rule_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_drop_index()");
    Ok(registry::drop(table(table_name)?, column(column_name)?, rule_name)?)
}

/// Pauses the rules of a table, or those on a column or of a name.
#[pg_extern]
fn ttl_pause(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
    rule_name: default!(Option<&str>, "NULL"),
) -> Result<i32, ErrorReport> {
    refuse_if_read_only("ttl_pause()");
    Ok(registry::set_active(table(table_name)?, column_name, rule_name, false)?)
}

/// Resumes the rules of a table, or those on a column or of a name.
#[pg_extern]
fn ttl_resume(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
    rule_name: default!(Option<&str>, "NULL"),
) -> Result<i32, ErrorReport> {
    refuse_if_read_only("ttl_resume()");
    Ok(registry::set_active(table(table_name)?, column_name, rule_name, true)?)
}

/// Returns the rules that are on hold until a restore or an initial copy is over, and what they wait for.
#[pg_extern(stable)]
pub fn ttl_holds() -> Result<TableIterator<'static, (name!(rule_id, i64), name!(hold, String))>, ErrorReport> {
    Ok(TableIterator::new(Catalog::open()?.holds()?))
}

/// Returns the batch size of rules without one of their own.
#[pg_extern(stable)]
pub fn ttl_default_batch_size() -> i32 {
    guc::batch_size()
}

/// Registers a rule. A rule that is registered again stays paused or active unless the caller says which.
fn create(
    (table_name, column_name, rule_name): (Option<Regclass>, Option<&str>, Option<&str>),
    given: Given,
    active: Option<bool>,
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_create_index()");
    let (table, column) = (table(table_name)?, column(column_name)?);
    registry::create(table, column, rule_name, given)?;
    if let Some(active) = active {
        registry::set_active(table, Some(column), Some(rule_name.unwrap_or_default()), active)?;
    }
    Ok(true)
}

fn table(table_name: Option<Regclass>) -> Result<Oid, TtlError> {
    Ok(table_name.ok_or(Invalid::Missing("table_name"))?.0)
}

fn column(column_name: Option<&str>) -> Result<&str, TtlError> {
    Ok(column_name.ok_or(Invalid::Missing("column_name"))?)
}

fn ttl_of_seconds(seconds: i32) -> Result<Ttl, TtlError> {
    Ok(Ttl::from_seconds(seconds)?)
}

fn column_names(names: Vec<Option<String>>) -> Result<Vec<String>, TtlError> {
    Ok(names.into_iter().collect::<Option<_>>().ok_or(Invalid::ClearColumns)?)
}

/// Converts an interval that is not a time to live.
fn span_of(option: &'static str, interval: Interval) -> Result<Ttl, TtlError> {
    Ok(ttl_of_interval(interval).map_err(|_| Invalid::Span(option))?)
}

fn ttl_of_interval(interval: Interval) -> Result<Ttl, TtlError> {
    Ok(Ttl::new(interval.months(), interval.days(), interval.micros())?)
}
