//! Finds rules: for workers, for a table, and for queries that must not see hidden rows.

use super::Catalog;
use super::binding::Columns;
use super::rule::{Broken, Rule};
use crate::error::TtlError;
use crate::pg::{access, memo, process, spi};
use pgrx::PgSqlErrorCode;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys::Oid;
use std::time::Duration;

/// How often rules are read again while a command that concerns them is committing, a millisecond apart.
const DDL_ENDS: u32 = 20;

impl Catalog {
    /// Returns the active rules on one table, or on all, if the current role has the rights of the table's owner. A
    /// rule that cannot be swept comes with the reason.
    pub fn active_rules(&self, relid: Option<Oid>) -> Result<Vec<Result<Rule, Broken>>, TtlError> {
        let condition = "t.active AND b.relid = coalesce($1, b.relid) AND pg_has_role($2, c.relowner, 'USAGE')";
        self.rules_where(condition, &[relid.into(), access::current_role().into()])
    }

    /// Returns the active rules that workers may sweep, or the one with this id: none while sweeping is off, and none
    /// that is on hold during a restore or an initial copy. One snapshot decides about all, so that a rule created in
    /// the transaction that switches sweeping off is not swept. A rule whose restore is over is released for good: a
    /// trigger dropped from then on no longer counts as still to be restored.
    pub fn rules_for_workers(&self, id: Option<i64>) -> Result<Vec<Result<Rule, Broken>>, TtlError> {
        let condition = format!(
            "t.active AND t.id = coalesce($1, t.id) AND NOT EXISTS (SELECT FROM {}.ttl_worker_off)",
            self.schema
        );
        if id.is_none() {
            self.remove_forsaken()?;
            self.bind_rebuilt_indexes()?;
        }
        let mut rules = self.rules_where(&condition, &[id.into()])?;
        // In a parallel restore, a session may create a trigger while another writes the rule: neither sees the other.
        for rule in rules.iter().flatten().filter(|rule| rule.state.was_restored && rule.state.hold.is_some()) {
            if self.is_free(rule.id)? {
                self.count_guards(rule.id, rule.relid)?;
            }
        }
        rules.retain(|rule| rule.as_ref().map_or_else(|broken| !broken.is_held, |rule| rule.state.hold.is_none()));
        for rule in rules.iter().flatten().filter(|rule| rule.state.was_restored) {
            // A session that is changing the rule releases it itself, or the next pass does.
            if self.is_free(rule.id)? {
                self.release(Some(rule.id))?;
            }
        }
        Ok(rules)
    }

    /// Removes rules whose table is gone. They go with it; one left behind must not wait for a new table of that name.
    fn remove_forsaken(&self) -> Result<(), TtlError> {
        let find = format!(
            "SELECT b.rule_id FROM {}.ttl_binding b LEFT JOIN pg_class c ON c.oid = b.relid WHERE c.oid IS NULL",
            self.schema
        );
        let found = self.with_rights(|| spi::read(&find, &[], |row| Ok(row.get::<i64>(1)?.unwrap_or_default())))?;
        for id in found {
            if self.is_free(id)? {
                self.remove(id)?;
            }
        }
        Ok(())
    }

