//! The utility hook: tracks ALTER TABLE, reports drops and REASSIGN OWNED, and turns COPY into a query to hide rows.

use super::compat;
use super::executor;
use super::expression::elements;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::ptr;

/// Whether a COPY of a relation by the current role must omit rows.
pub type IsRestricted = fn(Oid) -> bool;

/// Called before a command that may drop the extension.
pub type BeforeDrop = fn(&Dropped);

/// Called after `REASSIGN OWNED`, for which no event trigger fires.
pub type AfterReassign = fn();

/// The objects that a command drops.
pub enum Dropped {
    Extension,
    /// Schemas, by name, with everything in them.
    Schemas(Vec<String>),
    /// Everything that these roles own.
    Owned(Vec<Oid>),
}

struct Hooks {
    is_restricted: IsRestricted,
    before_drop: BeforeDrop,
    after_reassign: AfterReassign,
    next: pg_sys::ProcessUtility_hook_type,
}

static HOOKS: once_cell::sync::OnceCell<Hooks> = once_cell::sync::OnceCell::new();

thread_local! {
    /// The transaction and subtransaction in which an ALTER TABLE is running, and the depth of the error context stack
    /// at its start. After an error it is void, because that subtransaction is over.
    static ALTERING: Cell<Option<(i64, u32, u32)>> = const { Cell::new(None) };
}

pub fn install(is_restricted: IsRestricted, before_drop: BeforeDrop, after_reassign: AfterReassign) {
    // SAFETY: while the library is being loaded; hooks installed earlier are called in turn.
    unsafe {
        let next = pg_sys::ProcessUtility_hook;
        if HOOKS.set(Hooks { is_restricted, before_drop, after_reassign, next }).is_ok() {
            pg_sys::ProcessUtility_hook = Some(process_utility);
        }
    }
}

/// Whether an ALTER TABLE is running a query of its own, as it does to check new foreign keys. A user function that it
/// calls adds an error context callback of its own.
pub fn is_altering_a_table() -> bool {
    ALTERING.get().is_some_and(|(start, subtransaction, depth)| (start, subtransaction, depth + 1) == place())
}

