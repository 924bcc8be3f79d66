//! Rules as users define them.

use super::Catalog;
use crate::error::TtlError;
use crate::pg::spi;
use crate::rule::{IndexMethod, Options, Ttl};
use pgrx::datum::{DatumWithOid, Interval};
use pgrx::pg_sys::Oid;

/// A rule as the catalog has it.
pub struct StoredRule {
    pub id: i64,
    pub options: Options,
    pub index: Option<RuleIndex>,
}

/// The index of a rule.
pub struct RuleIndex {
    pub name: String,
    /// `None` before it is looked up, or when it is gone.
    pub oid: Option<Oid>,
    pub made_by_us: bool,
}

/// What a registration writes.
pub struct Definition<'a> {
    pub options: &'a Options,
    /// The names of the columns the filter reads.
    pub filter_columns: Vec<String>,
    /// Of a rule on an expression: the names of the columns it reads, and its type.
    pub expression: Option<(Vec<String>, String)>,
    pub index: Option<&'a RuleIndex>,
}

/// What [`options`] reads of `ttl_index_table t`.
pub(super) const OPTIONS: &str =
    "t.expire_after, t.batch_size, t.soft_delete_column, t.filter, t.time_zone, t.unit, t.index_method, t.hide_expired";

/// Whether a rule is on the column with the number `$2`, or, without one, on the expression `$3`.
const ON_SUBJECT: &str = "CASE WHEN b.attnum IS NULL THEN $2 IS NULL AND t.column_name = $3 ELSE b.attnum = $2 END";

const DEFINITION: &str = "expire_after, batch_size, soft_delete_column, filter, filter_columns, expression_columns, \
                          expression_type, time_zone, unit, index_method, hide_expired, index_name, index_created_by_extension";
const VALUES: &str = "$1 + $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14";

impl Definition<'_> {
    /// The values for [`DEFINITION`]. An interval of mixed signs is the sum of two that are not.
    fn values(&self) -> Vec<DatumWithOid<'_>> {
        let Options {
            expire_after,
            batch_size,
            soft_delete_column,
            filter,
            time_zone,
            unit,
            index_method,
            hide_expired,
        } = self.options;
        let (months, days, micros) = expire_after.fields();
        vec![
            Interval::new(months, 0, 0).ok().into(),
            Interval::new(0, days, micros).ok().into(),
            (*batch_size).into(),
            soft_delete_column.as_deref().into(),
            filter.as_deref().into(),
            self.filter_columns.clone().into(),
            self.expression.as_ref().map(|(columns, _)| columns.clone()).into(),
            self.expression.as_ref().map(|(_, type_name)| type_name.as_str()).into(),
            time_zone.as_str().into(),
            unit.as_deref().into(),
            index_method.to_string().into(),
            (*hide_expired).into(),
            self.index.map(|index| index.name.as_str()).into(),
            self.index.is_some_and(|index| index.made_by_us).into(),
        ]
    }
}

impl Catalog {
    /// The rule on a column, or on an expression in its canonical form, locked until the transaction ends.
    pub fn find(&self, relid: Oid, attnum: Option<i16>, name: &str) -> Result<Option<StoredRule>, TtlError> {
        let sql = format!(
            "SELECT t.id, t.index_name, t.index_created_by_extension,
                    {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name), {OPTIONS}
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE b.relid = $1 AND {ON_SUBJECT}
             FOR UPDATE OF t",
            schema = self.schema
        );
        let args = [relid.into(), attnum.into(), name.into()];
        let rows = self.with_rights(|| spi::query(&sql, &args, |row| Ok(stored_rule(&row))))?;
        rows.into_iter().next().transpose()
    }

    /// Registers a rule, and tells its number.
    pub fn insert(
        &self,
        schema: &str,
        table: &str,
        column: &str,
        definition: &Definition<'_>,
    ) -> Result<i64, TtlError> {
        let sql = format!(
            "INSERT INTO {}.ttl_index_table (schema_name, table_name, column_name, {DEFINITION})
             VALUES ($15, $16, $17, {VALUES}) RETURNING id",
            self.schema
        );
        let release =
            format!("UPDATE {}.ttl_binding SET held_by = NULL, held_since = NULL WHERE rule_id = $1", self.schema);
        let mut values = definition.values();
        values.extend([schema.into(), table.into(), column.into()]);
        self.with_rights(|| {
            let ids = spi::query(&sql, &values, |row| Ok(row.get::<i64>(1)?.unwrap_or_default()))?;
            for id in &ids {
                spi::execute(&release, &[(*id).into()])?;
            }
            Ok(ids.into_iter().next().unwrap_or_default())
        })
    }

