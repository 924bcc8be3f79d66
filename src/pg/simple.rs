//! Recognizes filters that cannot run user code, from their text alone and without running any.

use super::expression::{elements, parse};
use crate::error::Purpose;
use pgrx::{PgTryBuilder, pg_sys};
use std::ffi::CStr;

/// Comparison operators as PostgreSQL prints them. It qualifies operators outside `pg_catalog` with their schema.
const OPERATORS: [&CStr; 6] = [c"=", c"<>", c"<", c">", c"<=", c">="];

/// Types that a constant may be cast to.
const TYPES: [&str; 20] = [
    "bool",
    "int2",
    "int4",
    "int8",
    "numeric",
    "float4",
    "float8",
    "text",
    "varchar",
    "bpchar",
    "date",
    "time",
    "timestamp",
    "timestamptz",
    "interval",
    "uuid",
    "name",
    "oid",
    "char",
    "bytea",
];

/// The maximum length of a simple filter, in bytes.
const LONGEST: usize = 500;

/// Whether a stored filter only compares columns of built-in types with each other and with constants.
///
/// The filter is parsed but not analyzed: analysis reads constants, which can call the check constraints of domains.
/// Anything not known to be harmless is not simple.
pub fn is_simple(filter: &str, type_of: impl Fn(&str) -> Option<pg_sys::Oid>) -> bool {
    // Every comparison with a large value detoasts it.
    if filter.len() > LONGEST {
        return false;
    }
    let type_of = std::panic::AssertUnwindSafe(type_of);
    PgTryBuilder::new(move || {
        let type_of = type_of;
        // SAFETY: within a transaction; the parser returns a valid node.
        unsafe { parse(filter, Purpose::Filter).is_ok_and(|node| is_simple_node(node, &*type_of)) }
    })
    .catch_others(|_| false)
    .execute()
}

/// # Safety
/// `node` is null or a raw parse tree.
unsafe fn is_simple_node(node: *mut pg_sys::Node, type_of: &dyn Fn(&str) -> Option<pg_sys::Oid>) -> bool {
    // SAFETY: as promised; every cast follows the node's tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        let all = |list| elements(list).iter().all(|cell| is_simple_node(cell.ptr_value.cast(), type_of));
        match (*node).type_ {
            pg_sys::NodeTag::T_A_Const => true,
            pg_sys::NodeTag::T_ColumnRef => {
                let column = &*node.cast::<pg_sys::ColumnRef>();
                let [name] = elements(column.fields) else { return false };
                (*name.ptr_value.cast::<pg_sys::Node>()).type_ == pg_sys::NodeTag::T_String
                    && type_of(&names(column.fields)).is_some_and(|of| of.to_u32() < pg_sys::FirstNormalObjectId)
            }
            pg_sys::NodeTag::T_TypeCast => {
                let cast = &*node.cast::<pg_sys::TypeCast>();
                is_simple_type(cast.typeName) && is_simple_node(cast.arg, type_of)
            }
            pg_sys::NodeTag::T_A_Expr => {
                let comparison = &*node.cast::<pg_sys::A_Expr>();
                let is_known = matches!(
                    comparison.kind,
                    pg_sys::A_Expr_Kind::AEXPR_OP
                        | pg_sys::A_Expr_Kind::AEXPR_OP_ANY
                        | pg_sys::A_Expr_Kind::AEXPR_OP_ALL
                        | pg_sys::A_Expr_Kind::AEXPR_DISTINCT
                        | pg_sys::A_Expr_Kind::AEXPR_NOT_DISTINCT
                );
                is_known
                    && OPERATORS.iter().any(|operator| operator.to_str() == Ok(names(comparison.name).as_str()))
                    && is_simple_node(comparison.lexpr, type_of)
                    && is_simple_node(comparison.rexpr, type_of)
            }
            pg_sys::NodeTag::T_A_ArrayExpr => all((*node.cast::<pg_sys::A_ArrayExpr>()).elements),
            pg_sys::NodeTag::T_BoolExpr => all((*node.cast::<pg_sys::BoolExpr>()).args),
            pg_sys::NodeTag::T_NullTest => is_simple_node((*node.cast::<pg_sys::NullTest>()).arg.cast(), type_of),
            pg_sys::NodeTag::T_BooleanTest => is_simple_node((*node.cast::<pg_sys::BooleanTest>()).arg.cast(), type_of),
            _ => false,
        }
    }
}

/// # Safety
/// A raw parse tree.
unsafe fn is_simple_type(name: *mut pg_sys::TypeName) -> bool {
    // SAFETY: as promised.
    unsafe {
        let is_plain = !(*name).setof && !(*name).pct_type;
        let name = names((*name).names);
        is_plain && TYPES.contains(&name.strip_prefix("pg_catalog.").unwrap_or(&name))
    }
}

/// # Safety
/// A list of names in a raw parse tree.
unsafe fn names(list: *mut pg_sys::List) -> String {
    // SAFETY: as promised; the text is copied.
    unsafe { CStr::from_ptr(pg_sys::NameListToString(list)).to_string_lossy().into_owned() }
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use super::is_simple;
    use pgrx::{pg_sys, pg_test};

    #[pg_test]
    fn comparisons_of_columns_and_constants_are_simple_and_nothing_else_is() {
        let type_of = |column: &str| match column {
            "n" => Some(pg_sys::INT4OID),
            "s" => Some(pg_sys::TEXTOID),
            "b" => Some(pg_sys::BOOLOID),
            "e" => Some(pg_sys::Oid::from(99_999)),
            _ => None,
        };
        for filter in [
            "b",
            "NOT b",
            "(n > 5)",
            "((n > 5) AND (s = 'x'::text)) OR b IS NOT TRUE",
            "s IS NULL",
            "(s)::character varying = 'x'",
            "n = ANY (ARRAY[1, 2, 3])",
            "s = ANY ('{a,b}'::text[])",
            "n IS DISTINCT FROM 4",
        ] {
            assert!(is_simple(filter, type_of), "{filter}");
        }
        for filter in [
            "e = 'x'",
            "unknown = 1",
            "f(n)",
            "lower(s) = 'x'",
            "n OPERATOR(public.=) 1",
            "s ~ 'x'",
            "n + 1 > 2",
            "('(1)'::public.pair IS NOT NULL)",
            "'x'::d = s",
            "CASE WHEN b THEN true END",
            "t.*",
            "(SELECT true)",
            "",
        ] {
            assert!(!is_simple(filter, type_of), "{filter}");
        }
    }
}
