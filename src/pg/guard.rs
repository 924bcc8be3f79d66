//! Adds the conditions of hidden tables to a query so that nothing in it can reveal a hidden row.

use super::condition::Condition;
use super::expression::elements;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;

/// Adds conditions to the relations at these range table indexes.
///
/// Nothing that could reveal a row may be called for a hidden one. [`check_first`] makes a scan check the condition
/// before all others. An index comes before that: operators that could reveal a value must not be called on its
/// entries. So the condition becomes a security qual like those of policies, which leaves indexes to operators that
/// PostgreSQL marks leakproof. If the query uses only these and comparisons, the condition is added beside them
/// instead, and the planner is free.
///
/// # Safety
/// The query is valid and has relations at these indexes.
pub(super) unsafe fn add(query: *mut pg_sys::Query, conditions: &[(i32, Rc<Condition>)], may_tell: bool) {
    // SAFETY: as promised by the caller.
    unsafe {
        let is_plain = [pg_sys::CmdType::CMD_SELECT, pg_sys::CmdType::CMD_UPDATE, pg_sys::CmdType::CMD_DELETE]
            .contains(&(*query).commandType);
        if is_plain && !may_tell {
            wrap((*query).jointree.cast(), conditions);
            return;
        }
        for (index, condition) in conditions {
            let cell = &elements((*query).rtable)[*index as usize - 1];
            let entry = &mut *cell.ptr_value.cast::<pg_sys::RangeTblEntry>();
            entry.securityQuals = pg_sys::lcons(condition.for_relation(*index), entry.securityQuals);
        }
    }
}

/// Makes scans of a relation check its condition before anything else.
///
/// PostgreSQL orders the quals of a scan by security level and then by cost. A qual that gets nothing from a row counts
/// as leakproof and may come first if it is cheap: `1 / $2`, a user's function, a subquery. Whether it is called, or
/// fails, would reveal whether there is a row. So the condition gets the lowest level and a cost below all others.
///
/// # Safety
/// Called while the relation at this index is planned.
pub(super) unsafe fn check_first(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    index: i32,
    condition: &Condition,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        let clauses = simplified(root, condition, index);
        for cell in elements((*relation).baserestrictinfo) {
            let restriction = &mut *cell.ptr_value.cast::<pg_sys::RestrictInfo>();
            if pg_sys::list_member(clauses, restriction.clause.cast()) {
                restriction.security_level = 0;
                restriction.eval_cost = pg_sys::QualCost { startup: 0.0, per_tuple: -1.0 };
            }
        }
    }
}

/// Keeps PostgreSQL's own kinds of indexes from sorting a relation by distance: that computes the distance of every
/// entry, and one that overflows would reveal a hidden row. Those of extensions, such as pgvector's, can do nothing
/// else.
///
/// # Safety
/// Called while the relation is planned, after its indexes have been read.
pub(super) unsafe fn keep_from_sorting(relation: *mut pg_sys::RelOptInfo) {
    // SAFETY: as promised by the caller.
    unsafe {
        for cell in elements((*relation).indexlist) {
            let index = &mut *cell.ptr_value.cast::<pg_sys::IndexOptInfo>();
            if index.relam.to_u32() < pg_sys::FirstNormalObjectId {
                index.amcanorderbyop = false;
            }
        }
    }
}

