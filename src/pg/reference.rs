//! Recognizes the queries with which PostgreSQL itself enforces foreign keys: these must see all rows, hidden or not.

use super::expression::elements;
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;

thread_local! {
    /// PostgreSQL's error context callback for SPI statements, learned from a statement of ours.
    static SPI_CALLBACK: Cell<*const c_void> = const { Cell::new(ptr::null()) };
}

/// Remembers the SPI error context callback. Call while a statement of ours is being planned through SPI.
pub fn learn() {
    if SPI_CALLBACK.get().is_null() {
        SPI_CALLBACK.set(callbacks()[0]);
    }
}

/// Whether a query that is being planned enforces a foreign key.
///
/// A user's trigger behind a foreign key runs in the same session state and can contain the same query. But a language
/// handler sends that query, and not PostgreSQL itself. Built-in functions that run a query for their caller take no
/// parameters for it, or return nothing of it. The query must also match a foreign key query in every part, so that its
/// errors reveal nothing.
///
/// # Safety
/// `query` is valid.
pub unsafe fn is_foreign_key(query: *mut pg_sys::Query) -> bool {
    // SAFETY: reads the state of the process, and the query as promised by the caller.
    unsafe {
        pg_sys::InNoForceRLSOperation()
            && pg_sys::InLocalUserIdChange()
            && is_of_postgres()
            && is_about_one_relation(query)
    }
}

/// Returns the two innermost error context callbacks: the one that runs the current statement, and its caller.
fn callbacks() -> [*const c_void; 2] {
    // SAFETY: the callbacks are a list.
    unsafe {
        let innermost = pg_sys::error_context_stack;
        let next = if innermost.is_null() { innermost } else { (*innermost).previous };
        [innermost, next].map(|entry| {
            let callback = if entry.is_null() { None } else { (*entry).callback };
            callback.map_or(ptr::null(), |callback| callback as *const c_void)
        })
    }
}

#[repr(C)]
struct DlInfo {
    file: *const std::ffi::c_char,
    base: *const c_void,
    symbol: *const std::ffi::c_char,
    address: *const c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
}

/// Returns the base address of the program or library that contains an address.
fn module_of(address: *const c_void) -> Option<*const c_void> {
    let mut info = DlInfo { file: ptr::null(), base: ptr::null(), symbol: ptr::null(), address: ptr::null() };
    // SAFETY: the function takes any address.
    (unsafe { dladdr(address, &mut info) } != 0).then_some(info.base)
}

/// Whether the current statement runs through SPI and was not sent by a language handler, which would be in a library.
fn is_of_postgres() -> bool {
    let ([runs, behalf], spi) = (callbacks(), SPI_CALLBACK.get());
    !spi.is_null()
        && runs == spi
        && (behalf.is_null() || module_of(behalf).is_some_and(|it| Some(it) == module_of(spi)))
}

/// Whether a query only locks or changes rows of one relation, found by keys that are its parameters.
///
/// # Safety
/// `query` is valid.
unsafe fn is_about_one_relation(query: *mut pg_sys::Query) -> bool {
    // SAFETY: as promised by the caller; the fields read fit the kind of the entry.
    unsafe {
        let query = &*query;
        let [cell] = elements(query.rtable) else { return false };
        let entry = &*cell.ptr_value.cast::<pg_sys::RangeTblEntry>();
        let does_nothing_else = !query.hasSubLinks && query.cteList.is_null() && query.returningList.is_null();
        does_nothing_else
            && match entry.rtekind {
                pg_sys::RTEKind::RTE_RELATION => {
                    let tells_nothing = query.resultRelation == 1
                        || (!query.rowMarks.is_null()
                            && elements(query.targetList).iter().all(|cell| is_constant(cell)));
                    tells_nothing && compares_keys((*query.jointree).quals)
                }
                pg_sys::RTEKind::RTE_SUBQUERY => is_about_one_relation(entry.subquery),
                _ => false,
            }
    }
}

/// Whether a query that is being planned is the one with which ALTER TABLE checks a foreign key for all rows at once: a
/// join of the two tables of a foreign key on its columns, and nothing else.
///
/// # Safety
/// `query` is valid.
pub unsafe fn is_initial_check(query: *mut pg_sys::Query) -> bool {
    // SAFETY: as promised by the caller; the casts follow the kind of the entry, or the node's tag.
    unsafe {
        let query = &*query;
        let [fk, pk, _] = elements(query.rtable) else { return false };
        let [fk, pk] = [fk, pk].map(|cell| &*cell.ptr_value.cast::<pg_sys::RangeTblEntry>());
        let are_relations = [fk, pk].iter().all(|entry| entry.rtekind == pg_sys::RTEKind::RTE_RELATION);
        let tells_of_fk_alone = |cell: &pg_sys::ListCell| {
            let expression: *mut pg_sys::Node = (*cell.ptr_value.cast::<pg_sys::TargetEntry>()).expr.cast();
            (*expression).type_ == pg_sys::NodeTag::T_Var && (*expression.cast::<pg_sys::Var>()).varno == 1
        };
        let [join] = elements((*query.jointree).fromlist) else { return false };
        let join = join.ptr_value.cast::<pg_sys::JoinExpr>();
        are_relations
            && !query.hasSubLinks
            && query.cteList.is_null()
            && elements(query.targetList).iter().all(tells_of_fk_alone)
            && (*join).type_ == pg_sys::NodeTag::T_JoinExpr
            && is_plain_condition((*join).quals)
            && is_plain_condition((*query.jointree).quals)
            && is_foreign_key_between(fk.relid, pk.relid, &columns_of(query.jointree.cast(), 2))
    }
}

