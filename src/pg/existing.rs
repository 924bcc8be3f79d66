//! A row that conflicts with another, or did: its newest version, whatever a snapshot sees.

use super::compat;
use super::condition::Condition;
use super::expression::Relation;
use super::plan::Tid;
use pgrx::pg_sys::{self, Datum, Oid};
use std::ptr;

/// The result of an attempt to delete or lock a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// Another transaction has changed or deleted it meanwhile.
    Changed,
    /// It belongs to the running statement.
    Own,
}

/// A conflicting row.
pub struct Existing {
    relation: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
}

/// Creates an executor state in which expressions see the row of a slot.
///
/// # Safety
/// The slot has a row, and outlives the use of the state.
pub(super) unsafe fn executor_for(
    slot: *mut pg_sys::TupleTableSlot,
) -> (*mut pg_sys::EState, *mut pg_sys::ExprContext) {
    // SAFETY: both are freed with the memory context they are created in.
    unsafe {
        let estate = pg_sys::CreateExecutorState();
        let context = pg_sys::MakePerTupleExprContext(estate);
        (*context).ecxt_scantuple = slot;
        (estate, context)
    }
}

/// # Safety
/// `state` is a boolean expression, ready to be evaluated in the context.
pub(super) unsafe fn is_true(state: *mut pg_sys::ExprState, context: *mut pg_sys::ExprContext) -> bool {
    // SAFETY: as promised by the caller.
    unsafe { evaluate(state, context) }.is_some_and(|value| value.value() != 0)
}

/// # Safety
/// `state` is an expression, ready to be evaluated in the context.
pub(super) unsafe fn evaluate(state: *mut pg_sys::ExprState, context: *mut pg_sys::ExprContext) -> Option<Datum> {
    let mut is_null = false;
    // SAFETY: as promised by the caller.
    unsafe {
        let evaluate = (*state).evalfunc;
        let value = pg_sys::ffi::pg_guard_ffi_boundary(|| evaluate.map(|it| it(state, context, &mut is_null)));
        value.filter(|_| !is_null)
    }
}

pub(super) fn position(tid: Tid) -> (u32, u16) {
    super::plan::position(&tid)
}

impl Existing {
    /// # Safety
    /// The relation is open, and the slot has a row of it.
    pub(super) unsafe fn new(relation: pg_sys::Relation, slot: *mut pg_sys::TupleTableSlot) -> Self {
        Self { relation, slot }
    }

    /// Whether the current transaction wrote this version of the row.
    pub(super) fn is_of_this_transaction(&self) -> bool {
        let (attribute, mut is_null) = (pg_sys::MinTransactionIdAttributeNumber, false);
        // SAFETY: the slot has a heap tuple, which has an xmin.
        unsafe {
            let writer = pg_sys::slot_getsysattr(self.slot, attribute, &mut is_null);
            pg_sys::TransactionIdIsCurrentTransactionId(pg_sys::TransactionId::from(writer.value() as u32))
        }
    }

    pub fn tid(&self) -> Tid {
        // SAFETY: the slot has a row.
        unsafe { (*self.slot).tts_tid }
    }

    /// Whether the row meets a condition. Functions in it run as the current role.
    pub fn meets(&self, condition: &Condition) -> bool {
        // SAFETY: the slot has a row of the relation that the condition is about.
        unsafe {
            let (estate, context) = executor_for(self.slot);
            let is_met = is_true(pg_sys::ExecPrepareExpr(condition.expression(), estate), context);
            pg_sys::FreeExecutorState(estate);
            is_met
        }
    }

    /// Deletes this version of the row from the heap, and does nothing else.
    pub fn delete(&self) -> Outcome {
        // SAFETY: the relation is open and locked for writing.
        let result = unsafe {
            let command = pg_sys::GetCurrentCommandId(true);
            pg_sys::CheckCmdReplicaIdentity(self.relation, pg_sys::CmdType::CMD_DELETE);
            compat::heap_delete_waiting(self.relation, self.tid(), command)
        };
        outcome(result)
    }

    /// Keeps other transactions from changing this version of the row until this one ends. An update of it would take
    /// the same lock, so this adds no deadlocks.
    pub fn lock(&self) -> Outcome {
        let mut tuple = pg_sys::HeapTupleData { t_self: self.tid(), ..Default::default() };
        let (mut buffer, mut failure) = (0, pg_sys::TM_FailureData::default());
        let (mode, policy) = (pg_sys::LockTupleMode::LockTupleNoKeyExclusive, pg_sys::LockWaitPolicy::LockWaitBlock);
        // SAFETY: the relation is open and locked for writing; the pinned buffer is released.
        let result = unsafe {
            let (command, follow) = (pg_sys::GetCurrentCommandId(true), false);
            let result = pg_sys::heap_lock_tuple(
                self.relation,
                &mut tuple,
                command,
                mode,
                policy,
                follow,
                &mut buffer,
                &mut failure,
            );
            if buffer != 0 {
                pg_sys::ReleaseBuffer(buffer);
            }
            result
        };
        outcome(result)
    }
}

pub(super) fn outcome(result: pg_sys::TM_Result::Type) -> Outcome {
    match result {
        pg_sys::TM_Result::TM_Ok => Outcome::Done,
        pg_sys::TM_Result::TM_Invisible | pg_sys::TM_Result::TM_SelfModified => Outcome::Own,
        _ => Outcome::Changed,
    }
}

/// Calls `judge` with the newest version of the row that was at `tid`, deleted or not; `None` if nothing is left of it.
pub fn newest<T>(relid: Oid, tid: Tid, judge: impl FnOnce(&Existing) -> T) -> Option<T> {
    let relation = Relation::open(relid);
    let mut tid = tid;
    // SAFETY: the relation is open; the slot is dropped below, or by the abort that an error causes. A tuple is valid
    // while its slot holds it.
    unsafe {
        let slot = pg_sys::table_slot_create(relation.0, ptr::null_mut());
        let any = &raw mut pg_sys::SnapshotAnyData;
        let mut writer = None;
        // Row versions from before the statement stay until it ends, because its snapshot may see them.
        let is_found = loop {
            if !pg_sys::table_tuple_fetch_row_version(relation.0, &mut tid, any, slot) {
                break false;
            }
            let mut is_copy = false;
            let header = (*pg_sys::ExecFetchSlotHeapTuple(slot, false, &mut is_copy)).t_data;
            if writer.is_some_and(|writer| writer != (*header).t_choice.t_heap.t_xmin) {
                break false;
            }
            let (flags, next) = (u32::from((*header).t_infomask), (*header).t_ctid);
            let changer = if flags & pg_sys::HEAP_XMAX_IS_MULTI == 0 {
                (*header).t_choice.t_heap.t_xmax
            } else {
                pg_sys::HeapTupleGetUpdateXid(header)
            };
            let is_unchanged = flags & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0;
            let is_last =
                position(next) == position(tid) || u32::from(next.ip_posid) >= pg_sys::MovedPartitionsOffsetNumber;
            if is_unchanged || is_last || !pg_sys::TransactionIdDidCommit(changer) {
                break true;
            }
            (writer, tid) = (Some(changer), next);
        };
        let judged = is_found.then(|| judge(&Existing { relation: relation.0, slot }));
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        judged
    }
}
