//! The index of a rule: its name and definition, which one serves, building it at once or concurrently, leftovers.

pub mod build;
mod ensure;

pub use ensure::{drop, ensure};

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::index::{self, Wanted};
use crate::pg::{access, names, spi};
use crate::rule::{IndexMethod, Predicate};
use pgrx::pg_sys::Oid;
use pgrx::spi::quote_identifier;

/// The prefix of the names of indexes that the extension makes.
const PREFIX: &str = "idx_ttl_";

/// A heap of this many blocks (128 MB) is scanned faster than an index on it is built.
pub const SHORT_HEAP: u32 = 16_384;

/// Returns the index of a relation that has the rule's rows in order of expiry.
pub fn serving(rule: &Rule, relid: Oid) -> Result<Option<Oid>, TtlError> {
    of_method(rule, relid, IndexMethod::Btree)
}

/// Returns the BRIN index of a relation that tells which blocks can hold expired rows.
pub fn pruning(rule: &Rule, relid: Oid) -> Result<Option<Oid>, TtlError> {
    of_method(rule, relid, IndexMethod::Brin)
}

fn of_method(rule: &Rule, relid: Oid, method: IndexMethod) -> Result<Option<Oid>, TtlError> {
    index::serving(&Wanted {
        relid,
        key: &rule.predicate.expiry.compared(),
        method: &method.to_string(),
        condition: rule.predicate.timeless().as_deref(),
        at_once: true,
        guarantee: None,
    })
}

/// Returns the predicate of an index, if it is partial.
pub fn predicate(index: Oid) -> Result<Option<String>, TtlError> {
    let sql = "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indexrelid = $1";
    Ok(spi::read(sql, &[index.into()], |row| row.get(1))?.into_iter().next().flatten())
}

/// Returns the command that creates an index on `table`; `how` is `CONCURRENTLY ` or empty.
fn command(
    how: &str,
    name: &str,
    table: &str,
    method: IndexMethod,
    predicate: &Predicate,
    condition: Option<&str>,
) -> String {
    format!(
        "CREATE INDEX {how}{} ON {table} USING {method} (({})){}",
        quote_identifier(name),
        predicate.expiry.compared(),
        condition.map_or_else(String::new, |condition| format!(" WHERE {condition}"))
    )
}

/// Returns a free name for a relation's index: `idx_ttl_{table}_{column}`, shortened and numbered as PostgreSQL does.
/// `column` is `None` for an expression. The names of indexes that are still to be built are not free.
fn free_name(namespace: Oid, table: &str, column: Option<&str>) -> Result<String, TtlError> {
    let pending = Catalog::open()?.index_names(namespace)?;
    let numbers = std::iter::once(None).chain((1..).map(Some));
    let table = format!("{PREFIX}{table}");
    let mut names = numbers.map(|number: Option<u32>| names::object_name(&table, column.unwrap_or("expr"), number));
    let is_free = |name: &String| !pending.contains(name) && access::is_free_name(namespace, name);
    Ok(names.find(is_free).unwrap_or_default())
}
