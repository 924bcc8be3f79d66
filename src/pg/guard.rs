//! Adds the conditions of hidden tables to a query so that nothing in it can reveal a hidden row.

use super::condition::Condition;
use super::expression::elements;
use pgrx::pg_sys;
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
/// fails, would reveal whether there is a row. So the condition is given a cost below all others.
///
/// # Safety
/// Called while the relation at this index is planned.
pub(super) unsafe fn check_first(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    index: i32,
    condition: &Condition,
) {
    // SAFETY: as promised by the caller. The condition is simplified as PostgreSQL has simplified the one in the query.
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
