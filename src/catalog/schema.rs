//! Which versions of the extension's schema this library serves.
//!
//! A package may be upgraded long before `ALTER EXTENSION … UPDATE`, and a schema before the server restarts. Until
//! they match, or if a user has altered the tables by hand, the library leaves the database alone: no query may fail.

use crate::error::{TtlError, Unserved};
use crate::pg::memo::Memo;
use crate::pg::{process, spi};
use pgrx::pg_sys::{InvalidOid, Oid};
use std::rc::Rc;

/// The versions that are served, each with the [`DIGEST`] of its schema. A release adds a line; no line is removed
/// before the next major version.
const SERVED: [(&str, &str); 1] = [("4.0.0", "d0c4f9295b227fc281c92893830c4028")];

/// SQL for a digest of the names and types of all columns and functions that belong to the extension `e`.
const DIGEST: &str = "SELECT md5(string_agg(part, ' ' ORDER BY part COLLATE \"C\"))
     FROM pg_depend d
     CROSS JOIN LATERAL (
         SELECT format('%s.%s %s', c.relname, a.attname, t.typname)
         FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         JOIN pg_type t ON t.oid = a.atttypid
         WHERE d.classid = 'pg_class'::regclass AND c.oid = d.objid AND c.relkind = 'r' AND c.relnamespace = e.extnamespace
         UNION ALL
         SELECT format('%s(%s) %s', p.proname, array_to_string(ARRAY(
                    SELECT y.typname FROM unnest(p.proargtypes) WITH ORDINALITY AS argument (type, place)
                    JOIN pg_type y ON y.oid = argument.type ORDER BY place), ','), t.typname)
         FROM pg_proc p JOIN pg_type t ON t.oid = p.prorettype
         WHERE d.classid = 'pg_proc'::regclass AND p.oid = d.objid AND p.pronamespace = e.extnamespace) AS parts (part)
     WHERE d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND d.deptype = 'e'";

/// What a database has installed of the extension.
struct Installed {
    /// All of the extension's tables, the table of rules first.
    tables: Vec<Oid>,
    /// Why the library does not serve them, if it does not.
    unserved: Option<Unserved>,
}

thread_local! {
    static INSTALLED: Memo<(), Installed> = Memo::new();
}

fn installed() -> Result<Rc<Installed>, TtlError> {
    INSTALLED.with(|memo| match memo.get(&()) {
        Some(installed) => Ok(installed),
        None => memo.remember(&(), || spi::with_latest_snapshot(look)),
    })
}

/// Returns the extension's tables, the table of rules first, if this library serves them.
pub fn tables() -> Result<Vec<Oid>, TtlError> {
    let installed = installed()?;
    match &installed.unserved {
        Some(reason) => Err(TtlError::Unserved(reason.clone())),
        None if installed.tables.is_empty() => Err(TtlError::NotInstalled),
        None => Ok(installed.tables.clone()),
    }
}

/// Returns the relations that change when the installed schema does; any relation, if nothing is installed.
pub fn watched() -> Result<Vec<Oid>, TtlError> {
    Ok(watching(&installed()?.tables))
}

fn watching(tables: &[Oid]) -> Vec<Oid> {
    // The extension exists before its tables do.
    if tables.is_empty() { vec![InvalidOid] } else { tables.to_vec() }
}

/// Returns what is installed, and the relations whose changes may change that. No schema can make it fail.
fn look() -> Result<(Vec<Oid>, Installed), TtlError> {
    let nothing = || (vec![InvalidOid], Installed { tables: Vec::new(), unserved: None });
    // Most databases lack the extension, and any change in them may create it: this is cheaper than a query.
    if !process::has_extension() {
        return Ok(nothing());
    }
    let sql = format!(
        "SELECT e.extversion, ({DIGEST}),
                ARRAY(SELECT c.oid FROM pg_depend d JOIN pg_class c ON c.oid = d.objid
                      WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
                        AND d.deptype = 'e' AND c.relkind = 'r' AND c.relnamespace = e.extnamespace
                      ORDER BY c.relname = 'ttl_index_table' DESC)
         FROM pg_extension e WHERE e.extname = 'pg_ttl_index'"
    );
    let found = spi::peek(&sql, |row| {
        let (version, digest): (Option<String>, Option<String>) = (row.get(1)?, row.get(2)?);
        Ok((version.unwrap_or_default(), digest.unwrap_or_default(), row.get::<Vec<Oid>>(3)?.unwrap_or_default()))
    })?;
    let Some((version, digest, tables)) = found.into_iter().next() else { return Ok(nothing()) };
    Ok((watching(&tables), Installed { tables, unserved: judge(&version, &digest).err() }))
}

fn judge(version: &str, digest: &str) -> Result<(), Unserved> {
    match SERVED.iter().find(|(served, _)| *served == version) {
        Some((_, whole)) if *whole == digest => Ok(()),
        Some(_) => Err(Unserved::Damaged(digest.into())),
        None if numbers(version) > numbers(env!("CARGO_PKG_VERSION")) => Err(Unserved::Newer(version.into())),
        None => Err(Unserved::Older(version.into())),
    }
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map(|number| number.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_apart_by_their_numbers() {
        assert_eq!(judge("3.0.0", ""), Err(Unserved::Older("3.0.0".into())));
        assert_eq!(judge("4.10.0", ""), Err(Unserved::Newer("4.10.0".into())));
        assert_eq!(judge("10.0", ""), Err(Unserved::Newer("10.0".into())));
        assert_eq!(judge("", ""), Err(Unserved::Older(String::new())));
        let (version, digest) = SERVED[0];
        assert_eq!(judge(version, digest), Ok(()));
        assert_eq!(judge(version, "another"), Err(Unserved::Damaged("another".into())));
    }
}
