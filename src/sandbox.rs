//! The environment of a sweep: the rights of the table's owner, and settings of its own.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::identity;
use crate::pg::transaction::lock_timeout;
use pgrx::pg_sys::Oid;
use std::cell::Cell;
use std::ffi::CString;

/// Runs `work` as the table's owner, under settings that do not depend on the database or role.
pub fn in_sandbox<T>(rule: &Rule, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, TtlError> {
    let time_zone = CString::new(rule.options.time_zone.as_str()).unwrap_or_default();
    let lock_timeout = lock_timeout();
    let settings = [
        (c"TimeZone", time_zone.as_c_str()),
        (c"lock_timeout", lock_timeout.as_c_str()),
        (c"session_replication_role", c"origin"),
        (c"row_security", c"on"),
        (c"enable_indexscan", c"on"),
        (c"enable_tidscan", c"on"),
        (c"max_parallel_workers_per_gather", c"0"),
        (c"jit", c"off"),
    ];
    identity::sandboxed_as(rule.owner, || identity::with_settings(&settings, work))
}

thread_local! {
    static UNDER_WAY: Cell<Option<Oid>> = const { Cell::new(None) };
}

/// Whether changes to the rows of a relation are being made by a sweep.
pub fn is_under_way_in(relid: Oid) -> bool {
    UNDER_WAY.get() == Some(relid)
}

/// Marks a sweep of a relation as under way until dropped, even by an error. Triggers may begin another inside it.
pub struct UnderWay {
    outer: Option<Oid>,
}

impl UnderWay {
    pub fn begin(relid: Oid) -> Self {
        Self { outer: UNDER_WAY.replace(Some(relid)) }
    }

    /// Marks no sweep as under way until dropped.
    pub fn pause() -> Self {
        Self { outer: UNDER_WAY.take() }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.set(self.outer);
    }
}
