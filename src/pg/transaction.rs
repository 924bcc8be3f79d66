//! Transactions and subtransactions whose failure is contained.

use super::compat;
use super::{identity, origin, shmem};
use crate::error::TtlError;
use once_cell::sync::OnceCell;
use pgrx::pg_sys::panic::{CaughtError, ErrorReport, ErrorReportWithLevel};
use pgrx::{PgSqlErrorCode, PgTryBuilder, function_name, pg_sys};
use std::cell::Cell;
use std::ffi::CString;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::ptr;
use std::time::{Duration, Instant};

/// The PostgreSQL function that raises the error of a cancel or timeout.
const CANCELLED_IN: &str = "ProcessInterrupts";

/// Whether an error is an interrupt, such as a cancel or timeout, and not the fault of the running code.
pub(super) fn is_interrupt(report: &ErrorReportWithLevel) -> bool {
    report.function_name() == Some(CANCELLED_IN)
}
/// The function name of an error that was a panic of ours, when it is raised again.
const PANICKED_IN: &str = "pg_ttl_index panic";

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub code: PgSqlErrorCode,
    pub message: String,
    /// What a user can do about it.
    pub hint: Option<String>,
    /// Whether the whole operation is to end, not only this attempt. `code` does not tell: user code can raise it.
    pub is_cancel: bool,
    /// Whether this is a bug of ours, and not the fault of the rule or its rows.
    pub is_bug: bool,
    /// Whether the attempt failed only because this process is in a hurry: see [`Hurry`].
    pub needs_time: bool,
}

impl Failure {
    /// The five characters of the SQLSTATE.
    pub fn sqlstate(&self) -> String {
        let code = self.code as i32;
        (0..5).map(|position| char::from((((code >> (6 * position)) & 0x3f) as u8) + b'0')).collect()
    }

    /// Raises the failure as an error of the current (sub)transaction.
    pub fn raise(self) -> ! {
        ErrorReport::from(self).report(pgrx::PgLogLevel::ERROR);
        unreachable!("an error does not return")
    }

    /// Writes the failure to the server log, as a warning.
    pub fn log(self) {
        ErrorReport::from(self).report(pgrx::PgLogLevel::WARNING);
    }

    pub fn new(code: PgSqlErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: cut(message.into()), hint: None, is_cancel: false, is_bug: false, needs_time: false }
    }
}

/// The maximum length of a message: users write messages, and we store and log them.
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
        Self { hint: error.hint(), ..Self::new(error.code(), error.to_string()) }
    }
}

impl From<Failure> for ErrorReport {
    fn from(failure: Failure) -> Self {
        let raised_in = match (failure.is_cancel, failure.is_bug) {
            (true, _) => CANCELLED_IN,
            (_, true) => PANICKED_IN,
            _ => function_name!(),
        };
        let report = ErrorReport::new(failure.code, failure.message, raised_in);
        match failure.hint {
            Some(hint) => report.set_hint(hint),
            None => report,
        }
    }
}

/// The transactional scope of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A transaction of its own, in a background worker.
    Transaction,
    /// A subtransaction of the caller's transaction.
    Subtransaction,
    /// A subtransaction of the caller's transaction, which is then committed, in a procedure that was called outside a
    /// transaction block.
    Procedure,
}

impl Scope {
    /// Runs `work` atomically: if it fails, nothing of it remains.
    pub fn attempt<T>(self, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
        let outer = origin::take_wanted();
        match self {
            Self::Transaction => transaction(work),
            Self::Subtransaction => {
                let result = subtransaction(work);
                origin::want(outer);
                result
            }
            Self::Procedure => {
                let result = subtransaction(work);
                if result.is_err() {
                    origin::forget();
                }
                commit_procedure();
                result
            }
        }
    }
}

pub fn subtransaction<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    in_subtransaction(true, work)
}

/// Runs `work`, which only reads, and keeps nothing but its result; above all, no lock. Subtransactions are not
/// possible in parallel mode: there an error is raised, and locks stay.
pub fn reading<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    // SAFETY: reads backend-local state.
    if unsafe { pg_sys::IsInParallelMode() } { work().map_err(Failure::from) } else { in_subtransaction(false, work) }
}

