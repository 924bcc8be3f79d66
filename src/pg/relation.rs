//! The current shape of a relation, and locks on it.

use super::compat;
use super::expression::elements;
use super::storage::{self, Kept};
use super::{harmless, spi};
use pgrx::pg_sys;
use pgrx::spi::quote_qualified_identifier;
use std::collections::HashSet;
use std::ffi::CStr;

/// What a statement prepared for a relation relies on. If any of it changes, names in the statement may mean something
/// else.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    namespace: String,
    name: String,
    /// All its parents and ancestors: a relation that was detached, or attached elsewhere, is no longer swept.
    ancestors: Vec<pg_sys::Oid>,
    owner: pg_sys::Oid,
    is_heap: bool,
    kept: Option<Kept>,
    has_triggers: bool,
    /// Whether a trigger, rule or policy makes a DELETE do more than remove the rows, or remove fewer of them.
    has_side_effects: bool,
    /// Whether planning may call user code, in expressions or predicates of indexes and statistics.
    is_risky_to_plan: bool,
    has_rules: bool,
    /// Number, name, type and type modifier.
    columns: Vec<(i16, String, pg_sys::Oid, i32)>,
}

impl Shape {
    /// The schema-qualified, quoted name.
    pub fn qualified_name(&self) -> String {
        quote_qualified_identifier(&self.namespace, &self.name)
    }

    pub fn owner(&self) -> pg_sys::Oid {
        self.owner
    }

    /// Whether the relation is `root` or one of its descendants.
    pub fn belongs_to(&self, relid: pg_sys::Oid, root: pg_sys::Oid) -> bool {
        relid == root || self.ancestors.contains(&root)
    }

    /// Whether the rows are in the relation's own heap.
    pub fn is_heap(&self) -> bool {
        self.is_heap && self.kept.is_none_or(|kept| kept.obstacle().is_none())
    }

    /// Whether the relation has triggers, including those of foreign keys.
    pub fn has_triggers(&self) -> bool {
        self.has_triggers
    }

    /// Whether statements may be rewritten.
    pub fn has_rules(&self) -> bool {
        self.has_rules
    }

    /// Whether planning any search for rows may run user code.
    pub fn is_risky_to_plan(&self) -> bool {
        self.is_risky_to_plan
    }

    pub fn type_of(&self, column: &str) -> Option<pg_sys::Oid> {
        self.columns.iter().find(|(_, name, ..)| name == column).map(|(_, _, type_oid, _)| *type_oid)
    }

    /// Whether rows can be deleted directly from the heap, because no trigger, rule, policy or extension would notice.
    pub fn is_plain(&self) -> bool {
        !self.has_side_effects && self.kept.is_none()
    }
}

/// Returns a relation and all its descendants, parents first. Takes no locks: those that are gone by now are left out, and
/// users of the result notice others that come or go in the meantime.
pub fn tree(relid: pg_sys::Oid) -> Vec<pg_sys::Oid> {
    let (mut found, mut seen, mut next) = (vec![relid], HashSet::from([relid]), 0);
    while next < found.len() {
        let key = pg_sys::Datum::from(found[next]);
        let none = pg_sys::Datum::null();
        // SAFETY: reads the catalog. Between the two calls nothing makes this session notice that a relation is gone.
        unsafe {
            if !pg_sys::SearchSysCacheExists(pg_sys::SysCacheIdentifier::RELOID as _, key, none, none, none) {
                found.remove(next);
                continue;
            }
            let children = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                compat::find_inheritance_children(found[next], pg_sys::NoLock as pg_sys::LOCKMODE)
            });
            let children = elements(children).iter().map(|cell| cell.oid_value);
            found.extend(children.filter(|child| seen.insert(*child)));
        }
        next += 1;
    }
    found
}

/// The number of blocks in a relation's heap, if that can be told without waiting for a lock.
pub fn blocks_at_once(relid: pg_sys::Oid) -> Option<u32> {
    // SAFETY: opened with the lock that reading takes, if it is free, and closed again.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        if !pg_sys::ConditionalLockRelationOid(relid, lock) {
            return None;
        }
        let relation = pg_sys::try_relation_open(relid, pg_sys::NoLock as pg_sys::LOCKMODE);
        if relation.is_null() {
            pg_sys::UnlockRelationOid(relid, lock);
            return None;
        }
        let has_heap = (*(*relation).rd_rel).relkind == pg_sys::RELKIND_RELATION as std::ffi::c_char;
        let blocks =
            has_heap.then(|| pg_sys::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM));
        pg_sys::relation_close(relation, lock);
        blocks
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

