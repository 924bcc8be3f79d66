//! Planner estimates for a query that is not run.

use super::planner;
use pgrx::pg_sys;
use pgrx::spi::Spi;
use std::ffi::CString;

/// Returns how many rows the planner expects from a query. Unlike `EXPLAIN`, it leaves statement statistics alone.
pub fn rows(sql: &str) -> i64 {
    let text = CString::new(sql).unwrap_or_default();
    Spi::connect(|_| {
        // SAFETY: within an SPI connection, whose end frees the statement; its plan is valid until it is released. The
        // plan of a statement that is not saved has no resource owner.
        unsafe {
            let statement = pg_sys::SPI_prepare(text.as_ptr(), 0, std::ptr::null_mut());
            let plan = planner::planning(sql, || pg_sys::SPI_plan_get_cached_plan(statement));
            if plan.is_null() {
                return 0;
            }
            let planned: *mut pg_sys::PlannedStmt = pg_sys::list_nth((*plan).stmt_list, 0).cast();
            let rows = (*(*planned).planTree).plan_rows;
            pg_sys::ReleaseCachedPlan(plan, std::ptr::null_mut());
            rows as i64
        }
    })
}
