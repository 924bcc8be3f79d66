//! The table of a rule, and whether it can have rules.

use crate::catalog::Catalog;
use crate::error::{Purpose, TtlError};
use crate::pg::expression::{self, Checked};
use crate::pg::{access, citus, identity, shmem, spi, storage};
use pgrx::pg_sys::Oid;
use pgrx::spi::{quote_identifier, quote_qualified_identifier};

pub struct Table {
    pub relid: Oid,
    pub namespace: Oid,
    pub schema: String,
    pub name: String,
    pub owner: Oid,
    pub is_partitioned: bool,
}

/// What a rule reads a row's expiry from: a column, or an expression over the row.
pub struct Subject {
    /// The name of the column, or the expression in its canonical form.
    pub name: String,
    /// The column's number; `None` for an expression.
    pub attnum: Option<i16>,
    /// SQL over the row.
    pub sql: String,
    /// The type as users write it, with its modifier.
    pub data_type: String,
    /// The type below all domains.
    pub base_type: u32,
    pub immutable: bool,
    /// The numbers of the columns that an expression uses.
    pub uses: Vec<i16>,
    /// Whether it can run in any user's query.
    pub is_harmless: bool,
}

pub struct Column {
    pub attnum: i16,
    pub name: String,
    /// The type as users write it, with its modifier.
    pub data_type: String,
    /// The type below all domains.
    pub base_type: u32,
    pub not_null: bool,
    /// Whether PostgreSQL computes or numbers it.
    pub generated: bool,
}

/// Returns the OID of the table with this name.
pub fn table_oid(name: &str) -> Result<Oid, TtlError> {
    let found = spi::query("SELECT $1::regclass::oid", &[name.into()], |row| row.get(1))?;
    Ok(found.into_iter().flatten().next().unwrap_or_default())
}

impl Table {
    /// Returns the table, if the caller may put rules on it, locked against concurrent DDL until the transaction ends.
    pub fn lock(relid: Oid) -> Result<Self, TtlError> {
        // Check before locking, so that no user can hold up another user's table, and again afterwards.
        Self::describe(relid)?;
        // A builder of an index on the table holds that lock, and may be waiting for us. It begins again later.
        shmem::end_builders_on(relid);
        access::lock_against_ddl(relid);
        Self::describe(relid)
    }

