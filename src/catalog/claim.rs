//! Claims: a rule has one sweeper at a time, and only while its definition is the one that was loaded.

use super::binding::{Binding, Columns};
use super::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::{access, spi};

/// First key of the advisory lock that a rule's sweeper holds; the second is the rule's id.
const ADVISORY_LOCK_CLASS: u32 = 0x7474_6c00;

/// Whether a sweep may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    Held,
    /// Another session is sweeping the rule.
    Busy,
    /// The rule was changed, paused or dropped.
    Changed,
}

impl Catalog {
    /// Tries to lock a rule's catalog rows without waiting. Returns whether it could.
    pub fn is_free(&self, id: i64) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE t.id = $1 FOR UPDATE OF t, b SKIP LOCKED",
            schema = self.schema
        );
        Ok(self.with_rights(|| spi::execute(&sql, &[id.into()]))? > 0)
    }

    /// Makes the current transaction the only sweeper of a rule until it ends, unless another session sweeps the rule
    /// or the rule has changed since it was loaded. Meanwhile no session can change the rule: a change that has
    /// committed is never followed by removals under the old definition. Does not wait for locks.
    ///
    /// Processes with shares of one sweep claim the rule together. They lock the key of its row, which includes the
    /// version: that keeps everybody from changing the rule, and nobody from counting rows.
    pub fn claim(&self, rule: &Rule, is_shared: bool) -> Result<Claim, TtlError> {
        if !access::try_advisory_lock(ADVISORY_LOCK_CLASS, rule.id, is_shared) {
            return Ok(Claim::Busy);
        }
        // Rebind, once, a rule that was bound under another major version.
        if !rule.meanings.is_comparable && self.is_free(rule.id)? {
            self.bind(rule.id, Binding::Upgraded)?;
            return Ok(Claim::Changed);
        }
        let lock = if is_shared { "FOR KEY SHARE OF t SKIP LOCKED" } else { "FOR NO KEY UPDATE OF t SKIP LOCKED" };
        if self.is_unchanged(rule, lock)? {
            self.check_meaning(rule)?;
            return Ok(Claim::Held);
        }
        Ok(if self.has_changed(rule)? { Claim::Changed } else { Claim::Busy })
    }

    /// Whether the rule has changed since it was loaded.
    pub fn has_changed(&self, rule: &Rule) -> Result<bool, TtlError> {
        Ok(!self.is_unchanged(rule, "")?)
    }

    /// Whether the rule is as it was loaded, and could be locked, if `lock` says so.
    fn is_unchanged(&self, rule: &Rule, lock: &str) -> Result<bool, TtlError> {
        // Check the columns themselves, too: DDL that no event trigger followed would not show in the version.
        let sql = format!(
            "SELECT to_regclass(t.archive_to) IS NOT DISTINCT FROM b.archive_relid
                    AND CASE WHEN t.on_expire IS NULL THEN b.on_expire_oid IS NULL
                             ELSE {schema}.ttl_on_expire_oid(t.on_expire) IS NOT DISTINCT FROM b.on_expire_oid END,
                    {columns}
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE t.id = $1 AND t.active AND t.version = $2 {lock}",
            columns = Columns::SQL,
            schema = self.schema
        );
        let same = self.with_rights(|| {
            spi::query_kept(&sql, &[rule.id.into(), rule.version.into()], |row| {
                Ok(row.get(1)? == Some(true) && Columns::read(&row, 2).is_ok_and(|columns| columns.check().is_ok()))
            })
        })?;
        Ok(same == [true])
    }
}
