//! The blocks of a table that a BRIN index does not rule out.

use super::compat;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use std::ops::Range;

/// Returns the ranges of blocks that may hold a value up to `bound`, which is not null. Rows that were there when the
/// index was read are nowhere else. Blocks that are not summarized yet are in the ranges, and neighbours are joined.
/// Returns `None` if the index cannot be asked about a value of this type.
pub fn ranges_up_to(index: pg_sys::Oid, bound: &DatumWithOid<'_>) -> Option<Vec<Range<u32>>> {
    let bound_type = bound.oid();
    let bound = bound.datum()?.sans_lifetime();
    let (lock, strategy) = (pg_sys::AccessShareLock as pg_sys::LOCKMODE, pg_sys::BTLessEqualStrategyNumber);
    // SAFETY: the index is open while it is read, and the key has the type that its operator takes. On error the abort
    // closes the index and frees the bitmap.
    unsafe {
        let index = pg_sys::index_open(index, lock);
        let (family, key_type) = (*(*index).rd_opfamily, *(*index).rd_opcintype);
        let operator = pg_sys::get_opfamily_member(family, key_type, bound_type, strategy as i16);
        let ranges = (operator != pg_sys::InvalidOid).then(|| {
            let mut key = pg_sys::ScanKeyData::default();
            let (column, collation) = (1, *(*index).rd_indcollation);
            let function = pg_sys::get_opcode(operator);
            pg_sys::ScanKeyEntryInitialize(
                &mut key,
                0,
                column,
                strategy as u16,
                bound_type,
                collation,
                function,
                bound,
            );
            let scan = compat::index_beginscan_bitmap(index, pg_sys::GetActiveSnapshot(), 1);
            pg_sys::index_rescan(scan, &mut key, 1, std::ptr::null_mut(), 0);
            let bitmap = compat::tbm_create(pg_sys::maintenance_work_mem);
            pg_sys::index_getbitmap(scan, bitmap);
            pg_sys::index_endscan(scan);
            let mut ranges: Vec<Range<u32>> = Vec::new();
            compat::for_each_block(bitmap, |block| match ranges.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => ranges.push(block..block + 1),
            });
            pg_sys::tbm_free(bitmap);
            ranges
        });
        pg_sys::index_close(index, lock);
        ranges
    }
}

/// Returns how many blocks a range of a BRIN index has.
pub fn pages_per_range(index: pg_sys::Oid) -> u32 {
    let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    let mut stats = compat::BrinStats::default();
    // SAFETY: the index is open while its metapage is read.
    unsafe {
        let index = pg_sys::index_open(index, lock);
        pg_sys::ffi::pg_guard_ffi_boundary(|| compat::brinGetStats(index, &mut stats));
        pg_sys::index_close(index, lock);
    }
    stats.range.max(1)
}

/// Whether all rows in these blocks are visible to everybody and none is left to vacuum.
pub fn is_clean(relid: pg_sys::Oid, blocks: Range<u32>) -> bool {
    let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    let mut buffer = pg_sys::InvalidBuffer as pg_sys::Buffer;
    // SAFETY: the relation is open while its visibility map is read; the last buffer of the map is released.
    unsafe {
        let relation = pg_sys::relation_open(relid, lock);
        let is_clean = blocks.into_iter().all(|block| {
            let status = pg_sys::visibilitymap_get_status(relation, block, &mut buffer);
            u32::from(status) & pg_sys::VISIBILITYMAP_ALL_VISIBLE != 0
        });
        if buffer != pg_sys::InvalidBuffer as pg_sys::Buffer {
            pg_sys::ReleaseBuffer(buffer);
        }
        pg_sys::relation_close(relation, lock);
        is_clean
    }
}
