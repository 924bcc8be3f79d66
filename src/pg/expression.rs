//! Expressions over the rows of one table: checked, and printed in canonical form.

use super::access;
use super::harmless::{Whose, is_harmless, is_own_type};
use super::identity::{with_canonical_output, with_standard_syntax};
use super::transaction::{is_interrupt, subtransaction};
use crate::error::{Purpose, TtlError};
use pgrx::pg_sys::panic::CaughtError;
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};
use std::ffi::{CStr, CString};
use std::panic::AssertUnwindSafe;
use std::ptr;

/// An analyzed expression.
pub struct Checked {
    /// Canonical text, with every name outside `pg_catalog` qualified.
    pub sql: String,
    /// The columns it reads, by attribute number.
    pub attnums: Vec<i16>,
    /// Whether it may be indexed.
    pub immutable: bool,
    /// The type of its value.
    pub type_oid: pg_sys::Oid,
    /// Whether it is a bare column.
    pub is_column: bool,
    /// Whether it can run in any user's query.
    pub is_harmless: bool,
}

/// Checks an expression as its author wrote it, under the current search path and settings.
pub fn check_given(relid: pg_sys::Oid, text: &str, purpose: Purpose) -> Result<Checked, TtlError> {
    let relation = Relation::open(relid);
    let node = analyze_as_written(&relation, text, purpose)?;
    // SAFETY: an analyzed expression over the relation.
    unsafe { checked(&relation, node, purpose) }
}

/// Checks an expression in its canonical form.
pub fn check_stored(relid: pg_sys::Oid, text: &str, purpose: Purpose) -> Result<Checked, TtlError> {
    let relation = Relation::open(relid);
    let node = analyze(&relation, text, purpose)?;
    // SAFETY: an analyzed expression over the relation.
    unsafe { checked(&relation, node, purpose) }
}

/// # Safety
/// `node` is an analyzed expression over the relation.
unsafe fn checked(relation: &Relation, node: *mut pg_sys::Node, purpose: Purpose) -> Result<Checked, TtlError> {
    // SAFETY: as promised by the caller.
    let attnums = unsafe { attnums(node) };
    if attnums.iter().any(|attnum| *attnum <= 0) {
        return Err(TtlError::WholeRow(purpose));
    }
    // SAFETY: `node` is an analyzed expression; planning copies it.
    let (volatile, mutable) = unsafe {
        let planned: *mut pg_sys::Node = pg_sys::expression_planner(node.cast()).cast();
        (
            pg_sys::contain_volatile_functions(node) || pg_sys::contain_volatile_functions(planned),
            pg_sys::contain_mutable_functions(node) || pg_sys::contain_mutable_functions(planned),
        )
    };
    if volatile {
        return Err(TtlError::Volatile(purpose));
    }
    // SAFETY: as promised by the caller.
    unsafe {
        Ok(Checked {
            sql: relation.deparse(node),
            attnums,
            immutable: !mutable,
            type_oid: pg_sys::exprType(node),
            is_column: (*node).type_ == pg_sys::NodeTag::T_Var,
            is_harmless: is_harmless(node, Whose::Users),
        })
    }
}

/// Returns the value that a default gives a column, as a constant in SQL. Fails unless it is always the same value, of a
/// type of PostgreSQL's own, and calls nothing of users. `text` is the default as PostgreSQL prints it, which leaves out
/// casts to the column's type.
pub fn constant(relid: pg_sys::Oid, attnum: i16, text: &str) -> Result<String, TtlError> {
    let varies = || TtlError::DefaultVaries(text.to_owned());
    let relation = Relation::open(relid);
    let type_name = access::base_type_name(relid, attnum).ok_or(TtlError::Mismatch)?;
    let node = analyze(&relation, &format!("CAST(({text}) AS {type_name})"), Purpose::Value)?;
    // SAFETY: an analyzed expression over the relation; a node with that tag is a Const.
    unsafe {
        let planned: *mut pg_sys::Node = pg_sys::expression_planner(node.cast()).cast();
        if (*planned).type_ != pg_sys::NodeTag::T_Const || !is_harmless(node, Whose::Users) {
            return Err(varies());
        }
        if (*planned.cast::<pg_sys::Const>()).constisnull {
            return Ok("NULL".into());
        }
        if !is_own_type(pg_sys::exprType(planned)) {
            return Err(varies());
        }
        Ok(relation.deparse(planned))
    }
}

/// Whether a text is a bare name or not even an expression: then it can only be meant as a column name.
pub fn is_name(text: &str) -> bool {
    let is_name = subtransaction(|| {
        // SAFETY: within a transaction; the node is valid.
        unsafe { Ok((*parse(text, Purpose::Value)?).type_ == pg_sys::NodeTag::T_ColumnRef) }
    });
    is_name.unwrap_or(true)
}

