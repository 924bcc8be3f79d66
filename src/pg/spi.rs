//! The one way to run SQL: with a pinned search path.

use super::identity::with_pinned_search_path;
use crate::error::TtlError;
use pgrx::datum::DatumWithOid;
use pgrx::spi::{Spi, SpiHeapTupleData, SpiResult};

pub type Row<'a> = SpiHeapTupleData<'a>;

/// Runs a query and maps its rows. In a transaction that has not written yet it assigns no transaction id.
pub fn read<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    with_pinned_search_path(|| {
        Spi::connect(|client| {
            let rows = client.select(sql, None, args)?;
            rows.map(|row| Ok(map(row)?)).collect()
        })
    })
}

/// Runs a statement that may write, and maps the rows it returns. It sees all that this transaction did before.
pub fn query<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    with_pinned_search_path(|| {
        Spi::connect_mut(|client| {
            let rows = client.update(sql, None, args)?;
            rows.map(|row| Ok(map(row)?)).collect()
        })
    })
}

/// Runs a statement and tells how many rows it affected.
pub fn execute(sql: &str, args: &[DatumWithOid<'_>]) -> Result<usize, TtlError> {
    with_pinned_search_path(|| Spi::connect_mut(|client| Ok(client.update(sql, None, args)?.len())))
}
