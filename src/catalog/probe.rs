//! The index that tells how late a rule is without running user code.

use super::Catalog;
use crate::error::TtlError;
use crate::pg::index::{self, Wanted};
use crate::pg::{identity, spi};
use pgrx::datum::Interval;
use pgrx::pg_sys::Oid;
use std::collections::HashSet;

/// The data needed to tell how late a rule is.
pub struct Probe {
    pub id: i64,
    pub index: Oid,
    pub unit: Option<String>,
    pub ttl: Interval,
    pub time_zone: String,
}

impl Catalog {
    /// Finds out whether the index of a rule has exactly its rows. That reads the filter as the owner, so the answer is
    /// stored: a user who only looks runs no other user's code.
    pub(super) fn know_probe(&self, id: i64) -> Result<(), TtlError> {
        let read = format!(
            "SELECT b.index_relid FROM {schema}.ttl_binding b JOIN pg_class c ON c.oid = b.relid
             JOIN pg_index i ON i.indexrelid = b.index_relid AND i.indisvalid
             WHERE b.rule_id = $1 AND b.probe_relid IS DISTINCT FROM b.index_relid AND (c.relkind = 'p' OR NOT c.relhassubclass)",
            schema = self.schema
        );
        let write = format!("UPDATE {}.ttl_binding SET probe_relid = $2 WHERE rule_id = $1", self.schema);
        let found = self.with_rights(|| spi::query(&read, &[id.into()], |row| row.get::<Oid>(1)))?;
        let Some(index) = found.into_iter().flatten().next() else { return Ok(()) };
        let Some(rule) = self.rule_now(id)?.filter(|rule| rule.check_owner().is_ok()) else { return Ok(()) };
        let tells = identity::sandboxed_as(rule.owner, || {
            index::tells(
                index,
                &Wanted {
                    relid: rule.relid,
                    key: &rule.predicate.expiry.compared(),
                    method: "btree",
                    condition: rule.predicate.timeless().as_deref(),
                    at_once: false,
                    guarantee: None,
                },
            )
        })?;
        if tells {
            self.with_rights(|| spi::execute(&write, &[id.into(), index.into()]))?;
        }
        Ok(())
    }

    /// Returns the rules that the current role may see and whose lag an index can tell.
    pub fn probes(&self) -> Result<Vec<Probe>, TtlError> {
        let visible: HashSet<i64> = self.visible_rules()?.into_iter().collect();
        let sql = format!(
            "SELECT t.id, CASE WHEN EXISTS (SELECT FROM pg_index i WHERE i.indexrelid = b.probe_relid) THEN b.probe_relid
                               ELSE {schema}.ttl_index_oid(b.relid, NULL, t.index_name) END, t.unit, t.expire_after, t.time_zone
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE b.probe_relid = b.index_relid AND b.types <> '{{}}'",
            schema = self.schema
        );
        let mut probes = self.with_rights(|| {
            spi::read(&sql, &[], |row| {
                Ok(Probe {
                    id: row.get(1)?.unwrap_or_default(),
                    index: row.get(2)?.unwrap_or_default(),
                    unit: row.get(3)?,
                    ttl: row.get(4)?.ok_or(pgrx::spi::Error::InvalidPosition)?,
                    time_zone: row.get(5)?.unwrap_or_default(),
                })
            })
        })?;
        probes.retain(|probe| visible.contains(&probe.id));
        Ok(probes)
    }
}
