//! Hooks around running statements: plans that must not be reused, and rows that `ON CONFLICT DO NOTHING` leaves alone.

use super::compat::{
    self, executor_run_hook, local_transaction, standard_ExecutorFinish, standard_ExecutorRun, standard_ExecutorStart,
};
use super::expression::elements;
use super::pending::PendingRow;
use super::plan::Tid;
use super::trigger::Change;
use super::{identity, planner};
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

/// Whether a query of these relations skips rows that the current role must not learn of.
pub type IsRestricted = fn(&[Oid]) -> bool;

/// Rechecks conflicting rows because of which a statement has done nothing.
pub type Recheck = fn(&[(Oid, Tid)]);

/// Rechecks rows that a statement was to write, for the rule with this ID: whether a row that was not visible before
/// has come into conflict with them.
pub type RecheckPending = fn(i64, &[PendingRow]);

/// How many rows of a statement are kept before they are rechecked and freed.
const MOST_PENDING: usize = 1000;

struct Hooks {
    recheck: Recheck,
    recheck_pending: RecheckPending,
    is_restricted: IsRestricted,
    start: pg_sys::ExecutorStart_hook_type,
    run: pg_sys::ExecutorRun_hook_type,
    finish: pg_sys::ExecutorFinish_hook_type,
}

static HOOKS: once_cell::sync::OnceCell<Hooks> = once_cell::sync::OnceCell::new();

/// A statement that modifies rows. It is stale after an error, because its subtransaction is over.
struct Running {
    transaction: u32,
    subtransaction: pg_sys::SubTransactionId,
    has_conflict_clause: bool,
    does_nothing_on_conflict: bool,
    conflicts: Vec<(Oid, Tid)>,
    pending: HashMap<i64, Pending>,
    estate: *mut pg_sys::EState,
    /// Whether PostgreSQL counts the rows that this statement writes, and no others.
    counts_rows: bool,
}

/// A query that will be explained.
struct Explained {
    query: *mut pg_sys::QueryDesc,
    transaction: u32,
    subtransaction: pg_sys::SubTransactionId,
    /// Whether it, or a query inside it, passes over rows: what such a query reads is counted for those around it, too.
    passes_over_rows: bool,
}

/// Rows of a statement that had no conflict.
#[derive(Default)]
struct Pending {
    rows: Vec<PendingRow>,
    /// How many rows there were so far, including those no longer kept.
    count: u64,
}

impl Running {
    /// Whether all `count` rows were written, so that no conflict has come up since.
    fn has_written(&self, count: u64) -> bool {
        // SAFETY: the statement is running.
        self.counts_rows && self.conflicts.is_empty() && unsafe { (*self.estate).es_processed } == count
    }

    /// Keeps a row; returns the rows to recheck before it is written.
    fn keep(&mut self, rule_id: i64, change: &Change<'_>) -> Vec<PendingRow> {
        let count = self.pending.get(&rule_id).map_or(0, |pending| pending.count);
        let has_written = self.has_written(count);
        let pending = self.pending.entry(rule_id).or_default();
        let mut due = Vec::new();
        if pending.rows.len() >= MOST_PENDING {
            due = std::mem::take(&mut pending.rows);
            if has_written {
                due.drain(..).for_each(PendingRow::free);
            }
        }
        // SAFETY: the memory context of the running statement.
        pending.rows.push(unsafe { PendingRow::copy(change, (*self.estate).es_query_cxt) });
        pending.count += 1;
        due
    }
}

thread_local! {
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
    /// Set when a plan was made that must be used only once.
    static IS_MOMENTARY: Cell<bool> = const { Cell::new(false) };
    /// The running queries that will be explained.
    static EXPLAINED: RefCell<Vec<Explained>> = const { RefCell::new(Vec::new()) };
}

pub fn install(recheck: Recheck, recheck_pending: RecheckPending, is_restricted: IsRestricted) {
    // SAFETY: nothing runs while the library is loaded; hooks installed before ours are called in turn.
    unsafe {
        let (start_hook, run_hook) = (pg_sys::ExecutorStart_hook, pg_sys::ExecutorRun_hook);
        let finish_hook = pg_sys::ExecutorFinish_hook;
        let hooks =
            Hooks { recheck, recheck_pending, is_restricted, start: start_hook, run: run_hook, finish: finish_hook };
        if HOOKS.set(hooks).is_ok() {
            pg_sys::ExecutorStart_hook = Some(start);
            pg_sys::ExecutorRun_hook = Some(run);
            pg_sys::ExecutorFinish_hook = Some(finish);
        }
    }
}

/// Makes PostgreSQL use the plan being made only once: it depends on more than the plan cache tracks.
pub fn use_plan_once() {
    IS_MOMENTARY.set(true);
}