/// An open relation, whose lock is kept until the end of the transaction.
pub(super) struct Relation(pub(super) pg_sys::Relation);

impl Relation {
    pub(super) fn open(relid: pg_sys::Oid) -> Self {
        // SAFETY: raises an ordinary error if there is no such relation.
        Self(unsafe { pg_sys::relation_open(relid, pg_sys::AccessShareLock as pg_sys::LOCKMODE) })
    }

    /// # Safety
    /// `node` is an analyzed expression over this relation alone.
    pub(super) unsafe fn deparse(&self, node: *mut pg_sys::Node) -> String {
        // Print constants so that they read back the same, whatever the session prefers.
        with_canonical_output(|| {
            // SAFETY: as promised by the caller; the relation is open, and is range table entry 1.
            unsafe {
                let name = (*(*self.0).rd_rel).relname.data.as_ptr();
                let context = pg_sys::deparse_context_for(name, (*self.0).rd_id);
                let text = pg_sys::deparse_expression(node, context, false, false);
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        })
    }
}

impl Drop for Relation {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: opened by us; the lock stays.
            unsafe { pg_sys::relation_close(self.0, pg_sys::NoLock as pg_sys::LOCKMODE) };
        }
    }
}

/// Returns the condition as the planner compares predicates: simplified, as a list of ANDed clauses.
pub(super) fn clauses(relation: &Relation, condition: &str) -> Result<*mut pg_sys::List, TtlError> {
    let node = analyze(relation, condition, Purpose::Filter)?;
    // SAFETY: `node` is an analyzed boolean expression.
    unsafe {
        let simplified = pg_sys::eval_const_expressions(ptr::null_mut(), node);
        Ok(pg_sys::make_ands_implicit(pg_sys::canonicalize_qual(simplified.cast(), false)))
    }
}

/// Parse analysis of a text that is in canonical form or written by us.
pub(super) fn analyze(relation: &Relation, text: &str, purpose: Purpose) -> Result<*mut pg_sys::Node, TtlError> {
    with_standard_syntax(|| analyze_as_written(relation, text, purpose))
}

/// Parse analysis. PostgreSQL's errors are raised again as [`TtlError::Expression`], without their cursor position,
/// which would point into our caller's statement. They are not returned as values, because no code may continue before
/// the (sub)transaction in which they occurred is rolled back.
fn analyze_as_written(relation: &Relation, text: &str, purpose: Purpose) -> Result<*mut pg_sys::Node, TtlError> {
    let relation = AssertUnwindSafe(relation.0);
    let analyzed = PgTryBuilder::new(|| {
        // SAFETY: the relation outlives the call, and the parse state is used for this one expression.
        unsafe {
            let raw = parse(text, purpose)?;
            let state = pg_sys::make_parsestate(ptr::null_mut());
            let lock = pg_sys::AccessShareLock as i32;
            let item = pg_sys::addRangeTableEntryForRelation(state, *relation, lock, ptr::null_mut(), false, true);
            pg_sys::addNSItemToQuery(state, item, false, true, true);
            let mut node = pg_sys::transformExpr(state, raw, pg_sys::ParseExprKind::EXPR_KIND_WHERE);
            if purpose == Purpose::Filter {
                node = pg_sys::coerce_to_boolean(state, node, c"a TTL filter".as_ptr());
            }
            pg_sys::assign_expr_collations(state, node);
            if (*state).p_hasSubLinks { Err(TtlError::Subquery(purpose)) } else { Ok(node) }
        }
    })
    .catch_others(|error| match error {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) if !is_interrupt(&report) => {
            let code = match report.sql_error_code() {
                // User code that raises the SQLSTATE of a cancel must not pass for one: handlers let cancels through.
                PgSqlErrorCode::ERRCODE_QUERY_CANCELED => PgSqlErrorCode::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
                code => code,
            };
            Err(TtlError::Expression { purpose, code, message: report.message().into() })
        }
        interrupt_or_panic => interrupt_or_panic.rethrow(),
    })
    .execute();
    match analyzed {
        Err(error @ TtlError::Expression { .. }) => error.raise(),
        analyzed => analyzed,
    }
}

