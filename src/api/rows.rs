//! One row's time to live.

use crate::error::TtlError;
use crate::pg::access::refuse_if_read_only;
use crate::pg::entry::c_function;
use crate::pg::names::{Regclass, text_of};
use crate::pg::span::{interval_of_seconds, interval_of_text};
use crate::pg::trigger;
use crate::registry;
use crate::row::{self, Key, Mode, Row};
use crate::rule::Invalid;
use crate::visibility;
use pgrx::AnyElement;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

/// Defines a function about one row twice: with a text key, which untyped literals and parameters resolve to, and with
/// a key of any other type. The body gets the row.
macro_rules! about_row {
    ($(#[doc = $doc:literal])* fn $name:tt ($by_text:ident, $by_value:ident)
     ($($first:tt)*) ($($last:tt)*) -> $result:ty |$row:ident| $body:expr) => {
        $(#[doc = $doc])*
        #[pg_extern(name = $name)]
        fn $by_text(
            table_name: Option<Regclass>,
            key: Option<&str>,
            $($first)*
            column_name: default!(Option<&str>, "NULL"),
            $($last)*
            rule_name: default!(Option<&str>, "NULL"),
        ) -> Result<$result, ErrorReport> {
            let $row = row_of(table_name, key.map(Key::Text), column_name, rule_name)?;
            $body
        }

        $(#[doc = $doc])*
        #[pg_extern(name = $name)]
        fn $by_value(
            table_name: Option<Regclass>,
            key: Option<AnyElement>,
            $($first)*
            column_name: default!(Option<&str>, "NULL"),
            $($last)*
            rule_name: default!(Option<&str>, "NULL"),
        ) -> Result<$result, ErrorReport> {
            let text = key.map(|key| text_of(&key));
            let key = text.as_ref().map(|(text, is_json)| if *is_json { Key::of_json(text) } else { Key::Text(text) });
            let $row = row_of(table_name, key, column_name, rule_name)?;
            $body
        }
    };
}

about_row! {
    /// Returns the seconds until a row expires; -1 if it never does, -2 if it does not exist or has expired.
    fn "ttl_get" (ttl_get_by_text, ttl_get_by_value) () () -> f64 |row| Ok(row::get(&row)?)
}

about_row! {
    /// Makes a row expire after a time. Returns `false` if it does not exist, has expired, or the mode forbids it.
    fn "ttl_set" (ttl_set_by_text, ttl_set_by_value)
    (ttl: Option<Interval>,) (mode: default!(Option<&str>, "'always'"),) -> bool |row| set(row, ttl, mode)
}

about_row! {
    /// Like `ttl_set` with an interval, but takes a number of seconds.
    fn "ttl_set" (ttl_set_seconds_by_text, ttl_set_seconds_by_value)
    (ttl: Option<f64>,) (mode: default!(Option<&str>, "'always'"),) -> bool |row|
    set(row, ttl.map(interval_of_seconds).transpose()?, mode)
}

about_row! {
    /// Like `ttl_set`, with an interval or seconds as text: untyped literals and parameters resolve to this one.
    fn "ttl_set" (ttl_set_text_by_text, ttl_set_text_by_value)
    (ttl: Option<&str>,) (mode: default!(Option<&str>, "'always'"),) -> bool |row|
    set(row, ttl.map(interval_of_text).transpose()?, mode)
}

about_row! {
    /// Makes a row expire at an instant. Returns `false` where `ttl_set` does.
    fn "ttl_expire_at" (ttl_expire_at_by_text, ttl_expire_at_by_value)
    (expires_at: Option<TimestampWithTimeZone>,) (mode: default!(Option<&str>, "'always'"),) -> bool |row|
    expire_at(row, expires_at, mode)
}

about_row! {
    /// Restarts a row's clock. Returns `false` if the row does not exist or has expired.
    fn "ttl_touch" (ttl_touch_by_text, ttl_touch_by_value) () () -> bool |row| {
        refuse_if_read_only("ttl_touch()");
        Ok(row::touch(&row)?)
    }
}

about_row! {
    /// Makes a row never expire. Returns `false` if the row does not exist or has expired.
    fn "ttl_persist" (ttl_persist_by_text, ttl_persist_by_value) () () -> bool |row| {
        refuse_if_read_only("ttl_persist()");
        Ok(row::persist(&row)?)
    }
}

/// Makes every UPDATE of a row restart its clock. Returns `false` if it already did.
#[pg_extern]
fn ttl_enable_touch(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
    rule_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_enable_touch()");
    let relid = table_name.ok_or(TtlError::from(Invalid::Missing("table_name")))?.0;
    Ok(registry::enable_touch(relid, column_name, rule_name)?)
}

/// Makes an UPDATE leave a row's clock alone. Returns `false` if it already did.
#[pg_extern]
fn ttl_disable_touch(
    table_name: Option<Regclass>,
    column_name: default!(Option<&str>, "NULL"),
    rule_name: default!(Option<&str>, "NULL"),
) -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_disable_touch()");
    let relid = table_name.ok_or(TtlError::from(Invalid::Missing("table_name")))?.0;
    Ok(registry::disable_touch(relid, column_name, rule_name)?)
}

c_function!(
    /// The trigger behind `ttl_enable_touch`; its argument is a rule's id. Declared in `sql/rows.sql`.
    ttl_touch_row,
    pg_finfo_ttl_touch_row,
    trigger::Call<'_>,
    |call| call.answer(row::touched)
);

c_function!(
    /// The trigger on a table with hidden rows; its argument is a rule's id. Declared in `sql/rows.sql`.
    ttl_free_key,
    pg_finfo_ttl_free_key,
    trigger::Call<'_>,
    |call| call.answer(visibility::made_room)
);

/// Fails a statement that would do nothing about a hidden row that conflicts. The planner hook adds calls of it.
#[pg_extern]
fn ttl_refuse(relid: pg_sys::Oid) -> Result<bool, ErrorReport> {
    Ok(visibility::refuse(relid)?)
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

fn row_of<'a>(
    table_name: Option<Regclass>,
    key: Option<Key<'a>>,
    column: Option<&'a str>,
    rule_name: Option<&'a str>,
) -> Result<Row<'a>, TtlError> {
    let relid = table_name.ok_or(Invalid::Missing("table_name"))?.0;
    Ok(Row { relid, key: key.ok_or(Invalid::Missing("key"))?, column, rule_name })
}
