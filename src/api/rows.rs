//! One row's time to live.

use crate::error::TtlError;
use crate::pg::access::refuse_if_read_only;
use crate::pg::names::{JsonText, Regclass};
use crate::pg::trigger;
use crate::registry;
use crate::row::{self, Key, Mode, Row};
use crate::rule::Invalid;
use crate::visibility;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

/// Seconds until a row expires; -1 if it never does, -2 if it is not there or has expired.
#[pg_extern(name = "ttl_get")]
fn ttl_get_text(
    table_name: Option<Regclass>,
    key: Option<&str>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<f64, ErrorReport> {
    Ok(row::get(&by_text(table_name, key, column_name)?)?)
}

#[pg_extern(name = "ttl_get")]
fn ttl_get_json(
    table_name: Option<Regclass>,
    key: Option<JsonText>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<f64, ErrorReport> {
    Ok(row::get(&by_json(table_name, key, column_name)?)?)
}

/// Has a row expire after a time; `false` if it is not there or has expired, or if the mode says no.
#[pg_extern(name = "ttl_set")]
fn ttl_set_text(
    table_name: Option<Regclass>,
    key: Option<&str>,
    ttl: Option<Interval>,
    column_name: default!(Option<&str>, "NULL"),
    mode: default!(Option<&str>, "'always'"),
) -> Result<bool, ErrorReport> {
    set(by_text(table_name, key, column_name)?, ttl, mode)
}

#[pg_extern(name = "ttl_set")]
fn ttl_set_json(
    table_name: Option<Regclass>,
    key: Option<JsonText>,
    ttl: Option<Interval>,
    column_name: default!(Option<&str>, "NULL"),
    mode: default!(Option<&str>, "'always'"),
) -> Result<bool, ErrorReport> {
    set(by_json(table_name, key, column_name)?, ttl, mode)
}

/// Has a row expire at an instant, in the same way.
#[pg_extern(name = "ttl_expire_at")]
fn ttl_expire_at_text(
    table_name: Option<Regclass>,
    key: Option<&str>,
    expires_at: Option<TimestampWithTimeZone>,
    column_name: default!(Option<&str>, "NULL"),
    mode: default!(Option<&str>, "'always'"),
) -> Result<bool, ErrorReport> {
    expire_at(by_text(table_name, key, column_name)?, expires_at, mode)
}

#[pg_extern(name = "ttl_expire_at")]
fn ttl_expire_at_json(
    table_name: Option<Regclass>,
    key: Option<JsonText>,
    expires_at: Option<TimestampWithTimeZone>,
    column_name: default!(Option<&str>, "NULL"),
    mode: default!(Option<&str>, "'always'"),
) -> Result<bool, ErrorReport> {
    expire_at(by_json(table_name, key, column_name)?, expires_at, mode)
}

/// Restarts a row's clock; `false` if it is not there or has expired.
#[pg_extern(name = "ttl_touch")]
fn ttl_touch_text(
    table_name: Option<Regclass>,
    key: Option<&str>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_touch()");
    Ok(row::touch(&by_text(table_name, key, column_name)?)?)
}

#[pg_extern(name = "ttl_touch")]
fn ttl_touch_json(
    table_name: Option<Regclass>,
    key: Option<JsonText>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_touch()");
    Ok(row::touch(&by_json(table_name, key, column_name)?)?)
}

/// Has a row never expire; `false` if it is not there or has expired.
#[pg_extern(name = "ttl_persist")]
fn ttl_persist_text(
    table_name: Option<Regclass>,
    key: Option<&str>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_persist()");
    Ok(row::persist(&by_text(table_name, key, column_name)?)?)
}

#[pg_extern(name = "ttl_persist")]
fn ttl_persist_json(
    table_name: Option<Regclass>,
    key: Option<JsonText>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_persist()");
    Ok(row::persist(&by_json(table_name, key, column_name)?)?)
}

/// From now on every UPDATE of a row restarts its clock; `false` if that was so.
#[pg_extern]
fn ttl_enable_touch(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_enable_touch()");
    let relid = table_name.ok_or(TtlError::from(Invalid::Missing("table_name")))?.0;
    Ok(registry::enable_touch(relid, column_name)?)
}

/// From now on an UPDATE leaves the clock alone; `false` if that was so.
#[pg_extern]
fn ttl_disable_touch(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_disable_touch()");
    let relid = table_name.ok_or(TtlError::from(Invalid::Missing("table_name")))?.0;
    Ok(registry::disable_touch(relid, column_name)?)
}

/// The trigger behind `ttl_enable_touch`; its argument is the number of a rule. Declared in `sql/rows.sql`.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn ttl_touch_row(call: trigger::Call<'_>) -> pg_sys::Datum {
    call.answer(row::touched)
}

/// The trigger of a table with hidden rows; its argument is the number of a rule. Declared in `sql/rows.sql`.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn ttl_make_room(call: trigger::Call<'_>) -> pg_sys::Datum {
    call.answer(visibility::made_room)
}

/// Fails a statement that would do nothing about a hidden row in its way. Put into statements when they are planned.
#[pg_extern]
fn ttl_refuse(relid: pg_sys::Oid) -> Result<bool, ErrorReport> {
    Ok(visibility::refuse(relid)?)
}

/// What PostgreSQL asks of a function written in C.
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_ttl_touch_row() -> &'static pg_sys::Pg_finfo_record {
    &pg_sys::Pg_finfo_record { api_version: 1 }
}

#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_ttl_make_room() -> &'static pg_sys::Pg_finfo_record {
    pg_finfo_ttl_touch_row()
}

fn set(row: Row<'_>, ttl: Option<Interval>, mode: Option<&str>) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_set()");
    let ttl = ttl.ok_or(TtlError::from(Invalid::Missing("ttl")))?;
    Ok(row::set(&row, ttl, mode_of(mode)?)?)
}

fn expire_at(row: Row<'_>, expires_at: Option<TimestampWithTimeZone>, mode: Option<&str>) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_expire_at()");
    let expires_at = expires_at.ok_or(TtlError::from(Invalid::Missing("expires_at")))?;
    Ok(row::expire_at(&row, expires_at, mode_of(mode)?)?)
}

fn mode_of(name: Option<&str>) -> Result<Mode, TtlError> {
    Mode::parse(name.ok_or(Invalid::Missing("mode"))?)
}

fn by_text<'a>(
    table_name: Option<Regclass>,
    key: Option<&'a str>,
    column: Option<&'a str>,
) -> Result<Row<'a>, TtlError> {
    by_key(table_name, key.map(Key::Text), column)
}

fn by_json(table_name: Option<Regclass>, key: Option<JsonText>, column: Option<&str>) -> Result<Row<'_>, TtlError> {
    by_key(table_name, key.map(|key| Key::of_json(&key.0)), column)
}

fn by_key<'a>(
    table_name: Option<Regclass>,
    key: Option<Key<'a>>,
    column: Option<&'a str>,
) -> Result<Row<'a>, TtlError> {
    let relid = table_name.ok_or(Invalid::Missing("table_name"))?.0;
    Ok(Row { relid, key: key.ok_or(Invalid::Missing("key"))?, column })
}
