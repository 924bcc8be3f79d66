//! Rules as users define them.

use super::binding::Binding;
use super::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::spi;
use crate::rule::{Invalid, Options};
use pgrx::JsonB;
use pgrx::pg_sys::Oid;
use pgrx::spi::quote_identifier;
use serde::Serialize;

/// A rule as the catalog has it.
pub struct StoredRule {
    pub id: i64,
    /// The rule that softly deletes what this one removes.
    pub purges: Option<i64>,
    /// The owner of the table when it was registered.
    pub registered_for: Oid,
    pub options: Options,
    pub index: Option<RuleIndex>,
}

/// The index of a rule.
pub struct RuleIndex {
    pub name: String,
    /// `None` before it is looked up, or when it is gone.
    pub oid: Option<Oid>,
    pub made_by_us: bool,
    /// Whether it is there and complete.
    pub is_valid: bool,
}

/// What a registration writes, by the names of the catalog's columns.
#[derive(Serialize)]
pub struct Definition<'a> {
    #[serde(flatten)]
    pub options: &'a Options,
    /// The columns the filter reads.
    pub filter_columns: Vec<String>,
    /// Of a rule on an expression: the columns it reads, and its type.
    pub expression_columns: Option<Vec<String>>,
    pub expression_type: Option<String>,
    pub index_name: Option<&'a str>,
    pub index_created_by_extension: bool,
    /// The rule that softly deletes what this one removes.
    pub purges: Option<i64>,
}

/// Whether a rule is on the column with the number `$2`, or, without one, on the expression `$3`.
const ON_SUBJECT: &str = "CASE WHEN b.attnum IS NULL THEN $2 IS NULL AND t.column_name = $3 ELSE b.attnum = $2 END";

/// The columns that a row has, and what they are set to.
fn columns(row: &impl Serialize) -> (String, JsonB) {
    let values = serde_json::to_value(row).unwrap_or_default();
    let names: Vec<_> = values.as_object().into_iter().flatten().map(|(name, _)| quote_identifier(name)).collect();
    (names.join(", "), JsonB(values))
}

impl Catalog {
    /// The rule on a column, or on an expression in its canonical form, locked until the transaction ends.
    pub fn find(&self, relid: Oid, attnum: Option<i16>, name: &str) -> Result<Option<StoredRule>, TtlError> {
        let sql = format!(
            "SELECT t.id, t.index_name, t.index_created_by_extension,
                    {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name), t.purges, {options},
                    EXISTS (SELECT FROM pg_index i WHERE i.indisvalid
                              AND i.indexrelid = {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name)), b.owner
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE b.relid = $1 AND {ON_SUBJECT}
             FOR UPDATE OF t",
            options = options_of("t"),
            schema = self.schema
        );
        let args = [relid.into(), attnum.into(), name.into()];
        let rows = self.with_rights(|| spi::query(&sql, &args, |row| Ok(stored_rule(&row))))?;
        rows.into_iter().next().transpose()
    }

    /// The TTL column of the rule that purges for a rule, if there is one.
    pub fn purge_of(&self, id: i64) -> Result<Option<String>, TtlError> {
        // Anybody may have written a rule on a table of his own that says to purge for this one.
        let sql = format!(
            "SELECT p.column_name FROM {schema}.ttl_index_table p JOIN {schema}.ttl_binding own ON own.rule_id = p.id
             JOIN {schema}.ttl_binding b ON b.relid = own.relid WHERE p.purges = $1 AND b.rule_id = $1",
            schema = self.schema
        );
        let found = self.with_rights(|| spi::query(&sql, &[id.into()], |row| row.get(1)))?;
        Ok(found.into_iter().flatten().next())
    }

    /// Has the rule that purges for a rule rest while that does.
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

    /// Registers a rule, and tells its number.
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

    /// Writes the row of a rule, by the names of its columns, and tells its number.
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

    /// Binds a rule to what its names mean now, because somebody has said so.
    fn confirm(&self, id: i64) -> Result<(), TtlError> {
        self.release(Some(id))?;
        self.bind(id, Binding::Registered)
    }

    /// Redefines a rule. Statistics and a pause stay; a fault of the old definition is forgotten.
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
        // The same names may be other objects by now: the old ones were dropped, and the rule is to use these.
        self.confirm(id)
    }

    /// Has a rule know its index, which a worker has made.
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

    pub fn remove(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!("DELETE FROM {}.ttl_index_table WHERE id = $1", self.schema);
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Pauses or resumes one rule of a table, or every rule; tells how many changed. A restored rule that rests is resumed, too.
    pub fn set_active(&self, relid: Oid, subject: Option<(Option<i16>, &str)>, active: bool) -> Result<i32, TtlError> {
        let chosen = format!(
            "b.rule_id = t.id AND b.relid = $1
               AND ($3 IS NULL OR {ON_SUBJECT} OR t.purges IN (
                   SELECT t.id FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
                   WHERE b.relid = $1 AND {ON_SUBJECT}))",
            schema = self.schema
        );
        let set = format!(
            "UPDATE {schema}.ttl_index_table t SET active = $4, retry_at = NULL, index_retry_at = NULL
             FROM {schema}.ttl_binding b WHERE {chosen} AND t.active <> $4 RETURNING t.id",
            schema = self.schema
        );
        let resting = format!(
            "SELECT t.id FROM {schema}.ttl_index_table t, {schema}.ttl_binding b
             WHERE {chosen} AND b.held_by IS NOT NULL AND $4",
            schema = self.schema
        );
        let (attnum, name) = subject.map_or((None, None), |(attnum, name)| (attnum, Some(name)));
        let args = [relid.into(), attnum.into(), name.into(), active.into()];
        let ids =
            |sql: &str| self.with_rights(|| spi::query(sql, &args, |row| Ok(row.get::<i64>(1)?.unwrap_or_default())));
        let (resting, mut changed) = (ids(&resting)?, ids(&set)?);
        for id in resting {
            self.release(Some(id))?;
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
        options: options(row, 6)?,
        index,
    })
}

/// SQL for the options of a rule, as JSON. Nothing else of its row: what users can have written there may be long.
pub(super) fn options_of(table: &str) -> String {
    let pairs: Vec<_> =
        Options::names().iter().map(|name| format!("'{name}', {table}.{}", quote_identifier(name))).collect();
    format!("jsonb_build_object({})", pairs.join(", "))
}

/// The options that [`options_of`] has put at this place of a row.
pub(super) fn options(row: &spi::Row<'_>, ordinal: usize) -> Result<Options, TtlError> {
    let values = row.get::<JsonB>(ordinal)?.map(|json| json.0).unwrap_or_default();
    Ok(serde_json::from_value(values).map_err(|error| Invalid::Other(error.to_string()))?)
}
