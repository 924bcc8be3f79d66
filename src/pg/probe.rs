//! Reads the first key of an index that belongs to a visible row from the index itself, without running user code.

use super::compat;
use super::index::is_usable_at_once;
use pgrx::pg_sys::{self, Datum, Oid};
use pgrx::{FromDatum, IntoDatum};
use std::ptr;

/// The first key of an index.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Microseconds since 2000.
    Instant(i64),
    /// Microseconds since 2000, in local time.
    Local(i64),
    /// A number, in digits.
    Number(String),
    Uuid([u8; 16]),
}

/// How many heap tuples to visit: the first entries of an index may point to dead rows.
const MOST_VISITS: usize = 300;
/// How many index entries to read.
const MOST_ENTRIES: usize = 3_000;
/// How many indexes of a partitioned index to read.
const MOST_PARTS: usize = 1_000;

/// Returns the first key of a visible row for which `can_expire` holds, for each part of a btree index. Returns `None`
/// if that cannot be told at once, because the table is locked or too many entries come first.
pub fn first_values(index: Oid, can_expire: impl Fn(&Value) -> bool) -> Option<Vec<Value>> {
    // An index that has been dropped has no parts.
    super::access::relation_name(index)?;
    let mut values = Vec::new();
    let parts = super::relation::tree(index);
    if parts.len() > MOST_PARTS {
        return None;
    }
    for part in parts {
        values.extend(first_value(part, &can_expire)?);
    }
    Some(values)
}

fn first_value(index: Oid, can_expire: &impl Fn(&Value) -> bool) -> Option<Option<Value>> {
    // SAFETY: both relations are opened with the locks that reading takes, if these are free, and closed again; on
    // error the abort closes them.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let table = pg_sys::IndexGetRelation(index, true);
        if table == pg_sys::InvalidOid || !pg_sys::ConditionalLockRelationOid(table, lock) {
            return None;
        }
        let heap = pg_sys::try_relation_open(table, pg_sys::NoLock as pg_sys::LOCKMODE);
        if heap.is_null() {
            pg_sys::UnlockRelationOid(table, lock);
            return None;
        }
        let mut found = None;
        if pg_sys::ConditionalLockRelationOid(index, lock) {
            let opened = pg_sys::try_relation_open(index, pg_sys::NoLock as pg_sys::LOCKMODE);
            if opened.is_null() {
                pg_sys::UnlockRelationOid(index, lock);
            } else {
                found = read(heap, opened, can_expire);
                pg_sys::relation_close(opened, lock);
            }
        }
        pg_sys::relation_close(heap, lock);
        found
    }
}

