//! `regclass` as a function argument: the name resolves in the caller's search path before we are called.

use pgrx::callconv::{Arg, ArgAbi};
use pgrx::nullable::Nullable;
use pgrx::{impl_sql_translatable, pg_sys};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regclass(pub pg_sys::Oid);

impl_sql_translatable!(Regclass, "regclass");

// SAFETY: regclass has the representation of oid.
unsafe impl<'fcx> ArgAbi<'fcx> for Regclass {
    unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
        // SAFETY: as promised by the caller, who unboxes an argument declared as regclass.
        Self(unsafe { pg_sys::Oid::unbox_arg_unchecked(arg) })
    }

    unsafe fn unbox_nullable_arg(arg: Arg<'_, 'fcx>) -> Nullable<Self> {
        // SAFETY: as above.
        match unsafe { pg_sys::Oid::unbox_nullable_arg(arg) } {
            Nullable::Valid(oid) => Nullable::Valid(Self(oid)),
            Nullable::Null => Nullable::Null,
        }
    }
}
