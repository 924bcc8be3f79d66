//! Argument types that pgrx does not have: `regclass` and `regprocedure`, whose names resolve in the caller's search
//! path before we are called. Also values of any type as text, and names of new objects.

use super::identity;
use pgrx::callconv::{Arg, ArgAbi};
use pgrx::nullable::Nullable;
use pgrx::spi::quote_qualified_identifier;
use pgrx::{AnyElement, impl_sql_translatable, pg_sys};
use std::ffi::{CStr, CString, c_char};
use std::ptr;

/// Builds an object name from two others and a number, shortened as PostgreSQL shortens the names it chooses.
pub fn object_name(first: &str, second: &str, number: Option<u32>) -> String {
    let text = |text: String| CString::new(text).unwrap_or_default();
    let (first, second) = (text(first.to_owned()), text(second.to_owned()));
    let number = number.map(|number| text(number.to_string()));
    let label = number.as_ref().map_or(ptr::null(), |number| number.as_ptr());
    // SAFETY: all are C strings; the result is palloc'd.
    unsafe {
        CStr::from_ptr(pg_sys::makeObjectName(first.as_ptr(), second.as_ptr(), label)).to_string_lossy().into_owned()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regclass(pub pg_sys::Oid);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regprocedure(pub pg_sys::Oid);

impl_sql_translatable!(Regclass, "regclass");
impl_sql_translatable!(Regprocedure, "regprocedure");

macro_rules! pass_as_oid {
    ($name:ident) => {
        // SAFETY: the type has the representation of oid.
        unsafe impl<'fcx> ArgAbi<'fcx> for $name {
            unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
                // SAFETY: as promised by the caller, who unboxes an argument declared as this type.
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
    };
}
pass_as_oid!(Regclass);
pass_as_oid!(Regprocedure);

/// Returns the text of a value of any type, as every session prints it, and whether it is JSON. JSON may be nested
/// deeper, and its numbers larger, than any parser here accepts.
pub fn text_of(value: &AnyElement) -> (String, bool) {
    let type_oid = value.oid();
    let is_json = [pg_sys::JSONOID, pg_sys::JSONBOID].contains(&type_oid);
    let (mut output, mut is_varlena) = (pg_sys::InvalidOid, false);
    // SAFETY: the value is of its type, which has an output function; the text is copied.
    let text = identity::with_pinned_values(|| unsafe {
        pg_sys::getTypeOutputInfo(type_oid, &mut output, &mut is_varlena);
        CStr::from_ptr(pg_sys::OidOutputFunctionCall(output, value.datum())).to_string_lossy().into_owned()
    });
    (text, is_json)
}

impl Regclass {
    /// The qualified and quoted name; `None` if there is no such relation.
    pub fn qualified_name(self) -> Option<String> {
        // SAFETY: both look into the catalog caches.
        unsafe { qualified(pg_sys::get_rel_namespace(self.0), pg_sys::get_rel_name(self.0)) }
    }
}

impl Regclass {
    /// Schema and name, unquoted; `None` if there is no such relation.
    pub fn split_name(self) -> Option<(String, String)> {
        // SAFETY: both look into the catalog caches.
        unsafe { parts(pg_sys::get_rel_namespace(self.0), pg_sys::get_rel_name(self.0)) }
    }
}

impl Regprocedure {
    /// The qualified and quoted name, without arguments; `None` if there is no such function.
    pub fn qualified_name(self) -> Option<String> {
        // SAFETY: both look into the catalog caches.
        unsafe { qualified(pg_sys::get_func_namespace(self.0), pg_sys::get_func_name(self.0)) }
    }
}

/// # Safety
/// The name is null or a C string.
unsafe fn qualified(namespace: pg_sys::Oid, name: *const c_char) -> Option<String> {
    // SAFETY: as promised by the caller.
    unsafe { parts(namespace, name) }.map(|(schema, name)| quote_qualified_identifier(schema, name))
}

/// # Safety
/// The name is null or a C string.
unsafe fn parts(namespace: pg_sys::Oid, name: *const c_char) -> Option<(String, String)> {
    // SAFETY: as promised by the caller; strings are copied.
    unsafe {
        let schema = pg_sys::get_namespace_name(namespace);
        let text = |name: *const c_char| CStr::from_ptr(name).to_string_lossy().into_owned();
        (!name.is_null() && !schema.is_null()).then(|| (text(schema), text(name)))
    }
}
