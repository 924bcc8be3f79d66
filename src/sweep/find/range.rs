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