/// The columns of a relation that are used in a join tree.
///
/// # Safety
/// `node` is a join tree.
unsafe fn columns_of(node: *mut pg_sys::Node, place: u32) -> Vec<i16> {
    let mut found = Vec::new();
    // SAFETY: as promised by the caller; the set is palloc'd by PostgreSQL.
    unsafe {
        let mut set = ptr::null_mut();
        pg_sys::pull_varattnos(node, place, &mut set);
        let mut member = pg_sys::bms_next_member(set, -1);
        while member >= 0 {
            found.push((member + pg_sys::FirstLowInvalidHeapAttributeNumber) as i16);
            member = pg_sys::bms_next_member(set, member);
        }
    }
    found
}

fn is_foreign_key_between(fk: pg_sys::Oid, pk: pg_sys::Oid, columns: &[i16]) -> bool {
    let columns: Vec<_> = columns.iter().map(i16::to_string).collect();
    let sql = format!(
        "SELECT FROM pg_constraint WHERE contype = 'f' AND conrelid = {} AND confrelid = {} AND confkey @> '{{{}}}'::int2[]",
        fk.to_u32(),
        pk.to_u32(),
        columns.join(",")
    );
    super::spi::peek(&sql, |_| Ok(())).is_ok_and(|found| !found.is_empty())
}

/// # Safety
/// `node` is null or part of an analyzed condition.
unsafe fn is_plain_condition(node: *mut pg_sys::Node) -> bool {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        match (*node).type_ {
            pg_sys::NodeTag::T_BoolExpr => elements((*node.cast::<pg_sys::BoolExpr>()).args)
                .iter()
                .all(|cell| is_plain_condition(cell.ptr_value.cast())),
            pg_sys::NodeTag::T_NullTest => is_operand((*node.cast::<pg_sys::NullTest>()).arg.cast(), &mut false),
            pg_sys::NodeTag::T_OpExpr => {
                let operation = &*node.cast::<pg_sys::OpExpr>();
                let is_plain = |cell: &pg_sys::ListCell| is_operand(cell.ptr_value.cast(), &mut false);
                elements(operation.args).iter().all(is_plain) && is_for_indexes(operation.opno)
            }
            _ => false,
        }
    }
}

/// # Safety
/// `cell` belongs to a target list.
unsafe fn is_constant(cell: &pg_sys::ListCell) -> bool {
    // SAFETY: a target list has entries with expressions; a key passed up by a subquery counts as a constant, too.
    unsafe {
        let expression: *mut pg_sys::Node = (*cell.ptr_value.cast::<pg_sys::TargetEntry>()).expr.cast();
        [pg_sys::NodeTag::T_Const, pg_sys::NodeTag::T_Var].contains(&(*expression).type_)
    }
}

/// Whether a condition consists of index operators, which only superusers define, between columns and parameters.
///
/// # Safety
/// `node` is null or part of an analyzed condition.
unsafe fn compares_keys(node: *mut pg_sys::Node) -> bool {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        match (*node).type_ {
            pg_sys::NodeTag::T_BoolExpr => {
                let both = &*node.cast::<pg_sys::BoolExpr>();
                both.boolop == pg_sys::BoolExprType::AND_EXPR
                    && elements(both.args).iter().all(|cell| compares_keys(cell.ptr_value.cast()))
            }
            pg_sys::NodeTag::T_OpExpr => {
                let operation = &*node.cast::<pg_sys::OpExpr>();
                let mut finds_parameter = false;
                let is_plain = |cell: &pg_sys::ListCell| is_operand(cell.ptr_value.cast(), &mut finds_parameter);
                elements(operation.args).iter().all(is_plain) && finds_parameter && is_for_indexes(operation.opno)
            }
            _ => false,
        }
    }
}

/// Whether a node is a column or a parameter, possibly cast.
///
/// # Safety
/// `node` is part of an analyzed expression.
unsafe fn is_operand(node: *mut pg_sys::Node, has_parameter: &mut bool) -> bool {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        match (*node).type_ {
            pg_sys::NodeTag::T_Var => true,
            pg_sys::NodeTag::T_Param => {
                *has_parameter = true;
                true
            }
            pg_sys::NodeTag::T_RelabelType => {
                is_operand((*node.cast::<pg_sys::RelabelType>()).arg.cast(), has_parameter)
            }
            pg_sys::NodeTag::T_FuncExpr => {
                let function = &*node.cast::<pg_sys::FuncExpr>();
                let is_cast = function.funcformat != pg_sys::CoercionForm::COERCE_EXPLICIT_CALL
                    && function.funcid.to_u32() < pg_sys::FirstNormalObjectId;
                is_cast
                    && elements(function.args)
                        .first()
                        .is_some_and(|cell| is_operand(cell.ptr_value.cast(), has_parameter))
            }
            _ => false,
        }
    }
}

/// # Safety
/// Within a transaction.
unsafe fn is_for_indexes(operator: pg_sys::Oid) -> bool {
    // SAFETY: looks into the catalog caches.
    unsafe {
        let (key, none) = (pg_sys::Datum::from(operator), pg_sys::Datum::null());
        let families = pg_sys::SearchSysCacheList(pg_sys::SysCacheIdentifier::AMOPOPID as _, 1, key, none, none);
        let is_member = (*families).n_members > 0;
        pg_sys::ReleaseCatCacheList(families);
        is_member
    }
}
