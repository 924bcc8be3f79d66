//! The meaning of an expression: not its words but the objects they refer to, kept as an analyzed node tree.
//!
//! A tree refers to columns by number, and to functions, operators, types and enum labels by OID. So it can be printed
//! again after any of them was renamed, and shows whether a text still means the same.

use super::expression::{Relation, analyze};
use super::harmless;
use crate::error::{Purpose, TtlError};
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::ffi::{CStr, CString, c_void};
use std::ptr;

/// An analyzed expression, as text.
pub struct Meaning {
    pub tree: String,
    /// The functions in it that are not PostgreSQL's own.
    pub functions: Vec<Oid>,
    /// The operators and types in it that are not PostgreSQL's own.
    pub others: Vec<Oid>,
}

#[derive(Default)]
struct Objects {
    functions: Vec<Oid>,
    others: Vec<Oid>,
}

/// The major version that trees are written by. Another version may write them differently.
pub fn version() -> i32 {
    pg_sys::PG_VERSION_NUM as i32 / 10_000
}

/// Returns the meaning of a text in canonical form. Analyzing it may run user code (a domain check on a literal), so
/// call this as the table's owner.
pub fn of(relid: Oid, text: &str, purpose: Purpose) -> Result<Meaning, TtlError> {
    let relation = Relation::open(relid);
    let node = analyze(&relation, text, purpose)?;
    let mut objects = Objects::default();
    // SAFETY: `node` is an analyzed expression that only we use; its text is copied.
    unsafe {
        forget_modifiers(node, ptr::null_mut());
        collect(node, ptr::from_mut(&mut objects).cast());
        let Objects { mut functions, mut others } = objects;
        for list in [&mut functions, &mut others] {
            list.sort_unstable_by_key(|object| object.to_u32());
            list.dedup();
        }
        let tree = CStr::from_ptr(pg_sys::nodeToString(node.cast())).to_string_lossy().into_owned();
        Ok(Meaning { tree, functions, others })
    }
}

/// Whether a tree of this version calls no user code.
pub fn is_harmless(tree: &str) -> bool {
    let tree = CString::new(tree).unwrap_or_default();
    // SAFETY: the tree was written by `of`.
    unsafe { harmless::is_harmless(pg_sys::stringToNode(tree.as_ptr()).cast(), harmless::Whose::Users) }
}

/// Whether a text in canonical form means the same as a tree of this version. Call this, too, as the table's owner.
pub fn is(relid: Oid, text: &str, purpose: Purpose, tree: &str) -> Result<bool, TtlError> {
    let relation = Relation::open(relid);
    let node = analyze(&relation, text, purpose)?;
    let tree = CString::new(tree).unwrap_or_default();
    // SAFETY: `node` is an analyzed expression that only we use, and the tree was written by `of`.
    unsafe {
        forget_modifiers(node, ptr::null_mut());
        Ok(pg_sys::equal(node.cast(), pg_sys::stringToNode(tree.as_ptr())))
    }
}

/// Returns the canonical text of a tree of this version, with the current names of all objects. Raises PostgreSQL's
/// error if one of them is gone.
pub fn text_of(relid: Oid, tree: &str) -> String {
    let relation = Relation::open(relid);
    let tree = CString::new(tree).unwrap_or_default();
    // SAFETY: the tree was written by `of` for this relation.
    unsafe { relation.deparse(pg_sys::stringToNode(tree.as_ptr()).cast()) }
}

