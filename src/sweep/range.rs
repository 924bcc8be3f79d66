//! What partitions are by: their ranges, beside a cutoff, and their keys.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::{bound, spi};
use pgrx::pg_sys::Oid;
use std::collections::HashMap;

/// How the range of a partition stands to a cutoff.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verdict {
    /// Whether it has room for values up to the cutoff.
    pub can_hold: bool,
    /// Whether it has none for others, so that every row in it has expired.
    pub is_past: bool,
}

/// The bounds of partitions by range, as parameters of a query.
pub struct Bounds {
    pub relids: Vec<Oid>,
    pub lower: Vec<Option<String>>,
    pub upper: Vec<Option<String>>,
}

impl Bounds {
    /// Those of the relations that are partitions by range still. Bounds are read as PostgreSQL keeps them, and compared by their
    /// type: no text decides about a partition.
    pub fn of(relids: &[Oid]) -> Self {
        let ranges: Vec<_> = relids.iter().filter_map(|relid| Some((*relid, bound::range_of(*relid)?))).collect();
        Self {
            relids: ranges.iter().map(|(relid, _)| *relid).collect(),
            lower: ranges.iter().map(|(_, range)| range.lower.clone()).collect(),
            upper: ranges.into_iter().map(|(_, range)| range.upper).collect(),
        }
    }

    /// The same as SQL, from the parameter of this number on.
    pub fn table(first: usize, type_name: &str) -> String {
        format!(
            "(SELECT relid, lower::{type_name}, upper::{type_name}
              FROM unnest(${first}::oid[], ${}::text[], ${}::text[]) AS bounds (relid, lower, upper))",
            first + 1,
            first + 2
        )
    }
}

/// How the ranges of these partitions stand to the cutoff; those that have none are left out.
pub fn judge(rule: &Rule, relids: &[Oid], cutoff: &str) -> Result<HashMap<Oid, Verdict>, TtlError> {
    let bounds = Bounds::of(relids);
    if bounds.relids.is_empty() {
        return Ok(HashMap::new());
    }
    let source = rule.predicate.expiry.source();
    let can_expire = source.can_expire_from("lower").unwrap_or_else(|| "false".into());
    let sql = format!(
        "SELECT relid, coalesce(lower <= {cutoff}, true), coalesce(upper <= {cutoff}, false) AND {can_expire}
         FROM {} AS bound",
        Bounds::table(1, source.type_name())
    );
    let found = spi::query(&sql, &[bounds.relids.into(), bounds.lower.into(), bounds.upper.into()], |row| {
        let verdict = Verdict { can_hold: row.get(2)?.unwrap_or(true), is_past: row.get(3)?.unwrap_or(false) };
        Ok((row.get(1)?.unwrap_or_default(), verdict))
    })?;
    Ok(found.into_iter().collect())
}

/// SQL that tells whether a column, by its name, is part of the partition key of a relation, or an expression in it uses it:
/// PostgreSQL has such a column depend on its own table.
pub fn is_key(relid: &str, column: &str) -> String {
    format!(
        "EXISTS (SELECT FROM pg_partitioned_table p
                 JOIN pg_attribute key ON key.attrelid = p.partrelid AND key.attname = {column}
                 JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = p.partrelid AND d.objsubid = key.attnum
                  AND d.refclassid = d.classid AND d.refobjid = d.objid AND d.refobjsubid = 0 AND d.deptype = 'i'
                 WHERE p.partrelid = {relid})"
    )
}

/// Whether a column is in the partition key of something that the relation is a partition of.
pub fn is_key_above(relid: Oid, column: &str) -> Result<bool, TtlError> {
    let sql = format!(
        "SELECT FROM pg_partition_ancestors($1) AS above WHERE above.relid <> $1 AND {}",
        is_key("above.relid", "$2")
    );
    Ok(!spi::read(&sql, &[relid.into(), column.into()], |_| Ok(()))?.is_empty())
}

/// The same of it, or of anything below it.
pub fn is_key_anywhere(relid: Oid, column: &str) -> Result<bool, TtlError> {
    let sql = format!("SELECT FROM pg_partition_tree($1) AS tree WHERE {}", is_key("tree.relid", "$2"));
    let is_below = !spi::read(&sql, &[relid.into(), column.into()], |_| Ok(()))?.is_empty();
    Ok(is_below || is_key_above(relid, column)?)
}
