//! Pieces of SQL that mean the same under every search path.

/// Returns an operation with a built-in operator, in parentheses. An unqualified operator would be a user's where that
/// fits the types better than the built-in one.
pub fn operation(left: &str, operator: &str, right: &str) -> String {
    format!("({left} OPERATOR(pg_catalog.{operator}) {right})")
}
