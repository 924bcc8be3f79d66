//! Where a row is now that was at a place before.

use super::plan::Tid;
use pgrx::pg_sys;

/// The latest versions of the rows at these places that this transaction sees, its own included. A place whose row is gone stays
/// what it is, and so does one whose row was moved to another partition.
pub fn latest(relid: pg_sys::Oid, tids: &[Tid]) -> Vec<Tid> {
    // SAFETY: the caller has locked the relation, a heap; the scan ends before its snapshot goes. The heap reads places and changes
    // the copies it is given.
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
