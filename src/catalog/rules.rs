//! Rules as users define them.

use super::binding::Binding;
use super::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::{process, shmem, spi};
use crate::rule::{Invalid, Options};
use pgrx::JsonB;
use pgrx::pg_sys::Oid;
use pgrx::spi::quote_identifier;
use serde::Serialize;

/// A rule as stored in the catalog.
pub struct StoredRule {
    pub id: i64,
    /// Tells the rules on one column apart.
    pub rule_name: Option<String>,
    /// The number of its column, 0 for an expression.
    pub attnum: i16,
    /// The rule that soft-deletes the rows this one removes.
    pub purges: Option<i64>,
    /// The owner of the table when the rule was registered.
    pub registered_for: Oid,
    pub options: Options,
    pub index: Option<RuleIndex>,
}

/// The index of a rule.
pub struct RuleIndex {
    pub name: String,
    /// `None` before the index is looked up, or if it is gone.
    pub oid: Option<Oid>,
    pub made_by_us: bool,
    /// Whether the index exists and is complete.
    pub is_valid: bool,
}

/// The values that a registration writes, by the names of the catalog's columns.
#[derive(Serialize)]
pub struct Definition<'a> {
    #[serde(flatten)]
    pub options: &'a Options,
    pub rule_name: Option<&'a str>,
    /// The columns the filter reads.
    pub filter_columns: Vec<String>,
    /// For a rule on an expression: the columns it reads, and its type.
    pub expression_columns: Option<Vec<String>>,
    pub expression_type: Option<String>,
    pub index_name: Option<&'a str>,
    pub index_created_by_extension: bool,
    /// The rule that soft-deletes the rows this one removes.
    pub purges: Option<i64>,
}

/// SQL for whether a rule is on the column number `$2` or, if that is NULL, on the expression `$3`.
const ON_SUBJECT: &str = "CASE WHEN b.attnum IS NULL THEN $2 IS NULL AND t.column_name = $3 ELSE b.attnum = $2 END";

/// SQL for whether a rule has the name `$4`: an empty name is that of a rule without one, and NULL is any name.
const IS_NAMED: &str = "($4 IS NULL OR coalesce(t.rule_name, '') = $4)";

/// Returns the names of a row's columns, and their values.
fn columns(row: &impl Serialize) -> (String, JsonB) {
    let values = serde_json::to_value(row).unwrap_or_default();
    let names: Vec<_> = values.as_object().into_iter().flatten().map(|(name, _)| quote_identifier(name)).collect();
    (names.join(", "), JsonB(values))
}

impl Catalog {
    /// Returns the rules on a column, or on an expression in canonical form, and locks them until the transaction ends:
    /// all, or the one of this name, which is empty for a rule without a name.
    pub fn find(
        &self,
        relid: Oid,
        attnum: Option<i16>,
        name: &str,
        rule_name: Option<&str>,
    ) -> Result<Vec<StoredRule>, TtlError> {
        let sql = format!(
            "SELECT t.id, t.index_name, t.index_created_by_extension,
                    {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name), t.purges, {options},
                    EXISTS (SELECT FROM pg_index i WHERE i.indisvalid
                              AND i.indexrelid = {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name)), b.owner,
                    t.rule_name, coalesce(b.attnum, 0::smallint)
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE b.relid = $1 AND {ON_SUBJECT} AND {IS_NAMED}
             ORDER BY t.id
             FOR UPDATE OF t",
            options = options_of("t"),
            schema = self.schema
        );
        let args = [relid.into(), attnum.into(), name.into(), rule_name.into()];
        let rows = self.with_rights(|| spi::query(&sql, &args, |row| Ok(stored_rule(&row))))?;
        rows.into_iter().collect()
    }

