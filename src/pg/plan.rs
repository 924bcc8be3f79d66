//! Statements planned once, under settings that then need not be in force while they run.

use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::spi::Spi;
use std::ffi::{CStr, CString};

/// A prepared statement that keeps the plan it got when it was made, whatever its parameters.
pub struct Plan(pg_sys::SPIPlanPtr);

/// A row's place in its table.
pub type Tid = pg_sys::ItemPointerData;

/// Rows found, in the order they were found.
pub struct Found {
    pub tids: Vec<Tid>,
    /// The second column of the last row, as text.
    pub last: Option<String>,
}

impl Plan {
    /// Plans a query without parameters.
    pub fn for_search(sql: &str) -> Self {
        Self::new(sql, &mut [])
    }

    /// Plans a statement about the rows at given places, its parameter.
    pub fn for_rows(sql: &str) -> Self {
        Self::new(sql, &mut [pg_sys::TIDARRAYOID])
    }

    fn new(sql: &str, parameters: &mut [pg_sys::Oid]) -> Self {
        let sql = CString::new(sql).unwrap_or_default();
        Spi::connect(|_| {
            // SAFETY: within an SPI connection; the plan is kept, and released by Drop.
            unsafe {
                let options = pg_sys::CURSOR_OPT_GENERIC_PLAN as i32;
                let count = parameters.len() as i32;
                let plan = pg_sys::SPI_prepare_cursor(sql.as_ptr(), count, parameters.as_mut_ptr(), options);
                pg_sys::SPI_keepplan(plan);
                plan_now(plan);
                Self(plan)
            }
        })
    }

    /// Runs a statement that changes the rows at `tids`; tells how many it changed.
    pub fn change(&self, tids: &[Tid]) -> usize {
        self.execute(Some(tids), 0, || {
            // SAFETY: set by the execution just before.
            unsafe { pg_sys::SPI_processed as usize }
        })
    }

    /// Runs a query for one number.
    pub fn count(&self, tids: &[Tid]) -> i64 {
        // SAFETY: a count is a bigint, and there is one row.
        self.execute(Some(tids), 1, || unsafe {
            let mut null = false;
            let table = &*pg_sys::SPI_tuptable;
            pg_sys::SPI_getbinval(*table.vals, table.tupdesc, 1, &mut null).value() as i64
        })
    }

    /// Runs a query whose first column is a `ctid`, for at most `limit` rows.
    pub fn find(&self, limit: usize) -> Found {
        self.execute(None, limit, || {
            // SAFETY: the table holds SPI_processed rows, whose first column is a tid that is never null; what is kept is
            // copied.
            unsafe {
                let table = &*pg_sys::SPI_tuptable;
                let rows = std::slice::from_raw_parts(table.vals, pg_sys::SPI_processed as usize);
                let mut null = false;
                let tid = |row: &pg_sys::HeapTuple| {
                    *pg_sys::SPI_getbinval(*row, table.tupdesc, 1, &mut null).cast_mut_ptr::<Tid>()
                };
                let last = rows.last().filter(|_| (*table.tupdesc).natts > 1).map(|row| {
                    CStr::from_ptr(pg_sys::SPI_getvalue(*row, table.tupdesc, 2)).to_string_lossy().into_owned()
                });
                Found { tids: rows.iter().map(tid).collect(), last }
            }
        })
    }

    /// Each execution has a new snapshot, sees what this transaction did before, and assigns no transaction id unless
    /// it writes.
    fn execute<T>(&self, tids: Option<&[Tid]>, limit: usize, read: impl FnOnce() -> T) -> T {
        Spi::connect(|_| {
            let mut values: Vec<_> = tids.and_then(|tids| tids.to_vec().into_datum()).into_iter().collect();
            // SAFETY: within an SPI connection; there is a value for each parameter, and none is null.
            unsafe {
                pg_sys::SPI_execute_plan(self.0, values.as_mut_ptr(), std::ptr::null(), false, limit as _);
            }
            read()
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: kept by us and not used any more.
            unsafe { pg_sys::SPI_freeplan(self.0) };
        }
    }
}

/// # Safety
/// `plan` is a kept plan of one statement, and there is an SPI connection.
unsafe fn plan_now(plan: pg_sys::SPIPlanPtr) {
    // SAFETY: as promised by the caller; the plan of a kept statement is pinned by the current resource owner.
    unsafe { pg_sys::ReleaseCachedPlan(pg_sys::SPI_plan_get_cached_plan(plan), pg_sys::CurrentResourceOwner) };
}
