//! Starting, stopping and watching workers.

use crate::catalog::Catalog;
use crate::error::{TtlError, Unserved};
use crate::index;
use crate::pg::access::refuse_if_read_only;
use crate::pg::entry::c_function;
use crate::pg::shmem::{For, Hold, Path};
use crate::pg::transaction::subtransaction;
use crate::pg::{memo, process, recovery, relation, shmem};
use crate::rule::Window;
use crate::sweep::inspect::lag;
use crate::worker;
use crate::worker::schedule;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::iter::TableIterator;
use pgrx::pg_sys::Oid;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use std::collections::HashSet;

/// Switches automatic sweeping on in this database.
#[pg_extern(name = "ttl_start_worker")]
fn start_worker() -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_start_worker()");
    Catalog::open()?.set_sweeping(true)?;
    if shmem::is_preloaded() {
        process::at_commit(shmem::wake);
        return Ok(true);
    }
    if Catalog::open()?.has_worker()? {
        return Ok(true);
    }
    let started = worker::start_database_worker(process::current_database()).is_some();
    if started {
        notice!(
            "the worker runs until the server restarts; add pg_ttl_index to shared_preload_libraries to have it started with the server"
        );
    }
    Ok(started)
}

/// Switches automatic sweeping off in this database. Returns `false` if it was already off.
#[pg_extern(name = "ttl_stop_worker")]
fn stop_worker() -> Result<bool, ErrorReport> {
    refuse_if_read_only("ttl_stop_worker()");
    let stopped = Catalog::open()?.set_sweeping(false)?;
    process::at_commit(shmem::wake);
    Ok(stopped)
}

/// Makes every session look again at what this database has of the extension when this transaction commits, and wakes
/// the worker. Every script of the extension must end with a call of it.
#[pg_extern]
fn ttl_wake() {
    memo::forget_all();
    process::at_commit(shmem::wake);
}

/// Returns the last point-in-time recovery of this server, if there was one.
#[pg_extern(stable)]
pub fn ttl_last_recovery() -> Option<i64> {
    recovery::last()
}

