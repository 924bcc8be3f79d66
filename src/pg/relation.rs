//! A relation's present shape, and locks on it.

use super::expression::elements;
use pgrx::pg_sys;
use pgrx::spi::quote_qualified_identifier;
use std::ffi::CStr;

/// What a statement prepared for a relation relies on: if any of it changes, names in the statement may mean
/// something else.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    namespace: String,
    name: String,
    /// Whether it is a partition or child of another relation: one that was detached is not swept on.
    has_parent: bool,
    owner: pg_sys::Oid,
    is_heap: bool,
    has_triggers: bool,
    /// Whether a DELETE does more than remove rows, or not all of them: by a trigger, a rule or a policy.
    has_side_effects: bool,
    columns: Vec<(i16, String, pg_sys::Oid)>,
}

impl Shape {
    /// Qualified and quoted.
    pub fn qualified_name(&self) -> String {
        quote_qualified_identifier(&self.namespace, &self.name)
    }

    pub fn owner(&self) -> pg_sys::Oid {
        self.owner
    }

    /// Whether its rows are in a heap of its own.
    pub fn is_heap(&self) -> bool {
        self.is_heap
    }

    /// Whether it has triggers, those of foreign keys included.
    pub fn has_triggers(&self) -> bool {
        self.has_triggers
    }

    /// Whether a row can be removed from the heap and nobody would have had anything to say about it.
    pub fn is_plain(&self) -> bool {
        !self.has_side_effects
    }
}

unsafe extern "C-unwind" {
    /// Whether `pg_inherits` has a parent of the relation.
    fn has_superclass(relid: pg_sys::Oid) -> bool;
    /// A relation and everything below it.
    fn find_all_inheritors(
        relid: pg_sys::Oid,
        lock: pg_sys::LOCKMODE,
        parents: *mut *mut pg_sys::List,
    ) -> *mut pg_sys::List;
}

/// A relation and all that inherit from it.
pub fn tree(relid: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    // SAFETY: looks into the catalog without locks; what comes or goes meanwhile tells of itself.
    unsafe {
        let lock = pg_sys::NoLock as pg_sys::LOCKMODE;
        let tree = pg_sys::ffi::pg_guard_ffi_boundary(|| find_all_inheritors(relid, lock, std::ptr::null_mut()));
        elements(tree).iter().map(|cell| cell.oid_value).collect()
    }
}

/// # Safety
/// `relation` is open.
unsafe fn has_delete_triggers(relation: pg_sys::Relation) -> bool {
    // SAFETY: an open relation's triggers are null or valid.
    unsafe {
        (*relation).trigdesc.as_ref().is_some_and(|triggers| {
            triggers.trig_delete_before_row
                || triggers.trig_delete_after_row
                || triggers.trig_delete_instead_row
                || triggers.trig_delete_before_statement
                || triggers.trig_delete_after_statement
        })
    }
}

/// Whether a relation is a partition or child of another.
pub fn has_parent(relid: pg_sys::Oid) -> bool {
    // SAFETY: looks into the catalog.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| has_superclass(relid)) }
}

/// How a relation is going to be used.
#[derive(Clone, Copy, Debug)]
pub enum Lock {
    Read,
    Change,
    Drop,
}

/// Locks the relation until the transaction ends, waiting no longer than `lock_timeout`, and describes it. `None` if it
/// is not there any more.
pub fn lock(relid: pg_sys::Oid, lock: Lock) -> Option<Shape> {
    let mode = match lock {
        Lock::Read => pg_sys::AccessShareLock,
        Lock::Change => pg_sys::RowExclusiveLock,
        Lock::Drop => pg_sys::AccessExclusiveLock,
    };
    // SAFETY: an open relation's form and descriptor are valid; it is closed again, and the lock stays.
    unsafe {
        let relation = pg_sys::try_relation_open(relid, mode as pg_sys::LOCKMODE);
        if relation.is_null() {
            return None;
        }
        let form = &*(*relation).rd_rel;
        let text = |name: &pg_sys::NameData| CStr::from_ptr(name.data.as_ptr()).to_string_lossy().into_owned();
        let attributes = pgrx::PgTupleDesc::from_pg_copy((*relation).rd_att);
        let columns = attributes
            .iter()
            .filter(|attribute| !attribute.attisdropped)
            .map(|attribute| (attribute.attnum, text(&attribute.attname), attribute.atttypid))
            .collect();
        let namespace = pg_sys::get_namespace_name(form.relnamespace);
        let namespace =
            if namespace.is_null() { String::new() } else { CStr::from_ptr(namespace).to_string_lossy().into_owned() };
        let has_parent = pg_sys::ffi::pg_guard_ffi_boundary(|| has_superclass(relid));
        let shape = Shape {
            namespace,
            name: text(&form.relname),
            has_parent,
            owner: form.relowner,
            is_heap: form.relam == pg_sys::HEAP_TABLE_AM_OID,
            has_triggers: form.relhastriggers,
            has_side_effects: has_delete_triggers(relation) || form.relhasrules || form.relforcerowsecurity,
            columns,
        };
        pg_sys::relation_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
        Some(shape)
    }
}
