//! The ranges of partitions, and how they compare with a cutoff.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::{bound, spi};
use pgrx::pg_sys::Oid;
use std::collections::HashMap;

/// How the range of a partition compares with a cutoff.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verdict {
    /// Whether the range includes values up to the cutoff.
    pub can_hold: bool,
    /// Whether the range includes no other values, so that every row has expired.
    pub is_past: bool,
}

/// The bounds of range partitions, as query parameters.
pub struct Bounds {
    pub relids: Vec<Oid>,
    pub lower: Vec<Option<String>>,
    pub upper: Vec<Option<String>>,
}

impl Bounds {
    /// Reads the bounds of those relations that are still range partitions. Bounds are read as PostgreSQL stores them
    /// and compared by their type: no text decides about a partition.
    pub fn of(relids: &[Oid]) -> Self {
        let ranges: Vec<_> = relids.iter().filter_map(|relid| Some((*relid, bound::range_of(*relid)?))).collect();
        Self {
            relids: ranges.iter().map(|(relid, _)| *relid).collect(),
            lower: ranges.iter().map(|(_, range)| range.lower.clone()).collect(),
            upper: ranges.into_iter().map(|(_, range)| range.upper).collect(),
        }
    }

    /// The bounds as an SQL subquery, with parameters numbered from `first`.
    pub fn table(first: usize, type_name: &str) -> String {
        format!(
            "(SELECT relid, lower::{type_name}, upper::{type_name}
              FROM unnest(${first}::oid[], ${}::text[], ${}::text[]) AS bounds (relid, lower, upper))",
            first + 1,
            first + 2
        )
    }
}

/// Compares the ranges of these partitions with the cutoff. Relations without a range are left out.
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
