//! Commands that cannot run inside a transaction, because they use several of their own.

use super::compat;
use super::restriction::Restriction;
use super::transaction::{Failure, batch_timeout_ms, catch, leave_nothing_behind, set_time_limit};
use super::{identity, process, shmem};
use crate::error::TtlError;
use pgrx::{PgList, PgMemoryContexts, pg_sys};
use std::ffi::{CStr, CString};
use std::time::Duration;

/// Runs a utility command in a background worker, outside a transaction, as `role` and in a sandbox. Waits for a lock
/// or another transaction no longer than `patience`, and takes no longer than a batch may.
pub fn run_alone(sql: &str, role: pg_sys::Oid, patience: Duration) -> Result<(), Failure> {
    let text = CString::new(sql).unwrap_or_default();
    set_lock_timeout(patience);
    set_time_limit(batch_timeout_ms());
    shmem::report_busy(true);
    let result = in_transactions(Some(role), |memory| {
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
    });
    set_time_limit(0);
    forget_settings();
    shmem::report_busy(false);
    result
}

/// Resets settings that the owner's code may have changed: nothing undoes them at the end of these transactions.
fn forget_settings() {
    // SAFETY: outside a transaction; settings return to the values of the server and the database.
    unsafe { pg_sys::ResetAllOptions() };
    process::pin_again();
}

/// Runs `CREATE INDEX CONCURRENTLY` on the relation with this OID, whatever its name means by then, in a background
/// worker, outside a transaction and without a time limit.
///
/// Analyzing the expressions may run the owner's code, so it is done as the owner; during the build PostgreSQL switches
/// to the owner by itself. In between, the worker only reads catalogs as itself.
///
/// Once the relation is locked, `is_wanted` decides whether the index is still wanted. Returns its answer.
pub fn create_index_alone(
    sql: &str,
    relid: pg_sys::Oid,
    owner: pg_sys::Oid,
    is_wanted: impl FnOnce() -> Result<bool, TtlError>,
) -> Result<bool, Failure> {
    let text = CString::new(sql).unwrap_or_default();
    in_transactions(None, |memory| {
        // SAFETY: in a transaction; the statement is an IndexStmt. It is analyzed for the relation it is built on,
        // which stays locked. What PostgreSQL needs of it after the transaction is in `memory`.
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

/// Runs `work` in a transaction, which it may end to start others; ends the last. Passes it memory that outlives them. With
/// a role, the work runs as that role and restricted. The search path is the worker's.
fn in_transactions<T>(
    role: Option<pg_sys::Oid>,
    work: impl FnOnce(pg_sys::MemoryContext) -> Result<T, TtlError>,
) -> Result<T, Failure> {
    // Outside a transaction, the parent of this context is one that stays.
    let memory = PgMemoryContexts::new("command of pg_ttl_index");
    // SAFETY: the protocol of a background worker; an error anywhere ends in the abort below.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        let restriction = role.map(Restriction::impose);
        let result = catch(|| {
            let done = work(memory.value())?;
            pg_sys::CommitTransactionCommand();
            Ok(done)
        });
        if result.is_err() {
            pg_sys::AbortCurrentTransaction();
        }
        if let Some(restriction) = restriction {
            restriction.lift();
        }
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        leave_nothing_behind();
        result
    }
}

/// Parses a text and returns its first command; raises an error if there is none.
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

/// Runs a command in a portal: commands that end transactions keep there what they need afterwards.
///
/// # Safety
/// In a transaction, with one planned statement that outlives it.
unsafe fn run_in_portal(text: &CStr, tag: pg_sys::CommandTag::Type, statements: *mut pg_sys::List) {
    // SAFETY: as promised by the caller; an abort also drops the portal.
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
