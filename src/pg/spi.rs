//! The only way to run SQL: under a pinned search path and with standard string syntax.

use super::identity::with_pinned_names;
use super::planner;
use crate::error::TtlError;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::spi::{Error, Spi, SpiHeapTupleData, SpiResult};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};

pub type Row<'a> = SpiHeapTupleData<'a>;

/// Runs a statement and maps the rows it returns. It sees everything this transaction has done, and what others have
/// committed by now as far as the isolation level allows. A transaction ID is assigned only if the statement writes.
pub fn query<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    run(sql, args, Mode::Fresh, |rows| rows.map(|row| Ok(map(row?)?)).collect())
}

/// Like [`query`], for statements that only read.
pub fn read<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    query(sql, args, map)
}

/// Runs a query and maps its rows. Works anywhere: also while another query is being planned, in a parallel worker, or
/// in a function that may not write. Sees what the calling query sees.
pub fn peek<T>(sql: &str, map: impl Fn(Row<'_>) -> SpiResult<T>) -> Result<Vec<T>, TtlError> {
    run(sql, &[], Mode::AsCaller, |rows| rows.map(|row| Ok(map(row?)?)).collect())
}

/// Runs a statement and returns the number of rows it affected.
pub fn execute(sql: &str, args: &[DatumWithOid<'_>]) -> Result<usize, TtlError> {
    // SAFETY: set by the statement that has just run.
    run(sql, args, Mode::Fresh, |_| Ok(unsafe { pg_sys::SPI_processed } as usize))
}

/// Like [`query`], for a statement that runs again and again with other arguments: its plan is kept. Every text takes
/// memory until the session ends, so nothing in it may vary but names of the extension's own.
pub fn query_kept<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    map: impl Fn(Row<'_>) -> SpiResult<T>,
) -> Result<Vec<T>, TtlError> {
    run(sql, args, Mode::Kept, |rows| rows.map(|row| Ok(map(row?)?)).collect())
}

/// Like [`execute`], with a plan that is kept: see [`query_kept`].
pub fn execute_kept(sql: &str, args: &[DatumWithOid<'_>]) -> Result<usize, TtlError> {
    // SAFETY: set by the statement that has just run.
    run(sql, args, Mode::Kept, |_| Ok(unsafe { pg_sys::SPI_processed } as usize))
}

/// The snapshot that a statement uses, and whether its plan is kept.
#[derive(Clone, Copy)]
enum Mode {
    /// A new snapshot.
    Fresh,
    /// A new snapshot, and a plan that is kept.
    Kept,
    /// The snapshot of the calling query.
    AsCaller,
}

/// Runs a statement without pgrx's client, which assigns a transaction ID to any statement that may write.
fn run<T>(
    sql: &str,
    args: &[DatumWithOid<'_>],
    mode: Mode,
    take: impl FnOnce(&mut dyn Iterator<Item = SpiResult<Row<'_>>>) -> Result<T, TtlError>,
) -> Result<T, TtlError> {
    let text = CString::new(sql).unwrap_or_default();
    let mut types: Vec<_> = args.iter().map(DatumWithOid::oid).collect();
    let datums = args.iter().map(|arg| arg.datum().map(|datum| datum.sans_lifetime()));
    let (mut values, nulls): (Vec<_>, Vec<_>) = datums
        .map(|datum| (datum.unwrap_or(pg_sys::Datum::null()), if datum.is_none() { b'n' } else { b' ' } as c_char))
        .unzip();
    with_pinned_names(|| {
        Spi::connect(|_| {
            // SAFETY: within an SPI connection; types, values and nulls are equal in number. The tuple table is valid
            // until the next statement, and its rows are read before that.
            unsafe {
                pg_sys::SPI_tuptable = std::ptr::null_mut();
                let (count, types, values) = (values.len() as i32, types.as_mut_ptr(), values.as_mut_ptr());
                let execute = |read_only| {
                    pg_sys::SPI_execute_with_args(text.as_ptr(), count, types, values, nulls.as_ptr(), read_only, 0)
                };
                let status = match mode {
                    Mode::Fresh => planner::planning(sql, || execute(false)),
                    Mode::Kept => planner::planning(sql, || {
                        pg_sys::SPI_execute_plan(kept_plan(&text, count, types), values, nulls.as_ptr(), false, 0)
                    }),
                    Mode::AsCaller => execute(true),
                };
                Spi::check_status(status)?;
                let Some(table) = pg_sys::SPI_tuptable.as_ref() else { return take(&mut std::iter::empty()) };
                let rows = std::slice::from_raw_parts(table.vals, table.numvals as usize);
                let row = |row: &pg_sys::HeapTuple| Row::new(table.tupdesc, *row)?.ok_or(Error::NoTupleTable);
                take(&mut rows.iter().map(row))
            }
        })
    })
}

thread_local! {
    /// Kept plans, by the text of the statement.
    static KEPT: RefCell<HashMap<CString, pg_sys::SPIPlanPtr>> = RefCell::new(HashMap::new());
}

/// Returns the kept plan of a statement, which is prepared on first use. PostgreSQL remakes a plan if something that it
/// depends on has changed.
///
/// # Safety
/// There is an SPI connection, and `types` has `count` elements, the same for every use of this text.
unsafe fn kept_plan(text: &CStr, count: i32, types: *mut pg_sys::Oid) -> pg_sys::SPIPlanPtr {
    if let Some(plan) = KEPT.with_borrow(|plans| plans.get(text).copied()) {
        return plan;
    }
    // SAFETY: as promised by the caller; a kept plan is valid until the process ends.
    let plan = unsafe {
        let plan = pg_sys::SPI_prepare_cursor(text.as_ptr(), count, types, pg_sys::CURSOR_OPT_GENERIC_PLAN as i32);
        if plan.is_null() || pg_sys::SPI_keepplan(plan) != 0 {
            TtlError::Mismatch.raise();
        }
        plan
    };
    KEPT.with_borrow_mut(|plans| plans.insert(text.to_owned(), plan));
    plan
}

/// Runs `work` under a snapshot of this moment, whatever the transaction sees: results that outlive the transaction
/// must be what all other sessions see, too.
pub fn with_latest_snapshot<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: within a transaction; the snapshot is popped below, or by the abort after an error.
    unsafe {
        pg_sys::InvalidateCatalogSnapshot();
        pg_sys::PushActiveSnapshot(pg_sys::GetCatalogSnapshot(pg_sys::InvalidOid));
    }
    let result = work();
    // SAFETY: pushed above.
    unsafe { pg_sys::PopActiveSnapshot() };
    result
}
