//! Tells whether any row of a table has expired, from the first entry of an index in expiry order.

use super::compat;
use super::condition::Condition;
use super::existing::is_true;
use super::trigger::Change;
use super::unique_conflict::dirty_snapshot;
use pgrx::pg_sys::{self, Oid};
use std::ptr;

/// How many index entries to try until one has a row: with more dead entries in front, probing does not pay off.
const FEW_ENTRIES: usize = 8;

/// A btree index that orders a table's rows by expiry, and a test for rows that have not expired.
pub struct Order {
    index: Oid,
    estate: *mut pg_sys::EState,
    state: *mut pg_sys::ExprState,
    context: *mut pg_sys::ExprContext,
    /// The condition that `state` was compiled from; must be dropped after it.
    _is_later: Condition,
}

impl Order {
    /// Returns `None` if the index does not start with the row that expires first.
    pub fn by(index: Oid, is_later: Condition) -> Option<Self> {
        // SAFETY: the index is opened and closed; the state lives in the condition's memory, and no longer than that.
        unsafe {
            let relation = pg_sys::index_open(index, pg_sys::AccessShareLock as pg_sys::LOCKMODE);
            let is_ascending = *(*relation).rd_indoption == 0;
            pg_sys::index_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
            is_ascending.then(|| {
                let before = pg_sys::MemoryContextSwitchTo(is_later.memory());
                let estate = pg_sys::CreateExecutorState();
                let context = pg_sys::MakePerTupleExprContext(estate);
                let state = pg_sys::ExecPrepareExpr(is_later.expression(), estate);
                pg_sys::MemoryContextSwitchTo(before);
                Self { index, estate, state, context, _is_later: is_later }
            })
        }
    }

    /// Whether no row of the table has expired, uncommitted rows included. Returns `false` if that is hard to tell.
    pub fn is_clear(&self, change: &Change<'_>) -> bool {
        // SAFETY: the writer has the relation and its indexes open and locked. Snapshot and slot outlive the scan.
        unsafe {
            let index = pg_sys::RelationIdGetRelation(self.index);
            if index.is_null() {
                return false;
            }
            let (relation, forward) = (change.relation(), pg_sys::ScanDirection::ForwardScanDirection);
            let mut snapshot = dirty_snapshot();
            let scan = compat::index_beginscan(relation, index, &raw mut snapshot, 0);
            pg_sys::index_rescan(scan, ptr::null_mut(), 0, ptr::null_mut(), 0);
            let slot = pg_sys::table_slot_create(relation, ptr::null_mut());
            // The table is clear if the index has no entries, or if its first row has not expired.
            let mut is_clear = false;
            for _ in 0..FEW_ENTRIES {
                if pg_sys::index_getnext_tid(scan, forward).is_null() {
                    is_clear = true;
                    break;
                }
                if pg_sys::index_fetch_heap(scan, slot) {
                    is_clear = self.has_not_expired(slot);
                    break;
                }
            }
            pg_sys::index_endscan(scan);
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            pg_sys::RelationClose(index);
            is_clear
        }
    }

    /// # Safety
    /// The slot has a row of the table.
    unsafe fn has_not_expired(&self, slot: *mut pg_sys::TupleTableSlot) -> bool {
        // SAFETY: as promised by the caller; memory that the test allocates is freed by the next test.
        unsafe {
            (*self.context).ecxt_scantuple = slot;
            pg_sys::MemoryContextReset((*self.context).ecxt_per_tuple_memory);
            let before = pg_sys::MemoryContextSwitchTo((*self.context).ecxt_per_tuple_memory);
            let has_not = is_true(self.state, self.context);
            pg_sys::MemoryContextSwitchTo(before);
            has_not
        }
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        // SAFETY: no one else has the state.
        unsafe { pg_sys::FreeExecutorState(self.estate) };
    }
}
