//! Commands that are not planned: what goes on while they run, and a COPY that must become a query.

use super::expression::elements;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::ptr;

/// Whether a COPY of a relation by the current role has to leave rows out.
pub type IsRestricted = fn(Oid) -> bool;

struct Hooks {
    is_restricted: IsRestricted,
    next: pg_sys::ProcessUtility_hook_type,
}

static HOOKS: once_cell::sync::OnceCell<Hooks> = once_cell::sync::OnceCell::new();

thread_local! {
    static ALTERING: Cell<u32> = const { Cell::new(0) };
}

pub fn install(is_restricted: IsRestricted) {
    // SAFETY: while the library is loaded; whoever was there before is called in turn.
    unsafe {
        if HOOKS.set(Hooks { is_restricted, next: pg_sys::ProcessUtility_hook }).is_ok() {
            pg_sys::ProcessUtility_hook = Some(process_utility);
        }
    }
}

/// Whether an ALTER TABLE is under way: it checks new foreign keys by queries.
pub fn is_altering_a_table() -> bool {
    ALTERING.get() > 0
}

struct Altering;

impl Altering {
    fn begin() -> Self {
        ALTERING.set(ALTERING.get() + 1);
        Self
    }
}

impl Drop for Altering {
    fn drop(&mut self) {
        ALTERING.set(ALTERING.get() - 1);
    }
}

#[pg_guard]
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
    let (mut statement, mut is_read_only) = (statement, is_read_only);
    // SAFETY: called by PostgreSQL with a statement; the casts follow the node's tag.
    unsafe {
        let node = (*statement).utilityStmt;
        let _altering = ((*node).type_ == pg_sys::NodeTag::T_AlterTableStmt).then(Altering::begin);
        if (*node).type_ == pg_sys::NodeTag::T_CopyStmt && must_be_query(node.cast()) {
            if is_read_only {
                statement = pg_sys::copyObjectImpl(statement.cast()).cast();
                is_read_only = false;
            }
            make_query((*statement).utilityStmt.cast());
        }
        match HOOKS.get().and_then(|hooks| hooks.next) {
            Some(next) => pg_sys::ffi::pg_guard_ffi_boundary(|| {
                next(statement, text, is_read_only, context, parameters, environment, receiver, completion)
            }),
            None => pg_sys::standard_ProcessUtility(
                statement,
                text,
                is_read_only,
                context,
                parameters,
                environment,
                receiver,
                completion,
            ),
        }
    }
}

/// Whether this copies a table out for somebody who may not see all of its rows.
///
/// # Safety
/// `copy` is a COPY statement.
unsafe fn must_be_query(copy: *mut pg_sys::CopyStmt) -> bool {
    // SAFETY: as promised by the caller. The lock is the one that COPY takes; a missing table is COPY's to complain of.
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
/// `copy` is a COPY statement of a table, and may be changed.
unsafe fn make_query(copy: *mut pg_sys::CopyStmt) {
    // SAFETY: as promised by the caller; the names are C strings, and the parser returns one statement.
    unsafe {
        let quoted =
            |name: *const c_char| CStr::from_ptr(pg_sys::quote_identifier(name)).to_string_lossy().into_owned();
        let relation = &*(*copy).relation;
        let schema = if relation.schemaname.is_null() { String::new() } else { quoted(relation.schemaname) + "." };
        let columns: Vec<_> = elements((*copy).attlist)
            .iter()
            .map(|cell| {
                #[cfg(feature = "pg14")]
                let name = (*cell.ptr_value.cast::<pg_sys::Value>()).val.str_;
                #[cfg(not(feature = "pg14"))]
                let name = (*cell.ptr_value.cast::<pg_sys::String>()).sval;
                quoted(name)
            })
            .collect();
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
