//! Whose rights code runs with, and in whose search path.
//!
//! Both are restored when the work ends. When it fails, the abort of the (sub)transaction restores them.

use pgrx::pg_sys;

/// Runs `work` with nothing but `pg_catalog` in the search path, so that no unqualified name means something else.
/// `pg_temp` stands last by name, or it would be searched first.
pub fn with_pinned_search_path<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: the nest level is closed below, or by the transaction abort that an error brings.
    let nest_level = unsafe {
        let nest_level = pg_sys::NewGUCNestLevel();
        pg_sys::set_config_option(
            c"search_path".as_ptr(),
            c"pg_catalog, pg_temp".as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            pg_sys::GucAction::GUC_ACTION_SAVE,
            true,
            0,
            false,
        );
        nest_level
    };
    let result = work();
    // SAFETY: closes the level opened above.
    unsafe { pg_sys::AtEOXact_GUC(false, nest_level) };
    result
}

/// Runs `work`, which calls no user code, with the rights of `role`.
pub fn with_rights_of<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    switch(role, pg_sys::SECURITY_LOCAL_USERID_CHANGE, work)
}

/// Runs `work`, which may call user code, as `role` and with a pinned search path. The code cannot change the role,
/// nor leave anything behind in the session.
pub fn sandboxed_as<R>(role: pg_sys::Oid, work: impl FnOnce() -> R) -> R {
    switch(role, pg_sys::SECURITY_RESTRICTED_OPERATION, || with_pinned_search_path(work))
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
