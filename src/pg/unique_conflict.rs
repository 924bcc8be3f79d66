//! Finds rows that a new row would collide with in a unique index or exclusion constraint, as PostgreSQL itself does:
//! the newest versions count, whatever a snapshot sees, and a transaction that is writing one is waited for.

use super::compat;
use super::existing::{Existing, evaluate, executor_for, is_true, position};
use super::expression::{Relation, elements};
use super::trigger::Change;
use pgrx::pg_sys::{self, Datum, Oid};
use std::ptr;

/// A unique index or an exclusion constraint of a table.
pub struct Constraint {
    pub(super) index: Oid,
    pub name: String,
    keys: Vec<Key>,
    /// Whether its keys are plain columns and it covers every row.
    is_plain: bool,
    are_nulls_equal: bool,
    /// Whether it is checked row by row, and not at the end.
    pub is_immediate: bool,
    pub is_exclusion: bool,
}

/// A key column of a constraint.
struct Key {
    /// The column number; 0 for an expression.
    attnum: i16,
    strategy: u16,
    procedure: Oid,
    collation: Oid,
    is_generated: bool,
}

/// What to do after a row was found.
pub enum Next {
    /// Look for other rows.
    Continue,
    /// The row has changed: start the scan again.
    Again,
}

/// Returns the unique indexes and exclusion constraints of a table.
pub fn constraints(relid: Oid) -> Vec<Constraint> {
    let relation = Relation::open(relid);
    // SAFETY: the relation is open, so its list of indexes is valid, and their locks keep them in place.
    unsafe {
        let indexes = elements(pg_sys::RelationGetIndexList(relation.0)).iter();
        indexes.filter_map(|cell| Constraint::of(cell.oid_value, relation.0)).collect()
    }
}

impl Constraint {
    /// # Safety
    /// The table of the index is open.
    unsafe fn of(oid: Oid, relation: pg_sys::Relation) -> Option<Self> {
        // SAFETY: an open index has its catalog entries, and as many keys as it says.
        unsafe {
            let index = pg_sys::index_open(oid, pg_sys::AccessShareLock as pg_sys::LOCKMODE);
            let form = &*(*index).rd_index;
            let is_one = (form.indisunique || form.indisexclusion) && form.indislive && form.indisready;
            let found = is_one.then(|| Self {
                index: oid,
                name: std::ffi::CStr::from_ptr((*(*index).rd_rel).relname.data.as_ptr()).to_string_lossy().into_owned(),
                keys: keys(index, relation),
                is_plain: pg_sys::RelationGetIndexExpressions(index).is_null()
                    && pg_sys::RelationGetIndexPredicate(index).is_null(),
                are_nulls_equal: form.indnullsnotdistinct,
                is_immediate: form.indimmediate,
                is_exclusion: form.indisexclusion,
            });
            pg_sys::index_close(index, pg_sys::NoLock as pg_sys::LOCKMODE);
            found
        }
    }

    /// Whether writing the row can cause a conflict: an update that leaves the key unchanged cannot.
    pub fn concerns(&self, change: &Change<'_>) -> bool {
        !change.is_update()
            || !self.is_plain
            || self.keys.iter().any(|key| key.is_generated || change.changes(key.attnum))
    }

    /// Passes every row that the new one would collide with to `judge`. Waits for transactions that are writing or
    /// removing such a row, as inserting the new row would.
    pub fn probe(&self, change: &Change<'_>, judge: &mut dyn FnMut(&Existing) -> Next) {
        // SAFETY: the writing statement has the relation and its indexes open and locked. The end of the transaction
        // releases what an error leaves open.
        unsafe {
            let index = pg_sys::RelationIdGetRelation(self.index);
            if index.is_null() {
                return;
            }
            let slot = completed(change.relation(), change.slot());
            if let Some(values) = self.values(index, slot) {
                let mut keys = self.scan_keys(&values);
                while !self.scan(index, change, &values, &mut keys, judge) {}
            }
            drop_completed(slot, change.slot());
            pg_sys::RelationClose(index);
        }
    }

