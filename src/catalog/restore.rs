//! Rules restored from a dump, and why they are on hold.

use super::binding::Binding;
use super::{Catalog, Definition};
use crate::error::TtlError;
use crate::guc;
use crate::pg::transaction::subtransaction;
use crate::pg::{memo, process, shmem, spi};
use pgrx::heap_tuple::PgHeapTuple;
use pgrx::prelude::*;
use pgrx::{AllocatedByRust, JsonB};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The columns that a restore keeps of a dumped rule, besides its options. Statistics are not kept: only the catalog's
/// owner may say that they are true.
#[derive(Serialize, Deserialize)]
pub struct DumpedRule {
    pub id: i64,
    pub schema_name: String,
    pub table_name: String,
    pub column_name: String,
    pub rule_name: Option<String>,
    pub active: bool,
    pub guards: i32,
    pub column_types: Option<Vec<String>>,
    pub index_name: Option<String>,
    pub index_created_by_extension: bool,
    pub purges: Option<i64>,
}

/// How far a dumped rule's id may be ahead of the sequence here, so that no user can exhaust it.
const NUMBERS_AHEAD: i64 = 1_000_000_000;

/// The table and columns that a row written into the catalog names.
struct Written {
    schema: String,
    table: String,
    column: String,
    mark: Option<String>,
    is_complete: bool,
    /// Whether another rule is already on the column.
    is_taken: bool,
    is_its_own_mark: bool,
}

impl Catalog {
    /// Binds a rule that was written. A rule whose table or column is missing is left out, because restoring a dump
    /// without some of its tables must not lose the other rules.
    pub fn bind_written(&self, id: i64) -> Result<(), TtlError> {
        let insert = format!(
            "INSERT INTO {schema}.ttl_binding (rule_id, relid, rule_name, attnum, expression_attnums, held_by, held_since)
             SELECT t.id, named.relid, t.rule_name, CASE WHEN t.expression_columns IS NULL THEN ({schema}.ttl_attnums(named.relid, ARRAY[t.column_name]))[1] END,
                    {schema}.ttl_attnums(named.relid, t.expression_columns), a.pid, a.backend_start
             FROM {schema}.ttl_index_table t
             CROSS JOIN LATERAL (SELECT to_regclass(format('%I.%I', t.schema_name, t.table_name))::oid) AS named (relid)
             CROSS JOIN pg_stat_get_activity(pg_backend_pid()) AS a
             WHERE t.id = $1",
            schema = self.schema
        );
        let forget = format!("DELETE FROM {}.ttl_index_table WHERE id = $1", self.schema);
        let written = self.written(id)?;
        let Some(written) = written else { return Ok(()) };
        if written.is_its_own_mark {
            return Err(TtlError::CatalogMark(written.column));
        }
        if !written.is_complete || written.is_taken {
            let Written { column, schema, table, is_taken, .. } = written;
            let reason = if is_taken {
                "another rule is on the column"
            } else {
                "the table or a column it needs does not exist"
            };
            warning!("TTL rule on column \"{column}\" of table \"{schema}.{table}\" left out: {reason}");
            return self.with_rights(|| spi::execute(&forget, &[id.into()])).map(|_| ());
        }
        let bound = subtransaction(|| {
            self.keep_number(id)?;
            self.with_rights(|| spi::execute(&insert, &[id.into()]))?;
            self.bind(id, Binding::Restored)
        });
        if let Err(failure) = bound {
            let Written { column, schema, table, .. } = written;
            warning!("TTL rule on column \"{column}\" of table \"{schema}.{table}\" left out: {}", failure.message);
            return self.with_rights(|| spi::execute(&forget, &[id.into()])).map(|_| ());
        }
        process::at_commit(shmem::wake);
        self.forget_rule(id)
    }

