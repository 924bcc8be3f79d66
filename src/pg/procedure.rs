//! Procedures that commit.

use crate::error::TtlError;
use pgrx::pg_sys;

/// Runs `work` so that it may commit, which it may not if the procedure was called in a transaction block.
pub fn with_commits<T>(
    call: pg_sys::FunctionCallInfo,
    work: impl FnOnce() -> Result<T, TtlError>,
) -> Result<T, TtlError> {
    // SAFETY: `call` is the call we are in. The connection is closed here, or by the abort that an error brings.
    unsafe {
        let context: *mut pg_sys::CallContext = (*call).context.cast();
        if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_CallContext || (*context).atomic {
            return Err(TtlError::CannotCommit);
        }
        pg_sys::SPI_connect_ext(pg_sys::SPI_OPT_NONATOMIC as i32);
        let result = work();
        pg_sys::SPI_finish();
        result
    }
}