/// Records a row that conflicts with the running statement, if that says DO NOTHING; returns whether it does.
pub fn note_conflict(relid: Oid, tid: Tid) -> bool {
    with_present(|statement| {
        if statement.does_nothing_on_conflict {
            statement.conflicts.push((relid, tid));
        }
        statement.does_nothing_on_conflict
    })
    .unwrap_or(false)
}

/// Keeps a row without a conflict, if the statement would do nothing on one that arises before the row is written.
pub fn keep_pending(rule_id: i64, change: &Change<'_>) {
    let due =
        with_present(
            |statement| {
                if statement.does_nothing_on_conflict { statement.keep(rule_id, change) } else { Vec::new() }
            },
        );
    recheck_pending(rule_id, due.unwrap_or_default());
}

fn recheck_pending(rule_id: i64, rows: Vec<PendingRow>) {
    if !rows.is_empty()
        && let Some(hooks) = HOOKS.get()
    {
        (hooks.recheck_pending)(rule_id, &rows);
        rows.into_iter().for_each(PendingRow::free);
    }
}

/// Whether the running statement has an ON CONFLICT clause.
pub fn has_conflict_clause() -> bool {
    with_present(|statement| statement.has_conflict_clause).unwrap_or(false)
}

/// Identifies the running statement: its start time, its transaction and its command ID.
pub fn statement() -> (i64, u32, pg_sys::CommandId) {
    // SAFETY: reads the state of the transaction.
    unsafe {
        let command = pg_sys::GetCurrentCommandId(false);
        (pg_sys::GetCurrentStatementStartTimestamp(), local_transaction(), command)
    }
}

/// Calls `ask` with the running statement. Statements that failed inside it belong to subtransactions that are over.
fn with_present<T>(ask: impl FnOnce(&mut Running) -> T) -> Option<T> {
    let place = place();
    RUNNING.with_borrow_mut(|running| {
        let is_present = |statement: &&mut Running| (statement.transaction, statement.subtransaction) == place;
        running.iter_mut().rev().find(is_present).map(ask)
    })
}

fn place() -> (u32, pg_sys::SubTransactionId) {
    // SAFETY: reads the state of the transaction.
    (local_transaction(), unsafe { pg_sys::GetCurrentSubTransactionId() })
}

