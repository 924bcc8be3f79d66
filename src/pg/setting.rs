//! Kinds of settings that PostgreSQL does not have.

use super::origin;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, pg_guard, pg_sys};
use std::ffi::{CStr, CString, c_char, c_void};

/// The value of a setting that is an amount of data or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    Kilobytes(i32),
    Milliseconds(i32),
}

/// Defines a setting that is an amount of data or a time.
pub fn define_quantity(
    name: &'static CStr,
    about: &'static CStr,
    more: &'static CStr,
    setting: &'static GucSetting<Option<CString>>,
) {
    let (context, flags) = (GucContext::Sighup, GucFlags::default());
    // SAFETY: the hook has the type that PostgreSQL expects.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(name, about, more, setting, context, flags, Some(check), None, None);
    }
}

/// Defines a setting that is the name of a replication origin.
pub fn define_origin(
    name: &'static CStr,
    about: &'static CStr,
    more: &'static CStr,
    setting: &'static GucSetting<Option<CString>>,
) {
    let (context, flags, check) = (GucContext::Sighup, GucFlags::default(), Some(check_origin as _));
    // SAFETY: the hook has the type that PostgreSQL expects.
    unsafe { GucRegistry::define_string_guc_with_hooks(name, about, more, setting, context, flags, check, None, None) };
}

#[pg_guard]
unsafe extern "C-unwind" fn check_origin(
    text: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: called with a new value, which may be null.
    unsafe { (*text).is_null() || origin::is_free_name(CStr::from_ptr(*text)) }
}

/// Parses an amount of data or a time as PostgreSQL's own settings do; `None` if it is neither.
pub fn quantity(text: &CStr) -> Option<Quantity> {
    // A number without a unit could be either.
    if !text.to_bytes().last().is_some_and(u8::is_ascii_alphabetic) {
        return None;
    }
    let read = |unit: u32| {
        let mut number = 0;
        // SAFETY: the text is a C string; the function raises no error.
        let is_number = unsafe { pg_sys::parse_int(text.as_ptr(), &mut number, unit as i32, std::ptr::null_mut()) };
        (is_number && number >= 0).then_some(number)
    };
    read(pg_sys::GUC_UNIT_KB).map(Quantity::Kilobytes).or_else(|| read(pg_sys::GUC_UNIT_MS).map(Quantity::Milliseconds))
}

#[pg_guard]
unsafe extern "C-unwind" fn check(
    text: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: called with a new value, which may be null.
    unsafe {
        if (*text).is_null() {
            return true;
        }
        let text = CStr::from_ptr(*text);
        text.is_empty() || quantity(text).is_some()
    }
}
