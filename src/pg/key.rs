//! Primary keys and their equality operators.

use super::spi;
use crate::error::TtlError;
use pgrx::pg_sys::Oid;

/// A column of a primary key.
pub struct KeyColumn {
    pub name: String,
    /// The quoted name.
    pub column: String,
    /// Qualified and quoted, like `equals`, the key's equality operator.
    pub data_type: String,
    pub equals: String,
}

/// Returns the columns of the primary key of a table, in order; none if there is no primary key.
pub fn primary(relid: Oid) -> Result<Vec<KeyColumn>, TtlError> {
    let sql = "SELECT a.attname::text, quote_ident(a.attname), format('%I.%I', tn.nspname, t.typname),
                      format('OPERATOR(%I.%s)', n.nspname, o.oprname)
               FROM pg_index i
               CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indclass::oid[])
                          WITH ORDINALITY AS k (attnum, opclass, position)
               JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
               JOIN pg_type t ON t.oid = a.atttypid
               JOIN pg_namespace tn ON tn.oid = t.typnamespace
               JOIN pg_opclass c ON c.oid = k.opclass
               JOIN pg_am am ON am.oid = c.opcmethod AND am.amname = 'btree'
               JOIN pg_amop m ON m.amopfamily = c.opcfamily AND m.amopstrategy = 3
                             AND m.amoplefttype = c.opcintype AND m.amoprighttype = c.opcintype
               JOIN pg_operator o ON o.oid = m.amopopr
               JOIN pg_namespace n ON n.oid = o.oprnamespace
               WHERE i.indrelid = $1 AND i.indisprimary
               ORDER BY k.position";
    spi::read(sql, &[relid.into()], |row| {
        let text = |ordinal| Ok::<String, pgrx::spi::Error>(row.get(ordinal)?.unwrap_or_default());
        Ok(KeyColumn { name: text(1)?, column: text(2)?, data_type: text(3)?, equals: text(4)? })
    })
}
