//! Whether a query calls something that may reveal the rows it is called for.

use super::expression::elements;
use super::harmless::is_own_type;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::ffi::c_void;
use std::ptr;

/// Whether a query has conditions that may reveal rows, or may get them: conditions of outer queries are pushed down
/// into subqueries, whose expressions they then contain.
///
/// # Safety
/// `query` is valid.
pub unsafe fn query_may_tell(query: *mut pg_sys::Query, is_top: bool) -> bool {
    // SAFETY: as promised by the caller; the casts follow the kind of the entry or the node's tag.
    unsafe {
        let state = ptr::null_mut();
        may_tell((*query).jointree.cast(), state)
            || may_tell((*query).havingQual, state)
            || (!is_top
                && elements((*query).targetList)
                    .iter()
                    .any(|cell| may_tell((*cell.ptr_value.cast::<pg_sys::TargetEntry>()).expr.cast(), state)))
            || elements((*query).rtable).iter().any(|cell| {
                let entry = &*cell.ptr_value.cast::<pg_sys::RangeTblEntry>();
                // An item in FROM may be pulled up and then evaluated for any row.
                let parts = [
                    entry.values_lists.cast(),
                    entry.functions.cast(),
                    entry.tablefunc.cast(),
                    entry.tablesample.cast(),
                ];
                if parts.into_iter().any(|part: *mut pg_sys::Node| may_tell(part, state)) {
                    return true;
                }
                entry.rtekind == pg_sys::RTEKind::RTE_SUBQUERY
                    && !entry.subquery.is_null()
                    && query_may_tell(entry.subquery, false)
            })
            || elements((*query).cteList).iter().any(|cell| {
                let query = (*cell.ptr_value.cast::<pg_sys::CommonTableExpr>()).ctequery;
                (*query).type_ != pg_sys::NodeTag::T_Query || query_may_tell(query.cast(), false)
            })
            || (is_top && (*query).hasSubLinks)
    }
}

/// Whether an expression or join tree may call something that reveals rows.
#[pg_guard]
unsafe extern "C-unwind" fn may_tell(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        let tells = match (*node).type_ {
            pg_sys::NodeTag::T_OpExpr => {
                let operation = &*node.cast::<pg_sys::OpExpr>();
                operator_may_tell(operation.opno, operation.args, operation.inputcollid)
            }
            pg_sys::NodeTag::T_ScalarArrayOpExpr => {
                let operation = &*node.cast::<pg_sys::ScalarArrayOpExpr>();
                operator_may_tell(operation.opno, operation.args, operation.inputcollid)
            }
            pg_sys::NodeTag::T_FromExpr
            | pg_sys::NodeTag::T_JoinExpr
            | pg_sys::NodeTag::T_RangeTblRef
            | pg_sys::NodeTag::T_List
            | pg_sys::NodeTag::T_BoolExpr
            | pg_sys::NodeTag::T_NullTest
            | pg_sys::NodeTag::T_BooleanTest
            | pg_sys::NodeTag::T_RelabelType
            | pg_sys::NodeTag::T_ArrayExpr
            | pg_sys::NodeTag::T_Var
            | pg_sys::NodeTag::T_Const
            | pg_sys::NodeTag::T_Param
            | pg_sys::NodeTag::T_CurrentOfExpr => false,
            pg_sys::NodeTag::T_SubLink => true,
            // An expression that gets nothing from a row cannot reveal its values.
            _ if !has_vars(node, ptr::null_mut()) => return false,
            _ => true,
        };
        tells || pg_sys::expression_tree_walker(node, Some(may_tell), state)
    }
}

/// Whether an expression uses rows of this query or of an outer one.
#[pg_guard]
unsafe extern "C-unwind" fn has_vars(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: `node` is null or part of an analyzed expression.
    unsafe {
        !node.is_null()
            && ((*node).type_ == pg_sys::NodeTag::T_Var || pg_sys::expression_tree_walker(node, Some(has_vars), state))
    }
}

/// `pg_operator.oid` of `LIKE` for text, bpchar and name.
const LIKE: [u32; 3] = [1209, 1211, 1207];
/// `pg_operator.oid` of `jsonb @> jsonb` and `tsvector @@ tsquery`.
const CONTAINMENT: [u32; 2] = [3246, 3636];
/// The most bytes of a constant operand of those: the row then bounds the cost of comparing, and no stack overflows.
const SMALL: usize = 1_000;
/// `pg_am.oid`.
const BTREE_AND_HASH: [u32; 2] = [403, 405];
/// `pg_type.oid` of `anyenum`: enum values are compared by OID.
const ANYENUM: u32 = 3500;