unsafe extern "C-unwind" fn start(query: *mut pg_sys::QueryDesc, flags: i32) {
    // SAFETY: called by PostgreSQL. No value here has a destructor. The current plan is in use and stays valid; neither
    // code that this statement calls nor a later statement finds it again.
    unsafe {
        HOOKS.get().and_then(|hooks| hooks.start).unwrap_or(standard_ExecutorStart)(query, flags);
        if IS_MOMENTARY.take() {
            forget_plans();
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn forget_plans() {
    // SAFETY: marks the cached plans of this process.
    unsafe { pg_sys::ResetPlanCache() };
}

executor_run_hook!(
    HOOKS.get().and_then(|hooks| hooks.run).unwrap_or(standard_ExecutorRun),
    |query| (begin(query), enter()),
    |(depth, path)| {
        leave(path);
        end(depth);
    }
);

#[pg_guard]
pub(super) unsafe extern "C-unwind" fn enter() -> i32 {
    identity::enter_users_path()
}

#[pg_guard]
pub(super) unsafe extern "C-unwind" fn leave(nest_level: i32) {
    identity::leave_users_path(nest_level);
}

/// Records a statement that modifies rows; returns how many statements are around it, or -1 if it modifies none.
#[pg_guard]
unsafe extern "C-unwind" fn begin(query: *mut pg_sys::QueryDesc) -> isize {
    // SAFETY: a started query has a plan.
    unsafe {
        note_explained(query);
        let plan = &*(*query).plannedstmt;
        if plan.commandType == pg_sys::CmdType::CMD_SELECT && !plan.hasModifyingCTE {
            return -1;
        }
        let (transaction, subtransaction) = place();
        let subplans = elements(plan.subplans).iter().map(|cell| cell.ptr_value.cast());
        let (mut has_conflict_clause, mut does_nothing_on_conflict) = (false, false);
        for node in std::iter::once(plan.planTree.cast()).chain(subplans) {
            let action = action_on_conflict(node);
            has_conflict_clause |= action != pg_sys::OnConflictAction::ONCONFLICT_NONE;
            does_nothing_on_conflict |= action == pg_sys::OnConflictAction::ONCONFLICT_NOTHING;
        }
        RUNNING.with_borrow_mut(|running| {
            // Statements left over from an earlier transaction have failed.
            running.retain(|statement| statement.transaction == transaction);
            running.push(Running {
                transaction,
                subtransaction,
                has_conflict_clause,
                does_nothing_on_conflict,
                conflicts: Vec::new(),
                pending: HashMap::new(),
                estate: (*query).estate,
                counts_rows: plan.commandType == pg_sys::CmdType::CMD_INSERT && !plan.hasModifyingCTE,
            });
            running.len() as isize - 1
        })
    }
}

/// # Safety
/// `node` is null or a plan.
unsafe fn action_on_conflict(node: *mut pg_sys::Node) -> pg_sys::OnConflictAction::Type {
    // SAFETY: the cast follows the node's tag.
    unsafe {
        if node.is_null() || (*node).type_ != pg_sys::NodeTag::T_ModifyTable {
            return pg_sys::OnConflictAction::ONCONFLICT_NONE;
        }
        (*node.cast::<pg_sys::ModifyTable>()).onConflictAction
    }
}

/// Ends a statement, and those that failed inside it.
#[pg_guard]
unsafe extern "C-unwind" fn end(depth: isize) {
    let Ok(depth) = usize::try_from(depth) else { return };
    let ended = RUNNING.with_borrow_mut(|running| {
        running.truncate(depth + 1);
        running.pop()
    });
    let Some(mut ended) = ended else { return };
    for (rule_id, pending) in std::mem::take(&mut ended.pending) {
        if !ended.has_written(pending.count) {
            recheck_pending(rule_id, pending.rows);
        }
    }
    if !ended.conflicts.is_empty()
        && let Some(hooks) = HOOKS.get()
    {
        (hooks.recheck)(&ended.conflicts);
    }
}

unsafe extern "C-unwind" fn finish(query: *mut pg_sys::QueryDesc) {
    // SAFETY: called by PostgreSQL with a query that has run. No value here has a destructor.
    unsafe {
        // Modifying CTEs that the query did not read to the end run only now.
        let (depth, path) = (begin(query), enter());
        HOOKS.get().and_then(|hooks| hooks.finish).unwrap_or(standard_ExecutorFinish)(query);
        leave(path);
        end(depth);
        if (*query).instrument_options != 0 {
            forget_counts(query);
        }
    }
}

/// Records a query that will be explained, and for those around a query whether it passes over rows.
///
/// # Safety
/// The query has a plan.
unsafe fn note_explained(query: *mut pg_sys::QueryDesc) {
    let (transaction, subtransaction) = place();
    // SAFETY: as promised by the caller.
    let (is_explained, plan) = unsafe { ((*query).instrument_options != 0, &*(*query).plannedstmt) };
    let is_inside = EXPLAINED.with_borrow_mut(|explained| {
        // Others have failed: those around this query began before it.
        explained.retain(|other| other.transaction == transaction && other.subtransaction <= subtransaction);
        if is_explained && explained.iter().all(|other| other.query != query) {
            explained.push(Explained { query, transaction, subtransaction, passes_over_rows: false });
        }
        !explained.is_empty()
    });
    if is_inside {
        // SAFETY: a list of OIDs.
        let relids: Vec<_> = unsafe { elements(plan.relationOids).iter().map(|cell| cell.oid_value).collect() };
        // Finding out takes queries, and these may be explained, too.
        let is_restricted = || HOOKS.get().is_some_and(|hooks| (hooks.is_restricted)(&relids));
        if planner::ask(is_restricted).unwrap_or(false) {
            EXPLAINED.with_borrow_mut(|all| all.iter_mut().for_each(|explained| explained.passes_over_rows = true));
        }
    }
}

/// Resets counters that EXPLAIN ANALYZE shows of a query that passes over rows, and of those around it: rows removed by a
/// filter would reveal that a hidden row has a key, and so would the blocks that were read for it.
#[pg_guard]
unsafe extern "C-unwind" fn forget_counts(query: *mut pg_sys::QueryDesc) {
    let passes_over_rows = EXPLAINED.with_borrow_mut(|explained| {
        let place = explained.iter().position(|other| other.query == query);
        place.is_some_and(|place| explained.remove(place).passes_over_rows)
    });
    if passes_over_rows {
        // SAFETY: a query that has run has a plan state.
        unsafe { forget_count((*query).planstate, ptr::null_mut()) };
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn forget_count(state: *mut pg_sys::PlanState, context: *mut c_void) -> bool {
    // SAFETY: null or part of a running plan.
    unsafe {
        if state.is_null() {
            return false;
        }
        if let Some(instrument) = (*state).instrument.as_mut() {
            (instrument.nfiltered1, instrument.nfiltered2, instrument.ntuples2) = (0.0, 0.0, 0.0);
            compat::forget_buffers(instrument);
            // These count index entries, including those of hidden rows.
            let is_of_entries = [
                pg_sys::NodeTag::T_BitmapIndexScanState,
                pg_sys::NodeTag::T_BitmapAndState,
                pg_sys::NodeTag::T_BitmapOrState,
            ];
            if is_of_entries.contains(&(*state).type_) {
                (instrument.tuplecount, instrument.ntuples) = (0.0, 0.0);
            }
        }
        (*state).worker_instrument = ptr::null_mut();
        if (*state).type_ == pg_sys::NodeTag::T_BitmapHeapScanState {
            compat::forget_pages(&mut *state.cast());
        }
        pg_sys::ffi::pg_guard_ffi_boundary(|| compat::planstate_tree_walker(state, forget_count, context))
    }
}