/// Clears the type modifiers of columns: the length limit of a column does not change the meaning.
#[pg_guard]
unsafe extern "C-unwind" fn forget_modifiers(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: `node` is null or part of an analyzed expression; the cast follows its tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        if (*node).type_ == pg_sys::NodeTag::T_Var {
            (*node.cast::<pg_sys::Var>()).vartypmod = -1;
        }
        pg_sys::expression_tree_walker(node, Some(forget_modifiers), state)
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn collect(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: `node` is null or part of an analyzed expression; the state is an `Objects`; casts follow the node's tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        let others = &mut (*state.cast::<Objects>()).others;
        match (*node).type_ {
            pg_sys::NodeTag::T_OpExpr | pg_sys::NodeTag::T_DistinctExpr | pg_sys::NodeTag::T_NullIfExpr => {
                take((*node.cast::<pg_sys::OpExpr>()).opno, others);
            }
            pg_sys::NodeTag::T_ScalarArrayOpExpr => {
                take((*node.cast::<pg_sys::ScalarArrayOpExpr>()).opno, others);
            }
            _ => {}
        }
        let has_type = !matches!((*node).type_, pg_sys::NodeTag::T_List | pg_sys::NodeTag::T_CaseWhen);
        if has_type {
            let type_oid = pg_sys::exprType(node);
            take(type_oid, others);
            take(pg_sys::getBaseType(type_oid), others);
            take(pg_sys::get_element_type(type_oid), others);
        }
        pg_sys::check_functions_in_node(node, Some(collect_function), state);
        pg_sys::expression_tree_walker(node, Some(collect), state)
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn collect_function(function: Oid, state: *mut c_void) -> bool {
    // SAFETY: the state is an `Objects`.
    take(function, unsafe { &mut (*state.cast::<Objects>()).functions });
    false
}

fn take(object: Oid, list: &mut Vec<Oid>) {
    if object.to_u32() >= pg_sys::FirstNormalObjectId {
        list.push(object);
    }
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use super::*;

    fn table() -> Oid {
        Spi::run("CREATE TABLE subject (gone int, id int, at timestamptz, name varchar(5))").unwrap();
        Spi::run("ALTER TABLE subject DROP COLUMN gone").unwrap();
        Spi::get_one("SELECT 'subject'::regclass::oid").unwrap().unwrap()
    }

    #[pg_test]
    fn a_meaning_is_printed_with_the_names_of_now() {
        let relid = table();
        let meaning = of(relid, "((id > 1) AND ((name)::text = 'x'::text))", Purpose::Filter).unwrap();
        Spi::run("ALTER TABLE subject RENAME id TO name2; ALTER TABLE subject RENAME name TO id").unwrap();
        assert_eq!(text_of(relid, &meaning.tree), "((name2 > 1) AND ((id)::text = 'x'::text))");
        assert!(!is(relid, "((id)::text = 'x'::text)", Purpose::Filter, &meaning.tree).unwrap());
        assert!(is(relid, &text_of(relid, &meaning.tree), Purpose::Filter, &meaning.tree).unwrap());
    }

    #[pg_test]
    fn a_longer_column_means_the_same_and_another_type_does_not() {
        let relid = table();
        let text = "((name)::text = 'x'::text)";
        let meaning = of(relid, text, Purpose::Filter).unwrap();
        Spi::run("ALTER TABLE subject ALTER name TYPE varchar(9)").unwrap();
        assert!(is(relid, text, Purpose::Filter, &meaning.tree).unwrap());
        Spi::run("ALTER TABLE subject ALTER name TYPE bpchar(9)").unwrap();
        assert!(!is(relid, text, Purpose::Filter, &meaning.tree).unwrap());
    }

    #[pg_test]
    fn objects_of_users_are_known() {
        Spi::run("CREATE TYPE mood AS ENUM ('a'); CREATE TABLE moods (m mood)").unwrap();
        Spi::run("CREATE FUNCTION yes(mood) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'").unwrap();
        let relid = Spi::get_one("SELECT 'moods'::regclass::oid").unwrap().unwrap();
        let meaning = of(relid, "yes(m) AND m = 'a'", Purpose::Filter).unwrap();
        assert_eq!(meaning.others, [Spi::get_one("SELECT 'mood'::regtype::oid").unwrap().unwrap()]);
        assert_eq!(meaning.functions, [Spi::get_one("SELECT 'yes'::regproc::oid").unwrap().unwrap()]);
    }
}
