//! The table a rule stands on, and whether it may.

use crate::error::TtlError;
use crate::pg::{access, spi};
use pgrx::pg_sys::Oid;
use pgrx::spi::{quote_identifier, quote_qualified_identifier};

pub struct Table {
    pub relid: Oid,
    pub namespace: Oid,
    pub schema: String,
    pub name: String,
    pub owner: Oid,
}

pub struct Column {
    pub attnum: i16,
    pub name: String,
    /// As users write it, with its modifier.
    pub data_type: String,
    /// `typname` of the type under all domains, if it is one of PostgreSQL's own.
    pub base_type: Option<String>,
    pub not_null: bool,
    pub generated: bool,
}

impl Table {
    /// The table, if the caller may rule it, held against concurrent DDL until the transaction ends.
    pub fn lock(relid: Oid) -> Result<Self, TtlError> {
        // Checked before the lock, so that nobody can hold up a table of somebody else, and again after it.
        Self::describe(relid)?;
        access::lock_against_ddl(relid);
        Self::describe(relid)
    }

    fn describe(relid: Oid) -> Result<Self, TtlError> {
        let found = spi::query(
            "SELECT c.relnamespace, n.nspname::text, c.relname::text, c.relowner, c.relkind::text,
                    pg_has_role(c.relowner, 'USAGE'),
                    c.relpersistence = 't',
                    n.nspname IN ('pg_catalog', 'information_schema', 'pg_toast') OR EXISTS (
                        SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
                        WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'
                          AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'pg_ttl_index')
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.oid = $1",
            &[relid.into()],
            |row| {
                let table = Self {
                    relid,
                    namespace: row.get(1)?.unwrap_or_default(),
                    schema: row.get(2)?.unwrap_or_default(),
                    name: row.get(3)?.unwrap_or_default(),
                    owner: row.get(4)?.unwrap_or_default(),
                };
                let flag = |column| Ok::<_, pgrx::spi::Error>(row.get(column)?.unwrap_or(false));
                Ok((table, row.get::<String>(5)?.unwrap_or_default(), flag(6)?, flag(7)?, flag(8)?))
            },
        )?;
        let Some((table, kind, owned, temporary, system)) = found.into_iter().next() else {
            return Err(TtlError::UnknownTable(relid.to_u32()));
        };
        if let Some(kind) = other_kind(&kind) {
            return Err(TtlError::NotATable { name: table.name, kind });
        }
        if system {
            return Err(TtlError::SystemTable(table.name));
        }
        if !owned {
            return Err(TtlError::NotOwner(table.name));
        }
        if temporary {
            return Err(TtlError::TemporaryTable);
        }
        Ok(table)
    }

    pub fn qualified_name(&self) -> String {
        quote_qualified_identifier(&self.schema, &self.name)
    }

    pub fn column(&self, name: &str) -> Result<Column, TtlError> {
        spi::query(
            "WITH RECURSIVE base (oid, typname, typnamespace, typtype, typbasetype) AS (
                 SELECT t.oid, t.typname, t.typnamespace, t.typtype, t.typbasetype
                 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
                 WHERE a.attrelid = $1 AND a.attname = $2
                 UNION ALL
                 SELECT t.oid, t.typname, t.typnamespace, t.typtype, t.typbasetype
                 FROM base b JOIN pg_type t ON t.oid = b.typbasetype
                 WHERE b.typtype = 'd')
             SELECT a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated <> '',
                    (SELECT b.typname::text FROM base b
                     WHERE b.typtype <> 'd' AND b.typnamespace = 'pg_catalog'::regnamespace)
             FROM pg_attribute a
             WHERE a.attrelid = $1 AND a.attname = $2 AND NOT a.attisdropped",
            &[self.relid.into(), name.into()],
            |row| {
                Ok(Column {
                    attnum: row.get(1)?.unwrap_or_default(),
                    name: name.to_owned(),
                    data_type: row.get(2)?.unwrap_or_default(),
                    not_null: row.get(3)?.unwrap_or_default(),
                    generated: row.get(4)?.unwrap_or_default(),
                    base_type: row.get(5)?,
                })
            },
        )?
        .into_iter()
        .next()
        .ok_or_else(|| TtlError::UnknownColumn { table: self.name.clone(), column: name.to_owned() })
    }

    pub fn column_names(&self, attnums: &[i16]) -> Result<Vec<String>, TtlError> {
        spi::query(
            "SELECT a.attname::text FROM unnest($2) WITH ORDINALITY AS used (attnum, position)
             JOIN pg_attribute a ON a.attrelid = $1 AND a.attnum = used.attnum
             ORDER BY used.position",
            &[self.relid.into(), attnums.to_vec().into()],
            |row| Ok(row.get(1)?.unwrap_or_default()),
        )
    }
}

impl Column {
    pub fn quoted(&self) -> String {
        quote_identifier(&self.name)
    }
}

/// What a relation is that is neither a table nor a partitioned table.
fn other_kind(relkind: &str) -> Option<&'static str> {
    match relkind {
        "r" | "p" => None,
        "v" => Some("a view"),
        "m" => Some("a materialized view"),
        "f" => Some("a foreign table"),
        "S" => Some("a sequence"),
        "i" | "I" => Some("an index"),
        "c" => Some("a composite type"),
        "t" => Some("a TOAST table"),
        _ => Some("a relation without rows of its own"),
    }
}
