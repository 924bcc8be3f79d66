//! What a rule does to rows that stay: whether their table allows it.

use super::check_as_owner;
use crate::cascade;
use crate::catalog::Catalog;
use crate::error::TtlError;
use crate::pg::{access, bound, spi};
use crate::rule::{Cleared, Mark, Options, Update};
use crate::table::{Subject, Table};
use pgrx::pg_sys::Oid;

/// Checks what a rule does to rows that stay.
pub(super) fn check(
    table: &Table,
    subject: &Subject,
    options: &Options,
    id: Option<i64>,
) -> Result<Option<Update>, TtlError> {
    let catalog = Catalog::open()?;
    if catalog.is_updated_otherwise(table.relid, id, options)? {
        return Err(TtlError::UpdatedTwice);
    }
    let own: Vec<i16> = subject.attnum.iter().chain(&subject.uses).copied().collect();
    for column in catalog.cleared_by_others(table.relid, id)? {
        check_apart(table, &column, &own)?;
    }
    match (&options.soft_delete_column, &options.clear_columns) {
        (Some(mark), _) => check_mark(table, subject, mark).map(Some),
        (None, Some(columns)) => {
            let sources = [own, catalog.sources_of_others(table.relid, id)?].concat();
            check_clear(table, &sources, columns).map(Some)
        }
        (None, None) => Ok(None),
    }
}

/// Fails if clearing a column would change one by which rows expire.
fn check_apart(table: &Table, column: &str, sources: &[i16]) -> Result<(), TtlError> {
    let changed = cascade::changed_columns(table.relid, &[column.to_owned()])?;
    if sources.iter().any(|source| changed.contains(source)) {
        return Err(TtlError::ClearsSource(column.to_owned()));
    }
    Ok(())
}

/// Checks the column that marks soft-deleted rows.
fn check_mark(table: &Table, subject: &Subject, name: &str) -> Result<Update, TtlError> {
    let column = table.column(name)?;
    if subject.attnum == Some(column.attnum) || subject.uses.contains(&column.attnum) {
        return Err(TtlError::MarkIsSource(column.name));
    }
    if column.generated {
        return Err(TtlError::MarkIsGenerated(column.name));
    }
    if bound::is_partition_key(table.relid, std::slice::from_ref(&column.name))? {
        return Err(TtlError::MarkIsKey(column.name));
    }
    match Mark::of_type(column.base_type) {
        None => Err(TtlError::CannotMark { column: column.name, data_type: column.data_type }),
        Some(Mark::Instant) if column.not_null => Err(TtlError::MarkIsNotNull(column.name)),
        Some(mark) => Ok(Update::Mark(column.quoted(), mark)),
    }
}

/// Checks the columns that go back to their defaults. `sources` are those by which the table's rows expire.
fn check_clear(table: &Table, sources: &[i16], names: &[String]) -> Result<Update, TtlError> {
    let columns = names.iter().map(|name| table.column(name)).collect::<Result<Vec<_>, _>>()?;
    let attnums: Vec<i16> = columns.iter().map(|column| column.attnum).collect();
    let values = Catalog::open()?.default_values(table.relid, table.owner, &attnums)?;
    let mut cleared = Vec::new();
    for (column, default) in columns.into_iter().zip(values) {
        let clear = Cleared { column: column.quoted(), default };
        let itself = std::slice::from_ref(&column.name);
        check_apart(table, &column.name, sources)?;
        if column.generated {
            return Err(TtlError::ClearsGenerated(column.name));
        }
        if bound::is_partition_key(table.relid, itself)? {
            return Err(TtlError::ClearsKey { column: column.name, table: table.qualified_name() });
        }
        cascade::check_cleared(table.relid, itself, if clear.is_null() { itself } else { &[] })?;
        if column.not_null && clear.is_null() {
            return Err(TtlError::ClearsNotNull(column.name));
        }
        if !clear.is_null() && !are_told_apart(table.relid, column.attnum)? {
            return Err(TtlError::ClearsUnequal(column.name));
        }
        cleared.push(clear);
    }
    let update = Update::Clear(cleared);
    check_as_owner(table, &update.outstanding())?;
    Ok(update)
}

/// Whether values of a column that are equal are the same: its type has an order, and its collation is deterministic.
fn are_told_apart(relid: Oid, attnum: i16) -> Result<bool, TtlError> {
    let sql = "SELECT coalesce(c.collisdeterministic, true) FROM pg_attribute a LEFT JOIN pg_collation c ON c.oid = a.attcollation
               WHERE a.attrelid = $1 AND a.attnum = $2";
    let is_deterministic = spi::read(sql, &[relid.into(), attnum.into()], |row| row.get(1))? == [Some(true)];
    Ok(is_deterministic && access::has_order(relid, attnum))
}