/// Returns the raw parse tree of exactly one expression. A text that ends it and begins another clause is rejected.
///
/// # Safety
/// Must be called in a transaction, because it runs PostgreSQL's parser.
pub(super) unsafe fn parse(text: &str, purpose: Purpose) -> Result<*mut pg_sys::Node, TtlError> {
    let sql = CString::new(format!("SELECT {text}")).map_err(|_| TtlError::NotAnExpression(purpose))?;
    // SAFETY: the parser returns a list of RawStmt; each cast below follows a check of the node's tag or its type.
    unsafe {
        let [statement] = elements(pg_sys::raw_parser(sql.as_ptr(), pg_sys::RawParseMode::RAW_PARSE_DEFAULT)) else {
            return Err(TtlError::NotAnExpression(purpose));
        };
        let select: *mut pg_sys::SelectStmt = (*statement.ptr_value.cast::<pg_sys::RawStmt>()).stmt.cast();
        if (*select).type_ != pg_sys::NodeTag::T_SelectStmt {
            return Err(TtlError::NotAnExpression(purpose));
        }
        let s = &*select;
        let lists = [
            s.distinctClause,
            s.fromClause,
            s.groupClause,
            s.windowClause,
            s.valuesLists,
            s.sortClause,
            s.lockingClause,
        ];
        let nodes =
            [s.whereClause, s.havingClause, s.limitOffset, s.limitCount, s.intoClause.cast(), s.withClause.cast()];
        let bare = lists.iter().all(|list| list.is_null())
            && nodes.iter().all(|node| node.is_null())
            && s.op == pg_sys::SetOperation::SETOP_NONE;
        match elements(s.targetList) {
            [target] if bare => {
                let target = &*target.ptr_value.cast::<pg_sys::ResTarget>();
                if target.name.is_null() && !is_star(target.val) {
                    Ok(target.val)
                } else {
                    Err(TtlError::NotAnExpression(purpose))
                }
            }
            _ => Err(TtlError::NotAnExpression(purpose)),
        }
    }
}

/// Whether a node is a bare `*`, which is not an expression, although only a SELECT list knows that.
///
/// # Safety
/// `node` is a valid raw parse node.
unsafe fn is_star(node: *mut pg_sys::Node) -> bool {
    // SAFETY: the cast follows a check of the node's tag; the fields of a column reference are nodes.
    unsafe {
        (*node).type_ == pg_sys::NodeTag::T_ColumnRef
            && elements((*node.cast::<pg_sys::ColumnRef>()).fields)
                .first()
                .is_some_and(|field| (*field.ptr_value.cast::<pg_sys::Node>()).type_ == pg_sys::NodeTag::T_A_Star)
    }
}

/// # Safety
/// `node` is an analyzed expression over range table entry 1.
unsafe fn attnums(node: *mut pg_sys::Node) -> Vec<i16> {
    let mut found = Vec::new();
    // SAFETY: as promised by the caller; the set is palloc'd by PostgreSQL.
    unsafe {
        let mut set = ptr::null_mut();
        pg_sys::pull_varattnos(node, 1, &mut set);
        let mut member = -1;
        loop {
            member = pg_sys::bms_next_member(set, member);
            if member < 0 {
                return found;
            }
            found.push((member + pg_sys::FirstLowInvalidHeapAttributeNumber) as i16);
        }
    }
}

/// # Safety
/// `list` is null or a valid list of pointers, not changed while the slice is in use.
pub(super) unsafe fn elements<'a>(list: *mut pg_sys::List) -> &'a [pg_sys::ListCell] {
    if list.is_null() {
        &[]
    } else {
        // SAFETY: a list holds `length` cells.
        unsafe { std::slice::from_raw_parts((*list).elements, (*list).length as usize) }
    }
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use super::*;
    use pgrx::prelude::*;

    fn table() -> pg_sys::Oid {
        Spi::run("CREATE TABLE subject (gone int, id int, at timestamptz, name text)").unwrap();
        Spi::run("ALTER TABLE subject DROP COLUMN gone").unwrap();
        Spi::get_one("SELECT 'subject'::regclass::oid").unwrap().unwrap()
    }

    #[pg_test]
    fn a_filter_is_printed_canonically_and_knows_its_columns() {
        let checked = check_given(table(), "name like 'a%' and ID > 1", Purpose::Filter).unwrap();
        assert_eq!(checked.sql, "((name ~~ 'a%'::text) AND (id > 1))");
        assert_eq!(checked.attnums, [2, 4]);
        assert!(checked.immutable);
    }

    #[pg_test]
    fn a_stable_filter_is_not_immutable() {
        assert!(!check_given(table(), "at < now()", Purpose::Filter).unwrap().immutable);
    }

    #[pg_test]
    fn what_postgres_says_of_a_bad_filter_keeps_its_sqlstate() {
        let relid = table();
        let failure = subtransaction(|| check_given(relid, "nowhere > 1", Purpose::Filter)).err().unwrap();
        assert_eq!(failure.to_string(), "42703: invalid filter: column \"nowhere\" does not exist");
    }
}
