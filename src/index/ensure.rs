//! The index a rule needs: found among the table's indexes, or created.

use super::{command, free_name};
use crate::catalog::RuleIndex;
use crate::error::TtlError;
use crate::pg::index::{self, Wanted};
use crate::pg::{access, identity, relation, spi, storage};
use crate::rule::{IndexMethod, Options, Predicate};
use crate::table::{Subject, Table};
use pgrx::pg_sys::Oid;
use pgrx::spi::quote_qualified_identifier;

/// Finds or creates the index. `author` is the role that wrote the conditions; the index is created as that role.
pub fn ensure(
    table: &Table,
    subject: &Subject,
    options: &Options,
    predicate: &Predicate,
    filter_is_immutable: bool,
    current: Option<&RuleIndex>,
    author: Oid,
) -> Result<Option<RuleIndex>, TtlError> {
    let method = options.index_method;
    if method == IndexMethod::None {
        return Ok(None);
    }
    if options.concurrently {
        storage::check_concurrent_index(table.relid)?;
    }
    let serving = identity::sandboxed_as(table.owner, || {
        index::serving(&Wanted {
            relid: table.relid,
            key: &predicate.expiry.compared(),
            method: &method.to_string(),
            condition: predicate.timeless().as_deref(),
            at_once: false,
            // With an index that has marked or cleared rows, too, every sweep would scan them again.
            guarantee: predicate.outstanding().as_deref(),
        })
    })?;
    if let Some(oid) = serving {
        let made_by_us = current.is_some_and(|index| index.oid == Some(oid) && index.made_by_us);
        return Ok(Some(RuleIndex { name: name_of(oid)?, oid: Some(oid), made_by_us, is_valid: true }));
    }
    if !subject.immutable {
        return Err(TtlError::NotImmutable);
    }
    let name = free_name(table.namespace, &table.name, subject.attnum.map(|_| subject.name.as_str()))?;
    if options.concurrently {
        if !access::may_create_in(&table.schema, access::current_role()) {
            return Err(TtlError::SchemaPermission(table.schema.clone()));
        }
        // An index that is not valid yet is being built under its name.
        let pending = current.filter(|index| index.made_by_us && !index.is_valid);
        let (name, oid) = pending.map_or((name, None), |index| (index.name.clone(), index.oid));
        return Ok(Some(RuleIndex { name, oid, made_by_us: true, is_valid: false }));
    }
    let condition = predicate.indexable(filter_is_immutable);
    let create = command("", &name, &table.qualified_name(), method, predicate, condition.as_deref());
    identity::sandboxed_as(author, || spi::execute(&create, &[]))?;
    Ok(Some(RuleIndex { name, oid: None, made_by_us: true, is_valid: true }))
}

/// Drops an index the extension made for the column with this number, 0 for an expression. An index that is already gone
/// is not an error.
pub fn drop(table: &Table, index: &RuleIndex, attnum: i16) -> Result<(), TtlError> {
    if let (Some(oid), true) = (index.oid, index.made_by_us) {
        // Somebody may have made another index under the name before ours was built.
        let sql = "SELECT FROM pg_index WHERE indexrelid = $1 AND indkey[0] = $2 AND indnatts = 1 AND NOT indisunique";
        if spi::read(sql, &[oid.into(), attnum.into()], |_| Ok(()))?.is_empty() {
            return Ok(());
        }
        // An index attached to a parent's index goes with that; one taken over by a constraint, with the constraint.
        if relation::has_parent(oid) || is_of_constraint(oid)? {
            return Ok(());
        }
        let drop = format!("DROP INDEX {}", quote_qualified_identifier(&table.schema, &name_of(oid)?));
        spi::execute(&drop, &[])?;
    }
    Ok(())
}

fn is_of_constraint(index: Oid) -> Result<bool, TtlError> {
    let sql = "SELECT FROM pg_constraint WHERE conindid = $1 AND contype IN ('p', 'u', 'x')";
    Ok(!spi::read(sql, &[index.into()], |_| Ok(()))?.is_empty())
}

fn name_of(oid: Oid) -> Result<String, TtlError> {
    access::relation_name(oid).ok_or(TtlError::UnknownTable(oid.to_u32()))
}