/// Makes the scans of a finished plan check conditions before they recheck what an index has found, where that calls a
/// user's function: `id = f(4)` in a hash index or in a lossy bitmap calls it once for each row, hidden or not.
///
/// # Safety
/// `plan` is a node of a plan with this range table, or null.
pub(super) unsafe fn check_first_in_rechecks(
    plan: *mut pg_sys::Plan,
    entries: &[pg_sys::ListCell],
    condition_of: &dyn Fn(Oid) -> Option<Rc<Condition>>,
) {
    // SAFETY: the casts follow the node's tag; a scan has its relation in the range table.
    unsafe {
        if plan.is_null() {
            return;
        }
        let recheck: *mut *mut pg_sys::List = match (*plan).type_ {
            pg_sys::NodeTag::T_IndexScan => &raw mut (*plan.cast::<pg_sys::IndexScan>()).indexqualorig,
            pg_sys::NodeTag::T_BitmapHeapScan => &raw mut (*plan.cast::<pg_sys::BitmapHeapScan>()).bitmapqualorig,
            _ => ptr::null_mut(),
        };
        if !recheck.is_null() && calls_user_function((*recheck).cast(), ptr::null_mut()) {
            let index = (*plan.cast::<pg_sys::Scan>()).scanrelid;
            let entry = entries[index as usize - 1].ptr_value.cast::<pg_sys::RangeTblEntry>();
            if let Some(condition) = condition_of((*entry).relid) {
                let mut first = ptr::null_mut();
                for clause in elements(simplified(ptr::null_mut(), &condition, index as i32)) {
                    // The engine's own queries do not have the condition.
                    let is_there =
                        [(*plan).qual, *recheck].iter().any(|quals| pg_sys::list_member(*quals, clause.ptr_value));
                    if is_there {
                        first = pg_sys::lappend(first, clause.ptr_value);
                    }
                }
                *recheck = pg_sys::list_concat(first, *recheck);
            }
        }
        let others = match (*plan).type_ {
            pg_sys::NodeTag::T_Append => (*plan.cast::<pg_sys::Append>()).appendplans,
            pg_sys::NodeTag::T_MergeAppend => (*plan.cast::<pg_sys::MergeAppend>()).mergeplans,
            pg_sys::NodeTag::T_CustomScan => (*plan.cast::<pg_sys::CustomScan>()).custom_plans,
            _ => ptr::null_mut(),
        };
        let subplan = match (*plan).type_ {
            pg_sys::NodeTag::T_SubqueryScan => (*plan.cast::<pg_sys::SubqueryScan>()).subplan,
            _ => ptr::null_mut(),
        };
        let others = elements(others).iter().map(|cell| cell.ptr_value.cast());
        for below in others.chain([subplan, (*plan).lefttree, (*plan).righttree]) {
            check_first_in_rechecks(below, entries, condition_of);
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn calls_user_function(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: null or part of an expression.
    unsafe {
        !node.is_null()
            && (pg_sys::check_functions_in_node(node, Some(is_user_function), state)
                || pg_sys::expression_tree_walker(node, Some(calls_user_function), state))
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn is_user_function(function: Oid, _state: *mut c_void) -> bool {
    function.to_u32() >= pg_sys::FirstNormalObjectId
}

/// Returns the clauses of a condition on the relation at this index, simplified as PostgreSQL simplifies those of a
/// query.
///
/// # Safety
/// Called while a query is planned; `root` is its planner state, or null when the plan is finished.
unsafe fn simplified(root: *mut pg_sys::PlannerInfo, condition: &Condition, index: i32) -> *mut pg_sys::List {
    // SAFETY: as promised by the caller.
    unsafe {
        let clause = pg_sys::eval_const_expressions(root, condition.for_relation(index).cast());
        pg_sys::make_ands_implicit(pg_sys::canonicalize_qual(clause.cast(), false))
    }
}

/// Adds conditions to the relations in a part of a join tree, below all joins: the shape that a subquery with a WHERE
/// has when it is pulled up.
///
/// # Safety
/// `node` is part of a join tree.
unsafe fn wrap(node: *mut pg_sys::Node, conditions: &[(i32, Rc<Condition>)]) -> *mut pg_sys::Node {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        match (*node).type_ {
            pg_sys::NodeTag::T_RangeTblRef => {
                let index = (*node.cast::<pg_sys::RangeTblRef>()).rtindex;
                match conditions.iter().find(|condition| condition.0 == index) {
                    Some((_, condition)) => {
                        let alone = pg_sys::lappend(ptr::null_mut(), node.cast());
                        pg_sys::makeFromExpr(alone, condition.for_relation(index).cast()).cast()
                    }
                    None => node,
                }
            }
            pg_sys::NodeTag::T_FromExpr => {
                let list = (*node.cast::<pg_sys::FromExpr>()).fromlist;
                for place in 0..elements(list).len() {
                    let cell = (*list).elements.add(place);
                    (*cell).ptr_value = wrap((*cell).ptr_value.cast(), conditions).cast();
                }
                node
            }
            pg_sys::NodeTag::T_JoinExpr => {
                let join = &mut *node.cast::<pg_sys::JoinExpr>();
                join.larg = wrap(join.larg, conditions);
                join.rarg = wrap(join.rarg, conditions);
                node
            }
            _ => node,
        }
    }
}
