//! Rows that `ON CONFLICT DO NOTHING` was asked to insert, kept until the statement has run. They are then checked
//! again for a conflicting row that was not visible yet when the trigger looked.

use super::compat;
use super::existing::Existing;
use super::expression::Relation;
use super::trigger::Change;
use super::unique_conflict::{self, Constraint};
use pgrx::pg_sys::{self, Oid};
use std::ptr;

/// A copy of a row that `ON CONFLICT DO NOTHING` was asked to insert, in the memory of that statement.
pub struct PendingRow {
    relid: Oid,
    tuple: pg_sys::HeapTuple,
}

impl PendingRow {
    /// # Safety
    /// `memory` lives at least as long as the copy.
    pub(super) unsafe fn copy(change: &Change<'_>, memory: pg_sys::MemoryContext) -> Self {
        // SAFETY: as promised by the caller; the row outlives the call of the trigger.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(memory);
            let tuple = pg_sys::heap_copytuple(change.tuple());
            pg_sys::MemoryContextSwitchTo(before);
            Self { relid: change.relid(), tuple }
        }
    }

    pub fn relid(&self) -> Oid {
        self.relid
    }

    pub fn free(self) {
        // SAFETY: a copy that no one else has.
        unsafe { pg_sys::heap_freetuple(self.tuple) };
    }

    /// Passes the row itself to `judge`.
    pub fn ask<T>(&self, judge: impl FnOnce(&Existing) -> T) -> T {
        let relation = Relation::open(self.relid);
        // SAFETY: the relation is open, and the slot has a row of it.
        unsafe {
            let own = self.slot(&relation);
            let completed = unique_conflict::completed(relation.0, own);
            let judged = judge(&Existing::new(relation.0, completed));
            unique_conflict::drop_completed(completed, own);
            pg_sys::ExecDropSingleTupleTableSlot(own);
            judged
        }
    }

    /// Whether there is a row that collides with this one and for which `judge` returns true, or whether the current
    /// transaction has written such a row, even if it is gone by now. Returns `None` if the constraint does not apply
    /// to this row. Does not wait for other transactions.
    pub fn meets_another(&self, constraint: &Constraint, judge: impl Fn(&Existing) -> bool) -> Option<bool> {
        let relation = Relation::open(self.relid);
        // SAFETY: relation and index are open, and the slots hold rows of the relation. The end of the transaction
        // releases what an error leaves open.
        unsafe {
            let index = pg_sys::index_open(constraint.index, pg_sys::AccessShareLock as pg_sys::LOCKMODE);
            let own = self.slot(&relation);
            let completed = unique_conflict::completed(relation.0, own);
            let values = constraint.values(index, completed);
            let is_met = values.map(|values| {
                let find = |snapshot, is_it: &dyn Fn(&Existing) -> bool| {
                    let (mut keys, forward) =
                        (constraint.scan_keys(&values), pg_sys::ScanDirection::ForwardScanDirection);
                    let scan = compat::index_beginscan(relation.0, index, snapshot, keys.len() as i32);
                    pg_sys::index_rescan(scan, keys.as_mut_ptr(), keys.len() as i32, ptr::null_mut(), 0);
                    let slot = pg_sys::table_slot_create(relation.0, ptr::null_mut());
                    let mut is_found = false;
                    while !is_found && pg_sys::index_getnext_slot(scan, forward, slot) {
                        let is_equal = !(*scan).xs_recheck || constraint.collides(index, slot, &values);
                        is_found = is_equal && is_it(&Existing::new(relation.0, slot));
                    }
                    pg_sys::index_endscan(scan);
                    pg_sys::ExecDropSingleTupleTableSlot(slot);
                    is_found
                };
                // The first scan sees all committed rows and all that this transaction has done, this command included.
                find(&raw mut pg_sys::SnapshotSelfData, &judge)
                    || find(&raw mut pg_sys::SnapshotAnyData, &|row| row.is_of_this_transaction() && judge(row))
            });
            unique_conflict::drop_completed(completed, own);
            pg_sys::ExecDropSingleTupleTableSlot(own);
            pg_sys::index_close(index, pg_sys::NoLock as pg_sys::LOCKMODE);
            is_met
        }
    }

    /// # Safety
    /// The slot is dropped before the relation is closed.
    unsafe fn slot(&self, relation: &Relation) -> *mut pg_sys::TupleTableSlot {
        // SAFETY: the copy is a row of the relation.
        unsafe {
            let slot = pg_sys::MakeSingleTupleTableSlot((*relation.0).rd_att, &pg_sys::TTSOpsHeapTuple);
            pg_sys::ExecStoreHeapTuple(self.tuple, slot, false);
            slot
        }
    }
}
