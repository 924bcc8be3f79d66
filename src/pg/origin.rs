//! Replication origins: streams of changes can leave out what was committed under one.
//!
//! PostgreSQL lets one process at a time use an origin. A transaction takes it for its commit alone, which is what a
//! stream goes by, so that code of users never runs while others wait for it.

use super::compat::{self, NO_ORIGIN, OriginId, session_origin, set_session_origin};
use super::identity;
use super::transaction::Failure;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, InvalidOid, Oid};
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString};

const LOCK: pg_sys::LOCKMODE = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;

/// The origin under which a transaction is to be committed.
#[derive(Clone)]
pub struct Wanted {
    id: OriginId,
    name: CString,
}

thread_local! {
    static WANTED: RefCell<Option<Wanted>> = const { RefCell::new(None) };
    /// Whether we have set the origin of this session.
    static IS_MARKED: Cell<bool> = const { Cell::new(false) };
    /// Whether this session uses an origin of ours, and the setting that is changed meanwhile.
    static IN_USE: Cell<Option<i32>> = const { Cell::new(None) };
}

/// Whether an origin may have this name: PostgreSQL reserves some for itself.
pub fn is_free_name(name: &CStr) -> bool {
    let name = name.to_bytes();
    let is_reserved = name.starts_with(b"pg_") || [&b"none"[..], b"any"].iter().any(|it| name.eq_ignore_ascii_case(it));
    !is_reserved && name.len() < 512
}

fn find(name: &CStr) -> OriginId {
    // SAFETY: in a transaction.
    unsafe { pg_sys::replorigin_by_name(name.as_ptr(), true) }
}

/// Makes an origin if it is missing and the session has none of its own. Others that make it wait until the transaction
/// ends, so it should do nothing else, and it waits for no standby.
pub fn make(name: &CStr) {
    // SAFETY: in a transaction; the name is looked up again once no other process can make the origin.
    unsafe {
        if session_origin() == NO_ORIGIN && find(name) == NO_ORIGIN {
            if pg_sys::synchronous_commit > LOCAL {
                identity::set_for_transaction((c"synchronous_commit", c"local"));
            }
            pg_sys::LockSharedObject(pg_sys::ReplicationOriginRelationId, InvalidOid, 0, LOCK);
            if find(name) == NO_ORIGIN {
                pg_sys::replorigin_create(name.as_ptr());
            }
        }
    }
}

/// Has the current transaction committed under an origin. A session that replays changes under an origin of its own keeps
/// that.
pub fn commit_under(name: &CStr) {
    if session_origin() == NO_ORIGIN {
        match find(name) {
            NO_ORIGIN => missing(name).raise(),
            id => WANTED.set(Some(Wanted { id, name: name.to_owned() })),
        }
    }
}

fn missing(name: &CStr) -> Failure {
    let message = format!("replication origin \"{}\" does not exist", name.to_string_lossy());
    Failure::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, message)
}

/// Takes what was wanted before: a transaction wants an origin anew, and one inside another does not change its wish.
pub(super) fn take_wanted() -> Option<Wanted> {
    WANTED.take()
}

pub(super) fn want(wanted: Option<Wanted>) {
    WANTED.set(wanted);
}

/// Marks the changes that `work` writes to the log, so that a stream need not collect them until it sees the commit.
/// `work` must not run code of users: PostgreSQL could not roll back a part of it.
pub fn marked<T>(work: impl FnOnce() -> T) -> T {
    struct Mark;
    impl Drop for Mark {
        fn drop(&mut self) {
            unmark();
        }
    }
    let Some(id) = WANTED.with_borrow(|wanted| wanted.as_ref().map(|wanted| wanted.id)) else { return work() };
    mark(id, 0);
    let _mark = Mark;
    work()
}

fn mark(id: OriginId, time: pg_sys::TimestampTz) {
    IS_MARKED.set(true);
    set_session_origin(id, time);
}

/// Takes back a mark of ours. An origin that a user has set up stays.
fn unmark() {
    if IS_MARKED.replace(false) {
        set_session_origin(NO_ORIGIN, 0);
    }
}

/// Commits by `commit`, under the origin that the transaction wants, if it has written anything.
///
/// A commit that waited for standbys would have all others wait. Removing an expired row again after a failover loses
/// nothing.
pub(super) fn commit(commit: impl FnOnce()) {
    // SAFETY: reads the state of this process.
    let has_written = unsafe { pg_sys::GetTopTransactionIdIfAny() } != pg_sys::InvalidTransactionId;
    let Some(Wanted { id, name }) = take_wanted().filter(|_| has_written) else { return commit() };
    let object = Oid::from(u32::from(id));
    // SAFETY: the lock keeps other processes of ours from using the origin, and users from dropping it. After an error,
    // the transaction is rolled back, which releases the lock, and `release` gives up the rest.
    unsafe {
        pg_sys::LockSharedObjectForSession(pg_sys::ReplicationOriginRelationId, object, 0, LOCK);
        if find(&name) != id {
            missing(&name).raise();
        }
        compat::replorigin_session_setup(id);
        IN_USE.set(Some(pg_sys::synchronous_commit));
        pg_sys::synchronous_commit = pg_sys::synchronous_commit.min(LOCAL);
        // Streams take this for the time of the commit.
        mark(id, pg_sys::GetCurrentTimestamp());
        commit();
    }
    release();
    // SAFETY: taken above.
    unsafe { pg_sys::UnlockSharedObjectForSession(pg_sys::ReplicationOriginRelationId, object, 0, LOCK) };
}

/// The `synchronous_commit` that waits for no standby.
const LOCAL: i32 = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH as i32;

/// Has a transaction that is about to be rolled back not use its origin.
pub(super) fn forget() {
    WANTED.set(None);
    unmark();
}

/// Gives up the origin. Call it when the transaction is over.
pub(super) fn release() {
    unmark();
    if let Some(level) = IN_USE.take() {
        // SAFETY: this session uses the origin, and the setting had this value.
        unsafe {
            pg_sys::synchronous_commit = level;
            pg_sys::replorigin_session_reset();
        }
    }
}
