//! Intervals as users write them.

use super::spi;
use crate::error::TtlError;
use pgrx::datum::Interval;

/// Parses an interval as PostgreSQL does: a bare number is seconds. For invalid text, PostgreSQL's own error is raised.
pub fn interval_of_text(text: &str) -> Result<Interval, TtlError> {
    let read = spi::query("SELECT $1::interval", &[text.into()], |row| row.get(1))?;
    read.into_iter().flatten().next().ok_or(TtlError::Mismatch)
}

pub fn interval_of_seconds(seconds: f64) -> Result<Interval, TtlError> {
    let read = spi::query("SELECT make_interval(secs => $1)", &[seconds.into()], |row| row.get(1))?;
    read.into_iter().flatten().next().ok_or(TtlError::Mismatch)
}
