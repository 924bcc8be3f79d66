//! Commands that cannot run in a transaction, because they have several of their own.

use super::identity;
use super::transaction::{Failure, catch};
use pgrx::{PgList, PgMemoryContexts, pg_sys};
use std::ffi::{CStr, CString, c_char};
use std::time::Duration;

unsafe extern "C-unwind" {
    /// Parse analysis of an index, for which the caller has locked the table.
    fn transformIndexStmt(
        relid: pg_sys::Oid,
        statement: *mut pg_sys::IndexStmt,
        text: *const c_char,
    ) -> *mut pg_sys::IndexStmt;
}

/// Runs a command of PostgreSQL's own, in a background worker, outside a transaction. Waits for a lock, and for a transaction
/// of somebody else, no longer than `patience`; zero is for ever.
pub fn run_alone(sql: &str, patience: Duration) -> Result<(), Failure> {
    set_lock_timeout(patience);
    let result = run(sql, |statement| statement);
    set_lock_timeout(Duration::ZERO);
    result
}

/// Runs `CREATE INDEX CONCURRENTLY` on a table, as [`run_alone`] would and without an end to its patience. Reading its
/// expressions may run code of the table's owner, and is done as such; building the index, PostgreSQL does that itself.
pub fn create_index_alone(sql: &str, relid: pg_sys::Oid, owner: pg_sys::Oid) -> Result<(), Failure> {
    let text = CString::new(sql).unwrap_or_default();
    run(sql, |statement| {
        identity::sandboxed_as(owner, || {
            // SAFETY: the statement is one about an index; the lock, which the command takes anyway, goes with the
            // transaction.
            unsafe {
                pg_sys::LockRelationOid(relid, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
                pg_sys::ffi::pg_guard_ffi_boundary(|| transformIndexStmt(relid, statement.cast(), text.as_ptr())).cast()
            }
        })
    })
}

fn set_lock_timeout(patience: Duration) {
    let millis = CString::new(patience.as_millis().to_string()).unwrap_or_default();
    let (context, source) = (pg_sys::GucContext::PGC_SUSET, pg_sys::GucSource::PGC_S_SESSION);
    // SAFETY: name and value are C strings. The setting outlives the transactions of the command.
    unsafe { pg_sys::SetConfigOption(c"lock_timeout".as_ptr(), millis.as_ptr(), context, source) };
}

/// Parses one command, has it prepared, and runs it.
fn run(sql: &str, prepare: impl FnOnce(*mut pg_sys::Node) -> *mut pg_sys::Node) -> Result<(), Failure> {
    let text = CString::new(sql).unwrap_or_default();
    // What is parsed has to outlive the transaction it is parsed in.
    let memory = PgMemoryContexts::new("command of pg_ttl_index");
    // SAFETY: the protocol of a background worker; the command ends the transaction it was begun in and begins others, the
    // last of which is ended here. An error anywhere ends in the abort below.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        let result = catch(|| {
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let context = pg_sys::MemoryContextSwitchTo(memory.value());
            let parsed = PgList::<pg_sys::RawStmt>::from_pg(pg_sys::pg_parse_query(text.as_ptr()));
            let command = parsed.get_ptr(0).map_or(std::ptr::null_mut(), |raw| prepare((*raw).stmt));
            let statement: *mut pg_sys::PlannedStmt = pg_sys::palloc0(size_of::<pg_sys::PlannedStmt>()).cast();
            (*statement).type_ = pg_sys::NodeTag::T_PlannedStmt;
            (*statement).commandType = pg_sys::CmdType::CMD_UTILITY;
            (*statement).canSetTag = true;
            (*statement).utilityStmt = command;
            (*statement).stmt_len = text.as_bytes().len() as i32;
            let mut statements = PgList::new();
            statements.push(statement);
            pg_sys::MemoryContextSwitchTo(context);
            pg_sys::PopActiveSnapshot();
            run_in_portal(&text, pg_sys::CreateCommandTag(command), statements.into_pg());
            pg_sys::CommitTransactionCommand();
            Ok(())
        });
        if result.is_err() {
            pg_sys::AbortCurrentTransaction();
        }
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        result
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
        let is_top_level = true;
        pg_sys::PortalRun(
            portal,
            std::ffi::c_long::MAX,
            is_top_level,
            #[cfg(not(feature = "pg18"))]
            true,
            receiver,
            receiver,
            std::ptr::null_mut(),
        );
        pg_sys::PortalDrop(portal, false);
    }
}
