//! Finds the latest version of a row from an earlier TID.

use super::plan::Tid;
use pgrx::pg_sys;

/// Returns the TIDs of the latest versions, as this transaction sees them and including its own changes, of the rows at
/// `tids`. A TID is unchanged if its row is gone or was moved to another partition.
pub fn latest(relid: pg_sys::Oid, tids: &[Tid]) -> Vec<Tid> {
    // SAFETY: the caller has locked the relation, a heap; the scan ends before its snapshot is popped. The heap reads
    // each TID and updates our copy of it.
    unsafe {
        pg_sys::CommandCounterIncrement();
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        let relation = pg_sys::relation_open(relid, pg_sys::NoLock as pg_sys::LOCKMODE);
        let (none, flags) = (std::ptr::null_mut(), pg_sys::ScanOptions::SO_TYPE_TIDSCAN);
        let scan = pg_sys::heap_beginscan(relation, pg_sys::GetActiveSnapshot(), 0, none, std::ptr::null_mut(), flags);
        let mut latest = tids.to_vec();
        for tid in &mut latest {
            pg_sys::heap_get_latest_tid(scan, tid);
        }
        pg_sys::heap_endscan(scan);
        pg_sys::relation_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
        pg_sys::PopActiveSnapshot();
        latest
    }
}