/// # Safety
/// Both are open, and `index` is an index of `heap`.
unsafe fn read(
    heap: pg_sys::Relation,
    index: pg_sys::Relation,
    can_expire: &impl Fn(&Value) -> bool,
) -> Option<Option<Value>> {
    // SAFETY: as promised by the caller; the scan is ended before the relations are closed.
    unsafe {
        if (*(*index).rd_rel).relkind == pg_sys::RELKIND_PARTITIONED_INDEX as std::ffi::c_char {
            return Some(None);
        }
        let form = &*(*index).rd_index;
        let is_btree = (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID;
        if !is_btree || !form.indisvalid || !form.indisready || !form.indislive || !is_usable_at_once(index) {
            return None;
        }
        let key_type = pg_sys::getBaseType(pgrx::PgTupleDesc::from_pg_copy((*index).rd_att).get(0)?.atttypid);
        let is_descending = *(*index).rd_indoption & pg_sys::INDOPTION_DESC as i16 != 0;
        let direction = if is_descending {
            pg_sys::ScanDirection::BackwardScanDirection
        } else {
            pg_sys::ScanDirection::ForwardScanDirection
        };
        let mut key = beginning(index, key_type)?;
        let scan = compat::index_beginscan(heap, index, pg_sys::GetActiveSnapshot(), 1);
        (*scan).xs_want_itup = true;
        pg_sys::index_rescan(scan, &raw mut key, 1, ptr::null_mut(), 0);
        let slot = pg_sys::table_slot_create(heap, ptr::null_mut());
        let (mut visits, mut entries) = (0, 0);
        let found = loop {
            pgrx::check_for_interrupts!();
            if pg_sys::index_getnext_tid(scan, direction).is_null() {
                break Some(None);
            }
            entries += 1;
            if entries > MOST_ENTRIES || visits >= MOST_VISITS {
                break None;
            }
            let Some(value) = value_of(scan, key_type).filter(can_expire) else { continue };
            visits += 1;
            if pg_sys::index_fetch_heap(scan, slot) {
                break Some(Some(value));
            }
        };
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::index_endscan(scan);
        found
    }
}

/// Returns a scan key for values that can expire: above minus infinity and zero, and not NULL. `None` for other types.
///
/// # Safety
/// The index is open.
unsafe fn beginning(index: pg_sys::Relation, key_type: Oid) -> Option<pg_sys::ScanKeyData> {
    // SAFETY: as promised by the caller; the operator is the index's own for its type and takes a value of that type.
    unsafe {
        let mut key = pg_sys::ScanKeyData::default();
        let bound = match key_type {
            pg_sys::TIMESTAMPTZOID | pg_sys::TIMESTAMPOID => Some(Datum::from(i64::MIN)),
            pg_sys::DATEOID => Some(Datum::from(i32::MIN)),
            pg_sys::INT2OID | pg_sys::INT4OID | pg_sys::INT8OID => Some(Datum::from(0)),
            pg_sys::NUMERICOID => pgrx::AnyNumeric::from(0).into_datum(),
            pg_sys::UUIDOID => None,
            _ => return None,
        };
        match bound {
            Some(bound) => {
                let strategy = pg_sys::BTGreaterStrategyNumber as i16;
                let operator = pg_sys::get_opfamily_member(*(*index).rd_opfamily, key_type, key_type, strategy);
                if operator == pg_sys::InvalidOid {
                    return None;
                }
                let function = pg_sys::get_opcode(operator);
                let (none, strategy) = (pg_sys::InvalidOid, pg_sys::BTGreaterStrategyNumber as u16);
                pg_sys::ScanKeyEntryInitialize(&raw mut key, 0, 1, strategy, key_type, none, function, bound);
            }
            None => {
                let flags = (pg_sys::SK_ISNULL | pg_sys::SK_SEARCHNOTNULL) as i32;
                let none = pg_sys::InvalidOid;
                pg_sys::ScanKeyEntryInitialize(&raw mut key, flags, 1, 0, none, none, none, Datum::null());
            }
        }
        Some(key)
    }
}

/// Returns the key at the scan's current position.
///
/// # Safety
/// The scan is at an entry and returns index tuples.
unsafe fn value_of(scan: pg_sys::IndexScanDesc, key_type: Oid) -> Option<Value> {
    // SAFETY: as promised by the caller; a tuple has as many values as its descriptor says.
    unsafe {
        let (tuple, descriptor) = ((*scan).xs_itup, (*scan).xs_itupdesc);
        if tuple.is_null() || descriptor.is_null() {
            return None;
        }
        let count = (*descriptor).natts as usize;
        let (mut values, mut nulls) = (vec![Datum::null(); count], vec![false; count]);
        pg_sys::index_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
        let (datum, is_null) = (*values.first()?, *nulls.first()?);
        if is_null {
            return None;
        }
        let number = |digits: String| Some(Value::Number(digits));
        match key_type {
            pg_sys::TIMESTAMPTZOID => Some(Value::Instant(datum.value() as i64)),
            pg_sys::TIMESTAMPOID => Some(Value::Local(datum.value() as i64)),
            pg_sys::DATEOID => match datum.value() as i32 {
                i32::MAX => Some(Value::Local(i64::MAX)),
                days => Some(Value::Local(i64::from(days) * 86_400_000_000)),
            },
            pg_sys::INT2OID => number((datum.value() as i16).to_string()),
            pg_sys::INT4OID => number((datum.value() as i32).to_string()),
            pg_sys::INT8OID => number((datum.value() as i64).to_string()),
            pg_sys::NUMERICOID => number(pgrx::AnyNumeric::from_datum(datum, false)?.to_string()),
            pg_sys::UUIDOID => Some(Value::Uuid(*pgrx::Uuid::from_datum(datum, false)?.as_bytes())),
            _ => None,
        }
    }
}