    /// Returns the keys of a row, with NULL as `None`; returns `None` if the constraint does not apply to the row.
    ///
    /// # Safety
    /// `index` is open, and the slot has a row of its table.
    pub(super) unsafe fn values(
        &self,
        index: pg_sys::Relation,
        slot: *mut pg_sys::TupleTableSlot,
    ) -> Option<Vec<Option<Datum>>> {
        // SAFETY: as promised by the caller; the executor state is freed with the memory of the statement.
        unsafe {
            let values: Vec<_> = if self.is_plain {
                let column = |key: &Key| {
                    let mut is_null = false;
                    let value = pg_sys::slot_getattr(slot, key.attnum.into(), &mut is_null);
                    (!is_null).then_some(value)
                };
                self.keys.iter().map(column).collect()
            } else {
                let info = pg_sys::BuildIndexInfo(index);
                let (estate, context) = executor_for(slot);
                if !(*info).ii_Predicate.is_null() {
                    let predicate = pg_sys::make_ands_explicit((*info).ii_Predicate);
                    if !is_true(pg_sys::ExecPrepareExpr(predicate, estate), context) {
                        return None;
                    }
                }
                let mut values = [Datum::null(); pg_sys::INDEX_MAX_KEYS as usize];
                let mut nulls = [false; pg_sys::INDEX_MAX_KEYS as usize];
                pg_sys::FormIndexDatum(info, slot, estate, values.as_mut_ptr(), nulls.as_mut_ptr());
                values
                    .into_iter()
                    .zip(nulls)
                    .take(self.keys.len())
                    .map(|(value, null)| (!null).then_some(value))
                    .collect()
            };
            (self.are_nulls_equal || values.iter().all(Option::is_some)).then_some(values)
        }
    }

    pub(super) fn scan_keys(&self, values: &[Option<Datum>]) -> Vec<pg_sys::ScanKeyData> {
        let mut keys = vec![pg_sys::ScanKeyData::default(); values.len()];
        for (((entry, key), value), number) in keys.iter_mut().zip(&self.keys).zip(values).zip(1..) {
            let flags = if value.is_some() { 0 } else { pg_sys::SK_ISNULL | pg_sys::SK_SEARCHNULL };
            let (value, any) = (value.unwrap_or(Datum::null()), pg_sys::InvalidOid);
            // SAFETY: fills in the entry.
            unsafe {
                pg_sys::ScanKeyEntryInitialize(
                    entry,
                    flags as i32,
                    number,
                    key.strategy,
                    any,
                    key.collation,
                    key.procedure,
                    value,
                );
            }
        }
        keys
    }

    /// Scans the index once. Returns `false` if the scan must be repeated.
    ///
    /// # Safety
    /// `index` is open, and `keys` are for it.
    unsafe fn scan(
        &self,
        index: pg_sys::Relation,
        change: &Change<'_>,
        values: &[Option<Datum>],
        keys: &mut [pg_sys::ScanKeyData],
        judge: &mut dyn FnMut(&Existing) -> Next,
    ) -> bool {
        // SAFETY: as promised by the caller. Snapshot and slot outlive the scan.
        unsafe {
            let (relation, forward) = (change.relation(), pg_sys::ScanDirection::ForwardScanDirection);
            let mut snapshot = dirty_snapshot();
            let (dirty, count) = (&raw mut snapshot, keys.len() as i32);
            let scan = compat::index_beginscan(relation, index, dirty, count);
            pg_sys::index_rescan(scan, keys.as_mut_ptr(), count, ptr::null_mut(), 0);
            // The usual case: the key is not in the index.
            if pg_sys::index_getnext_tid(scan, forward).is_null() {
                pg_sys::index_endscan(scan);
                return true;
            }
            let slot = pg_sys::table_slot_create(relation, ptr::null_mut());
            let mut wait = None;
            let mut is_enough = true;
            let mut has_row = pg_sys::index_fetch_heap(scan, slot) || pg_sys::index_getnext_slot(scan, forward, slot);
            while has_row {
                let existing = Existing::new(relation, slot);
                let is_other = Some(position(existing.tid())) != change.old_place().map(position);
                if is_other && (!(*scan).xs_recheck || self.collides(index, slot, values)) {
                    let writer =
                        if (*dirty).xmin == pg_sys::InvalidTransactionId { (*dirty).xmax } else { (*dirty).xmin };
                    if writer != pg_sys::InvalidTransactionId {
                        wait = Some((writer, existing.tid(), (*dirty).speculativeToken));
                        break;
                    }
                    if matches!(judge(&existing), Next::Again) {
                        is_enough = false;
                        break;
                    }
                }
                has_row = pg_sys::index_getnext_slot(scan, forward, slot);
            }
            pg_sys::index_endscan(scan);
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            match wait {
                None => is_enough,
                Some((writer, mut tid, token)) => {
                    if token != 0 {
                        pg_sys::SpeculativeInsertionWait(writer, token);
                    } else {
                        pg_sys::XactLockTableWait(writer, relation, &raw mut tid, pg_sys::XLTW_Oper::XLTW_InsertIndex);
                    }
                    false
                }
            }
        }
    }

