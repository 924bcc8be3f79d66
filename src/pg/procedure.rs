//! Procedures that commit.

use crate::error::TtlError;
use pgrx::callconv::{Arg, ArgAbi};
use pgrx::{impl_sql_translatable, pg_sys};

/// The call of a procedure. PostgreSQL passes it as an `internal` argument, which users cannot supply.
pub struct Call<'a>(&'a pg_sys::FunctionCallInfoBaseData);

impl_sql_translatable!(Call<'_>, "internal");

// SAFETY: the argument is not one that was passed but the call itself, which outlives the procedure's work.
unsafe impl<'fcx> ArgAbi<'fcx> for Call<'fcx> {
    unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
        // SAFETY: as promised by the caller.
        Self(unsafe { &*pg_sys::FunctionCallInfo::unbox_arg_unchecked(arg) })
    }

    fn is_virtual_arg() -> bool {
        true
    }
}

impl Call<'_> {
    /// Runs `work` so that it may commit. Fails if the procedure was called in a transaction block.
    pub fn with_commits<T>(self, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, TtlError> {
        // SAFETY: the cast follows the node's tag. The connection is closed here, or by the abort after an error.
        unsafe {
            let context: *mut pg_sys::CallContext = self.0.context.cast();
            if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_CallContext || (*context).atomic {
                return Err(TtlError::CannotCommit);
            }
            pg_sys::SPI_connect_ext(pg_sys::SPI_OPT_NONATOMIC as i32);
            let result = work();
            pg_sys::SPI_finish();
            result
        }
    }
}
