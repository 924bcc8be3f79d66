//! Rules that a role without rights on the catalog writes into it, as in a restore. Each is checked as at registration.

use super::{check, check_name, definition, find, function_name, table_name};
use crate::catalog::{Catalog, Definition, DumpedRule};
use crate::error::TtlError;
use crate::pg::names::{Regclass, Regprocedure};
use crate::pg::transaction::subtransaction;
use crate::pg::{access, spi};
use crate::rule::{Given, Invalid, Options};
use crate::table::Table;
use crate::table::table_oid;
use pgrx::JsonB;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use serde::de::DeserializeOwned;

/// Registers a rule from its row in a dump. A rule that cannot be registered is skipped with a warning, so that the
/// restore does not lose the others.
pub fn restore(row: &JsonB) -> Result<(), TtlError> {
    let rule: DumpedRule = match parse(row) {
        Ok(rule) => rule,
        Err(error) => {
            warning!("a row that is not a TTL rule was left out: {error}");
            return Ok(());
        }
    };
    if let Err(failure) = subtransaction(|| register(&rule, parse(row)?)) {
        let DumpedRule { schema_name, table_name, column_name, .. } = rule;
        warning!(
            "TTL rule on column \"{column_name}\" of table \"{schema_name}.{table_name}\" left out: {}",
            failure.message
        );
    }
    Ok(())
}

fn parse<T: DeserializeOwned>(row: &JsonB) -> Result<T, TtlError> {
    Ok(serde_json::from_value(row.0.clone()).map_err(|error| Invalid::Other(error.to_string()))?)
}

/// Registers a rule without index or triggers: the dump creates them after the rules.
fn register(rule: &DumpedRule, options: Options) -> Result<(), TtlError> {
    let options = canonical(options.alter(&Given::default(), &[])?)?;
    let table = Table::lock(table_named(&rule.schema_name, &rule.table_name)?)?;
    table.check_storage()?;
    let (catalog, author) = (Catalog::open()?, access::current_role());
    let subject = table.stored_subject(&rule.column_name, author)?;
    let rule_name = rule.rule_name.as_deref();
    check_name(rule_name)?;
    if find(&table, &subject, Some(rule_name.unwrap_or_default()))?.is_some() {
        return Err(TtlError::RestoredTwice(subject.name));
    }
    let accepted = check(&table, &subject, &options, Some(rule.id), author)?;
    let definition = Definition {
        index_name: rule.index_name.as_deref(),
        index_created_by_extension: rule.index_created_by_extension,
        ..definition(&table, &subject, rule_name, &options, accepted.filter, rule.purges)?
    };
    catalog.insert_dumped(rule, &subject.name, &definition)
}

/// Returns the options with names as a registration writes them: they must mean the same in the next restore.
fn canonical(mut options: Options) -> Result<Options, TtlError> {
    if let Some(archive) = &mut options.archive_to {
        *archive = table_name(Regclass(table_oid(archive)?))?;
    }
    if let Some(function) = &mut options.on_expire {
        let signature = format!("{function}(regclass, jsonb)");
        let found = spi::query("SELECT $1::regprocedure::oid", &[signature.into()], |row| row.get(1))?;
        *function = function_name(Regprocedure(found.into_iter().flatten().next().unwrap_or_default()))?;
    }
    Ok(options)
}

fn table_named(schema: &str, table: &str) -> Result<Oid, TtlError> {
    let sql = "SELECT to_regclass(format('%I.%I', $1, $2))::oid";
    let found = spi::query(sql, &[schema.into(), table.into()], |row| row.get(1))?;
    found.into_iter().flatten().next().ok_or(TtlError::RestoredTableMissing)
}