    /// Writes a dumped rule, already checked, under the id that its triggers have as their argument.
    pub fn insert_dumped(&self, rule: &DumpedRule, column: &str, definition: &Definition<'_>) -> Result<(), TtlError> {
        #[derive(Serialize)]
        struct Row<'a> {
            #[serde(flatten)]
            rule: &'a DumpedRule,
            column_name: &'a str,
            #[serde(flatten)]
            definition: &'a Definition<'a>,
        }
        let is_free = format!(
            "SELECT FROM {schema}.ttl_index_table_id_seq
             WHERE $1 BETWEEN 1 AND last_value + {NUMBERS_AHEAD} AND NOT EXISTS (SELECT FROM {schema}.ttl_index_table WHERE id = $1)",
            schema = self.schema
        );
        if self.with_rights(|| spi::query(&is_free, &[rule.id.into()], |_| Ok(())))?.is_empty() {
            return Err(TtlError::RestoredNumber(rule.id));
        }
        if let Some(other) = rule.purges
            && !self.may_purge_for(other, rule, column)?
        {
            return Err(TtlError::RestoredPurge(other));
        }
        // Types must be written as PostgreSQL prints them.
        let named = "SELECT coalesce(bool_and(format_type(to_regtype(name), NULL) = name), true) FROM unnest($1::text[]) AS named (name)";
        let types = rule.column_types.clone();
        if self.with_rights(|| spi::query(named, &[types.into()], |row| row.get(1)))? != [Some(true)] {
            return Err(TtlError::RestoredTypes);
        }
        self.insert_row(&Row { rule, column_name: column, definition }).map(|_| ())
    }

    /// Whether a rule may purge for the rule `other`, which may not have been restored yet.
    fn may_purge_for(&self, other: i64, rule: &DumpedRule, column: &str) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT NOT EXISTS (SELECT FROM {}.ttl_index_table t WHERE t.id = $1 AND NOT (
                 (t.schema_name, t.table_name) = ($2, $3) AND t.soft_delete_column IS NOT DISTINCT FROM $4
                 AND t.purge_after IS NOT NULL AND t.purges IS NULL))",
            self.schema
        );
        let args = [other.into(), rule.schema_name.as_str().into(), rule.table_name.as_str().into(), column.into()];
        Ok(other != rule.id && self.with_rights(|| spi::query(&sql, &args, |row| row.get(1)))? == [Some(true)])
    }

    /// Returns a row of one of the extension's tables as JSON, in the form that a rule's options are read from.
    pub fn row_as_json(&self, row: PgHeapTuple<'_, AllocatedByRust>) -> Result<JsonB, TtlError> {
        let args = [row.into()];
        let found = self.with_rights(|| spi::query("SELECT to_jsonb($1)", &args, |row| row.get(1)))?;
        found.into_iter().flatten().next().ok_or(TtlError::Mismatch)
    }

    /// Moves the sequence of ids past a rule that was written with its own id.
    fn keep_number(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "SELECT setval('{schema}.ttl_index_table_id_seq'::regclass, $1) FROM {schema}.ttl_index_table_id_seq WHERE last_value < $1 OR (last_value = $1 AND NOT is_called)",
            schema = self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Binds all rules as if they were just registered: an upgrade of the schema wrote them, and they are correct.
    pub fn adopt(&self) -> Result<(), TtlError> {
        let sql = format!("SELECT id FROM {}.ttl_index_table ORDER BY id", self.schema);
        for id in self.with_rights(|| spi::query(&sql, &[], |row| row.get(1)))?.into_iter().flatten() {
            self.bind(id, Binding::Registered)?;
        }
        self.release(None).map(|_| ())
    }

    /// Follows a change of a rule's row. The rule must stay on its table and column.
    pub fn check_written(&self, id: i64, has_other_mark: bool) -> Result<(), TtlError> {
        let stays = format!(
            "SELECT FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE t.id = $1 AND b.relid = to_regclass(format('%I.%I', t.schema_name, t.table_name))
               AND b.attnum IS NOT DISTINCT FROM CASE WHEN t.expression_columns IS NULL
                   THEN ({schema}.ttl_attnums(b.relid, ARRAY[t.column_name]))[1] END
               AND b.rule_name IS NOT DISTINCT FROM t.rule_name",
            schema = self.schema
        );
        let Some(written) = self.written(id)? else { return Ok(()) };
        if written.is_its_own_mark {
            return Err(TtlError::CatalogMark(written.column));
        }
        if self.with_rights(|| spi::query(&stays, &[id.into()], |_| Ok(())))?.is_empty() {
            return Err(TtlError::RuleMoved);
        }
        if has_other_mark && !written.is_complete {
            return Err(TtlError::ColumnMissing(written.mark.unwrap_or(written.column)));
        }
        self.bind_objects(id)?;
        self.forget_rule(id)
    }

    /// Binds a rule to the index, archive and function that its row names.
    pub(super) fn bind_objects(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {schema}.ttl_binding b
             SET index_relid = {schema}.ttl_ready_index(b.relid, t.index_name, t.concurrently),
                 archive_relid = to_regclass(t.archive_to), on_expire_oid = {schema}.ttl_on_expire_oid(t.on_expire)
             FROM {schema}.ttl_index_table t
             WHERE t.id = b.rule_id AND t.id = $1",
            schema = self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    fn written(&self, id: i64) -> Result<Option<Written>, TtlError> {
        let sql = format!(
            "SELECT t.schema_name, t.table_name, t.column_name,
                    named.relid IS NOT NULL
                        AND array_position({schema}.ttl_attnums(named.relid, coalesce(t.expression_columns, ARRAY[t.column_name])
                            || t.filter_columns || t.clear_columns || array_remove(ARRAY[t.soft_delete_column], NULL)), NULL) IS NULL,
                    t.expression_columns IS NULL AND (t.soft_delete_column = t.column_name
                                                      OR coalesce(t.column_name = ANY (t.clear_columns), false)), t.soft_delete_column,
                    EXISTS (SELECT FROM {schema}.ttl_binding b JOIN {schema}.ttl_index_table o ON o.id = b.rule_id
                            WHERE b.relid = named.relid AND o.id <> t.id AND o.column_name = t.column_name
                              AND o.rule_name IS NOT DISTINCT FROM t.rule_name)
             FROM {schema}.ttl_index_table t
             CROSS JOIN LATERAL (SELECT to_regclass(format('%I.%I', t.schema_name, t.table_name))::oid) AS named (relid)
             WHERE t.id = $1",
            schema = self.schema
        );
        let found = self.with_rights(|| {
            spi::query(&sql, &[id.into()], |row| {
                Ok(Written {
                    schema: row.get(1)?.unwrap_or_default(),
                    table: row.get(2)?.unwrap_or_default(),
                    column: row.get(3)?.unwrap_or_default(),
                    is_complete: row.get(4)?.unwrap_or_default(),
                    is_its_own_mark: row.get(5)?.unwrap_or_default(),
                    mark: row.get(6)?,
                    is_taken: row.get(7)?.unwrap_or_default(),
                })
            })
        })?;
        Ok(found.into_iter().next())
    }

    /// Makes every session forget what it knows about a rule's table when this transaction commits.
    pub fn forget_rule(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!("SELECT relid FROM {}.ttl_binding WHERE rule_id = $1", self.schema);
        let relids = self.with_rights(|| spi::query(&sql, &[id.into()], |row| row.get(1)))?;
        memo::forget(self.relid);
        relids.into_iter().flatten().for_each(memo::forget_tree);
        Ok(())
    }

    /// Removes the rule that purges for rule `id`, if it is on the same table: any user may write one that claims to.
    pub fn remove_purges(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "DELETE FROM {schema}.ttl_index_table p USING {schema}.ttl_binding own, {schema}.ttl_binding b
             WHERE p.purges = $1 AND own.rule_id = p.id AND b.rule_id = $1 AND b.relid = own.relid",
            schema = self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Returns SQL over a rule `t` and its binding `b` for why an active rule is on hold, or NULL.
    ///
    /// A restored rule must not run before the objects that protect rows exist: triggers and foreign keys come last in
    /// a restore, maybe in another session. While a subscription copies a table, rows that reference it may be missing.
    /// A rule that would take too much of its table waits until somebody agrees, or the setting allows it.
    pub(super) fn hold(&self) -> String {
        const COPIED: &str = "SELECT FROM pg_subscription_rel s WHERE s.srsubstate <> 'r' AND s.srrelid IN (
                 WITH RECURSIVE tree (relid) AS (
                     SELECT b.relid UNION SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.relid)
                 SELECT relid FROM tree
                 UNION ALL SELECT k.conrelid FROM tree JOIN pg_constraint k ON k.confrelid = tree.relid AND k.contype = 'f')";
        let takes_too_much = guc::max_share_per_run().map_or("false".into(), |most| format!("t.held_share > {most}"));
        format!(
            "CASE WHEN b.held_by IS NOT NULL AND b.guards_found < t.guards
                  THEN format('restore: %s of %s triggers and rules are there', b.guards_found, t.guards)
                  WHEN b.held_by IS NOT NULL AND EXISTS (
                      SELECT FROM pg_stat_get_activity(NULL) AS a
                      WHERE a.pid = b.held_by AND a.backend_start = b.held_since
                         OR a.application_name = 'pg_restore'
                            AND a.usesysid IN (SELECT r.oid FROM pg_roles r WHERE r.rolsuper
                                               UNION SELECT d.datdba FROM pg_database d WHERE d.datname = current_database()
                                               UNION SELECT c.relowner FROM pg_class c WHERE c.oid = b.relid)
                            AND a.datid = (SELECT oid FROM pg_database WHERE datname = current_database()))
                  THEN 'restore: under way'
                  WHEN (SELECT EXISTS (SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r')) AND EXISTS ({COPIED})
                  THEN 'subscription: initial copy'
                  WHEN {takes_too_much}
                  THEN format('max_share_per_run: would take %s %% of the table', round((100 * t.held_share)::numeric, 1))
             END"
        )
    }

    /// Returns the rules on hold that the current role may see, and why.
    pub fn holds(&self) -> Result<Vec<(i64, String)>, TtlError> {
        let sql = format!(
            "SELECT * FROM (SELECT t.id, {hold} AS hold
                            FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
                            WHERE b.held_by IS NOT NULL OR t.held_share IS NOT NULL OR EXISTS (SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r')) AS held
             WHERE hold IS NOT NULL",
            hold = self.hold(),
            schema = self.schema
        );
        let mut held: Vec<(i64, String)> = self.with_rights(|| {
            spi::read(&sql, &[], |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default())))
        })?;
        if !held.is_empty() {
            let visible: HashSet<i64> = self.visible_rules()?.into_iter().collect();
            held.retain(|(id, _)| visible.contains(id));
        }
        Ok(held)
    }

    /// Whether a change of type has put a rule in doubt.
    pub fn is_in_doubt(&self, id: i64) -> Result<bool, TtlError> {
        let sql = format!("SELECT types = '{{}}' FROM {}.ttl_binding WHERE rule_id = $1", self.schema);
        Ok(self.with_rights(|| spi::query(&sql, &[id.into()], |row| row.get(1)))? == [Some(true)])
    }

    /// Releases one restored rule that is on hold, or all of them; returns how many there were. Their tables are taken
    /// to have all their triggers and rewrite rules now.
    pub fn release(&self, id: Option<i64>) -> Result<i32, TtlError> {
        let agree = format!(
            "UPDATE {schema}.ttl_index_table t SET guards = b.guards_found FROM {schema}.ttl_binding b
             WHERE b.rule_id = t.id AND b.held_by IS NOT NULL AND t.guards <> b.guards_found AND t.id = coalesce($1, t.id)",
            schema = self.schema
        );
        let release = format!(
            "UPDATE {}.ttl_binding SET held_by = NULL, held_since = NULL
             WHERE held_by IS NOT NULL AND rule_id = coalesce($1, rule_id) RETURNING rule_id",
            self.schema
        );
        let released = self.with_rights(|| {
            spi::execute(&agree, &[id.into()])?;
            spi::query(&release, &[id.into()], |row| Ok(row.get::<i64>(1)?.unwrap_or_default()))
        })?;
        for id in &released {
            self.forget_rule(*id)?;
        }
        if !released.is_empty() {
            process::at_commit(shmem::wake);
        }
        Ok(i32::try_from(released.len()).unwrap_or(i32::MAX))
    }
}