    /// Returns the table, if the caller may put rules on it.
    pub fn describe(relid: Oid) -> Result<Self, TtlError> {
        let look = || {
            spi::query(
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
                        is_partitioned: row.get::<String>(5)?.as_deref() == Some("p"),
                    };
                    let flag = |column| Ok::<_, pgrx::spi::Error>(row.get(column)?.unwrap_or(false));
                    Ok((table, row.get::<String>(5)?.unwrap_or_default(), flag(6)?, flag(7)?, flag(8)?))
                },
            )
        };
        let found = citus::seeing_shards(look)?;
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

    /// Fails if rows of the table are not in its own heap or in that of a partition: elsewhere a `ctid` names other
    /// rows than it seems to.
    pub fn check_storage(&self) -> Result<(), TtlError> {
        storage::check_tree(self.relid)
    }

    pub fn qualified_name(&self) -> String {
        quote_qualified_identifier(&self.schema, &self.name)
    }

    /// Returns the column of that name, or else the text as an expression.
    pub fn subject(&self, text: &str) -> Result<Subject, TtlError> {
        match self.column(text) {
            Ok(column) => Ok(Subject {
                attnum: Some(column.attnum),
                sql: column.quoted(),
                name: column.name,
                data_type: column.data_type,
                base_type: column.base_type,
                immutable: true,
                uses: Vec::new(),
                is_harmless: true,
            }),
            Err(unknown) if expression::is_name(text) => Err(unknown),
            Err(_) => match Catalog::open()?.find(self.relid, None, text, None)?.pop() {
                // Reading an expression runs code. A stored one may be a former owner's: read it as that owner.
                Some(stored) => self.stored_subject(text, stored.registered_for),
                None => self.expression(expression::check_given(self.relid, text, Purpose::Value)?),
            },
        }
    }

    /// Returns the subject of a stored rule, read as its author. Stored expressions are in canonical form.
    pub fn stored_subject(&self, text: &str, author: Oid) -> Result<Subject, TtlError> {
        match self.column(text) {
            Ok(_) => self.subject(text),
            Err(unknown) if expression::is_name(text) => Err(unknown),
            Err(_) => {
                let stored = || expression::check_stored(self.relid, text, Purpose::Value);
                self.expression(identity::sandboxed_as(author, stored)?)
            }
        }
    }

    fn expression(&self, checked: Checked) -> Result<Subject, TtlError> {
        if checked.attnums.is_empty() {
            return Err(TtlError::Constant);
        }
        if checked.is_column {
            return self.subject(&self.column_names(&checked.attnums)?.concat());
        }
        // Use the name of the type below all domains, which no user can rename.
        let base_type = access::base_type(checked.type_oid);
        let data_types = spi::query("SELECT format_type($1, NULL)", &[base_type.into()], |row| row.get(1))?;
        Ok(Subject {
            attnum: None,
            sql: format!("({})", checked.sql),
            name: checked.sql,
            data_type: data_types.into_iter().next().flatten().unwrap_or_default(),
            base_type: base_type.to_u32(),
            immutable: checked.immutable,
            uses: checked.attnums,
            is_harmless: checked.is_harmless,
        })
    }

    pub fn column(&self, name: &str) -> Result<Column, TtlError> {
        spi::query(
            "SELECT a.attnum, a.atttypid, format_type(a.atttypid, a.atttypmod), a.attnotnull OR y.typnotnull,
                    a.attgenerated <> '' OR a.attidentity <> ''
             FROM pg_attribute a JOIN pg_type y ON y.oid = a.atttypid
             WHERE a.attrelid = $1 AND a.attname = $2 AND NOT a.attisdropped",
            &[self.relid.into(), name.into()],
            |row| {
                Ok(Column {
                    attnum: row.get(1)?.unwrap_or_default(),
                    name: name.to_owned(),
                    base_type: access::base_type(row.get(2)?.unwrap_or_default()).to_u32(),
                    data_type: row.get(3)?.unwrap_or_default(),
                    not_null: row.get(4)?.unwrap_or_default(),
                    generated: row.get(5)?.unwrap_or_default(),
                })
            },
        )?
        .into_iter()
        .next()
        .ok_or_else(|| TtlError::UnknownColumn { table: self.name.clone(), column: name.to_owned() })
    }

    /// Returns the triggers that call one of the extension's functions, for one rule or for all, quoted.
    pub fn triggers(&self, function: &str, rule_id: Option<i64>) -> Result<Vec<String>, TtlError> {
        spi::query(
            "SELECT quote_ident(t.tgname) FROM pg_trigger t
             WHERE t.tgrelid = $1 AND NOT t.tgisinternal AND t.tgparentid = 0
               AND t.tgfoid = (SELECT d.objid FROM pg_depend d
                               JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_ttl_index'
                               JOIN pg_proc p ON p.oid = d.objid AND p.proname = $3
                               WHERE d.classid = 'pg_proc'::regclass AND d.refclassid = 'pg_extension'::regclass
                                 AND d.deptype = 'e')
               AND ($2 IS NULL OR t.tgargs = convert_to($2, 'UTF8') || '\\x00')",
            &[self.relid.into(), rule_id.map(|id| id.to_string()).into(), function.into()],
            |row| Ok(row.get(1)?.unwrap_or_default()),
        )
    }

    /// Creates a trigger that calls one of the extension's functions for a rule. Returns `false` if it exists.
    pub fn create_trigger(&self, name: &str, events: &str, function: &str, rule_id: i64) -> Result<bool, TtlError> {
        if !self.triggers(function, Some(rule_id))?.is_empty() {
            return Ok(false);
        }
        let create = format!(
            "CREATE TRIGGER {} BEFORE {events} ON {} FOR EACH ROW EXECUTE FUNCTION {}('{rule_id}')",
            quote_identifier(format!("{name}_{rule_id}")),
            self.qualified_name(),
            Catalog::open()?.function(function),
        );
        spi::execute(&create, &[])?;
        Ok(true)
    }

    /// Drops triggers that call one of the extension's functions for a rule that is not on this table: a dump or a
    /// copy of the table has brought them.
    pub fn drop_orphaned_triggers(&self, function: &str) -> Result<(), TtlError> {
        let mut orphans = self.triggers(function, None)?;
        for rule_id in Catalog::open()?.numbers_on(self.relid)? {
            let own = self.triggers(function, Some(rule_id))?;
            orphans.retain(|trigger| !own.contains(trigger));
        }
        for trigger in orphans {
            spi::execute(&format!("DROP TRIGGER {trigger} ON {}", self.qualified_name()), &[])?;
        }
        Ok(())
    }

    /// Drops the triggers that [`Self::triggers`] finds. Returns whether there were any.
    pub fn drop_triggers(&self, function: &str, rule_id: Option<i64>) -> Result<bool, TtlError> {
        let triggers = self.triggers(function, rule_id)?;
        for trigger in &triggers {
            spi::execute(&format!("DROP TRIGGER {trigger} ON {}", self.qualified_name()), &[])?;
        }
        Ok(!triggers.is_empty())
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

/// Describes the kind of a relation that is neither a table nor a partitioned table.
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
