//! What a change of a row reaches through foreign keys.

use crate::error::TtlError;
use crate::pg::relation::{self, Lock};
use crate::pg::spi;
use pgrx::pg_sys::Oid;

/// What is going to be done to rows.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    Delete,
    /// This column is updated.
    Update(&'a str),
}

/// The tables that a change of rows in `$1` changes, too: `$2` is the column that is updated, NULL for a DELETE. What is updated
/// or deleted behind the first foreign key may be any column of that table.
const REACHED: &str = "WITH RECURSIVE reached (relid) AS (
     SELECT k.conrelid FROM pg_constraint k
     WHERE k.contype = 'f' AND k.confrelid = $1
       AND CASE WHEN $2 IS NULL THEN k.confdeltype IN ('c', 'n', 'd')
                ELSE k.confupdtype IN ('c', 'n', 'd') AND EXISTS (
                         SELECT FROM pg_attribute a
                         WHERE a.attrelid = $1 AND a.attname = $2 AND a.attnum = ANY (k.confkey)) END
     UNION
     SELECT k.conrelid FROM reached JOIN pg_constraint k ON k.confrelid = reached.relid
     WHERE k.contype = 'f' AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd')))";

/// Refuses a change that would run triggers of tables that somebody else owns: behind a foreign key's action they fire with our
/// rights, not with their owner's. To be called with the relation's lock held, so that no foreign key can come; those tables are
/// locked too, so that no trigger can.
pub fn check(relid: Oid, owner: Oid, change: Change<'_>) -> Result<(), TtlError> {
    let others = format!(
        "{REACHED} SELECT c.oid, format('%I.%I', n.nspname, c.relname), EXISTS (
                        SELECT FROM pg_trigger t
                        WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & 66 = 0)
                    -- A rule writes to other tables, whose triggers fire in the same way.
                    OR EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid)
             FROM reached JOIN pg_class c ON c.oid = reached.relid JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.relowner <> $3"
    );
    let args = [relid.into(), change.column().into(), owner.into()];
    for relid in spi::query(&others, &args, |row| Ok(row.get::<Oid>(1)?.unwrap_or_default()))? {
        relation::lock(relid, Lock::Change);
    }
    let found = spi::query(&others, &args, |row| {
        Ok((row.get::<String>(2)?.unwrap_or_default(), row.get(3)?.unwrap_or_default()))
    })?;
    match found.into_iter().find(|(_, has_after_triggers)| *has_after_triggers) {
        Some((table, _)) => Err(TtlError::CascadeTriggers(table)),
        None => Ok(()),
    }
}

/// Whether a DELETE in a relation runs nothing but foreign keys of PostgreSQL's own: no trigger, no rule, no default.
pub fn is_mechanical(relid: Oid) -> Result<bool, TtlError> {
    let sql = format!(
        "{REACHED} SELECT NOT EXISTS (
                 SELECT FROM pg_trigger t WHERE NOT t.tgisinternal AND t.tgenabled <> 'D'
                   AND (t.tgrelid = $1 AND t.tgtype & 8 <> 0 OR t.tgrelid IN (SELECT relid FROM reached)))
             AND NOT EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = $1 OR r.ev_class IN (SELECT relid FROM reached))
             AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.contype = 'f' AND k.confdeltype IN ('n', 'd')
                               AND (k.confrelid = $1 OR k.confrelid IN (SELECT relid FROM reached)))"
    );
    let found = spi::query(&sql, &[relid.into(), Change::Delete.column().into()], |row| row.get(1))?;
    Ok(found == [Some(true)])
}

/// What a change leaves to be done when the transaction commits, by whoever commits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deferred {
    /// Triggers of users.
    pub triggers: bool,
    /// Checks of foreign keys.
    pub references: bool,
}

/// What a DELETE in a relation can leave for later.
pub fn deferred(relid: Oid) -> Result<Deferred, TtlError> {
    let sql = format!(
        "{REACHED} SELECT coalesce(bool_or(NOT t.tgisinternal), false), coalesce(bool_or(t.tgisinternal), false)
             FROM pg_trigger t
             WHERE t.tgdeferrable AND t.tgenabled <> 'D' AND t.tgtype & 24 <> 0
               AND (t.tgrelid = $1 OR t.tgrelid IN (SELECT relid FROM reached))"
    );
    let found = spi::query(&sql, &[relid.into(), Change::Delete.column().into()], |row| {
        Ok(Deferred { triggers: row.get(1)?.unwrap_or_default(), references: row.get(2)?.unwrap_or_default() })
    })?;
    Ok(found.into_iter().next().unwrap_or_default())
}

impl<'a> Change<'a> {
    fn column(self) -> Option<&'a str> {
        match self {
            Self::Delete => None,
            Self::Update(column) => Some(column),
        }
    }
}
