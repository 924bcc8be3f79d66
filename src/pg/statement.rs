//! Commands that cannot run in a transaction, because they have several of their own.

use super::compat;
use super::transaction::{Failure, batch_timeout_ms, catch, leave_nothing_behind, set_time_limit};
use super::{identity, process, shmem};
use crate::error::TtlError;
use pgrx::{PgList, PgMemoryContexts, pg_sys};
use std::ffi::{CStr, CString};
use std::time::Duration;

/// Whether [`run_alone`] can: servers that were built to check themselves do not let restrictions outlive a transaction.
pub fn can_run_alone() -> bool {
    // SAFETY: a setting that always exists.
    unsafe { CStr::from_ptr(pg_sys::GetConfigOption(c"debug_assertions".as_ptr(), false, false)) == c"off" }
}

/// Runs a command of PostgreSQL's own in a background worker, outside a transaction, as `role` and in a sandbox. Waits for a
/// lock, and for a transaction of somebody else, no longer than `patience`, and in all no longer than a batch may take.
pub fn run_alone(sql: &str, role: pg_sys::Oid, patience: Duration) -> Result<(), Failure> {
    let text = CString::new(sql).unwrap_or_default();
    set_lock_timeout(patience);
    set_time_limit(batch_timeout_ms());
    shmem::report_busy(true);
    let result = as_role(role, || {
        in_transactions(|memory| {
            // SAFETY: in a transaction, with one statement that outlives it.
            unsafe {
                let context = pg_sys::MemoryContextSwitchTo(memory);
                let command = parse(&text);
                let statement: *mut pg_sys::PlannedStmt = pg_sys::palloc0(size_of::<pg_sys::PlannedStmt>()).cast();
                (*statement).type_ = pg_sys::NodeTag::T_PlannedStmt;
                (*statement).commandType = pg_sys::CmdType::CMD_UTILITY;
                (*statement).canSetTag = true;
                (*statement).utilityStmt = command;
                (*statement).stmt_len = text.as_bytes().len() as i32;
                let mut statements = PgList::new();
                statements.push(statement);
                pg_sys::MemoryContextSwitchTo(context);
                run_in_portal(&text, pg_sys::CreateCommandTag(command), statements.into_pg());
            }
            Ok(())
        })
    });
    set_time_limit(0);
    forget_settings();
    shmem::report_busy(false);
    result
}

/// Puts back what code of the owner may have set: nothing undoes that at the end of these transactions.
fn forget_settings() {
    // SAFETY: outside a transaction; settings go back to what the server and the database say.
    unsafe { pg_sys::ResetAllOptions() };
    process::pin_again();
}

