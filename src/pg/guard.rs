//! Where the conditions of hidden tables are put into a query, so that nothing in it can tell of a hidden row.

use super::compat;
use super::expression::elements;
use super::leakproof::{computes_from_parameters, is_observable, parameter_computations};
use super::planner::Condition;
use pgrx::pg_sys;
use std::ptr;
use std::rc::Rc;

/// Adds conditions to the relations at these places.
///
/// Nothing that could tell of a row may be called for one that is hidden: neither a function of a user, nor one of
/// PostgreSQL's own that fails on some values. So a condition is put where policies are, and is checked before all others.
/// Then only operators that PostgreSQL calls leakproof can use an index. Where the query has none but these and operators
/// made for indexes, the condition stands beside them instead, and the planner is free.
///
/// # Safety
/// The query is valid, and has relations at these places.
pub(super) unsafe fn add(query: *mut pg_sys::Query, conditions: &[(i32, Rc<Condition>)], may_tell: bool) {
    // SAFETY: as promised by the caller.
    unsafe {
        compute_parameters_first(query);
        let is_plain = [pg_sys::CmdType::CMD_SELECT, pg_sys::CmdType::CMD_UPDATE, pg_sys::CmdType::CMD_DELETE]
            .contains(&(*query).commandType);
        let has_observable_policy = |index: i32| {
            let cell = &elements((*query).rtable)[index as usize - 1];
            let policies = (*cell.ptr_value.cast::<pg_sys::RangeTblEntry>()).securityQuals;
            is_observable(policies.cast())
        };
        if is_plain && !may_tell && !conditions.iter().any(|(index, _)| has_observable_policy(*index)) {
            wrap((*query).jointree.cast(), conditions);
            return;
        }
        for (index, condition) in conditions {
            let cell = &elements((*query).rtable)[*index as usize - 1];
            let entry = &mut *cell.ptr_value.cast::<pg_sys::RangeTblEntry>();
            // Policies may call such functions, too.
            for place in 0..elements(entry.securityQuals).len() {
                let policy = (*entry.securityQuals).elements.add(place);
                if is_observable((*policy).ptr_value.cast()) {
                    let relation = Below { index: *index, nulled_by: Vec::new() };
                    (*policy).ptr_value = unless(is_hidden(condition, &relation), (*policy).ptr_value.cast()).cast();
                }
            }
            entry.securityQuals = pg_sys::lcons(condition.for_relation(*index), entry.securityQuals);
        }
        guard((*query).jointree.cast(), query, conditions);
    }
}

/// Computes what conditions compute from parameters alone before any row is read.
///
/// In a plan made for any values, `1 / $2` beside `id = $1` would fail only where a row with that key exists, hidden or not. PostgreSQL
/// itself computes it first wherever it knows the values. A MERGE has no place for this: [`guarded`] looks after it.
///
/// # Safety
/// The query is valid.
unsafe fn compute_parameters_first(query: *mut pg_sys::Query) {
    // SAFETY: makes nodes of copies of parts of the query.
    unsafe {
        let from = (*query).jointree;
        if (*query).commandType == pg_sys::CmdType::CMD_MERGE || from.is_null() {
            return;
        }
        for computation in parameter_computations(from.cast()) {
            let is = |kind| {
                let test = pgrx::PgBox::<pg_sys::NullTest>::alloc_node(pg_sys::NodeTag::T_NullTest).into_pg();
                (*test).arg = pg_sys::copyObjectImpl(computation.cast()).cast();
                (*test).nulltesttype = kind;
                (*test).location = -1;
                test
            };
            // Always true, and about no row: PostgreSQL checks such a condition once, at the start.
            let null = is(pg_sys::NullTestType::IS_NULL);
            let either = pg_sys::lappend(ptr::null_mut(), null.cast());
            let either = pg_sys::lappend(either, is(pg_sys::NullTestType::IS_NOT_NULL).cast());
            let either = pg_sys::makeBoolExpr(pg_sys::BoolExprType::OR_EXPR, either, -1);
            (*from).quals = pg_sys::make_and_qual((*from).quals, either.cast());
        }
    }
}

