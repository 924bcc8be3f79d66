//! The role and the settings that code runs under.
//!
//! Both are restored when the work ends or, if it fails, by the abort of the (sub)transaction.

use super::access;
use pgrx::pg_sys;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};

/// A setting's name and value.
pub type Setting<'a> = (&'a CStr, &'a CStr);

/// Only `pg_catalog`, so that no unqualified name resolves elsewhere. `pg_temp` is named last, or it is searched first.
const PINNED_SEARCH_PATH: Setting<'_> = (c"search_path", c"pg_catalog, pg_temp");

/// Settings for parsing and printing a stored text: the syntax of strings and names, and the meaning of `= NULL`.
///
/// They apply while a text of ours is parsed or printed, not while it runs: users' triggers and functions are parsed
/// when they are first called, and were written for the settings of their database.
const SYNTAX: &[Setting<'_>] = &[
    (c"standard_conforming_strings", c"on"),
    (c"backslash_quote", c"safe_encoding"),
    #[cfg(not(since = "19"))]
    (c"escape_string_warning", c"off"),
    (c"transform_null_equals", c"off"),
    (c"quote_all_identifiers", c"off"),
];

/// Settings for reading and printing values. Constants in a statement are read again whenever it is replanned, so these
/// apply while it runs, too. The time zone is not among them: each rule has its own.
const VALUES: [Setting<'_>; 13] = [
    (c"quote_all_identifiers", c"off"),
    (c"DateStyle", c"ISO, YMD"),
    (c"IntervalStyle", c"postgres"),
    (c"timezone_abbreviations", c"Default"),
    (c"extra_float_digits", c"1"),
    (c"bytea_output", c"hex"),
    (c"array_nulls", c"on"),
    (c"xmloption", c"content"),
    (c"xmlbinary", c"base64"),
    (c"lc_monetary", c"C"),
    (c"lo_compat_privileges", c"off"),
    (c"gin_fuzzy_search_limit", c"0"),
    (c"constraint_exclusion", c"partition"),
];

/// Settings that no text can specify itself and that user code, triggers included, may depend on. They are set to the
/// configuration of the server and the database, whatever the session has set.
const AS_CONFIGURED: [&CStr; 3] = [c"default_text_search_config", c"lc_numeric", c"lc_time"];

/// Sets a parameter until the transaction ends.
pub(super) fn set_for_transaction((name, value): Setting<'_>) {
    set(name, value, pg_sys::GucAction::GUC_ACTION_LOCAL);
}

/// Runs `work` with these settings. Settings that it changes are undone too.
pub fn with_settings<R>(settings: &[Setting<'_>], work: impl FnOnce() -> R) -> R {
    // SAFETY: the nest level is closed below, or by the abort that an error causes.
    let nest_level = unsafe { pg_sys::NewGUCNestLevel() };
    settings.iter().for_each(|(name, value)| set(name, value, pg_sys::GucAction::GUC_ACTION_SAVE));
    let result = work();
    // SAFETY: closes the level opened above.
    unsafe { pg_sys::AtEOXact_GUC(false, nest_level) };
    result
}

/// Sets a parameter unless it already has this value, as most do.
fn set(name: &CStr, value: &CStr, action: pg_sys::GucAction::Type) {
    // SAFETY: names and values are C strings; an invalid one raises an ordinary error. The old value is only compared.
    unsafe {
        let present = pg_sys::GetConfigOption(name.as_ptr(), true, false);
        if present.is_null() || CStr::from_ptr(present) != value {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_SESSION,
                action,
                true,
                0,
                false,
            );
        }
    }
}

/// Runs `work`, which makes PostgreSQL parse a text of ours, so that the text means the same in every session.
pub fn with_standard_syntax<R>(work: impl FnOnce() -> R) -> R {
    with_settings(SYNTAX, work)
}

/// Like [`with_standard_syntax`], but with a search path in which no user can have created anything.
pub fn with_pinned_names<R>(work: impl FnOnce() -> R) -> R {
    with_settings(&[PINNED_SEARCH_PATH], || with_standard_syntax(work))
}

/// Runs `work`, whose statements call user code under the search path of the session, but are parsed and planned under one
/// in which no user can have created anything.
pub fn with_callers_path<R>(work: impl FnOnce() -> R) -> R {
    let path = access::search_path();
    with_settings(&[PINNED_SEARCH_PATH], || with_users_path(&path, work))
}