    /// Returns the names of the indexes of all rules in a schema, be they built or not.
    pub fn index_names(&self, namespace: Oid) -> Result<Vec<String>, TtlError> {
        let sql = format!(
            "SELECT t.index_name FROM {}.ttl_index_table t
             WHERE t.index_name IS NOT NULL AND t.schema_name = (SELECT nspname FROM pg_namespace WHERE oid = $1)",
            self.schema
        );
        self.with_rights(|| spi::query(&sql, &[namespace.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// Leaves an index that the extension made for rule `id` to another rule that uses it. Returns whether there is one.
    pub fn hand_on_index(&self, index: Oid, id: i64) -> Result<bool, TtlError> {
        let sql = format!(
            "UPDATE {schema}.ttl_index_table SET index_created_by_extension = true
             WHERE id = (SELECT min(t.id) FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
                         WHERE t.id <> $2 AND {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name) = $1)",
            schema = self.schema
        );
        Ok(self.with_rights(|| spi::execute(&sql, &[index.into(), id.into()]))? > 0)
    }

    /// Returns the TTL column of the rule that purges for rule `id`, if there is one.
    pub fn purge_of(&self, id: i64) -> Result<Option<String>, TtlError> {
        // Any user may have written a rule on another table that claims to purge for this one.
        let sql = format!(
            "SELECT p.column_name FROM {schema}.ttl_index_table p JOIN {schema}.ttl_binding own ON own.rule_id = p.id
             JOIN {schema}.ttl_binding b ON b.relid = own.relid WHERE p.purges = $1 AND b.rule_id = $1",
            schema = self.schema
        );
        let found = self.with_rights(|| spi::query(&sql, &[id.into()], |row| row.get(1)))?;
        Ok(found.into_iter().flatten().next())
    }

    /// Pauses or resumes the rule that purges for rule `id` along with that rule.
    pub fn pause_with(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {schema}.ttl_index_table p SET active = t.active
             FROM {schema}.ttl_index_table t, {schema}.ttl_binding own, {schema}.ttl_binding b
             WHERE p.purges = t.id AND t.id = $1 AND p.active <> t.active
               AND own.rule_id = p.id AND b.rule_id = t.id AND b.relid = own.relid",
            schema = self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Registers a rule and returns its id.
    pub fn insert(
        &self,
        schema: &str,
        table: &str,
        column: &str,
        definition: &Definition<'_>,
    ) -> Result<i64, TtlError> {
        #[derive(Serialize)]
        struct Row<'a> {
            schema_name: &'a str,
            table_name: &'a str,
            column_name: &'a str,
            #[serde(flatten)]
            definition: &'a Definition<'a>,
        }
        let id = self.insert_row(&Row { schema_name: schema, table_name: table, column_name: column, definition })?;
        self.confirm(id)?;
        // A row that cannot be bound is left out, as in a restore.
        let is_there = format!("SELECT FROM {}.ttl_binding WHERE rule_id = $1", self.schema);
        match self.with_rights(|| spi::execute(&is_there, &[id.into()]))? {
            0 => Err(TtlError::Mismatch),
            _ => Ok(id),
        }
    }

    /// Inserts a rule's row, by the names of its columns, and returns its id.
    pub(super) fn insert_row(&self, row: &impl Serialize) -> Result<i64, TtlError> {
        let (columns, values) = columns(row);
        let sql = format!(
            "INSERT INTO {own}.ttl_index_table ({columns})
             SELECT {columns} FROM jsonb_populate_record(NULL::{own}.ttl_index_table, $1) RETURNING id",
            own = self.schema
        );
        let ids = self.with_rights(|| spi::query(&sql, &[values.into()], |row| row.get(1)))?;
        Ok(ids.into_iter().flatten().next().unwrap_or_default())
    }

    /// Binds a rule to what its names mean now, because a user has just defined it.
    fn confirm(&self, id: i64) -> Result<(), TtlError> {
        self.release(Some(id))?;
        self.bind(id, Binding::Registered)
    }

    /// Redefines a rule. Statistics and a pause are kept; errors of the old definition are cleared.
    pub fn update(&self, id: i64, definition: &Definition<'_>) -> Result<(), TtlError> {
        let (columns, values) = columns(definition);
        let sql = format!(
            "UPDATE {own}.ttl_index_table
             SET ({columns}) = (SELECT {columns} FROM jsonb_populate_record(NULL::{own}.ttl_index_table, $1)),
                 last_error_code = NULL, last_error_at = NULL, consecutive_failures = 0, retry_at = NULL,
                 index_failures = 0, index_retry_at = NULL
             WHERE id = $2",
            own = self.schema
        );
        let forgive = format!("DELETE FROM {}.ttl_state WHERE rule_id = $1", self.schema);
        self.with_rights(|| {
            spi::execute(&sql, &[values.into(), id.into()])?;
            spi::execute(&forgive, &[id.into()])
        })?;
        // The names may refer to new objects by now, which the rule must use: the old ones were dropped.
        self.confirm(id)
    }

    /// Binds a rule to the index that a worker has built.
    pub fn bind_index(&self, rule: &Rule, name: &str, is_ours: bool) -> Result<(), TtlError> {
        let rename = format!(
            "UPDATE {}.ttl_index_table SET index_name = $3, index_created_by_extension = $4
             WHERE id = $1 AND version = $2 AND index_name <> $3",
            self.schema
        );
        let forgive = format!(
            "WITH rule AS (UPDATE {schema}.ttl_index_table SET index_failures = 0, index_retry_at = NULL WHERE id = $1)
             UPDATE {schema}.ttl_state SET index_error = NULL WHERE rule_id = $1",
            schema = self.schema
        );
        let bind = format!(
            "UPDATE {schema}.ttl_binding b SET index_relid = {schema}.ttl_ready_index(b.relid, t.index_name, true)
             FROM {schema}.ttl_index_table t WHERE t.id = b.rule_id AND t.id = $1",
            schema = self.schema
        );
        self.with_rights(|| {
            spi::execute(&rename, &[rule.id.into(), rule.version.into(), name.into(), is_ours.into()])?;
            spi::execute(&forgive, &[rule.id.into()])?;
            spi::execute(&bind, &[rule.id.into()])
        })?;
        self.know_probe(rule.id)
    }

    /// Whether another rule of the table marks a column that a rule with these options clears, or the other way round:
    /// each would undo the other.
    pub fn is_updated_otherwise(&self, relid: Oid, id: Option<i64>, options: &Options) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE b.relid = $1 AND t.id IS DISTINCT FROM $2
               AND (t.soft_delete_column = ANY ($3) OR $4 = ANY (t.clear_columns))",
            schema = self.schema
        );
        let (clears, mark) = (options.clear_columns.clone(), options.soft_delete_column.clone());
        let args = [relid.into(), id.into(), clears.into(), mark.into()];
        Ok(self.with_rights(|| spi::execute(&sql, &args))? > 0)
    }

    /// Returns the columns that other rules of a table clear.
    pub fn cleared_by_others(&self, relid: Oid, id: Option<i64>) -> Result<Vec<String>, TtlError> {
        let sql = format!(
            "SELECT DISTINCT unnest(t.clear_columns) FROM {schema}.ttl_index_table t
             JOIN {schema}.ttl_binding b ON b.rule_id = t.id WHERE b.relid = $1 AND t.id IS DISTINCT FROM $2",
            schema = self.schema
        );
        self.with_rights(|| spi::read(&sql, &[relid.into(), id.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// Returns the numbers of the columns by which rows of a table expire under its other rules.
    pub fn sources_of_others(&self, relid: Oid, id: Option<i64>) -> Result<Vec<i16>, TtlError> {
        let sql = format!(
            "SELECT DISTINCT unnest(coalesce(expression_attnums, ARRAY[attnum])) FROM {}.ttl_binding
             WHERE relid = $1 AND rule_id IS DISTINCT FROM $2",
            self.schema
        );
        self.with_rights(|| spi::read(&sql, &[relid.into(), id.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// Holds a rule that would take this share of its table, or no longer holds it.
    pub fn hold_share(&self, rule: &Rule, share: Option<f64>) -> Result<(), TtlError> {
        let sql = format!("UPDATE {}.ttl_index_table SET held_share = $3 WHERE id = $1 AND version = $2", self.schema);
        self.with_rights(|| spi::execute(&sql, &[rule.id.into(), rule.version.into(), share.into()]))?;
        self.forget_rule(rule.id)
    }

    /// Lets a rule take the share of its table for which it is held.
    fn admit_share(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {}.ttl_index_table SET largest_share = greatest(largest_share, held_share), held_share = NULL
             WHERE id = $1 AND held_share IS NOT NULL",
            self.schema
        );
        if self.with_rights(|| spi::execute(&sql, &[id.into()]))? > 0 {
            process::at_commit(shmem::wake);
            self.forget_rule(id)?;
        }
        Ok(())
    }

    /// Forgets what shares of its table a rule may take: it takes others now.
    pub fn forget_shares(&self, id: i64) -> Result<(), TtlError> {
        let sql =
            format!("UPDATE {}.ttl_index_table SET largest_share = 0, held_share = NULL WHERE id = $1", self.schema);
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    pub fn remove(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!("DELETE FROM {}.ttl_index_table WHERE id = $1", self.schema);
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Pauses or resumes the rules of a table, or only those on a column or of a name; returns how many changed. Resuming
    /// releases restored rules.
    pub fn set_active(
        &self,
        relid: Oid,
        subject: Option<(Option<i16>, &str)>,
        rule_name: Option<&str>,
        active: bool,
    ) -> Result<i32, TtlError> {
        let is_meant = format!("($3 IS NULL OR {ON_SUBJECT}) AND {IS_NAMED}");
        let chosen = format!(
            "b.rule_id = t.id AND b.relid = $1
               AND ({is_meant} OR t.purges IN (
                   SELECT t.id FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
                   WHERE b.relid = $1 AND {is_meant}))",
            schema = self.schema
        );
        let set = format!(
            "UPDATE {schema}.ttl_index_table t SET active = $5, retry_at = NULL, index_retry_at = NULL
             FROM {schema}.ttl_binding b WHERE {chosen} AND t.active <> $5 RETURNING t.id",
            schema = self.schema
        );
        let resting = format!(
            "SELECT t.id FROM {schema}.ttl_index_table t, {schema}.ttl_binding b
             WHERE {chosen} AND (b.held_by IS NOT NULL OR t.held_share IS NOT NULL) AND $5",
            schema = self.schema
        );
        let (attnum, name) = subject.map_or((None, None), |(attnum, name)| (attnum, Some(name)));
        let args = [relid.into(), attnum.into(), name.into(), rule_name.into(), active.into()];
        let ids =
            |sql: &str| self.with_rights(|| spi::query(sql, &args, |row| Ok(row.get::<i64>(1)?.unwrap_or_default())));
        let (resting, mut changed) = (ids(&resting)?, ids(&set)?);
        for id in resting {
            self.release(Some(id))?;
            self.admit_share(id)?;
            if !changed.contains(&id) {
                changed.push(id);
            }
        }
        Ok(i32::try_from(changed.len()).unwrap_or(i32::MAX))
    }
}

fn stored_rule(row: &spi::Row<'_>) -> Result<StoredRule, TtlError> {
    let made_by_us = row.get(3)?.unwrap_or_default();
    let oid = row.get(4)?;
    let is_valid = row.get(7)?.unwrap_or_default();
    let index = row.get(2)?.map(|name| RuleIndex { name, oid, made_by_us, is_valid });
    Ok(StoredRule {
        id: row.get(1)?.unwrap_or_default(),
        purges: row.get(5)?,
        registered_for: row.get(8)?.unwrap_or_default(),
        rule_name: row.get(9)?,
        attnum: row.get(10)?.unwrap_or_default(),
        options: options(row, 6)?,
        index,
    })
}

/// Returns SQL for a rule's options as JSON. The rest of the row is left out: users may have written long values there.
pub(super) fn options_of(table: &str) -> String {
    let pairs: Vec<_> =
        Options::names().iter().map(|name| format!("'{name}', {table}.{}", quote_identifier(name))).collect();
    format!("jsonb_build_object({})", pairs.join(", "))
}

/// Reads the options that [`options_of`] has put at this ordinal of a row.
pub(super) fn options(row: &spi::Row<'_>, ordinal: usize) -> Result<Options, TtlError> {
    let values = row.get::<JsonB>(ordinal)?.map(|json| json.0).unwrap_or_default();
    Ok(serde_json::from_value(values).map_err(|error| Invalid::Other(error.to_string()))?)
}