/// Whether expressions and predicates of indexes and statistics call user code. Reads them without simplifying them,
/// because that would call it.
///
/// # Safety
/// `relation` is open.
unsafe fn is_risky_to_plan(relation: pg_sys::Relation) -> bool {
    const INDEX: [u32; 2] = [pg_sys::Anum_pg_index_indexprs, pg_sys::Anum_pg_index_indpred];
    // The number of `pg_statistic_ext.stxexprs`, the same in every version.
    const STATISTICS: [u32; 1] = [9];
    // SAFETY: reads the catalog caches; a tuple is valid until it is released, and the attributes are node trees.
    unsafe {
        let is_risky = |cache: i32, oid: pg_sys::Oid, attributes: &[u32]| {
            let tuple = pg_sys::SearchSysCache1(cache, pg_sys::Datum::from(oid));
            if tuple.is_null() {
                return true;
            }
            let is_risky = attributes.iter().any(|attribute| {
                let mut is_null = true;
                let tree = pg_sys::SysCacheGetAttr(cache, tuple, *attribute as i16, &mut is_null);
                let read = || pg_sys::stringToNode(pg_sys::text_to_cstring(tree.cast_mut_ptr())).cast();
                !is_null && !harmless::is_harmless(read(), harmless::Whose::Users)
            });
            pg_sys::ReleaseSysCache(tuple);
            is_risky
        };
        let index = pg_sys::SysCacheIdentifier::INDEXRELID as _;
        let statistics = pg_sys::SysCacheIdentifier::STATEXTOID as _;
        elements(pg_sys::RelationGetIndexList(relation)).iter().any(|cell| is_risky(index, cell.oid_value, &INDEX))
            || elements(pg_sys::RelationGetStatExtList(relation))
                .iter()
                .any(|cell| is_risky(statistics, cell.oid_value, &STATISTICS))
    }
}

/// Whether a relation is a partition or child of another.
pub fn has_parent(relid: pg_sys::Oid) -> bool {
    // SAFETY: looks into the catalog.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| compat::has_superclass(relid)) }
}

/// Returns all ancestors of a relation as of now, not as of the transaction's start.
fn ancestors(relid: pg_sys::Oid, is_partition: bool) -> Vec<pg_sys::Oid> {
    if !has_parent(relid) {
        return Vec::new();
    }
    if is_partition {
        // SAFETY: reads the catalog. A partition that is being detached has no ancestors any more.
        return unsafe {
            let above = pg_sys::ffi::pg_guard_ffi_boundary(|| compat::get_partition_ancestors(relid));
            elements(above).iter().map(|cell| cell.oid_value).collect()
        };
    }
    let above = "WITH RECURSIVE above (relid) AS (
                     SELECT inhparent FROM pg_inherits WHERE inhrelid = $1
                     UNION SELECT i.inhparent FROM above JOIN pg_inherits i ON i.inhrelid = above.relid)
                 SELECT relid FROM above ORDER BY relid";
    spi::query(above, &[relid.into()], |row| Ok(row.get(1)?.unwrap_or_default())).unwrap_or_default()
}

/// Locks a relation and all its descendants exclusively until the transaction ends, if no lock has to be waited for.
pub fn try_lock_tree(relid: pg_sys::Oid) -> bool {
    let mode = pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE;
    // SAFETY: takes locks that are released at transaction end; the OIDs need not exist.
    tree(relid).into_iter().all(|relid| unsafe { pg_sys::ConditionalLockRelationOid(relid, mode) })
}

/// A session-level lock: as long as it is held, no other session can rename, alter or drop the relation.
pub struct Held(pg_sys::LockRelId);

impl Held {
    /// Waits no longer than `lock_timeout`.
    pub fn against_ddl(relid: pg_sys::Oid) -> Self {
        // SAFETY: a session-level lock, released when the guard is dropped; the OID need not exist.
        unsafe {
            let mut id = pg_sys::LockRelId { relId: relid, dbId: pg_sys::MyDatabaseId };
            pg_sys::LockRelationIdForSession(&mut id, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
            Self(id)
        }
    }
}

impl Held {
    /// Forgets the lock after an abort, which has released session-level locks, too.
    pub fn was_released(self) {
        std::mem::forget(self);
    }
}

impl Drop for Held {
    /// Releases the lock even while unwinding, which happens before the abort.
    fn drop(&mut self) {
        // SAFETY: locked by us.
        unsafe {
            pg_sys::UnlockRelationIdForSession(&mut self.0, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE);
        }
    }
}

/// How a relation is going to be used.
#[derive(Clone, Copy, Debug)]
pub enum Lock {
    Read,
    Change,
    Drop,
}

/// Locks a relation until the transaction ends, waiting no longer than `lock_timeout`, and describes it. Returns `None`
/// if it no longer exists.
pub fn lock(relid: pg_sys::Oid, lock: Lock) -> Option<Shape> {
    let mode = match lock {
        Lock::Read => pg_sys::AccessShareLock,
        Lock::Change => pg_sys::RowExclusiveLock,
        Lock::Drop => pg_sys::AccessExclusiveLock,
    };
    // SAFETY: an open relation's form and descriptor are valid; it is closed again, and the lock is kept.
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
            .map(|attribute| (attribute.attnum, text(&attribute.attname), attribute.atttypid, attribute.atttypmod))
            .collect();
        let namespace = pg_sys::get_namespace_name(form.relnamespace);
        let namespace =
            if namespace.is_null() { String::new() } else { CStr::from_ptr(namespace).to_string_lossy().into_owned() };
        let shape = Shape {
            namespace,
            name: text(&form.relname),
            ancestors: ancestors(relid, form.relispartition),
            owner: form.relowner,
            is_heap: form.relam == pg_sys::HEAP_TABLE_AM_OID,
            // While the lock is held, the relation cannot be compressed or distributed.
            kept: storage::kept(relid).unwrap_or_else(|error| error.raise()),
            has_triggers: form.relhastriggers,
            has_rules: form.relhasrules,
            has_side_effects: has_delete_triggers(relation) || form.relhasrules || form.relforcerowsecurity,
            is_risky_to_plan: is_risky_to_plan(relation),
            columns,
        };
        pg_sys::relation_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
        Some(shape)
    }
}
