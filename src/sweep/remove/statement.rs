//! The statements that lock and remove rows.

use crate::pg::planner::ENGINE_TAG;
use crate::sweep::statement::{Statements, Which};
use pgrx::spi::{quote_identifier, quote_literal};

impl Statements {
    /// Selects the last value, as text, among a known value and those of the expired rows at some TIDs.
    pub fn last_value(&self, known: Option<&str>) -> String {
        let Self { leaf, compared, expired, .. } = self;
        let known = known.map_or_else(String::new, |known| format!(" UNION ALL SELECT {}", self.literal(known)));
        format!(
            "{ENGINE_TAG}SELECT value::text FROM (
                 SELECT {compared} FROM ONLY {leaf} WHERE ctid = ANY ($1) AND ({}) IS TRUE{known}) AS found (value)
             ORDER BY value DESC LIMIT 1",
            expired[0]
        )
    }

    /// Removes rows, if they are still expired. If rows are delivered, the same query also moves them into the archive;
    /// it returns one row with the numbers of rows removed and archived, the rows, and their range. Rows that are
    /// delivered as they were before are read by the same snapshot, so they must be locked.
    pub fn remove(&self, which: Which) -> String {
        let is_removed = self.expired_of(which);
        let removal = format!("{} WHERE {is_removed}", self.action);
        let Some(delivery) = &self.delivery else { return format!("{ENGINE_TAG}{removal}") };
        let archived = delivery.archive.as_ref().map_or_else(String::new, |(archive, columns)| {
            let columns = columns.join(", ");
            format!(
                ", archived AS (INSERT INTO {archive} ({columns}) OVERRIDING SYSTEM VALUE
                               SELECT {columns} FROM gone RETURNING 1)"
            )
        });
        let count = if archived.is_empty() { "NULL::bigint" } else { "(SELECT count(*) FROM archived)" };
        let rows = if delivery.wants_rows { "jsonb_agg(to_jsonb(gone.*))" } else { "NULL::jsonb" };
        let range = delivery.keys.as_ref().map_or_else(|| "NULL::jsonb".into(), |keys| self.range(keys));
        if self.delivers_before {
            let (leaf, count) = (&self.leaf, if archived.is_empty() { "count(*)" } else { count });
            return format!(
                "{ENGINE_TAG}WITH gone AS MATERIALIZED (SELECT * FROM ONLY {leaf} WHERE {is_removed}),
                     updated AS ({removal} RETURNING 1){archived}
                 SELECT (SELECT count(*) FROM updated), {count}, {rows}, {range} FROM gone"
            );
        }
        format!(
            "{ENGINE_TAG}WITH gone AS ({removal} RETURNING *){archived} SELECT count(*), {count}, {rows}, {range} FROM gone"
        )
    }

    /// The first and the last of the removed rows, by value and by key.
    fn range(&self, keys: &[String]) -> String {
        let ends = |[first, last]: [&str; 2], value: &str, order: &str| {
            let sorted = format!("array_agg({value} ORDER BY {order})");
            format!("'{first}', ({sorted})[1], '{last}', ({sorted})[count(*)]")
        };
        let values = ends(["oldest", "newest"], &self.compared, &self.compared);
        if keys.is_empty() {
            return format!("jsonb_build_object({values})");
        }
        let pairs: Vec<_> =
            keys.iter().map(|key| format!("{}, {}", quote_literal(key), quote_identifier(key))).collect();
        let order: Vec<_> = keys.iter().map(quote_identifier).collect();
        let key = format!("jsonb_build_object({})", pairs.join(", "));
        format!("jsonb_build_object({values}, {})", ends(["first_key", "last_key"], &key, &order.join(", ")))
    }

    /// Locks the expired rows that no other session has locked.
    pub fn lock(&self) -> String {
        format!("{} FOR UPDATE SKIP LOCKED", self.look(Which::Listed))
    }
}