/// Whether an operator may reveal a value that it is called with, by failing, taking long or otherwise.
///
/// It does not if PostgreSQL marks it leakproof, or if it compares two values of one of PostgreSQL's own types: these
/// comparisons are total. Being indexable proves nothing, because `LIKE` fails on a malformed pattern as soon as a
/// value matches up to the fault; it is safe with a well-formed constant.
///
/// # Safety
/// Within a transaction; `arguments` are those of the operator.
unsafe fn operator_may_tell(operator: Oid, arguments: *mut pg_sys::List, collation: Oid) -> bool {
    // SAFETY: looks into the catalog caches; the arguments are nodes.
    unsafe {
        // Without a known collation, a comparison fails, although PostgreSQL marks it leakproof.
        let is_collatable =
            |cell: &pg_sys::ListCell| pg_sys::type_is_collatable(pg_sys::exprType(cell.ptr_value.cast()));
        if collation == pg_sys::InvalidOid && elements(arguments).iter().any(is_collatable) {
            return true;
        }
        if LIKE.contains(&operator.to_u32()) && !pg_sys::get_collation_isdeterministic(collation) {
            return true;
        }
        if pg_sys::get_func_leakproof(pg_sys::get_opcode(operator)) {
            return false;
        }
        if operator.to_u32() >= pg_sys::FirstNormalObjectId {
            return true;
        }
        let right = elements(arguments).get(1).map(|cell| cell.ptr_value.cast::<pg_sys::Node>());
        if LIKE.contains(&operator.to_u32()) {
            return !right.is_some_and(|pattern| is_well_formed_pattern(pattern));
        }
        if CONTAINMENT.contains(&operator.to_u32()) {
            return right.and_then(|constant| bytes_of(constant)).is_none_or(|bytes| bytes.len() > SMALL);
        }
        !is_comparison(operator)
    }
}

/// # Safety
/// Within a transaction.
unsafe fn is_comparison(operator: Oid) -> bool {
    // SAFETY: looks into the catalog caches; a list is valid until it is released.
    unsafe {
        let (mut left, mut right) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
        pg_sys::op_input_types(operator, &mut left, &mut right);
        let is_scalar = |type_oid: Oid| {
            type_oid.to_u32() == ANYENUM
                || (is_own_type(type_oid) && pg_sys::get_base_element_type(type_oid) == pg_sys::InvalidOid)
        };
        if !is_scalar(left) || !is_scalar(right) {
            return false;
        }
        let (key, none) = (pg_sys::Datum::from(operator), pg_sys::Datum::null());
        let families = pg_sys::SearchSysCacheList(pg_sys::SysCacheIdentifier::AMOPOPID as _, 1, key, none, none);
        let members = (*families).members.as_slice((*families).n_members as usize);
        let compares = members.iter().any(|member| {
            let tuple = &raw mut (**member).tuple;
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_amop>();
            BTREE_AND_HASH.contains(&form.amopmethod.to_u32())
        });
        pg_sys::ReleaseCatCacheList(families);
        compares
    }
}

/// Returns the bytes of a constant of a variable-length type.
///
/// # Safety
/// `node` is part of an analyzed expression; the bytes are those of the node, or live in the current memory context.
unsafe fn bytes_of<'a>(node: *mut pg_sys::Node) -> Option<&'a [u8]> {
    // SAFETY: the cast follows the node's tag; a variable-length value has a header.
    unsafe {
        if (*node).type_ == pg_sys::NodeTag::T_RelabelType {
            return bytes_of((*node.cast::<pg_sys::RelabelType>()).arg.cast());
        }
        let constant = node.cast::<pg_sys::Const>();
        if (*node).type_ != pg_sys::NodeTag::T_Const || (*constant).constisnull || (*constant).constlen != -1 {
            return None;
        }
        let value = pg_sys::pg_detoast_datum((*constant).constvalue.cast_mut_ptr());
        Some(std::slice::from_raw_parts(pgrx::vardata_any(value).cast(), pgrx::varsize_any_exhdr(value)))
    }
}

/// Whether a node is a pattern that does not end inside an escape, so that no value makes it fail.
///
/// # Safety
/// As for [`bytes_of`].
unsafe fn is_well_formed_pattern(node: *mut pg_sys::Node) -> bool {
    // SAFETY: as promised by the caller.
    unsafe { bytes_of(node) }
        .is_some_and(|pattern| pattern.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 0)
}