    /// Binds rules to indexes that were rebuilt under a new OID, while their names tell which.
    fn bind_rebuilt_indexes(&self) -> Result<(), TtlError> {
        let find = format!(
            "SELECT b.rule_id FROM {schema}.ttl_binding b JOIN {schema}.ttl_index_table t ON t.id = b.rule_id
             WHERE b.index_relid IS NOT NULL AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indexrelid = b.index_relid)
               AND {schema}.ttl_ready_index(b.relid, t.index_name, t.concurrently) IS NOT NULL",
            schema = self.schema
        );
        let found = self.with_rights(|| spi::read(&find, &[], |row| Ok(row.get::<i64>(1)?.unwrap_or_default())))?;
        for id in found {
            if self.is_free(id)? {
                self.bind_objects(id)?;
                self.forget_rule(id)?;
            }
        }
        Ok(())
    }

    /// Whether a role has the owner's rights on a rule's table, and whether it has them as an owner and not as a
    /// superuser. Both are true if the table is gone: the role that has just dropped it may have had them.
    pub(super) fn rights_on(&self, id: i64, role: Oid) -> Result<(bool, bool), TtlError> {
        let sql = format!(
            "SELECT coalesce(pg_has_role($2, c.relowner, 'USAGE'), true),
                    coalesce(c.relowner = $2 OR NOT (SELECT rolsuper FROM pg_roles WHERE oid = $2), true)
             FROM {}.ttl_binding b LEFT JOIN pg_class c ON c.oid = b.relid WHERE b.rule_id = $1",
            self.schema
        );
        let flag = |row: &spi::Row<'_>, ordinal| Ok::<_, pgrx::spi::Error>(row.get(ordinal)?.unwrap_or_default());
        let args = [id.into(), role.into()];
        let found = self.with_rights(|| spi::read(&sql, &args, |row| Ok((flag(&row, 1)?, flag(&row, 2)?))))?;
        Ok(found.into_iter().next().unwrap_or_default())
    }

    /// Whether workers have anything to do in this database, now or later.
    pub fn has_active_rules(&self) -> Result<bool, TtlError> {
        let sql = format!("SELECT EXISTS (SELECT FROM {}.ttl_index_table WHERE active)", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))? == [Some(true)])
    }

    /// Returns the rules that hide expired rows, each with all relations that can hold its rows.
    pub fn hidden_rules(&self) -> Result<Vec<(Rule, Vec<Oid>)>, TtlError> {
        let tree = format!(
            "WITH RECURSIVE tree (rule_id, relid) AS (
                 SELECT b.rule_id, b.relid FROM {schema}.ttl_binding b JOIN {schema}.ttl_index_table t ON t.id = b.rule_id
                 WHERE t.hide_expired
                 UNION SELECT tree.rule_id, i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.relid)
             SELECT rule_id, relid FROM tree",
            schema = self.schema
        );
        let relations = self.with_rights(|| {
            spi::peek(&tree, |row| Ok((row.get::<i64>(1)?.unwrap_or_default(), row.get::<Oid>(2)?.unwrap_or_default())))
        })?;
        if relations.is_empty() {
            return Ok(Vec::new());
        }
        let rules = self.with_rights(|| spi::peek(&self.rules_sql("t.hide_expired"), |row| Ok(self.rule(&row))))?;
        let relids_of = |id| relations.iter().filter(|relation| relation.0 == id).map(|relation| relation.1).collect();
        Ok(rules
            .into_iter()
            .flatten()
            .map(|rule| (relids_of(rule.id), rule))
            .map(|(relids, rule)| (rule, relids))
            .collect())
    }

    /// Returns the rules on a table, active or not, to any caller: a row's expiry reveals no more than the row itself.
    pub fn rules_on(&self, relid: Oid) -> Result<Vec<Rule>, TtlError> {
        Ok(self.rules_where("b.relid = $1", &[relid.into()])?.into_iter().flatten().collect())
    }

    /// Returns the ids of all rules on a table, including rules that cannot be read.
    pub fn numbers_on(&self, relid: Oid) -> Result<Vec<i64>, TtlError> {
        let sql = format!("SELECT rule_id FROM {}.ttl_binding WHERE relid = $1", self.schema);
        self.with_rights(|| spi::query(&sql, &[relid.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// Returns table and archive of every rule that archives, except rule `but` and the one that purges for it.
    pub fn archives(&self, but: Option<i64>) -> Result<Vec<(Oid, Oid)>, TtlError> {
        let sql = format!(
            "SELECT b.relid, b.archive_relid FROM {schema}.ttl_binding b JOIN {schema}.ttl_index_table t ON t.id = b.rule_id
             WHERE b.archive_relid IS NOT NULL AND t.id IS DISTINCT FROM $1 AND ($1 IS NULL OR t.purges IS DISTINCT FROM $1)",
            schema = self.schema
        );
        self.with_rights(|| {
            spi::read(&sql, &[but.into()], |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default())))
        })
    }

    /// Returns a rule, if it exists and can be swept.
    pub fn rule_with_id(&self, id: i64) -> Result<Option<Rule>, TtlError> {
        Ok(self.rules_where("t.id = $1", &[id.into()])?.into_iter().find_map(Result::ok))
    }

    /// Returns the columns that a rule's filter and expression read.
    pub fn columns_read(&self, id: i64) -> Result<Vec<String>, TtlError> {
        let sql = format!(
            "SELECT DISTINCT unnest(filter_columns || expression_columns) FROM {}.ttl_index_table WHERE id = $1",
            self.schema
        );
        self.with_rights(|| spi::read(&sql, &[id.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// Returns a rule as this transaction has just written it.
    pub(super) fn rule_now(&self, id: i64) -> Result<Option<Rule>, TtlError> {
        let found =
            self.with_rights(|| spi::query(&self.rules_sql("t.id = $1"), &[id.into()], |row| Ok(self.rule(&row))))?;
        Ok(found.into_iter().find_map(Result::ok))
    }

    fn rules_where(&self, condition: &str, args: &[DatumWithOid<'_>]) -> Result<Vec<Result<Rule, Broken>>, TtlError> {
        let sql = self.rules_sql(condition);
        let read = || self.with_rights(|| spi::read(&sql, args, |row| Ok(self.rule(&row))));
        let mut rules = read()?;
        for _ in 0..DDL_ENDS {
            if !self.are_in_flux(&rules)? {
                break;
            }
            process::rest(Duration::from_millis(1));
            memo::hear_of_changes();
            rules = read()?;
        }
        Ok(rules)
    }

    /// Whether a rule seems to lack a column only because a command that renames it is just committing: the rule's row is
    /// read by a snapshot, and columns from PostgreSQL's cache, which hears of a commit a moment later.
    fn are_in_flux(&self, rules: &[Result<Rule, Broken>]) -> Result<bool, TtlError> {
        let lack =
            |broken: &&Broken| broken.failure.code == PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN && !broken.is_known;
        let ids: Vec<i64> =
            rules.iter().filter_map(|rule| rule.as_ref().err()).filter(lack).map(|it| it.rule_id).collect();
        if ids.is_empty() {
            return Ok(false);
        }
        let sql = format!(
            "SELECT coalesce(bool_and(a.attname = used.name), false)
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             CROSS JOIN LATERAL (SELECT {columns}) AS read (relid, attnums, names, types)
             CROSS JOIN LATERAL unnest(array_remove(read.attnums, NULL), array_remove(read.names, NULL)) AS used (attnum, name)
             LEFT JOIN pg_attribute a ON a.attrelid = b.relid AND a.attnum = used.attnum AND NOT a.attisdropped
             WHERE t.id = ANY ($1) GROUP BY t.id",
            columns = Columns::SQL,
            schema = self.schema
        );
        let are_there = self.with_rights(|| spi::read(&sql, &[ids.into()], |row| row.get(1)))?;
        Ok(are_there.contains(&Some(true)))
    }
}
