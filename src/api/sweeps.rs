//! Sweeps on request.

use crate::catalog::{Catalog, Initiator};
use crate::error::TtlError;
use crate::pg::access::refuse_if_read_only;
use crate::pg::names::Regclass;
use crate::pg::procedure;
use crate::pg::transaction::Scope;
use crate::registry;
use crate::rule::Invalid;
use crate::sweep::inspect::preview;
use crate::sweep::manual::{self, Limits};
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::iter::TableIterator;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use std::time::Duration;

/// Returns what the next sweep of a table's rules would do. Deletes nothing.
#[pg_extern]
#[allow(clippy::type_complexity)]
fn ttl_preview(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
    rule_name: default!(Option<&str>, "NULL"),
) -> Result<
    TableIterator<
        'static,
        (
            name!(schema_name, String),
            name!(table_name, String),
            name!(column_name, String),
            name!(cutoff, Option<TimestampWithTimeZone>),
            name!(expired_rows, i64),
            name!(oldest_value, Option<String>),
            name!(expired_bytes, i64),
            name!(plan, &'static str),
            name!(blockers, Vec<String>),
            name!(is_exact, bool),
            name!(unreadable_values, Option<i64>),
            name!(relation, String),
            name!(share, Option<f64>),
            name!(estimated_duration, Option<Interval>),
            name!(rule_name, Option<String>),
        ),
    >,
    ErrorReport,
> {
    let relid = table_name.ok_or(TtlError::from(Invalid::Missing("table_name")))?.0;
    let rules = registry::rules_to_preview(relid, column_name, rule_name)?;
    let mut rows = Vec::new();
    for (schema, table, rule) in rules {
        for it in preview::of(&Catalog::open()?, &rule)? {
            rows.push((
                schema.clone(),
                table.clone(),
                rule.name.clone(),
                it.cutoff,
                it.rows,
                it.oldest_value,
                it.bytes,
                it.plan,
                it.blockers,
                it.is_exact,
                it.unreadable,
                it.relation,
                it.share,
                it.duration,
                rule.rule_name.clone(),
            ));
        }
    }
    Ok(TableIterator::new(rows))
}

/// Sweeps now, in the caller's transaction. Returns the number of rows removed.
#[pg_extern]
fn ttl_runner(table_name: default!(Option<Regclass>, "NULL")) -> Result<i64, ErrorReport> {
    refuse_if_read_only("ttl_runner()");
    let relid = table_name.map(|table| registry::owned_table(table.0)).transpose()?;
    Ok(manual::sweep(relid, Initiator::Runner, Scope::Subtransaction, Limits::default())?)
}

/// Sweeps now and commits every batch. Declared as a procedure in `sql/sweeps.sql`.
#[pg_extern(sql = false)]
fn ttl_sweep(
    table_name: Option<Regclass>,
    max_rows: Option<i64>,
    max_time: Option<Interval>,
    call: procedure::Call<'_>,
) -> Result<(), ErrorReport> {
    refuse_if_read_only("CALL ttl_sweep()");
    let relid = table_name.map(|table| registry::owned_table(table.0)).transpose()?;
    if max_rows.is_some_and(|rows| rows <= 0) {
        return Err(TtlError::from(Invalid::Limit("max_rows")).into());
    }
    let time = match max_time.map(|time| u64::try_from(time.as_micros())) {
        None => None,
        Some(Ok(micros)) if micros > 0 => Some(Duration::from_micros(micros)),
        Some(_) => return Err(TtlError::from(Invalid::Limit("max_time")).into()),
    };
    let limits = Limits { rows: max_rows, time };
    let swept = call.with_commits(|| Ok(manual::sweep(relid, Initiator::Procedure, Scope::Procedure, limits)))?;
    swept?;
    Ok(())
}
