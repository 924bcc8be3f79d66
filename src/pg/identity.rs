//! Whose rights code runs with, and under which settings.
//!
//! Both are restored when the work ends. When it fails, the abort of the (sub)transaction restores them.

use pgrx::pg_sys;
use std::ffi::CStr;

/// The name of a setting and its value.
pub type Setting<'a> = (&'a CStr, &'a CStr);

/// Nothing but `pg_catalog`, so that no unqualified name means something else. `pg_temp` stands last by name, or it
/// would be searched first.
const PINNED_SEARCH_PATH: Setting<'_> = (c"search_path", c"pg_catalog, pg_temp");

/// Runs `work` with these settings. Whatever it sets itself is undone too.
pub fn with_settings<R>(settings: &[Setting<'_>], work: impl FnOnce() -> R) -> R {
    // SAFETY: the nest level is closed below, or by the transaction abort that an error brings.
    let nest_level = unsafe { pg_sys::NewGUCNestLevel() };
    for (name, value) in settings {
        // SAFETY: names and values are C strings; an invalid one is an ordinary error.
        unsafe {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_SESSION,
                pg_sys::GucAction::GUC_ACTION_SAVE,
                true,
                0,
                false,
            );
        }
    }
    let result = work();
    // SAFETY: closes the level opened above.
    unsafe { pg_sys::AtEOXact_GUC(false, nest_level) };
    result
}

/// Runs `work` in a search path that nobody can have put anything into.
pub fn with_pinned_search_path<R>(work: impl FnOnce() -> R) -> R {
    with_settings(&[PINNED_SEARCH_PATH], work)
}

/// Runs `work`, which calls no user code, with the rights of `role`.
pub fn with_rights_of<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    switch(role, pg_sys::SECURITY_LOCAL_USERID_CHANGE, work)
}

/// Runs `work`, which may call user code, as `role` and with a pinned search path. The code cannot change the role,
/// nor leave anything behind in the session. Row-level security does not apply to an owner, forced or not.
pub fn sandboxed_as<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    let restriction = pg_sys::SECURITY_RESTRICTED_OPERATION | pg_sys::SECURITY_NOFORCE_RLS;
    switch(role, restriction, || with_pinned_search_path(work))
}

/// Runs `work`, which may call user code, as `role` and with a pinned search path, as a function with the rights of its definer
/// does: what is deferred stays so.
pub fn acting_as<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    let restriction = pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_NOFORCE_RLS;
    switch(role, restriction, || with_pinned_search_path(work))
}

fn switch<R>(role: pg_sys::Oid, restriction: u32, work: impl FnOnce() -> R) -> R {
    let (mut caller, mut context) = (pg_sys::InvalidOid, 0);
    // SAFETY: plain reads and writes of backend-local state; restored below, or by the abort that an error brings.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&mut caller, &mut context);
        pg_sys::SetUserIdAndSecContext(role, context | restriction as i32);
    }
    let result = work();
    // SAFETY: puts back what was read above.
    unsafe { pg_sys::SetUserIdAndSecContext(caller, context) };
    result
}
