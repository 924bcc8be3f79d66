//! The environment of a sweep: the rights of the table's owner, and settings of its own.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::identity;
use crate::pg::transaction::lock_timeout;
use pgrx::pg_sys::Oid;
use std::cell::RefCell;
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
    /// The relations and rules of the batches under way, the innermost last; `None` for something else in between.
    static UNDER_WAY: RefCell<Vec<Option<(Oid, i64)>>> = const { RefCell::new(Vec::new()) };
}

/// Whether changes to the rows of a relation are being made by a sweep.
pub fn is_under_way_in(relid: Oid) -> bool {
    UNDER_WAY.with_borrow(|all| all.last().copied().flatten().is_some_and(|(innermost, _)| innermost == relid))
}

/// Whether this process is in the middle of a batch of a rule: user code in it must not begin another.
pub fn is_sweeping(rule_id: i64) -> bool {
    UNDER_WAY.with_borrow(|all| all.iter().flatten().any(|(_, of)| *of == rule_id))
}

/// Marks a batch as under way until dropped, even by an error. Triggers may begin one of another rule inside it.
pub struct UnderWay(());

impl UnderWay {
    pub fn begin(relid: Oid, rule_id: i64) -> Self {
        UNDER_WAY.with_borrow_mut(|all| all.push(Some((relid, rule_id))));
        Self(())
    }

    /// Marks no batch as under way until dropped.
    pub fn pause() -> Self {
        UNDER_WAY.with_borrow_mut(|all| all.push(None));
        Self(())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.with_borrow_mut(|all| all.pop());
    }
}
