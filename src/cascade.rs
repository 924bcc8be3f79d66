//! The tables that a change of a row reaches through foreign keys.

use crate::error::TtlError;
use crate::pg::relation::{self, Lock};
use crate::pg::spi;
use pgrx::pg_sys::Oid;

/// A change that is about to be made to rows.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    Delete,
    /// An update of these columns.
    Update(&'a [String]),
}

/// SQL for the columns of `$1` that an update of the columns `$2` changes: `given` is the number of one of these, and
/// `attnum` the same number, or that of a column that is generated from it.
const CHANGED: &str = "changed (given, attnum) AS (
     SELECT a.attnum, a.attnum FROM pg_attribute a WHERE a.attrelid = $1 AND a.attname = ANY ($2)
     UNION
     SELECT a.attnum, g.adnum FROM pg_attribute a
     JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
                     AND d.classid = 'pg_attrdef'::regclass AND d.deptype = 'n'
     JOIN pg_attrdef g ON g.oid = d.objid AND g.adrelid = a.attrelid
     WHERE a.attrelid = $1 AND a.attname = ANY ($2))";

/// SQL for the tables that a change of rows in `$1` changes, too: `$2` are the columns that are updated, NULL for
/// a DELETE. A trigger before an update can change any column; those of the extension leave the updates of sweeps alone.
/// Behind the first foreign key, rows may be deleted and any column may be updated.
fn reached() -> String {
    format!(
        "WITH RECURSIVE {CHANGED}, reached (relid) AS (
             SELECT k.conrelid FROM pg_constraint k
             WHERE k.contype = 'f' AND k.confrelid = $1
               AND CASE WHEN $2 IS NULL THEN k.confdeltype IN ('c', 'n', 'd')
                        ELSE k.confupdtype IN ('c', 'n', 'd')
                             AND (EXISTS (SELECT FROM changed WHERE changed.attnum = ANY (k.confkey))
                                  OR EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = $1 AND NOT t.tgisinternal
                                               AND t.tgenabled <> 'D' AND t.tgtype & 19 = 19 AND NOT EXISTS (
                                                   SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                                                   WHERE d.classid = 'pg_proc'::regclass AND d.objid = t.tgfoid
                                                     AND d.deptype = 'e' AND e.extname = 'pg_ttl_index'))) END
             UNION
             SELECT k.conrelid FROM reached JOIN pg_constraint k ON k.confrelid = reached.relid
             WHERE k.contype = 'f' AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd')))"
    )
}

/// Fails if a change would run triggers of tables with another owner: behind a foreign key's action they fire with our
/// rights, not with their owner's. The caller must hold the relation's lock, so that no foreign key can be added; this
/// function locks the other tables too, so that no trigger can be added.
pub fn check(relid: Oid, owner: Oid, change: Change<'_>) -> Result<(), TtlError> {
    let others = format!(
        "{} SELECT c.oid, format('%I.%I', n.nspname, c.relname), EXISTS (
                        SELECT FROM pg_trigger t
                        WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & 66 = 0)
                    -- A rule writes to other tables, whose triggers fire in the same way.
                    OR EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid)
             FROM reached JOIN pg_class c ON c.oid = reached.relid JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.relowner <> $3",
        reached()
    );
    let args = [relid.into(), change.columns().into(), owner.into()];
    let reached = spi::query_kept(&others, &args, |row| Ok(row.get::<Oid>(1)?.unwrap_or_default()))?;
    if reached.is_empty() {
        return Ok(());
    }
    for relid in reached {
        relation::lock(relid, Lock::Change);
    }
    let found = spi::query_kept(&others, &args, |row| {
        Ok((row.get::<String>(2)?.unwrap_or_default(), row.get(3)?.unwrap_or_default()))
    })?;
    match found.into_iter().find(|(_, has_after_triggers)| *has_after_triggers) {
        Some((table, _)) => Err(TtlError::CascadeTriggers(table)),
        None => Ok(()),
    }
}