/// Keeps conditions of outer queries out of a query, and the query where it is.
///
/// # Safety
/// The query is valid.
pub(super) unsafe fn fence(query: *mut pg_sys::Query) {
    // SAFETY: makes a node; a bigint is passed by value.
    unsafe {
        if (*query).commandType == pg_sys::CmdType::CMD_SELECT && (*query).limitOffset.is_null() {
            let (none, zero) = (pg_sys::InvalidOid, pg_sys::Datum::from(0_i64));
            (*query).limitOffset = pg_sys::makeConst(pg_sys::INT8OID, -1, none, 8, zero, false, true).cast();
        }
    }
}

/// A relation below a part of a join tree, and the outer joins in between that may put NULLs into the place of its rows.
struct Below {
    index: i32,
    nulled_by: Vec<i32>,
}

/// Has functions in a join tree that somebody could see being called be called for visible rows alone. PostgreSQL takes one that is
/// given nothing of a row for leakproof, and may call it before it looks at `securityQuals`: how often it is called would tell of hidden
/// rows. Returns the relations below the node.
///
/// # Safety
/// `node` is null or part of the join tree of the query.
unsafe fn guard(node: *mut pg_sys::Node, query: *mut pg_sys::Query, conditions: &[(i32, Rc<Condition>)]) -> Vec<Below> {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        if node.is_null() {
            return Vec::new();
        }
        match (*node).type_ {
            pg_sys::NodeTag::T_RangeTblRef => {
                vec![Below { index: (*node.cast::<pg_sys::RangeTblRef>()).rtindex, nulled_by: Vec::new() }]
            }
            pg_sys::NodeTag::T_FromExpr => {
                let from = &mut *node.cast::<pg_sys::FromExpr>();
                let parts = elements(from.fromlist).iter();
                let mut below: Vec<_> =
                    parts.flat_map(|cell| guard(cell.ptr_value.cast(), query, conditions)).collect();
                // The target of a MERGE is joined later, by its ON condition.
                if (*query).commandType == pg_sys::CmdType::CMD_MERGE && node == (*query).jointree.cast() {
                    below.push(Below { index: (*query).resultRelation, nulled_by: Vec::new() });
                    if let Some(condition) = compat::merge_condition(&mut *query) {
                        *condition = guarded(*condition, &below, query, conditions);
                    }
                }
                from.quals = guarded(from.quals, &below, query, conditions);
                below
            }
            pg_sys::NodeTag::T_JoinExpr => {
                let join = &mut *node.cast::<pg_sys::JoinExpr>();
                let (mut below, mut right) = (guard(join.larg, query, conditions), guard(join.rarg, query, conditions));
                let (left_count, kind) = (below.len(), join.jointype);
                below.append(&mut right);
                join.quals = guarded(join.quals, &below, query, conditions);
                let is_full = kind == pg_sys::JoinType::JOIN_FULL;
                for (place, relation) in below.iter_mut().enumerate() {
                    let by =
                        if place < left_count { pg_sys::JoinType::JOIN_RIGHT } else { pg_sys::JoinType::JOIN_LEFT };
                    if is_full || kind == by {
                        relation.nulled_by.push(join.rtindex);
                    }
                }
                below
            }
            _ => Vec::new(),
        }
    }
}

