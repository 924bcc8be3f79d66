//! Whether an expression can run in any user's query without running user code.

use super::expression::elements;
use pgrx::pg_sys;
use pgrx::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr;

/// Who wrote an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    Users,
    /// A condition of ours, which may contain a harmless expression of a user.
    Ours,
}

/// Whether an expression can run in any user's query: it calls only our functions and built-in immutable ones on
/// built-in types. Others may call user code: through a type, a name in a text, or a cast created later. Nor does it
/// call functions that depend on settings, which would be those of the querying session.
///
/// # Safety
/// `node` is an analyzed expression.
pub unsafe fn is_harmless(node: *mut pg_sys::Node, mut whose: Whose) -> bool {
    // SAFETY: as promised by the caller.
    unsafe { !may_harm(node, ptr::from_mut(&mut whose).cast()) }
}

#[pg_guard]
unsafe extern "C-unwind" fn may_harm(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: `node` is null or part of an analyzed expression.
    unsafe {
        if node.is_null() {
            return false;
        }
        let is_known = matches!(
            (*node).type_,
            pg_sys::NodeTag::T_Var
                | pg_sys::NodeTag::T_Const
                | pg_sys::NodeTag::T_OpExpr
                | pg_sys::NodeTag::T_FuncExpr
                | pg_sys::NodeTag::T_ScalarArrayOpExpr
                | pg_sys::NodeTag::T_DistinctExpr
                | pg_sys::NodeTag::T_NullIfExpr
                | pg_sys::NodeTag::T_BoolExpr
                | pg_sys::NodeTag::T_NullTest
                | pg_sys::NodeTag::T_BooleanTest
                | pg_sys::NodeTag::T_RelabelType
                | pg_sys::NodeTag::T_CoerceViaIO
                | pg_sys::NodeTag::T_CoalesceExpr
                | pg_sys::NodeTag::T_MinMaxExpr
                | pg_sys::NodeTag::T_CaseExpr
                | pg_sys::NodeTag::T_CaseWhen
                | pg_sys::NodeTag::T_CaseTestExpr
                | pg_sys::NodeTag::T_ArrayExpr
                | pg_sys::NodeTag::T_List
        );
        // A column may have a domain type: the checks of the domain do not run when it is read.
        let has_type = !matches!((*node).type_, pg_sys::NodeTag::T_List | pg_sys::NodeTag::T_CaseWhen);
        let is_of_postgres = !has_type || is_own_type(pg_sys::getBaseType(pg_sys::exprType(node)));
        !is_known
            || !is_of_postgres
            || has_varying_zone(node)
            || pg_sys::check_functions_in_node(node, Some(function_may_harm), state)
            || pg_sys::expression_tree_walker(node, Some(may_harm), state)
    }
}

/// Stable functions that our own conditions use.
const HARMLESS: [&CStr; 3] = [c"statement_timestamp", c"timestamptz_mi_interval", c"extract"];

/// Marked immutable, but dependent on `extra_float_digits`, `bytea_output` or `quote_all_identifiers`.
const BY_SETTINGS: [&CStr; 11] = [
    c"float4out",
    c"float8out",
    c"byteaout",
    c"point_out",
    c"lseg_out",
    c"path_out",
    c"box_out",
    c"line_out",
    c"poly_out",
    c"circle_out",
    c"quote_ident",
];

/// Time zone abbreviations whose meaning `timezone_abbreviations` can change, by the files that come with PostgreSQL.
const ABBREVIATIONS: [&str; 8] = ["ACST", "CST", "EAST", "EST", "IST", "SAST", "SAT", "WST"];

/// Whether a time zone name means the same under all settings.
pub fn is_lasting_zone(name: &str) -> bool {
    !ABBREVIATIONS.iter().any(|abbreviation| abbreviation.eq_ignore_ascii_case(name.trim()))
}

/// Whether a call uses a time zone whose name is not a constant or depends on settings.
///
/// # Safety
/// `node` is part of an analyzed expression.
unsafe fn has_varying_zone(node: *mut pg_sys::Node) -> bool {
    // SAFETY: the casts follow the nodes' tags; the function's name and argument type show that it takes a text first.
    unsafe {
        if (*node).type_ != pg_sys::NodeTag::T_FuncExpr {
            return false;
        }
        let call = &*node.cast::<pg_sys::FuncExpr>();
        let name = pg_sys::get_func_name(call.funcid);
        let Some(zone) = elements(call.args).first().map(|cell| cell.ptr_value.cast::<pg_sys::Node>()) else {
            return false;
        };
        if name.is_null() || CStr::from_ptr(name) != c"timezone" || pg_sys::exprType(zone) != pg_sys::TEXTOID {
            return false;
        }
        if (*zone).type_ != pg_sys::NodeTag::T_Const {
            return true;
        }
        let zone = &*zone.cast::<pg_sys::Const>();
        !zone.constisnull && !String::from_datum(zone.constvalue, false).is_some_and(|zone| is_lasting_zone(&zone))
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn function_may_harm(function: pg_sys::Oid, state: *mut c_void) -> bool {
    // SAFETY: the tuple is valid until it is released; the state is the `Whose` of `is_harmless`.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::PROCOID as _, pg_sys::Datum::from(function));
        if tuple.is_null() {
            return true;
        }
        let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_proc>();
        let name = CStr::from_ptr(form.proname.data.as_ptr());
        let arguments = form.proargtypes.values.as_slice(form.pronargs as usize);
        let is_own = function.to_u32() < pg_sys::FirstNormalObjectId
            && arguments.iter().chain([&form.prorettype]).all(|type_oid| is_own_type(*type_oid))
            && if form.provolatile == pg_sys::PROVOLATILE_IMMUTABLE as std::ffi::c_char {
                !BY_SETTINGS.contains(&name)
            } else {
                *state.cast::<Whose>() == Whose::Ours && HARMLESS.contains(&name)
            };
        // Only superusers can create C functions.
        let is_ours = form.prolang.to_u32() == C_LANGUAGE && name == c"ttl_instant";
        pg_sys::ReleaseSysCache(tuple);
        !is_own && !is_ours
    }
}

/// `pg_language.oid` of C, the same in every database.
const C_LANGUAGE: u32 = 13;

/// Whether a type is a built-in base type: neither polymorphic nor composed of others.
pub(super) unsafe fn is_own_type(type_oid: pg_sys::Oid) -> bool {
    // SAFETY: looks into the type cache.
    let kind = unsafe { pg_sys::get_typtype(type_oid) };
    // `cstring` is a pseudo-type, but the input and output functions of every type use it.
    type_oid == pg_sys::CSTRINGOID
        || (type_oid.to_u32() < pg_sys::FirstNormalObjectId && kind == pg_sys::TYPTYPE_BASE as std::ffi::c_char)
}
