//! Procedures that commit.

use crate::error::TtlError;
use pgrx::callconv::{Arg, ArgAbi};
use pgrx::{impl_sql_translatable, pg_sys};

/// A call of a procedure. Only PostgreSQL makes one: it is an argument of ours that users do not give.
pub struct Call<'a>(&'a pg_sys::FunctionCallInfoBaseData);

impl_sql_translatable!(Call<'_>, "internal");

// SAFETY: no argument that was passed, but the call itself, which outlives all that it does.
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
    /// Runs `work` so that it may commit, which it may not if the procedure was called in a transaction block.
    pub fn with_commits<T>(self, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, TtlError> {
        // SAFETY: the cast follows the node's tag. The connection is closed here, or by the abort that an error brings.
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
