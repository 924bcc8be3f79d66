//! Pieces of SQL that mean the same in every search path.

/// An operation by PostgreSQL's own operator, in parentheses. Where a user's operator fits the types better than
/// PostgreSQL's own, an unqualified one would be the user's.
pub fn operation(left: &str, operator: &str, right: &str) -> String {
    format!("({left} OPERATOR(pg_catalog.{operator}) {right})")
}
