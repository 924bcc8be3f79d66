//! What a role may know of rules: how those on tables that it may read are doing, and of its own and as a monitor what went wrong.

use super::Catalog;
use crate::error::TtlError;
use crate::pg::{access, spi};
use pgrx::pg_sys::Oid;

/// A rule that the current role may see.
pub struct Visible {
    pub id: i64,
    pub relid: Oid,
    pub index: Option<Oid>,
    /// What stopped it or blocks its rows: SQLSTATE, and for those who may know of its rows the message.
    pub last_error: Option<String>,
    /// The same of its index.
    pub index_error: Option<String>,
}

/// SQL over the table `c` of a rule, and a role, the first parameter.
const SEES_ROWS: &str = "(pg_has_role($1, 'pg_monitor', 'USAGE') OR pg_has_role($1, c.relowner, 'USAGE'))";

impl Catalog {
    /// All of them.
    pub fn visible(&self) -> Result<Vec<Visible>, TtlError> {
        self.visible_where("true", None)
    }

    /// Whether a rule is one of them.
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

    /// The numbers of those rules.
    pub fn visible_rules(&self) -> Result<Vec<i64>, TtlError> {
        Ok(self.visible()?.into_iter().map(|rule| rule.id).collect())
    }

    /// The errors in the history that the current role may read, by the number of the entry.
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