/// Runs `work` so that values are read and printed in the same way in every session.
pub fn with_pinned_values<R>(work: impl FnOnce() -> R) -> R {
    let configured = AS_CONFIGURED.map(|name| {
        // SAFETY: a setting that always exists; the value is copied, because setting it may free it.
        let value = unsafe {
            let value = pg_sys::GetConfigOptionResetString(name.as_ptr());
            (!value.is_null()).then(|| CStr::from_ptr(value).to_owned())
        };
        (name, value)
    });
    with_settings(&VALUES, || {
        let save = pg_sys::GucAction::GUC_ACTION_SAVE;
        configured.iter().for_each(|(name, value)| value.iter().for_each(|value| set(name, value, save)));
        work()
    })
}

/// Runs `work`, which prints an expression, so that the same expression always has the same text.
pub fn with_canonical_output<R>(work: impl FnOnce() -> R) -> R {
    with_pinned_names(|| with_pinned_values(|| with_settings(&[(c"TimeZone", c"UTC")], work)))
}

/// Runs `work`, which calls no user code, with the privileges of `role`.
pub fn with_rights_of<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    switch(role, pg_sys::SECURITY_LOCAL_USERID_CHANGE, work)
}

/// Runs `work`, which may call user code, as `role`, with a pinned search path and pinned values. The code cannot
/// change the role or leave anything in the session. Row-level security does not apply to an owner, forced or not.
pub fn sandboxed_as<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    let restriction = pg_sys::SECURITY_RESTRICTED_OPERATION | pg_sys::SECURITY_NOFORCE_RLS;
    switch(role, restriction, || with_settings(&[PINNED_SEARCH_PATH], || with_pinned_values(work)))
}

/// Runs `work`, which may call user code, as `role` and with a pinned search path, like a SECURITY DEFINER function:
/// deferred triggers stay deferred.
pub fn acting_as<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    let restriction = pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_NOFORCE_RLS;
    switch(role, restriction, || with_settings(&[PINNED_SEARCH_PATH], || with_pinned_values(work)))
}

thread_local! {
    /// The search path for user code called by the statements of `with_users_path`.
    static USERS_PATH: RefCell<Option<CString>> = const { RefCell::new(None) };
    /// Whether `USERS_PATH` is in force now.
    static IS_IN_FORCE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, whose statements call user code under this search path, as in a session of the code's owner. The
/// statements themselves are parsed and planned under the pinned path: this one is in force only while they run.
pub fn with_users_path<R>(path: &CStr, work: impl FnOnce() -> R) -> R {
    struct Outer(Option<CString>, bool);
    impl Drop for Outer {
        fn drop(&mut self) {
            USERS_PATH.set(self.0.take());
            IS_IN_FORCE.set(self.1);
        }
    }
    let _outer = Outer(USERS_PATH.replace(Some(path.to_owned())), IS_IN_FORCE.replace(false));
    work()
}

/// Whether a statement being planned is going to run under the user's search path.
pub(super) fn awaits_users_path() -> bool {
    !IS_IN_FORCE.get() && USERS_PATH.with_borrow(Option::is_some)
}

/// Whether the user's search path is in force, for [`reset_users_path`].
pub(super) fn has_users_path() -> bool {
    IS_IN_FORCE.get()
}

/// Records after an error whether the user's search path is in force: the abort has restored the settings.
pub(super) fn reset_users_path(is_in_force: bool) {
    IS_IN_FORCE.set(is_in_force);
}

/// Puts the user's search path in force for a statement, if it has one; returns the argument of [`leave_users_path`].
pub(super) fn enter_users_path() -> i32 {
    let path = if IS_IN_FORCE.get() { None } else { USERS_PATH.with_borrow(Option::clone) };
    let Some(path) = path else { return 0 };
    // SAFETY: the nest level is closed when the statement ends, or by the abort that an error causes.
    let nest_level = unsafe { pg_sys::NewGUCNestLevel() };
    set(c"search_path", &path, pg_sys::GucAction::GUC_ACTION_SAVE);
    IS_IN_FORCE.set(true);
    nest_level
}

/// Restores the pinned search path.
pub(super) fn leave_users_path(nest_level: i32) {
    if nest_level > 0 {
        // SAFETY: closes the level opened by `enter_users_path`.
        unsafe { pg_sys::AtEOXact_GUC(false, nest_level) };
        IS_IN_FORCE.set(false);
    }
}

fn switch<R>(role: pg_sys::Oid, restriction: u32, work: impl FnOnce() -> R) -> R {
    let (mut caller, mut context) = (pg_sys::InvalidOid, 0);
    // SAFETY: plain reads and writes of backend-local state; restored below, or by the abort that an error causes.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&mut caller, &mut context);
        pg_sys::SetUserIdAndSecContext(role, context | restriction as i32);
    }
    let result = work();
    // SAFETY: puts back what was read above.
    unsafe { pg_sys::SetUserIdAndSecContext(caller, context) };
    result
}
