//! Finds indexes of a table that meet given requirements.

use super::expression::{Relation, analyze, clauses, elements};
use crate::error::{Purpose, TtlError};
use pgrx::pg_sys;
use std::ffi::CString;
use std::ptr;

/// A rule's requirements on an index.
pub struct Wanted<'a> {
    pub relid: pg_sys::Oid,
    /// The sort key, as SQL over the row.
    pub key: &'a str,
    /// The name of the access method.
    pub method: &'a str,
    /// A condition that every row the rule looks for meets: an index may omit other rows.
    pub condition: Option<&'a str>,
    /// Whether the index is for a query now, rather than for later ones.
    pub at_once: bool,
    /// A condition that the index itself must guarantee for its rows, so that others are never scanned.
    pub guarantee: Option<&'a str>,
}

/// Returns the first index, in the order of the relcache, that meets the requirements.
pub fn serving(wanted: &Wanted<'_>) -> Result<Option<pg_sys::Oid>, TtlError> {
    let relation = Relation::open(wanted.relid);
    let key = analyze(&relation, wanted.key, Purpose::Value)?;
    let condition = wanted.condition.map_or(Ok(ptr::null_mut()), |text| clauses(&relation, text))?;
    let guarantee = wanted.guarantee.map_or(Ok(ptr::null_mut()), |text| clauses(&relation, text))?;
    // SAFETY: the relation is open, so its index list is valid, and locks keep the indexes in place.
    unsafe {
        for cell in elements(pg_sys::RelationGetIndexList(relation.0)) {
            let index = Index::open(cell.oid_value);
            if index.fits(wanted, key) {
                let predicate = pg_sys::RelationGetIndexPredicate(index.0);
                if pg_sys::predicate_implied_by(predicate, condition, false)
                    && (guarantee.is_null() || pg_sys::predicate_implied_by(guarantee, predicate, false))
                {
                    return Ok(Some(cell.oid_value));
                }
            }
        }
    }
    Ok(None)
}

/// An index with the wanted definition, whatever its name.
pub struct Equivalent {
    pub oid: pg_sys::Oid,
    pub is_valid: bool,
}

/// Returns the indexes of a table on this key alone and with this predicate: those that PostgreSQL would attach to such
/// an index of the parent, and leftovers of attempts to build them.
pub fn equivalents(wanted: &Wanted<'_>) -> Result<Vec<Equivalent>, TtlError> {
    let relation = Relation::open(wanted.relid);
    let key = analyze(&relation, wanted.key, Purpose::Value)?;
    let predicate = wanted.condition.map_or(Ok(ptr::null_mut()), |text| clauses(&relation, text))?;
    let mut found = Vec::new();
    // SAFETY: as in `serving`. Invalid indexes are in the list, too.
    unsafe {
        for cell in elements(pg_sys::RelationGetIndexList(relation.0)) {
            let index = Index::open(cell.oid_value);
            let form = &*(*index.0).rd_index;
            let own = pg_sys::RelationGetIndexPredicate(index.0);
            if index.is_on(wanted, key)
                && form.indnatts == 1
                && !form.indisunique
                && pg_sys::predicate_implied_by(predicate, own, false)
                && pg_sys::predicate_implied_by(own, predicate, false)
            {
                found.push(Equivalent { oid: cell.oid_value, is_valid: form.indisvalid });
            }
        }
    }
    Ok(found)
}

/// Whether a btree index is on the rule's key and has exactly the rows that the rule is about.
pub fn tells(index: pg_sys::Oid, wanted: &Wanted<'_>) -> Result<bool, TtlError> {
    let relation = Relation::open(wanted.relid);
    let key = analyze(&relation, wanted.key, Purpose::Value)?;
    let condition = wanted.condition.map_or(Ok(ptr::null_mut()), |text| clauses(&relation, text))?;
    // SAFETY: as in `serving`.
    unsafe {
        let index = Index::open(index);
        let predicate = pg_sys::RelationGetIndexPredicate(index.0);
        Ok(index.is_on(wanted, key)
            && pg_sys::predicate_implied_by(condition, predicate, false)
            && pg_sys::predicate_implied_by(predicate, condition, false))
    }
}

/// Whether this transaction can use an index: if built over broken HOT chains, it serves only later transactions.
pub(super) fn is_usable_at_once(index: pg_sys::Relation) -> bool {
    // SAFETY: an open index has its catalog tuple.
    unsafe {
        let header = &*(*(*index).rd_indextuple).t_data;
        let frozen = pg_sys::HEAP_XMIN_FROZEN as u16;
        !(*(*index).rd_index).indcheckxmin
            || header.t_infomask & frozen == frozen
            || pg_sys::TransactionIdPrecedes(header.t_choice.t_heap.t_xmin, pg_sys::TransactionXmin)
    }
}

struct Index(pg_sys::Relation);

impl Index {
    fn open(oid: pg_sys::Oid) -> Self {
        // SAFETY: raises an ordinary error if there is no such index.
        Self(unsafe { pg_sys::index_open(oid, pg_sys::AccessShareLock as pg_sys::LOCKMODE) })
    }

    /// Whether the index is usable and on the wanted key.
    ///
    /// # Safety
    /// `key` is an analyzed expression over the table of this index.
    unsafe fn fits(&self, wanted: &Wanted<'_>, key: *mut pg_sys::Node) -> bool {
        // SAFETY: the index is open; otherwise as promised by the caller.
        unsafe {
            let form = &*(*self.0).rd_index;
            form.indisvalid
                && form.indisready
                && form.indislive
                && (!wanted.at_once || is_usable_at_once(self.0))
                && self.is_on(wanted, key)
        }
    }

    /// Whether the index has the wanted method and the key first, in the default order of its type.
    ///
    /// # Safety
    /// `key` is an analyzed expression over the table of this index.
    unsafe fn is_on(&self, wanted: &Wanted<'_>, key: *mut pg_sys::Node) -> bool {
        let Ok(method) = CString::new(wanted.method) else { return false };
        // SAFETY: the index is open, and an index has at least one key column.
        unsafe {
            let method = pg_sys::get_am_oid(method.as_ptr(), false);
            let opclass = pg_sys::GetDefaultOpClass(pg_sys::exprType(key), method);
            (*(*self.0).rd_rel).relam == method
                && self.begins_with(key)
                && *(*self.0).rd_opfamily == pg_sys::get_opclass_family(opclass)
        }
    }
}

impl Index {
    /// Whether the first column of the index is the key, a column or an expression.
    ///
    /// # Safety
    /// `key` is an analyzed expression over the table of this open index.
    unsafe fn begins_with(&self, key: *mut pg_sys::Node) -> bool {
        // SAFETY: the cast follows a check of the node's tag; a first entry that is no column is the first expression.
        unsafe {
            let first = *(*(*self.0).rd_index).indkey.values.as_ptr();
            if (*key).type_ == pg_sys::NodeTag::T_Var {
                return first == (*key.cast::<pg_sys::Var>()).varattno;
            }
            // Index expressions are kept simplified.
            let key = pg_sys::eval_const_expressions(ptr::null_mut(), key);
            let expressions = elements(pg_sys::RelationGetIndexExpressions(self.0));
            first == 0 && expressions.first().is_some_and(|indexed| pg_sys::equal(indexed.ptr_value, key.cast()))
        }
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: opened by us; the lock stays.
            unsafe { pg_sys::index_close(self.0, pg_sys::NoLock as pg_sys::LOCKMODE) };
        }
    }
}
