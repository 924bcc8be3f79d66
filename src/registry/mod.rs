//! Puts rules onto tables: checks table, columns and filter, sees to the index, and writes the catalog.

mod index;
mod table;

use crate::catalog::{Catalog, Definition, RuleIndex, StoredRule};
use crate::error::TtlError;
use crate::pg::expression::{self, Checked};
use crate::pg::{access, identity, spi};
use crate::rule::{Given, Mark, Options, Source};
use index::Conditions;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use table::{Column, Table};

/// Registers a rule, or registers it anew: statistics and a pause stay, options that are not given again do not.
pub fn create(relid: Oid, column: &str, given: Given) -> Result<(), TtlError> {
    let table = Table::lock(relid)?;
    table.check_storage()?;
    let column = table.column(column)?;
    let stored = Catalog::open()?.find(relid, column.attnum)?;
    let given = check_given_filter(relid, given)?;
    let options = Options::create(given, access::session_time_zone())?;
    let author = access::current_role();
    save(&table, &column, &options, stored.as_ref(), author)?;
    if let Some(stored) = stored {
        for change in options.changes_since(&stored.options) {
            notice!("TTL rule on column \"{}\" of table \"{}\": {change}", column.name, table.name);
        }
    }
    Ok(())
}

/// Changes what is given, and puts back to its default what is named in `reset`.
pub fn alter(relid: Oid, column: &str, given: Given, reset: &[String]) -> Result<(), TtlError> {
    let table = Table::lock(relid)?;
    let column = table.column(column)?;
    let stored = Catalog::open()?
        .find(relid, column.attnum)?
        .ok_or_else(|| TtlError::NoRule { table: table.name.clone(), column: column.name.clone() })?;
    // A stored filter is its owner's text, whoever alters the rule.
    let author = if given.filter.is_some() { access::current_role() } else { table.owner };
    let given = check_given_filter(relid, given)?;
    if let Some(option) = reset.iter().find(|option| given.has(option)) {
        return Err(TtlError::GivenAndReset(option.clone()));
    }
    let mut options = stored.options.clone().alter(given)?;
    for option in reset {
        options.reset(option)?;
    }
    save(&table, &column, &options, Some(&stored), author)
}

/// Removes the rule, and the index if the extension made it.
pub fn drop(relid: Oid, column: &str) -> Result<bool, TtlError> {
    let table = Table::lock(relid)?;
    let column = table.column(column)?;
    let Some(stored) = Catalog::open()?.find(relid, column.attnum)? else { return Ok(false) };
    Catalog::open()?.remove(stored.id)?;
    if let Some(index) = &stored.index {
        index::drop(&table, index)?;
    }
    Ok(true)
}

/// Pauses or resumes one rule of a table, or all of them; tells how many were not so before.
pub fn set_active(relid: Oid, column: Option<&str>, active: bool) -> Result<i32, TtlError> {
    let table = Table::lock(relid)?;
    let attnum = column.map(|column| table.column(column)).transpose()?.map(|column| column.attnum);
    Catalog::open()?.set_active(relid, attnum, active)
}

/// The table, if the caller may rule it.
pub fn owned_table(relid: Oid) -> Result<Oid, TtlError> {
    Ok(Table::describe(relid)?.relid)
}

/// A stored filter, after columns it uses were renamed.
pub fn rename_filter(relid: Oid, owner: Oid, filter: &str, known: &[(i16, String)]) -> Result<String, TtlError> {
    identity::sandboxed_as(owner, || expression::rename_columns(relid, filter, known))
}

/// A filter is checked as its author wrote it, with the author's search path, and goes on in canonical form.
fn check_given_filter(relid: Oid, mut given: Given) -> Result<Given, TtlError> {
    if let Some(filter) = &mut given.filter {
        *filter = expression::check(relid, filter)?.sql;
    }
    Ok(given)
}

fn save(
    table: &Table,
    column: &Column,
    options: &Options,
    stored: Option<&StoredRule>,
    author: Oid,
) -> Result<(), TtlError> {
    if Source::of_type(column.base_type).is_none() {
        return Err(TtlError::CannotExpire { column: column.name.clone(), data_type: column.data_type.clone() });
    }
    check_time_zone(&options.time_zone)?;
    let filter = options.filter.as_deref().map(|filter| check_filter(table, filter, author)).transpose()?;
    let unmarked = options.soft_delete_column.as_deref().map(|mark| check_mark(table, column, mark)).transpose()?;
    let conditions = Conditions { filter: filter.as_ref().map(|f| (f.sql.clone(), f.immutable)), unmarked };

    let current = stored.and_then(|stored| stored.index.as_ref());
    let index = index::ensure(table, column, options.index_method, &conditions, current, author)?;
    if let Some(outdated) = current.filter(|current| !is_same(current, index.as_ref())) {
        index::drop(table, outdated)?;
    }
    let definition = Definition {
        options,
        filter_columns: filter.map_or(Ok(Vec::new()), |filter| table.column_names(&filter.attnums))?,
        index: index.as_ref(),
    };
    let catalog = Catalog::open()?;
    match stored {
        Some(stored) => catalog.update(stored.id, &definition),
        None => catalog.insert(&table.schema, &table.name, &column.name, &definition),
    }
}

fn is_same(current: &RuleIndex, chosen: Option<&RuleIndex>) -> bool {
    chosen.is_some_and(|chosen| chosen.oid.is_some() && chosen.oid == current.oid)
}

/// PostgreSQL's own error names a zone it does not know.
fn check_time_zone(time_zone: &str) -> Result<(), TtlError> {
    spi::execute("SELECT timezone($1, now())", &[time_zone.into()])?;
    Ok(())
}

/// Checks a canonical filter, and that the table's owner may call all its functions: the sweep will.
fn check_filter(table: &Table, filter: &str, author: Oid) -> Result<Checked, TtlError> {
    let checked = identity::sandboxed_as(author, || expression::check(table.relid, filter))?;
    let probe = format!("SELECT FROM ONLY {} WHERE {} LIMIT 0", table.qualified_name(), checked.sql);
    identity::sandboxed_as(table.owner, || spi::execute(&probe, &[]))?;
    Ok(checked)
}

/// Checks the column that marks softly deleted rows; returns the condition that a row is not marked.
fn check_mark(table: &Table, source: &Column, name: &str) -> Result<String, TtlError> {
    let column = table.column(name)?;
    if column.attnum == source.attnum {
        return Err(TtlError::MarkIsSource(column.name));
    }
    if column.generated {
        return Err(TtlError::MarkIsGenerated(column.name));
    }
    match Mark::of_type(column.base_type) {
        None => Err(TtlError::CannotMark { column: column.name, data_type: column.data_type }),
        Some(Mark::Instant) if column.not_null => Err(TtlError::MarkIsNotNull(column.name)),
        Some(mark) => Ok(mark.unmarked(&column.quoted())),
    }
}
