//! Instants that columns hold as text, numbers or UUIDs, read as a rule reads them. Any user may call these functions.

use crate::error::TtlError;
use crate::rule::{Invalid, Unit, instant};
use pgrx::datum::{AnyNumeric, TimestampWithTimeZone, Uuid};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

/// Returns the instant of an RFC 3339 timestamp; NULL for any other text.
#[pg_extern(name = "ttl_instant", immutable, strict, parallel_safe)]
pub fn ttl_instant_of_text(value: &str) -> Option<TimestampWithTimeZone> {
    timestamp(instant::of_rfc3339(value))
}

/// Returns the instant of a Unix time in digits; NULL for zero, negative numbers and any other text.
#[pg_extern(name = "ttl_instant", immutable, strict, parallel_safe)]
pub fn ttl_instant_of_digits(value: &str, unit: &str) -> Result<Option<TimestampWithTimeZone>, ErrorReport> {
    Ok(timestamp(instant::of_unix(value, counted_in(unit)?)))
}

/// Returns the instant of a Unix time; NULL for zero, negative and infinite numbers.
#[pg_extern(name = "ttl_instant", immutable, strict, parallel_safe)]
pub fn ttl_instant_of_number(value: AnyNumeric, unit: &str) -> Result<Option<TimestampWithTimeZone>, ErrorReport> {
    Ok(timestamp(instant::of_unix(&value.to_string(), counted_in(unit)?)))
}

/// Returns the instant in a version 7 UUID; NULL for other versions.
#[pg_extern(name = "ttl_instant", immutable, strict, parallel_safe)]
pub fn ttl_instant_of_uuid(value: Uuid) -> Option<TimestampWithTimeZone> {
    timestamp(instant::of_uuid_v7(value.as_bytes()))
}

/// Returns the instant in a ULID that is stored as a uuid.
#[pg_extern(name = "ttl_instant", immutable, strict, parallel_safe)]
pub fn ttl_instant_of_ulid(value: Uuid, unit: &str) -> Result<Option<TimestampWithTimeZone>, ErrorReport> {
    match unit {
        "ulid" => Ok(timestamp(instant::of_ulid(value.as_bytes()))),
        other => Err(TtlError::from(Invalid::Unit(other.into())).into()),
    }
}

/// Returns an instant as an RFC 3339 timestamp in UTC.
#[pg_extern(immutable, strict, parallel_safe)]
pub fn ttl_rfc3339(value: TimestampWithTimeZone) -> Result<String, ErrorReport> {
    let written = i64::from(value).checked_add(instant::POSTGRES_EPOCH).and_then(instant::to_rfc3339);
    Ok(written.ok_or(TtlError::from(Invalid::Year))?)
}

fn counted_in(unit: &str) -> Result<Unit, TtlError> {
    Ok(Unit::parse(unit).ok_or_else(|| Invalid::Unit(unit.into()))?)
}

fn timestamp(micros: Option<i64>) -> Option<TimestampWithTimeZone> {
    TimestampWithTimeZone::try_from(micros? - instant::POSTGRES_EPOCH).ok()
}
