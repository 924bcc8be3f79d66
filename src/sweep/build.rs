//! Making the index of a rule without keeping anybody from writing: in the transactions of `CREATE INDEX CONCURRENTLY`, in a
//! worker of its own, because it waits for the transactions of others.

use super::{in_sandbox, leaf, scan};
use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::expression::{self, Purpose};
use crate::pg::index;
use crate::pg::names::Regclass;
use crate::pg::relation::{self, Lock};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{spi, statement};
use pgrx::pg_sys::Oid;
use pgrx::spi::{quote_identifier, quote_qualified_identifier};
use std::time::Duration;

/// An index to be made.
struct Target {
    relid: Oid,
    schema: String,
    table: String,
    name: String,
}

/// Makes the index, if it is not there. A partitioned table has that of every partition made first, so that its own takes
/// no time.
pub fn run(catalog: &Catalog, rule: &Rule) -> Result<(), Failure> {
    let Some(name) = &rule.pending_index else { return Ok(()) };
    let scope = Scope::Transaction;
    let definition = scope.attempt(|| in_sandbox(rule, || Ok(definition(rule))))?;
    for target in scope.attempt(|| in_sandbox(rule, || targets(rule, name)))? {
        match target.existing(rule)? {
            Some((_, true)) => continue,
            Some((leftover, false)) if statement::can_run_alone() => {
                statement::run_alone(&format!("DROP INDEX CONCURRENTLY {leftover}"), rule.owner, Duration::ZERO)?;
            }
            Some((leftover, false)) => {
                let drop = format!("DROP INDEX {leftover}");
                scope.attempt(|| in_sandbox(rule, || spi::execute(&drop, &[])))?;
            }
            None => {}
        }
        let on = quote_qualified_identifier(&target.schema, &target.table);
        let create = format!("CREATE INDEX CONCURRENTLY {} ON {on} {definition}", quote_identifier(&target.name));
        statement::create_index_alone(&create, target.relid, rule.owner)?;
    }
    if rule.is_partitioned {
        let create = format!("CREATE INDEX {} ON {} {definition}", quote_identifier(name), rule.table);
        scope.attempt(|| in_sandbox(rule, || spi::execute(&create, &[])))?;
    }
    scope.attempt(|| catalog.bind_index(rule.id))
}

/// What stands behind the table's name.
fn definition(rule: &Rule) -> String {
    let filter = rule.options.filter.as_ref().filter(|filter| is_immutable(rule.relid, filter));
    let unmarked = rule.mark.as_ref().map(|(column, mark)| mark.unmarked(column));
    let conditions: Vec<_> = filter.into_iter().chain(&unmarked).map(|condition| format!("({condition})")).collect();
    let predicate = if conditions.is_empty() { String::new() } else { format!(" WHERE {}", conditions.join(" AND ")) };
    format!("USING {} (({})){predicate}", rule.options.index_method, rule.expiry.compared())
}

fn is_immutable(relid: Oid, filter: &str) -> bool {
    expression::check(relid, filter, Purpose::Filter).is_ok_and(|checked| checked.immutable)
}

/// The relations with rows of their own, each with the name of its index.
fn targets(rule: &Rule, name: &str) -> Result<Vec<Target>, TtlError> {
    let relids = if rule.is_partitioned { leaf::all(rule)? } else { vec![rule.relid] };
    let suffix = if rule.attnum.is_some() { rule.name.as_str() } else { "expr" };
    spi::read(
        "SELECT c.oid, n.nspname::text, c.relname::text
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY ($1) ORDER BY c.oid",
        &[relids.into()],
        |row| {
            let table: String = row.get(3)?.unwrap_or_default();
            let name = if rule.is_partitioned { index::usual_name(&table, suffix) } else { name.to_owned() };
            Ok(Target { relid: row.get(1)?.unwrap_or_default(), schema: row.get(2)?.unwrap_or_default(), table, name })
        },
    )
}

impl Target {
    /// The index of the table that has the name already, and whether it is what is wanted. If it is not, it is what is left
    /// of an attempt that failed, or that was made for what the rule said then.
    fn existing(&self, rule: &Rule) -> Result<Option<(String, bool)>, Failure> {
        let of_the_name = |relid: Oid| {
            spi::read(
                "SELECT i.indexrelid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
                 WHERE i.indrelid = $1 AND c.relname = $2",
                &[relid.into(), self.name.as_str().into()],
                |row| Ok(row.get::<Oid>(1)?.unwrap_or_default()),
            )
        };
        let method = rule.options.index_method.to_string();
        Scope::Transaction.attempt(|| {
            in_sandbox(rule, || {
                relation::lock(self.relid, Lock::Read);
                let Some(oid) = of_the_name(self.relid)?.into_iter().next() else { return Ok(None) };
                let is_wanted = scan::serving_index(rule, self.relid, &method, false)? == Some(oid);
                Ok(Regclass(oid).qualified_name().map(|name| (name, is_wanted)))
            })
        })
    }
}
