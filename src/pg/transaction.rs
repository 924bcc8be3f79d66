//! Work that fails alone.

use crate::error::TtlError;
use crate::guc;
use pgrx::pg_sys::panic::{CaughtError, ErrorReport};
use pgrx::{PgSqlErrorCode, PgTryBuilder, function_name, pg_sys};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::ptr;

/// The function of PostgreSQL that raises the error of a cancel or timeout.
const CANCELLED_IN: &str = "ProcessInterrupts";

/// The same of an error that was a panic of ours, when it is raised again.
const PANICKED_IN: &str = "pg_ttl_index panic";

/// Why an attempt came to nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub code: PgSqlErrorCode,
    pub message: String,
    /// Somebody wants the whole operation to end, not this attempt alone. The code does not tell: user code can raise it.
    pub is_cancel: bool,
    /// A bug of ours, and no fault of what was worked on.
    pub is_bug: bool,
}

impl Failure {
    /// The five characters of the SQLSTATE.
    pub fn sqlstate(&self) -> String {
        let code = self.code as i32;
        (0..5).map(|position| char::from((((code >> (6 * position)) & 0x3f) as u8) + b'0')).collect()
    }

    /// Raises it as an error of the present (sub)transaction.
    pub fn raise(self) -> ! {
        ErrorReport::from(self).report(pgrx::PgLogLevel::ERROR);
        unreachable!("an error does not return")
    }

    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: cut(message.into()), is_cancel: false, is_bug: false }
    }
}

/// What is kept of a message: users write them, and they are stored and logged.
const LONGEST_MESSAGE: usize = 1_000;

fn cut(mut message: String) -> String {
    if message.len() > LONGEST_MESSAGE {
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
        message.push('…');
    }
    message
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.sqlstate(), self.message)
    }
}

impl From<TtlError> for Failure {
    fn from(error: TtlError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

impl From<Failure> for ErrorReport {
    fn from(failure: Failure) -> Self {
        let raised_in = match (failure.is_cancel, failure.is_bug) {
            (true, _) => CANCELLED_IN,
            (_, true) => PANICKED_IN,
            _ => function_name!(),
        };
        ErrorReport::new(failure.code, failure.message, raised_in)
    }
}

/// What an attempt is made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A transaction of its own, in a background worker.
    Transaction,
    /// A part of the caller's transaction.
    Subtransaction,
    /// A part of the caller's transaction, which is then committed, in a procedure that was called outside a
    /// transaction block.
    Procedure,
}

impl Scope {
    /// Does the work or nothing of it.
    pub fn attempt<T>(self, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
        match self {
            Self::Transaction => transaction(work),
            Self::Subtransaction => subtransaction(work),
            Self::Procedure => {
                let result = subtransaction(work);
                commit_procedure();
                result
            }
        }
    }
}

/// Runs `work` in a subtransaction.
pub fn subtransaction<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    // SAFETY: the same protocol as PL/pgSQL's exception blocks: the memory context and resource owner of before are
    // put back when the subtransaction ends.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        let result = catch(work);
        match result {
            Ok(_) => pg_sys::ReleaseCurrentSubTransaction(),
            Err(_) => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
        if let Err(failure) = &result
            && failure.is_cancel
        {
            failure.clone().raise();
        }
        result
    }
}

/// Runs `work` in a transaction of its own. Only for background workers, outside a transaction.
fn transaction<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    // SAFETY: the protocol of a background worker; an error anywhere, in the commit too, ends in the abort below.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        set_time_limit(guc::batch_timeout_ms());
        let result = catch(|| {
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let done = work()?;
            pg_sys::PopActiveSnapshot();
            pg_sys::CommitTransactionCommand();
            Ok(done)
        });
        set_time_limit(0);
        if result.is_err() {
            pg_sys::AbortCurrentTransaction();
        }
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        // Autovacuum goes by these counts.
        pg_sys::pgstat_report_stat(true);
        result
    }
}

unsafe extern "C-unwind" {
    fn enable_timeout_after(id: i32, delay_ms: i32);
    fn disable_timeout(id: i32, keep_indicator: bool);
}

/// `TimeoutId` of the statement timeout, which background workers have but do not set by themselves.
const STATEMENT_TIMEOUT: i32 = 3;

/// Has the transaction cancelled after this time; 0 takes the limit back.
pub(super) fn set_time_limit(milliseconds: i32) {
    // SAFETY: the timeout was registered when the process connected; setting it raises no error.
    unsafe {
        if milliseconds > 0 {
            enable_timeout_after(STATEMENT_TIMEOUT, milliseconds);
        } else {
            disable_timeout(STATEMENT_TIMEOUT, false);
        }
    }
}

/// Commits, and begins the next transaction.
fn commit_procedure() {
    // SAFETY: the procedure connected to SPI as non-atomic, and no subtransaction is open.
    unsafe {
        pg_sys::SPI_commit();
        pg_sys::SPI_start_transaction();
        // What comes next may call functions outside SPI, which need a snapshot; the next commit forgets it.
        pg_sys::EnsurePortalSnapshotExists();
    }
}

pub(super) fn catch<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    let work = AssertUnwindSafe(work);
    PgTryBuilder::new(move || {
        let work = work;
        (work.0)().map_err(Failure::from)
    })
    .catch_others(|error| match error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => {
            let code = report.sql_error_code();
            let is_cancel =
                code == PgSqlErrorCode::ERRCODE_QUERY_CANCELED && report.function_name() == Some(CANCELLED_IN);
            let is_bug = report.function_name() == Some(PANICKED_IN);
            Err(Failure { code, message: cut(report.message().into()), is_cancel, is_bug })
        }
        CaughtError::RustPanic { ereport, .. } => {
            Err(Failure { is_bug: true, ..Failure::new(PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, ereport.message()) })
        }
    })
    .execute()
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use super::*;
    use pgrx::pg_test;

    #[pg_test]
    fn a_panic_is_a_bug_also_when_it_is_raised_again() {
        let panic = subtransaction(|| -> Result<(), TtlError> { panic!("oops") }).unwrap_err();
        assert_eq!((panic.sqlstate().as_str(), panic.is_bug, panic.is_cancel), ("XX000", true, false));
        let again = subtransaction(|| -> Result<(), TtlError> { panic.clone().raise() }).unwrap_err();
        assert_eq!(again, panic);
        let error = subtransaction(|| -> Result<(), TtlError> { Err(TtlError::NotInstalled) }).unwrap_err();
        assert!(!error.is_bug);
    }
}