/// Returns why nothing is swept in this database, if its schema or a recovery is the reason.
#[pg_extern(stable)]
pub fn ttl_database_hold() -> Result<Option<String>, ErrorReport> {
    match Catalog::open() {
        Ok(catalog) => Ok(catalog.off_because()?),
        Err(error @ TtlError::Unserved(_)) => Ok(Some(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

c_function!(
    /// The library function that version 3.0.0 of the schema declares and calls.
    ttl_start_worker,
    pg_finfo_ttl_start_worker,
    pg_sys::FunctionCallInfo,
    |_| TtlError::Unserved(Unserved::Older("3.0.0".into())).raise()
);

c_function!(
    /// Like `ttl_start_worker`: the schema of version 3.0.0 calls it.
    ttl_stop_worker,
    pg_finfo_ttl_stop_worker,
    pg_sys::FunctionCallInfo,
    |_| TtlError::Unserved(Unserved::Older("3.0.0".into())).raise()
);

/// Makes every session forget what it knows about the rules on a table, and replan its queries, when this transaction
/// commits.
#[pg_extern]
fn ttl_forget(relid: Oid) -> Result<(), ErrorReport> {
    memo::forget(Catalog::open()?.relid);
    memo::forget_tree(relid);
    Ok(())
}

/// Returns the running sweeps in this database, by process, of rules that the caller may see.
#[pg_extern]
#[allow(clippy::type_complexity)]
pub fn ttl_progress_slots() -> Result<
    TableIterator<
        'static,
        (
            name!(pid, i32),
            name!(rule_id, i64),
            name!(relid, Oid),
            name!(rows_removed, i64),
            name!(batches, i64),
            name!(estimated_rows, Option<i64>),
            name!(started_at, Option<TimestampWithTimeZone>),
            name!(hold, Option<&'static str>),
            name!(plan, Option<&'static str>),
            name!(is_building, bool),
            name!(workers, i32),
        ),
    >,
    ErrorReport,
> {
    let database = process::current_database().to_u32();
    let mut own: Vec<_> = shmem::sweeps().into_iter().filter(|progress| progress.database == database).collect();
    if !own.is_empty() {
        let visible: HashSet<_> = Catalog::open()?.visible_rules()?.into_iter().collect();
        own.retain(|progress| visible.contains(&progress.rule_id));
    }
    let rows = own.into_iter().map(|progress| {
        (
            progress.pid,
            progress.rule_id,
            Oid::from(progress.relid),
            progress.rows,
            progress.batches,
            (progress.estimate > 0).then_some(progress.estimate),
            TimestampWithTimeZone::try_from(progress.started_at).ok(),
            progress.hold.map(Hold::name),
            progress.path.map(Path::name),
            progress.is_building,
            progress.workers,
        )
    });
    Ok(TableIterator::new(rows))
}

/// Returns the rules that the caller may see, what they are bound to, and their errors.
#[pg_extern(stable)]
#[allow(clippy::type_complexity)]
pub fn ttl_states() -> Result<
    TableIterator<
        'static,
        (
            name!(rule_id, i64),
            name!(relid, Oid),
            name!(index_relid, Option<Oid>),
            name!(last_error, Option<String>),
            name!(index_error, Option<String>),
        ),
    >,
    ErrorReport,
> {
    let rules = Catalog::open()?.visible()?;
    Ok(TableIterator::new(
        rules.into_iter().map(|rule| (rule.id, rule.relid, rule.index, rule.last_error, rule.index_error)),
    ))
}

/// Returns the errors in the history that the caller may read.
#[pg_extern(stable)]
pub fn ttl_history_errors() -> Result<TableIterator<'static, (name!(id, i64), name!(error, String))>, ErrorReport> {
    Ok(TableIterator::new(Catalog::open()?.history_errors()?))
}

/// Returns how late the rules that the caller may see are, as far as their indexes tell.
#[pg_extern(stable)]
pub fn ttl_lags() -> Result<TableIterator<'static, (name!(rule_id, i64), name!(lag, Interval))>, ErrorReport> {
    Ok(TableIterator::new(lag::of_visible_rules(&Catalog::open()?)?))
}

/// Whether a table, or a part of it, is so large that a worker does not scan it while its index is being built.
#[pg_extern(stable)]
pub fn ttl_is_large(relid: Oid) -> bool {
    let is_large = |part: Oid| relation::blocks_at_once(part).is_some_and(|blocks| blocks > index::SHORT_HEAP);
    relation::tree(relid).into_iter().any(is_large)
}

/// Returns whether a run window is open at an instant, and until when; no row if the text is not a window.
#[pg_extern(stable)]
pub fn ttl_run_window(
    run_window: &str,
    time_zone: &str,
    at: TimestampWithTimeZone,
) -> Result<TableIterator<'static, (name!(is_open, bool), name!(until, TimestampWithTimeZone))>, ErrorReport> {
    let window = Window::parse(run_window).ok();
    // No row for a time zone that no longer exists, either.
    let opening = window.and_then(|window| subtransaction(|| schedule::opening(&window, time_zone, at)).ok());
    Ok(TableIterator::new(opening.map(|opening| (opening.is_open, opening.until))))
}

/// Whether a rule of this database waits for a process slot: the database has no worker, or the rule no helper.
#[pg_extern(stable)]
pub fn ttl_waits_for_process(rule_id: i64) -> bool {
    match shmem::waits(process::current_database()) {
        None => false,
        Some(For::Worker) => true,
        Some(For::Helper) => shmem::tasks().iter().any(|task| task.rule_id == rule_id && task.is_waiting()),
    }
}

/// Returns when a rule with its own schedule is due next, if the worker knows and the caller may see the rule.
#[pg_extern(stable)]
pub fn ttl_next_due(rule_id: i64) -> Result<Option<TimestampWithTimeZone>, ErrorReport> {
    let Some(at) = shmem::due(rule_id) else { return Ok(None) };
    let is_visible = Catalog::open()?.is_visible(rule_id)?;
    Ok(TimestampWithTimeZone::try_from(at).ok().filter(|_| is_visible))
}

/// Returns when the worker of this database begins its next pass.
#[pg_extern(stable)]
pub fn ttl_next_pass() -> Option<TimestampWithTimeZone> {
    let database = process::current_database().to_u32();
    let slot =
        shmem::slots().into_iter().find(|slot| slot.database == database && slot.role == shmem::Role::Database)?;
    TimestampWithTimeZone::try_from(slot.next_pass).ok().filter(|_| slot.next_pass != 0)
}