    /// Rechecks whether a row from a lossy index scan really collides.
    ///
    /// # Safety
    /// `index` is open, and the slot has a row of its table.
    pub(super) unsafe fn collides(
        &self,
        index: pg_sys::Relation,
        slot: *mut pg_sys::TupleTableSlot,
        values: &[Option<Datum>],
    ) -> bool {
        // SAFETY: as promised by the caller; the procedures are those of operators for these types.
        unsafe {
            let Some(existing) = self.values(index, slot) else { return false };
            self.keys.iter().zip(&existing).zip(values).all(|((key, existing), value)| match (existing, value) {
                (Some(existing), Some(value)) => {
                    pg_sys::OidFunctionCall2Coll(key.procedure, key.collation, *existing, *value).value() != 0
                }
                (existing, value) => existing.is_none() && value.is_none(),
            })
        }
    }
}

/// A snapshot that sees uncommitted rows and reports the transactions that are writing them.
pub(super) fn dirty_snapshot() -> pg_sys::SnapshotData {
    pg_sys::SnapshotData { snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY, ..Default::default() }
}

/// # Safety
/// `index` is an open unique index or exclusion constraint.
unsafe fn keys(index: pg_sys::Relation, relation: pg_sys::Relation) -> Vec<Key> {
    // SAFETY: an index has as many keys as it says; PostgreSQL allocates the arrays.
    unsafe {
        let form = &*(*index).rd_index;
        let count = form.indnkeyatts as usize;
        let (mut operators, mut procedures, mut strategies) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        if form.indisexclusion {
            pg_sys::RelationGetExclusionInfo(index, &mut operators, &mut procedures, &mut strategies);
        }
        let columns = pgrx::PgTupleDesc::from_pg_copy((*relation).rd_att);
        let equal = pg_sys::BTEqualStrategyNumber as u16;
        let key = |place: usize| {
            let (strategy, procedure) = if form.indisexclusion {
                (*strategies.add(place), *procedures.add(place))
            } else {
                let (family, input) = (*(*index).rd_opfamily.add(place), *(*index).rd_opcintype.add(place));
                (equal, pg_sys::get_opcode(pg_sys::get_opfamily_member(family, input, input, equal as i16)))
            };
            let attnum = *form.indkey.values.as_ptr().add(place);
            let collation = *(*index).rd_indcollation.add(place);
            let is_generated = columns.iter().any(|column| column.attnum == attnum && column.attgenerated != 0);
            Key { attnum, strategy, procedure, collation, is_generated }
        };
        (0..count).map(key).collect()
    }
}

/// Returns a new row with its generated columns computed: BEFORE triggers see the row without them.
///
/// # Safety
/// The slot has a row of `relation`, which is open.
pub(super) unsafe fn completed(
    relation: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
) -> *mut pg_sys::TupleTableSlot {
    // SAFETY: as promised by the caller. The descriptor has as many columns and defaults as it says; the new slot is
    // freed with the memory of the statement.
    unsafe {
        let description = (*relation).rd_att;
        let Some(constraints) = (*description).constr.as_ref().filter(|constraints| constraints.has_generated_stored)
        else {
            return slot;
        };
        let (count, complete) =
            ((*description).natts as usize, pg_sys::MakeSingleTupleTableSlot(description, &pg_sys::TTSOpsVirtual));
        let columns = pgrx::PgTupleDesc::from_pg_copy(description);
        pg_sys::slot_getallattrs(slot);
        ptr::copy_nonoverlapping((*slot).tts_values, (*complete).tts_values, count);
        ptr::copy_nonoverlapping((*slot).tts_isnull, (*complete).tts_isnull, count);
        for default in std::slice::from_raw_parts(constraints.defval, constraints.num_defval.into()) {
            let place = default.adnum as usize - 1;
            if columns.get(place).is_some_and(|column| column.attgenerated != 0) {
                let (estate, context) = executor_for(slot);
                let node = pg_sys::stringToNode(default.adbin);
                let value = evaluate(pg_sys::ExecPrepareExpr(node.cast(), estate), context);
                *(*complete).tts_isnull.add(place) = value.is_none();
                *(*complete).tts_values.add(place) = value.unwrap_or(Datum::null());
            }
        }
        pg_sys::ExecStoreVirtualTuple(complete)
    }
}

/// Frees the slot that [`completed`] has returned, unless it is the original.
///
/// # Safety
/// The slot is no longer used.
pub(super) unsafe fn drop_completed(completed: *mut pg_sys::TupleTableSlot, original: *mut pg_sys::TupleTableSlot) {
    if completed != original {
        // SAFETY: as promised by the caller.
        unsafe { pg_sys::ExecDropSingleTupleTableSlot(completed) };
    }
}
