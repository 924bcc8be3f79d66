//! This process: waiting, interrupts, and what other sessions see of it.

use super::compat;
use pgrx::bgworkers::{BackgroundWorker, SignalWakeFlags};
use pgrx::pg_sys;
use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::time::Duration;

/// Waits until the time is up or our latch is set. Handles cancel and shutdown.
pub fn rest(duration: Duration) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    // SAFETY: MyLatch is ours, and waiting on it is allowed anywhere an interrupt is.
    unsafe {
        pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, millis as _, compat::wait_event());
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
    check_for_interrupts();
}

/// Terminates another process of this server even while it runs user code, which can catch a cancel but not this. The
/// caller must know that `pid` is still a process of this server.
pub fn terminate(pid: i32) {
    // SAFETY: a signal that every process of the server has a handler for.
    unsafe { compat::kill(pid, pg_sys::SIGTERM as i32) };
}

/// Whether another process of this server is waiting for a lock.
pub fn waits_for_lock(pid: i32) -> bool {
    const CLASS: u32 = 0xff00_0000;
    // SAFETY: a process entry stays in place when its process exits.
    unsafe {
        let process = pg_sys::BackendPidGetProc(pid);
        !process.is_null() && (*process).wait_event_info & CLASS == pg_sys::PG_WAIT_LOCK
    }
}

/// Whether other sessions wait for this transaction to release rows.
pub fn is_awaited() -> bool {
    // SAFETY: looks for waiters of a lock that this transaction holds. It is in the shared table of locks, where those
    // of relations need not be.
    unsafe {
        let xid = pg_sys::GetCurrentTransactionIdIfAny();
        let tag = pg_sys::LOCKTAG {
            locktag_field1: xid.into_inner(),
            locktag_type: pg_sys::LockTagType::LOCKTAG_TRANSACTION as u8,
            locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
            ..pg_sys::LOCKTAG::default()
        };
        xid != pg_sys::InvalidTransactionId
            && pg_sys::LockHasWaiters(&tag, pg_sys::ExclusiveLock as pg_sys::LOCKMODE, false)
    }
}

pub fn check_for_interrupts() {
    pg_sys::check_for_interrupts!();
}

/// Like [`rest`], for a worker between two transactions: ignores a cancel that arrives while the worker is idle.
pub fn idle(duration: Duration) {
    // SAFETY: a flag that only our own signal handler sets.
    unsafe { pg_sys::QueryCancelPending = 0 };
    rest(duration);
}

/// Sets what `pg_stat_activity` shows for this process.
pub fn report_activity(query: Option<&str>) {
    let text = query.and_then(|query| CString::new(query).ok());
    // SAFETY: the text is copied.
    unsafe {
        match &text {
            Some(text) => pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, text.as_ptr()),
            None => pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, std::ptr::null()),
        }
    }
}

/// Installs the signal handlers of a background worker.
pub fn attach_signal_handlers() {
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP);
    compat::handle_sigterm();
}

/// Reloads the configuration after a SIGHUP.
pub fn reload_configuration() {
    if BackgroundWorker::sighup_received() {
        // SAFETY: outside a transaction or between two statements, as in every backend.
        unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) };
    }
}

/// A setting and its value.
pub type Pinned = (&'static CStr, &'static CStr);

thread_local! {
    /// The settings of this worker, which override `ALTER DATABASE` and `ALTER ROLE`.
    static PINNED: RefCell<Vec<Pinned>> = const { RefCell::new(Vec::new()) };
}

/// Applies settings to this worker and remembers them for [`pin_again`].
pub fn pin_settings(settings: Vec<Pinned>) {
    PINNED.set(settings);
    pin_again();
}

/// Applies the pinned settings again, after user code may have changed them.
pub fn pin_again() {
    let (context, source) = (pg_sys::GucContext::PGC_SUSET, pg_sys::GucSource::PGC_S_SESSION);
    for (name, value) in PINNED.with_borrow(Vec::clone) {
        // SAFETY: names and values are C strings.
        unsafe { pg_sys::SetConfigOption(name.as_ptr(), value.as_ptr(), context, source) };
    }
}

/// Whether another session is about to drop, rename or copy a database. Call in a transaction, in any database.
pub fn is_database_wanted(database: pg_sys::Oid) -> bool {
    // SAFETY: the tag is that of the database; the lock conflicts with the locks of those commands, is not waited for,
    // and is released with the transaction.
    unsafe {
        let tag = pg_sys::LOCKTAG {
            locktag_field1: 0,
            locktag_field2: pg_sys::DatabaseRelationId.to_u32(),
            locktag_field3: database.to_u32(),
            locktag_field4: 0,
            locktag_type: pg_sys::LockTagType::LOCKTAG_OBJECT as u8,
            locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        };
        let mode = pg_sys::RowExclusiveLock as pg_sys::LOCKMODE;
        pg_sys::LockAcquire(&tag, mode, false, true) == pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
    }
}

/// Whether this database has the extension. Call in a transaction.
pub fn has_extension() -> bool {
    // SAFETY: a catalog lookup.
    unsafe { pg_sys::get_extension_oid(c"pg_ttl_index".as_ptr(), true) != pg_sys::InvalidOid }
}

/// Returns the databases that allow connections and are not templates, with their names. Call in a transaction; no
/// database connection is needed.
pub fn databases() -> Vec<(pg_sys::Oid, String)> {
    let mut found = Vec::new();
    // SAFETY: a scan of a shared catalog, as in the autovacuum launcher.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let relation = pg_sys::table_open(pg_sys::DatabaseRelationId, lock);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let database = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_database>();
            if database.datallowconn && !database.datistemplate {
                let name = CStr::from_ptr(database.datname.data.as_ptr());
                found.push((database.oid, name.to_string_lossy().into_owned()));
            }
        }
        pg_sys::table_endscan(scan);
        pg_sys::table_close(relation, lock);
    }
    found
}

pub fn current_database() -> pg_sys::Oid {
    // SAFETY: a backend-local value.
    unsafe { pg_sys::MyDatabaseId }
}

/// The name of the database we are connected to. Call in a transaction.
pub fn current_database_name() -> String {
    // SAFETY: a catalog lookup; the string is copied.
    unsafe {
        let name = pg_sys::get_database_name(pg_sys::MyDatabaseId);
        if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    }
}

/// Bytes of write-ahead log that this process has written.
pub fn wal_bytes() -> i64 {
    // SAFETY: a backend-local counter.
    unsafe { pg_sys::pgWalUsage.wal_bytes as i64 }
}

/// The end of the server's write-ahead log, in bytes.
pub fn wal_end() -> i64 {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::GetXLogInsertRecPtr() as i64 }
}

pub fn pid() -> i32 {
    // SAFETY: a backend-local value.
    unsafe { pg_sys::MyProcPid }
}

/// Calls `then` once the transaction has committed.
pub fn at_commit(then: fn()) {
    pgrx::register_xact_callback(pgrx::PgXactCallbackEvent::Commit, then);
}