/// Returns the numbers of the columns that an update of these columns changes: themselves, and those generated from them.
pub fn changed_columns(relid: Oid, columns: &[String]) -> Result<Vec<i16>, TtlError> {
    let sql = format!("WITH {CHANGED} SELECT attnum FROM changed");
    spi::read(&sql, &[relid.into(), columns.to_vec().into()], |row| Ok(row.get(1)?.unwrap_or_default()))
}

/// Fails if one of these columns, which many rows are about to have the same value in, or one that is generated from it, is
/// part of a key: of the primary key or the replica identity, of one that a foreign key refers to, or of a unique one if
/// that value is not null. `to_null` are those among them that become null.
pub fn check_cleared(relid: Oid, columns: &[String], to_null: &[String]) -> Result<(), TtlError> {
    let sql = format!(
        "WITH {CHANGED}
         SELECT a.attname::text, $1::regclass::text FROM changed JOIN pg_attribute a ON a.attrelid = $1 AND a.attnum = changed.given
         WHERE EXISTS (SELECT FROM pg_constraint k
                       WHERE k.contype = 'f' AND k.confrelid = $1 AND changed.attnum = ANY (k.confkey))
            OR EXISTS (SELECT FROM pg_index i
                       WHERE i.indrelid = $1 AND changed.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
                         AND (i.indisprimary OR i.indisreplident OR i.indisunique
                              AND (i.indnullsnotdistinct OR a.attname <> ALL ($3))))"
    );
    let args = [relid.into(), columns.to_vec().into(), to_null.to_vec().into()];
    let keys = spi::query_kept(&sql, &args, |row| {
        Ok(TtlError::ClearsKey { column: row.get(1)?.unwrap_or_default(), table: row.get(2)?.unwrap_or_default() })
    })?;
    keys.into_iter().next().map_or(Ok(()), Err)
}

/// Whether a DELETE in a relation runs only PostgreSQL's own foreign-key actions: no trigger, rule or default.
pub fn is_mechanical(relid: Oid) -> Result<bool, TtlError> {
    let sql = format!(
        "{} SELECT NOT EXISTS (
                 SELECT FROM pg_trigger t WHERE NOT t.tgisinternal AND t.tgenabled <> 'D'
                   AND (t.tgrelid = $1 AND t.tgtype & 8 <> 0 OR t.tgrelid IN (SELECT relid FROM reached)))
             AND NOT EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = $1 OR r.ev_class IN (SELECT relid FROM reached))
             AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.contype = 'f' AND k.confdeltype IN ('n', 'd')
                               AND (k.confrelid = $1 OR k.confrelid IN (SELECT relid FROM reached)))",
        reached()
    );
    let found = spi::query(&sql, &[relid.into(), Change::Delete.columns().into()], |row| row.get(1))?;
    Ok(found == [Some(true)])
}

/// The work that a change defers until the transaction commits, when it runs as the role that commits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deferred {
    /// User triggers.
    pub triggers: bool,
    /// Foreign-key checks.
    pub references: bool,
}

/// Returns the work that a DELETE in a relation can defer.
pub fn deferred(relid: Oid) -> Result<Deferred, TtlError> {
    let sql = format!(
        "{} SELECT coalesce(bool_or(NOT t.tgisinternal), false), coalesce(bool_or(t.tgisinternal), false)
             FROM pg_trigger t
             WHERE t.tgdeferrable AND t.tgenabled <> 'D' AND t.tgtype & 24 <> 0
               AND (t.tgrelid = $1 OR t.tgrelid IN (SELECT relid FROM reached))",
        reached()
    );
    let found = spi::query(&sql, &[relid.into(), Change::Delete.columns().into()], |row| {
        Ok(Deferred { triggers: row.get(1)?.unwrap_or_default(), references: row.get(2)?.unwrap_or_default() })
    })?;
    Ok(found.into_iter().next().unwrap_or_default())
}

impl Change<'_> {
    fn columns(self) -> Option<Vec<String>> {
        match self {
            Self::Delete => None,
            Self::Update(columns) => Some(columns.to_vec()),
        }
    }
}