/// Runs `CREATE INDEX CONCURRENTLY` on a relation, whatever its name means by then, in a background worker, outside a
/// transaction, and without an end to its patience.
///
/// Reading the expressions may run code of the owner, and is done as such; while it builds, PostgreSQL becomes the owner by
/// itself. In between, as the worker, it does nothing but look into the catalogs.
///
/// Once the relation is locked, `is_wanted` is asked whether the index still is; tells whether it was.
pub fn create_index_alone(
    sql: &str,
    relid: pg_sys::Oid,
    owner: pg_sys::Oid,
    is_wanted: impl FnOnce() -> Result<bool, TtlError>,
) -> Result<bool, Failure> {
    let text = CString::new(sql).unwrap_or_default();
    in_transactions(|memory| {
        // SAFETY: in a transaction; the statement is one about an index. It is read for the relation that it is made on, which
        // stays locked. What PostgreSQL needs of it beyond the transaction is in memory of ours.
        unsafe {
            let context = pg_sys::MemoryContextSwitchTo(memory);
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            pg_sys::LockRelationOid(relid, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
            if !is_wanted()? {
                pg_sys::PopActiveSnapshot();
                pg_sys::MemoryContextSwitchTo(context);
                return Ok(false);
            }
            let parsed: *mut pg_sys::IndexStmt = parse(&text).cast();
            if (*parsed).type_ != pg_sys::NodeTag::T_IndexStmt {
                TtlError::Mismatch.raise();
            }
            let statement = identity::sandboxed_as(owner, || {
                pg_sys::ffi::pg_guard_ffi_boundary(|| compat::transformIndexStmt(relid, parsed, text.as_ptr()))
            });
            pg_sys::MemoryContextSwitchTo(context);
            compat::define_index(relid, statement);
            if pg_sys::ActiveSnapshotSet() {
                pg_sys::PopActiveSnapshot();
            }
            Ok(true)
        }
    })
}

fn set_lock_timeout(patience: Duration) {
    let millis = CString::new(patience.as_millis().to_string()).unwrap_or_default();
    let (context, source) = (pg_sys::GucContext::PGC_SUSET, pg_sys::GucSource::PGC_S_SESSION);
    // SAFETY: name and value are C strings. The setting outlives the transactions of the command.
    unsafe { pg_sys::SetConfigOption(c"lock_timeout".as_ptr(), millis.as_ptr(), context, source) };
}

/// Runs `work` as a role and in a sandbox, through all its transactions. The search path is that of a worker.
fn as_role<T>(role: pg_sys::Oid, work: impl FnOnce() -> T) -> T {
    let (mut worker, mut context) = (pg_sys::InvalidOid, 0);
    // SAFETY: plain reads and writes of backend-local state; work catches all errors.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&mut worker, &mut context);
        pg_sys::SetUserIdAndSecContext(role, context | pg_sys::SECURITY_RESTRICTED_OPERATION as i32);
        let result = work();
        pg_sys::SetUserIdAndSecContext(worker, context);
        result
    }
}

/// Begins a transaction, runs `work`, which may end it and begin others, and ends the last. It gets memory that outlives them.
fn in_transactions<T>(work: impl FnOnce(pg_sys::MemoryContext) -> Result<T, TtlError>) -> Result<T, Failure> {
    // Outside a transaction this is a part of the memory that stays.
    let memory = PgMemoryContexts::new("command of pg_ttl_index");
    // SAFETY: the protocol of a background worker; an error anywhere ends in the abort below.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        let result = catch(|| {
            let done = work(memory.value())?;
            pg_sys::CommitTransactionCommand();
            Ok(done)
        });
        if result.is_err() {
            pg_sys::AbortCurrentTransaction();
        }
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        leave_nothing_behind();
        result
    }
}

/// The first command of a text, which has to have one.
///
/// # Safety
/// In a transaction; the result lives in the current memory context.
unsafe fn parse(text: &CStr) -> *mut pg_sys::Node {
    // SAFETY: a C string; a syntax error is an ordinary error.
    unsafe {
        let parsed = identity::with_standard_syntax(|| pg_sys::pg_parse_query(text.as_ptr()));
        let parsed = PgList::<pg_sys::RawStmt>::from_pg(parsed);
        parsed.get_ptr(0).map_or_else(|| TtlError::Mismatch.raise(), |raw| (*raw).stmt)
    }
}

/// Commands that end transactions keep what they need beyond them in the portal they run in.
///
/// # Safety
/// In a transaction, with one planned statement that outlives it.
unsafe fn run_in_portal(text: &CStr, tag: pg_sys::CommandTag::Type, statements: *mut pg_sys::List) {
    // SAFETY: as promised by the caller; an abort drops the portal, too.
    unsafe {
        let portal = pg_sys::CreatePortal(c"".as_ptr(), true, true);
        (*portal).visible = false;
        pg_sys::PortalDefineQuery(portal, std::ptr::null(), text.as_ptr(), tag, statements, std::ptr::null_mut());
        pg_sys::PortalStart(portal, std::ptr::null_mut(), 0, std::ptr::null_mut());
        let receiver = pg_sys::CreateDestReceiver(pg_sys::CommandDest::DestNone);
        compat::portal_run(portal, receiver);
        pg_sys::PortalDrop(portal, false);
    }
}