    /// Redefines a rule. Statistics and a pause stay; a fault of the old definition is forgotten.
    pub fn update(&self, id: i64, definition: &Definition<'_>) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {}.ttl_index_table
             SET ({DEFINITION}) = ROW ({VALUES}),
                 last_error = NULL, last_error_code = NULL, last_error_at = NULL, consecutive_failures = 0, retry_at = NULL
             WHERE id = $15",
            self.schema
        );
        // The same names may be other columns by now: the old ones were dropped, and the rule is to use these.
        let bind = format!(
            "UPDATE {schema}.ttl_binding b
             SET filter_attnums = {schema}.ttl_attnums(b.relid, t.filter_columns), faulty_columns = NULL,
                 expression_attnums = {schema}.ttl_attnums(b.relid, t.expression_columns),
                 soft_delete_attnum = ({schema}.ttl_attnums(b.relid, ARRAY[t.soft_delete_column]))[1]
             FROM {schema}.ttl_index_table t
             WHERE t.id = b.rule_id AND t.id = $1",
            schema = self.schema
        );
        let mut values = definition.values();
        values.push(id.into());
        self.with_rights(|| {
            spi::execute(&sql, &values)?;
            spi::execute(&bind, &[id.into()])?;
            Ok(())
        })
    }

    pub fn remove(&self, id: i64) -> Result<(), TtlError> {
        let sql = format!("DELETE FROM {}.ttl_index_table WHERE id = $1", self.schema);
        self.with_rights(|| spi::execute(&sql, &[id.into()])).map(|_| ())
    }

    /// Pauses or resumes one rule of a table, or every rule; tells how many changed.
    pub fn set_active(&self, relid: Oid, subject: Option<(Option<i16>, &str)>, active: bool) -> Result<i32, TtlError> {
        let sql = format!(
            "UPDATE {schema}.ttl_index_table t SET active = $4, retry_at = NULL
             FROM {schema}.ttl_binding b
             WHERE b.rule_id = t.id AND b.relid = $1 AND ($3 IS NULL OR {ON_SUBJECT}) AND t.active <> $4",
            schema = self.schema
        );
        let (attnum, name) = subject.map_or((None, None), |(attnum, name)| (attnum, Some(name)));
        let args = [relid.into(), attnum.into(), name.into(), active.into()];
        let changed = self.with_rights(|| spi::execute(&sql, &args))?;
        Ok(i32::try_from(changed).unwrap_or(i32::MAX))
    }
}

fn stored_rule(row: &spi::Row<'_>) -> Result<StoredRule, TtlError> {
    let made_by_us = row.get(3)?.unwrap_or_default();
    let oid = row.get(4)?;
    let index = row.get(2)?.map(|name| RuleIndex { name, oid, made_by_us });
    Ok(StoredRule { id: row.get(1)?.unwrap_or_default(), options: options(row, 5)?, index })
}

/// The columns [`OPTIONS`] of a row, from ordinal `first` on.
pub(super) fn options(row: &spi::Row<'_>, first: usize) -> Result<Options, TtlError> {
    let expire_after = row.get::<Interval>(first)?.map_or((0, 0, 0), |i| (i.months(), i.days(), i.micros()));
    Ok(Options {
        expire_after: Ttl::new(expire_after.0, expire_after.1, expire_after.2)?,
        batch_size: row.get(first + 1)?,
        soft_delete_column: row.get(first + 2)?,
        filter: row.get(first + 3)?,
        time_zone: row.get(first + 4)?.unwrap_or_default(),
        unit: row.get(first + 5)?,
        index_method: IndexMethod::parse(&row.get::<String>(first + 6)?.unwrap_or_default())?,
        hide_expired: row.get(first + 7)?.unwrap_or_default(),
    })
}
