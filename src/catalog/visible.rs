//! What a role may see of rules: the state of rules on tables it may read, and error messages if it has the rights of
//! the table's owner or of `pg_monitor`.

use super::Catalog;
use crate::error::TtlError;
use crate::pg::{access, spi};
use pgrx::pg_sys::Oid;

/// A rule that the current role may see.
pub struct Visible {
    pub id: i64,
    pub relid: Oid,
    pub index: Option<Oid>,
    /// The error that stopped the rule or blocks its rows: SQLSTATE, and message if the role may see its rows.
    pub last_error: Option<String>,
    /// The error of building its index, in the same way.
    pub index_error: Option<String>,
}

/// SQL for whether the role `$1` may see messages that quote rows of a rule's table `c`.
const SEES_ROWS: &str = "(pg_has_role($1, 'pg_monitor', 'USAGE') OR pg_has_role($1, c.relowner, 'USAGE'))";

impl Catalog {
    /// Returns the rules that the current role may see.
    pub fn visible(&self) -> Result<Vec<Visible>, TtlError> {
        self.visible_where("true", None)
    }

    /// Whether the current role may see a rule.
    pub fn is_visible(&self, id: i64) -> Result<bool, TtlError> {
        Ok(!self.visible_where("t.id = $2", Some(id))?.is_empty())
    }

    fn visible_where(&self, condition: &str, id: Option<i64>) -> Result<Vec<Visible>, TtlError> {
        let sql = format!(
            "SELECT t.id, b.relid, b.index_relid,
                    CASE WHEN {SEES_ROWS} THEN t.last_error_code || ': ' || s.last_error ELSE t.last_error_code END,
                    CASE WHEN {SEES_ROWS} THEN s.index_error ELSE left(s.index_error, 5) END
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id JOIN pg_class c ON c.oid = b.relid
             LEFT JOIN {schema}.ttl_state s ON s.rule_id = t.id
             WHERE {condition} AND ({SEES_ROWS} OR has_any_column_privilege($1, c.oid, 'SELECT'))",
            schema = self.schema
        );
        let role = access::current_role();
        self.with_rights(|| {
            spi::read(&sql, &[role.into(), id.into()], |row| {
                Ok(Visible {
                    id: row.get(1)?.unwrap_or_default(),
                    relid: row.get(2)?.unwrap_or_default(),
                    index: row.get(3)?,
                    last_error: row.get(4)?,
                    index_error: row.get(5)?,
                })
            })
        })
    }

    /// Returns the ids of the rules that the current role may see.
    pub fn visible_rules(&self) -> Result<Vec<i64>, TtlError> {
        Ok(self.visible()?.into_iter().map(|rule| rule.id).collect())
    }

    /// Returns the errors in the history that the current role may read, with the ids of their entries.
    pub fn history_errors(&self) -> Result<Vec<(i64, String)>, TtlError> {
        let sql = format!(
            "SELECT l.id, l.error FROM {schema}.ttl_history_log l
             LEFT JOIN {schema}.ttl_binding b ON b.rule_id = l.rule_id LEFT JOIN pg_class c ON c.oid = b.relid
             WHERE l.error IS NOT NULL AND {SEES_ROWS}",
            schema = self.schema
        );
        let role = access::current_role();
        self.with_rights(|| {
            spi::read(&sql, &[role.into()], |row| {
                Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default()))
            })
        })
    }
}
