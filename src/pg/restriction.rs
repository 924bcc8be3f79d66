//! A role and a security restriction that outlast transactions, for commands that use several.
//!
//! PostgreSQL allows no restriction where a transaction begins, so it is suspended as one commits: no code of users runs from
//! there until the next one has begun. It is in force again before that one does anything: the command has changed relations
//! in the transaction that has committed, and a transaction begins with processing the invalidations of such changes. That is so
//! for `DETACH PARTITION CONCURRENTLY` and `DROP INDEX CONCURRENTLY`, and has to be checked for any other command.

use pgrx::{pg_guard, pg_sys};
use std::cell::Cell;
use std::ffi::c_void;

const RESTRICTED: i32 = pg_sys::SECURITY_RESTRICTED_OPERATION as i32;

thread_local! {
    /// The role that this process acts as.
    static ROLE: Cell<Option<pg_sys::Oid>> = const { Cell::new(None) };
    /// Whether the restriction is suspended.
    static IS_SUSPENDED: Cell<bool> = const { Cell::new(false) };
    static IS_REGISTERED: Cell<bool> = const { Cell::new(false) };
}

/// The restriction in force, and the identity of the worker before.
pub struct Restriction {
    worker: pg_sys::Oid,
    context: i32,
}

impl Restriction {
    /// Makes the process act as a role, restricted, from the beginning of a transaction on.
    pub fn impose(role: pg_sys::Oid) -> Self {
        let (mut worker, mut context) = (pg_sys::InvalidOid, 0);
        // SAFETY: plain reads and writes of state of this process; the callbacks are registered once, for good.
        unsafe {
            if !IS_REGISTERED.replace(true) {
                pg_sys::RegisterXactCallback(Some(suspend), std::ptr::null_mut());
                pg_sys::CacheRegisterRelcacheCallback(Some(resume), pg_sys::Datum::null());
            }
            pg_sys::GetUserIdAndSecContext(&mut worker, &mut context);
            pg_sys::SetUserIdAndSecContext(role, context | RESTRICTED);
        }
        ROLE.set(Some(role));
        Self { worker, context }
    }

    /// Makes the process itself again, outside a transaction.
    pub fn lift(self) {
        ROLE.set(None);
        IS_SUSPENDED.set(false);
        // SAFETY: puts back what was read above.
        unsafe { pg_sys::SetUserIdAndSecContext(self.worker, self.context) };
    }
}

/// Called at the end of every transaction.
#[pg_guard]
unsafe extern "C-unwind" fn suspend(event: pg_sys::XactEvent::Type, _argument: *mut c_void) {
    if event == pg_sys::XactEvent::XACT_EVENT_COMMIT
        && let Some(role) = ROLE.get()
    {
        IS_SUSPENDED.set(true);
        // SAFETY: writes state of this process.
        unsafe { pg_sys::SetUserIdAndSecContext(role, 0) };
    }
}

/// Called when a relation has changed. PostgreSQL may call this in the middle of anything, so it does nothing else.
#[pg_guard]
unsafe extern "C-unwind" fn resume(_argument: pg_sys::Datum, _relid: pg_sys::Oid) {
    if IS_SUSPENDED.replace(false)
        && let Some(role) = ROLE.get()
    {
        // SAFETY: writes state of this process.
        unsafe { pg_sys::SetUserIdAndSecContext(role, RESTRICTED) };
    }
}
