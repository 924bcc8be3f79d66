//! Where the conditions of hidden tables are put into a query, so that nothing in it can tell of a hidden row.

use super::condition::Condition;
use super::expression::elements;
use pgrx::pg_sys;
use std::ptr;
use std::rc::Rc;

/// Adds conditions to the relations at these places.
///
/// Nothing that could tell of a row may be called for one that is hidden. [`check_first`] sees to it that a scan checks the condition before
/// all others. An index comes before that: operators that could tell of a value must not be asked of its entries. So the condition is put
/// where policies are, which leaves indexes to operators that PostgreSQL calls leakproof. Where the query has none but these and comparisons,
/// the condition stands beside them instead, and the planner is free.
///
/// # Safety
/// The query is valid, and has relations at these places.
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

/// Has scans of a relation check its condition before anything else.
///
/// PostgreSQL sorts what a scan checks by security level and then by cost. What is given nothing of a row counts as leakproof, and may come
/// first if it is cheap: `1 / $2`, a function of a user, a subquery. Whether it is called, or fails, would tell whether there is a row. So the
/// condition is given a cost below all others.
///
/// # Safety
/// Called while the relation at this place is planned.
pub(super) unsafe fn check_first(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    index: i32,
    condition: &Condition,
) {
    // SAFETY: as promised by the caller. The condition goes the way that PostgreSQL has sent the one in the query.
    unsafe {
        let clause = pg_sys::eval_const_expressions(root, condition.for_relation(index).cast());
        let clause = pg_sys::canonicalize_qual(clause.cast(), false);
        let clauses = pg_sys::make_ands_implicit(clause);
        for cell in elements((*relation).baserestrictinfo) {
            let restriction = &mut *cell.ptr_value.cast::<pg_sys::RestrictInfo>();
            if pg_sys::list_member(clauses, restriction.clause.cast()) {
                restriction.eval_cost = pg_sys::QualCost { startup: 0.0, per_tuple: -1.0 };
            }
        }
    }
}

/// A part of a join tree in which each relation with a condition has it, below all joins: the shape that a subquery with a
/// WHERE has when it is pulled up.
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