/// `CASE WHEN hidden THEN false ELSE clause END` for each such clause, about the relations that it is about. One that is about none is
/// called for each row of the join that it stands in, when hidden rows are out already, unless there is nothing to join with. A row that
/// an outer join has made up of NULLs is not hidden. PostgreSQL may turn such a join into an inner one, so that the clause is checked at
/// the scan.
///
/// # Safety
/// `quals` is null or a condition in the join tree of the query, on the relations below it.
unsafe fn guarded(
    quals: *mut pg_sys::Node,
    below: &[Below],
    query: *mut pg_sys::Query,
    conditions: &[(i32, Rc<Condition>)],
) -> *mut pg_sys::Node {
    // SAFETY: makes nodes of the clauses of a condition; relations have their places in the range table.
    unsafe {
        let is_merge = (*query).commandType == pg_sys::CmdType::CMD_MERGE;
        let may_tell = |node| is_observable(node) || (is_merge && computes_from_parameters(node));
        if quals.is_null() || !may_tell(quals) {
            return quals;
        }
        let is_table = |relation: &&Below| {
            let cell = &elements((*query).rtable)[relation.index as usize - 1];
            (*cell.ptr_value.cast::<pg_sys::RangeTblEntry>()).rtekind == pg_sys::RTEKind::RTE_RELATION
        };
        let is_alone = below.iter().filter(is_table).count() == 1;
        let mut all = ptr::null_mut();
        for cell in elements(pg_sys::make_ands_implicit(quals.cast())) {
            let mut clause: *mut pg_sys::Node = cell.ptr_value.cast();
            if may_tell(clause) {
                let about = pg_sys::pull_varnos(ptr::null_mut(), clause);
                // A column of a join by its alias may be one of any relation below.
                let are_named = below.iter().filter(|relation| pg_sys::bms_is_member(relation.index, about)).count();
                let is_by_alias = pg_sys::bms_num_members(about) as usize > are_named;
                for (index, condition) in conditions {
                    let Some(relation) = below.iter().find(|relation| relation.index == *index) else { continue };
                    let is_concerned =
                        (about.is_null() && is_alone) || is_by_alias || pg_sys::bms_is_member(*index, about);
                    if is_concerned {
                        clause = unless(is_hidden(condition, relation), clause);
                    }
                }
            }
            all = pg_sys::lappend(all, clause.cast());
        }
        pg_sys::make_ands_explicit(all).cast()
    }
}

/// Whether a row of a relation is hidden, as it stands above the outer joins that may have made it up: one that is made up has no place.
///
/// # Safety
/// Called while a query is being planned that has the relation.
unsafe fn is_hidden(condition: &Condition, relation: &Below) -> *mut pg_sys::Node {
    // SAFETY: fills in new nodes.
    unsafe {
        let test = pgrx::PgBox::<pg_sys::BooleanTest>::alloc_node(pg_sys::NodeTag::T_BooleanTest).into_pg();
        (*test).arg = condition.for_relation(relation.index).cast();
        (*test).booltesttype = pg_sys::BoolTestType::IS_FALSE;
        (*test).location = -1;
        if relation.nulled_by.is_empty() {
            return test.cast();
        }
        let ctid = pg_sys::SelfItemPointerAttributeNumber as i16;
        let place = pg_sys::makeVar(relation.index as _, ctid, pg_sys::TIDOID, -1, pg_sys::InvalidOid, 0);
        let exists = pgrx::PgBox::<pg_sys::NullTest>::alloc_node(pg_sys::NodeTag::T_NullTest).into_pg();
        (*exists).arg = place.cast();
        (*exists).nulltesttype = pg_sys::NullTestType::IS_NOT_NULL;
        (*exists).location = -1;
        let both = pg_sys::lappend(pg_sys::lappend(ptr::null_mut(), exists.cast()), test.cast());
        let both = pg_sys::makeBoolExpr(pg_sys::BoolExprType::AND_EXPR, both, -1);
        compat::nulled_by(both.cast(), relation.index, &relation.nulled_by)
    }
}

/// `CASE WHEN hidden THEN false ELSE clause END`.
///
/// # Safety
/// Both are conditions of one query.
unsafe fn unless(hidden: *mut pg_sys::Node, clause: *mut pg_sys::Node) -> *mut pg_sys::Node {
    // SAFETY: fills in new nodes.
    unsafe {
        let when = pgrx::PgBox::<pg_sys::CaseWhen>::alloc_node(pg_sys::NodeTag::T_CaseWhen).into_pg();
        (*when).expr = hidden.cast();
        (*when).result = pg_sys::makeBoolConst(false, false).cast();
        (*when).location = -1;
        let case = pgrx::PgBox::<pg_sys::CaseExpr>::alloc_node(pg_sys::NodeTag::T_CaseExpr).into_pg();
        (*case).casetype = pg_sys::BOOLOID;
        (*case).args = pg_sys::lappend(ptr::null_mut(), when.cast());
        (*case).defresult = clause.cast();
        (*case).location = -1;
        case.cast()
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
