//! A condition on the rows of a relation, ready to be added to queries.

use super::expression::{Relation, analyze};
use super::harmless::{Whose, is_harmless};
use crate::error::{Purpose, TtlError};
use pgrx::pg_sys::{self, Oid};
use std::ffi::c_void;

/// The condition that the visible rows of a relation meet: an analyzed expression in its own memory context.
pub struct Condition {
    context: pg_sys::MemoryContext,
    node: *mut pg_sys::Node,
}

impl Condition {
    /// Analyzes a condition on the rows of a relation.
    pub fn read(relid: Oid, text: &str) -> Result<Self, TtlError> {
        let relation = Relation::open(relid);
        let node = analyze(&relation, text, Purpose::Filter)?;
        // SAFETY: an analyzed expression. Harmless at registration, it may no longer be: casts can be created.
        if unsafe { !is_harmless(node, Whose::Ours) } {
            return Err(TtlError::HiddenByCode);
        }
        // SAFETY: copies the expression into a context that lives as long as we do.
        unsafe {
            let context = pg_sys::AllocSetContextCreateInternal(
                pg_sys::CacheMemoryContext,
                c"pg_ttl_index condition".as_ptr(),
                pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
                pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
                pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
            );
            let before = pg_sys::MemoryContextSwitchTo(context);
            let node = pg_sys::copyObjectImpl(node.cast()).cast();
            pg_sys::MemoryContextSwitchTo(before);
            Ok(Self { context, node })
        }
    }

    /// The memory context of the expression.
    pub(super) fn memory(&self) -> pg_sys::MemoryContext {
        self.context
    }

    /// The expression itself, over range table entry 1. It must not be modified.
    pub(super) fn expression(&self) -> *mut pg_sys::Expr {
        self.node.cast()
    }

    /// Returns a copy for the relation at `index` in a range table.
    ///
    /// # Safety
    /// Called while a query is being planned.
    pub(super) unsafe fn for_relation(&self, index: i32) -> *mut c_void {
        // SAFETY: the expression and its copy are over range table entry 1 of level 0.
        unsafe {
            let copy = pg_sys::copyObjectImpl(self.node.cast());
            if index != 1 {
                pg_sys::ChangeVarNodes(copy.cast(), 1, index, 0);
            }
            copy
        }
    }
}

impl Drop for Condition {
    fn drop(&mut self) {
        // SAFETY: ours alone.
        unsafe { pg_sys::MemoryContextDelete(self.context) };
    }
}