fn in_subtransaction<T>(is_kept: bool, work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    // SAFETY: as in PL/pgSQL's exception blocks, the previous memory context and resource owner are restored when the
    // subtransaction ends.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        let has_users_path = identity::has_users_path();
        pg_sys::BeginInternalSubTransaction(ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        let result = catch(work);
        if is_kept && result.is_ok() {
            pg_sys::ReleaseCurrentSubTransaction();
        } else {
            pg_sys::RollbackAndReleaseCurrentSubTransaction();
            identity::reset_users_path(has_users_path);
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

/// How long a transaction in a hurry may last, and how long it waits for a lock.
const HASTY_LIMIT: Duration = Duration::from_secs(2);
const HASTY_LOCK_TIMEOUT: Duration = Duration::from_millis(50);

/// The settings that limit a worker's transactions: lock wait, and duration in milliseconds; 0 means no limit.
pub struct Limits {
    pub lock_timeout: fn() -> Duration,
    pub batch_timeout_ms: fn() -> i32,
}

static LIMITS: OnceCell<Limits> = OnceCell::new();

/// Installs the limits when the library is loaded.
pub fn install(limits: Limits) {
    let _ = LIMITS.set(limits);
}

pub(super) fn batch_timeout_ms() -> i32 {
    LIMITS.get().map_or(0, |limits| (limits.batch_timeout_ms)())
}

thread_local! {
    static IS_HASTY: Cell<bool> = const { Cell::new(false) };
}

/// While this guard exists, transactions of this process end soon and hardly wait for locks, because other rules wait
/// for their turn. A transaction that would have taken longer fails with [`Failure::needs_time`].
pub struct Hurry(());

impl Hurry {
    pub fn begin() -> Self {
        IS_HASTY.set(true);
        Self(())
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        IS_HASTY.set(false);
    }
}

/// How long a sweep waits for a lock, as a value for `lock_timeout`.
pub fn lock_timeout() -> CString {
    let most = if IS_HASTY.get() { HASTY_LOCK_TIMEOUT } else { Duration::MAX };
    let usual = LIMITS.get().map_or(Duration::ZERO, |limits| (limits.lock_timeout)());
    CString::new(usual.min(most).as_millis().to_string()).unwrap_or_default()
}

/// How long a worker's transaction may last, in milliseconds; 0 means no limit.
fn time_limit() -> i32 {
    let (usual, hasty) = (batch_timeout_ms(), HASTY_LIMIT.as_millis() as i32);
    match usual {
        _ if !IS_HASTY.get() => usual,
        0 => hasty,
        _ => usual.min(hasty),
    }
}

/// Runs `work` in a transaction of its own. Only for background workers, outside a transaction.
fn transaction<T>(work: impl FnOnce() -> Result<T, TtlError>) -> Result<T, Failure> {
    let started = Instant::now();
    // SAFETY: the protocol of a background worker; any error, even in the commit, ends in the abort below.
    let result = unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::StartTransactionCommand();
        shmem::report_busy(true);
        set_time_limit(time_limit());
        let result = catch(|| {
            identity::set_for_transaction((c"lock_timeout", &lock_timeout()));
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let done = work()?;
            pg_sys::PopActiveSnapshot();
            origin::commit(|| pg_sys::CommitTransactionCommand());
            Ok(done)
        });
        set_time_limit(0);
        if result.is_err() {
            origin::forget();
            pg_sys::AbortCurrentTransaction();
            origin::release();
        }
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        leave_nothing_behind();
        shmem::report_busy(false);
        // Autovacuum relies on these counts.
        pg_sys::pgstat_report_stat(true);
        result
    };
    result.map_err(|failure| {
        let is_late = failure.is_cancel && started.elapsed() >= HASTY_LIMIT;
        let is_locked_out = failure.code == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE;
        Failure { needs_time: IS_HASTY.get() && (is_late || is_locked_out), ..failure }
    })
}

/// Removes what user code may have left in a worker's session. Settings are undone with the transaction. In a
/// restricted operation PostgreSQL refuses holdable cursors, prepared statements, LISTEN and temporary relations, but
/// neither session-level advisory locks nor other temporary objects. Call outside a transaction.
pub(super) fn leave_nothing_behind() {
    let mut schemas = (pg_sys::InvalidOid, pg_sys::InvalidOid);
    // SAFETY: outside a transaction, in a background worker; none of its session-level advisory locks is ours.
    unsafe {
        pg_sys::LockReleaseSession(pg_sys::USER_LOCKMETHOD as pg_sys::LOCKMETHODID);
        pg_sys::GetTempNamespaceState(&mut schemas.0, &mut schemas.1);
        if schemas.0 == pg_sys::InvalidOid {
            return;
        }
        pg_sys::StartTransactionCommand();
        let removed = catch(|| {
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            pg_sys::ResetTempTableNamespace();
            pg_sys::PopActiveSnapshot();
            pg_sys::CommitTransactionCommand();
            Ok(())
        });
        if let Err(failure) = removed {
            pg_sys::AbortCurrentTransaction();
            pgrx::log!("pg_ttl_index could not remove temporary objects: {failure}");
        }
        pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
    }
}

/// The `TimeoutId` of the statement timeout, which background workers have but do not set by themselves.
const STATEMENT_TIMEOUT: i32 = 3;

/// Cancels the transaction after this time; 0 removes the limit.
pub(super) fn set_time_limit(milliseconds: i32) {
    // SAFETY: the timeout was registered when the process connected; setting it raises no error.
    unsafe {
        if milliseconds > 0 {
            compat::enable_timeout_after(STATEMENT_TIMEOUT, milliseconds);
        } else {
            compat::disable_timeout(STATEMENT_TIMEOUT, false);
        }
    }
}

/// Commits and starts the next transaction.
fn commit_procedure() {
    // SAFETY: the procedure connected to SPI as non-atomic, and no subtransaction is open.
    unsafe {
        let committed = catch(|| {
            origin::commit(|| pg_sys::SPI_commit());
            Ok(())
        });
        if let Err(failure) = committed {
            origin::release();
            failure.raise();
        }
        pg_sys::SPI_start_transaction();
        // Functions called next outside SPI need a snapshot; the next commit releases it.
        pg_sys::EnsurePortalSnapshotExists();
    }
}

/// Runs `work` and raises its error again without the details, which may quote rows that the caller cannot read.
pub fn without_details<T>(work: impl FnOnce() -> T) -> T {
    catch(|| Ok(work())).unwrap_or_else(|failure| failure.raise())
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
            let is_cancel = code == PgSqlErrorCode::ERRCODE_QUERY_CANCELED && is_interrupt(&report);
            let is_bug = report.function_name() == Some(PANICKED_IN);
            let (message, hint) = (cut(report.message().into()), report.hint().map(Into::into));
            Err(Failure { code, message, hint, is_cancel, is_bug, needs_time: false })
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