/// The current subtransaction and the depth of the error context stack.
fn place() -> (i64, u32, u32) {
    // SAFETY: reads the state of the transaction; the callbacks are a linked list.
    unsafe {
        let (mut depth, mut callback) = (0, pg_sys::error_context_stack);
        while !callback.is_null() {
            depth += 1;
            callback = (*callback).previous;
        }
        (pg_sys::GetCurrentTransactionStartTimestamp(), pg_sys::GetCurrentSubTransactionId(), depth)
    }
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C-unwind" fn process_utility(
    statement: *mut pg_sys::PlannedStmt,
    text: *const c_char,
    is_read_only: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    parameters: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    receiver: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    // SAFETY: called by PostgreSQL with a statement. No value here has a destructor.
    unsafe {
        let prepared = prepare(statement, is_read_only);
        let is_read_only = is_read_only && prepared == statement;
        let outer = ALTERING.get();
        if (*(*prepared).utilityStmt).type_ == pg_sys::NodeTag::T_AlterTableStmt {
            ALTERING.set(Some(place()));
        }
        let is_reassign = (*(*prepared).utilityStmt).type_ == pg_sys::NodeTag::T_ReassignOwnedStmt;
        let next = HOOKS.get().and_then(|hooks| hooks.next).unwrap_or(compat::standard_ProcessUtility);
        let path = executor::enter();
        next(prepared, text, is_read_only, context, parameters, environment, receiver, completion);
        executor::leave(path);
        ALTERING.set(outer);
        if is_reassign {
            after_reassign();
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn after_reassign() {
    HOOKS.get().iter().for_each(|hooks| (hooks.after_reassign)());
}

/// Returns the statement to run: the given one, except for a COPY that must become a query.
#[pg_guard]
unsafe extern "C-unwind" fn prepare(
    statement: *mut pg_sys::PlannedStmt,
    is_read_only: bool,
) -> *mut pg_sys::PlannedStmt {
    // SAFETY: the hook's arguments are valid; the casts follow the node's tag.
    unsafe {
        let node = (*statement).utilityStmt;
        if let Some(dropped) = dropped(node) {
            HOOKS.get().iter().for_each(|hooks| (hooks.before_drop)(&dropped));
        }
        if (*node).type_ != pg_sys::NodeTag::T_CopyStmt || !must_be_query(node.cast()) {
            return statement;
        }
        let own = if is_read_only { pg_sys::copyObjectImpl(statement.cast()).cast() } else { statement };
        make_query((*own).utilityStmt.cast());
        own
    }
}

/// Returns what a statement drops, if that may include the extension.
///
/// # Safety
/// `node` is a statement.
unsafe fn dropped(node: *mut pg_sys::Node) -> Option<Dropped> {
    // SAFETY: the casts follow the node's tag; extensions and schemas are named by one string each.
    unsafe {
        let text =
            |cell: &pg_sys::ListCell| CStr::from_ptr(string_of(cell.ptr_value.cast())).to_string_lossy().into_owned();
        match (*node).type_ {
            pg_sys::NodeTag::T_DropStmt => {
                let drop = &*node.cast::<pg_sys::DropStmt>();
                let names = || elements(drop.objects).iter().map(text);
                match drop.removeType {
                    pg_sys::ObjectType::OBJECT_EXTENSION => {
                        names().any(|name| name == "pg_ttl_index").then_some(Dropped::Extension)
                    }
                    pg_sys::ObjectType::OBJECT_SCHEMA if drop.behavior == pg_sys::DropBehavior::DROP_CASCADE => {
                        Some(Dropped::Schemas(names().collect()))
                    }
                    _ => None,
                }
            }
            pg_sys::NodeTag::T_DropOwnedStmt => {
                let roles = elements((*node.cast::<pg_sys::DropOwnedStmt>()).roles).iter();
                let roles = roles.map(|cell| pg_sys::get_rolespec_oid(cell.ptr_value.cast(), true));
                Some(Dropped::Owned(roles.collect()))
            }
            _ => None,
        }
    }
}

/// Returns the value of a string node.
///
/// # Safety
/// `node` is a string.
unsafe fn string_of(node: *mut pg_sys::Node) -> *const c_char {
    // SAFETY: as promised by the caller.
    unsafe { (*node.cast::<pg_sys::String>()).sval }
}

/// Whether a statement copies out a table of which the current role may not see all rows.
///
/// # Safety
/// `copy` is a COPY statement.
unsafe fn must_be_query(copy: *mut pg_sys::CopyStmt) -> bool {
    // SAFETY: as promised by the caller. The lock is the one that COPY takes; COPY itself reports a missing table.
    unsafe {
        if (*copy).is_from || (*copy).relation.is_null() || pg_sys::am_walsender {
            return false;
        }
        let (lock, missing_ok) = (pg_sys::AccessShareLock as i32, pg_sys::RVROption::RVR_MISSING_OK);
        let relid = pg_sys::RangeVarGetRelidExtended((*copy).relation, lock, missing_ok, None, ptr::null_mut());
        relid != pg_sys::InvalidOid
            && pg_sys::get_rel_relkind(relid) == pg_sys::RELKIND_RELATION as c_char
            && HOOKS.get().is_some_and(|hooks| (hooks.is_restricted)(relid))
    }
}

/// Turns `COPY t (a, b) TO` into `COPY (SELECT a, b FROM ONLY t) TO`.
///
/// # Safety
/// `copy` is a COPY statement for a table, and may be changed.
unsafe fn make_query(copy: *mut pg_sys::CopyStmt) {
    // SAFETY: as promised by the caller; the names are C strings, and the parser returns one statement.
    unsafe {
        let quoted =
            |name: *const c_char| CStr::from_ptr(pg_sys::quote_identifier(name)).to_string_lossy().into_owned();
        let relation = &*(*copy).relation;
        let schema = if relation.schemaname.is_null() { String::new() } else { quoted(relation.schemaname) + "." };
        let columns: Vec<_> =
            elements((*copy).attlist).iter().map(|cell| quoted(string_of(cell.ptr_value.cast()))).collect();
        let columns = if columns.is_empty() { "*".to_owned() } else { columns.join(", ") };
        let select = format!("SELECT {columns} FROM ONLY {schema}{}", quoted(relation.relname));
        let select = CString::new(select).unwrap_or_default();
        let parsed = elements(pg_sys::raw_parser(select.as_ptr(), pg_sys::RawParseMode::RAW_PARSE_DEFAULT));
        if let [statement] = parsed {
            (*copy).query = (*statement.ptr_value.cast::<pg_sys::RawStmt>()).stmt;
            (*copy).relation = ptr::null_mut();
            (*copy).attlist = ptr::null_mut();
        }
    }
}
