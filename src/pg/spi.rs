//! The one way to run SQL: with a pinned search path, and in standard syntax.

use super::identity::with_pinned_names;
use super::planner;
use crate::error::TtlError;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::spi::{Spi, SpiHeapTupleData, SpiResult};
use std::ffi::CString;

pub type Row<'a> = SpiHeapTupleData<'a>;

/// Runs a query and maps its rows. In a transaction that has not written yet it assigns no transaction id.
pub fn read<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    with_pinned_names(|| {
        Spi::connect(|client| {
            let rows = planner::planning(sql, || client.select(sql, None, args))?;
            rows.map(|row| Ok(map(row)?)).collect()
        })
    })
}

/// Runs a query and maps its rows, anywhere: also while another is being planned, in a parallel worker, or in a function
/// that may not write. It sees what the calling query sees.
pub fn peek<T>(sql: &str, map: impl Fn(Row<'_>) -> SpiResult<T>) -> Result<Vec<T>, TtlError> {
    with_pinned_names(|| {
        Spi::connect(|_| {
            let sql = CString::new(sql).unwrap_or_default();
            // SAFETY: within an SPI connection; the table of results is valid until the next statement.
            unsafe {
                let is_query = pg_sys::SPI_execute(sql.as_ptr(), true, 0) == pg_sys::SPI_OK_SELECT as i32;
                if !is_query || pg_sys::SPI_tuptable.is_null() {
                    return Err(TtlError::Spi(pgrx::spi::Error::NoTupleTable));
                }
                let table = &*pg_sys::SPI_tuptable;
                let rows = std::slice::from_raw_parts(table.vals, pg_sys::SPI_processed as usize);
                let rows = rows.iter().filter_map(|row| Row::new(table.tupdesc, *row).transpose());
                rows.map(|row| Ok(map(row?)?)).collect()
            }
        })
    })
}

/// Runs `work` with a snapshot of this moment, whatever the transaction sees: what is remembered beyond it must be what all
/// others see, too.
pub fn with_latest_snapshot<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: within a transaction; the snapshot is popped, or goes with the abort that an error brings.
    unsafe {
        pg_sys::InvalidateCatalogSnapshot();
        pg_sys::PushActiveSnapshot(pg_sys::GetCatalogSnapshot(pg_sys::InvalidOid));
    }
    let result = work();
    // SAFETY: pushed above.
    unsafe { pg_sys::PopActiveSnapshot() };
    result
}

/// Runs a statement that may write, and maps the rows it returns. It sees all that this transaction did before.
pub fn query<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    with_pinned_names(|| {
        Spi::connect_mut(|client| {
            let rows = planner::planning(sql, || client.update(sql, None, args))?;
            rows.map(|row| Ok(map(row)?)).collect()
        })
    })
}

/// Runs a statement and tells how many rows it affected.
pub fn execute(sql: &str, args: &[DatumWithOid<'_>]) -> Result<usize, TtlError> {
    with_pinned_names(|| Spi::connect_mut(|client| Ok(client.update(sql, None, args)?.len())))
}
