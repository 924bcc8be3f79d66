//! The primary key that names a row.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::spi;
use serde_json::Value;

/// What a caller names a row by.
pub enum Key<'a> {
    /// The one column of the key.
    Text(&'a str),
    /// An object with every column of the key.
    Json(Value),
}

/// A column of a primary key.
pub struct KeyColumn {
    pub name: String,
    /// Quoted.
    pub column: String,
    /// Qualified and quoted, like the operator by which the key tells its values apart.
    pub data_type: String,
    pub equals: String,
}

impl Key<'_> {
    /// The key that a JSON text is. What cannot be read is no object, and so no key.
    pub fn of_json(text: &str) -> Self {
        Self::Json(serde_json::from_str(text).unwrap_or_default())
    }

    /// The text of each column, in the order of the key.
    pub fn texts(&self, table: &str, columns: &[KeyColumn]) -> Result<Vec<String>, TtlError> {
        let texts = match (self, columns) {
            (Self::Text(text), [_]) => Some(vec![(*text).to_owned()]),
            (Self::Json(Value::Object(object)), _) if object.len() == columns.len() => {
                columns.iter().map(|column| object.get(&column.name).and_then(text_of)).collect()
            }
            _ => None,
        };
        texts.ok_or_else(|| TtlError::KeyShape {
            table: table.to_owned(),
            columns: columns.iter().map(|column| column.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }
}

/// A number with a fraction, or beyond 64 bits, may not be the one that was written: it has to come as a string.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) => Some(value.to_string()),
        Value::Number(number) if !number.is_f64() => Some(number.to_string()),
        _ => None,
    }
}

/// The columns of the primary key of a rule's table, in order.
pub fn primary_key(rule: &Rule) -> Result<Vec<KeyColumn>, TtlError> {
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
    let key = spi::read(sql, &[rule.relid.into()], |row| {
        let text = |ordinal| Ok::<String, pgrx::spi::Error>(row.get(ordinal)?.unwrap_or_default());
        Ok(KeyColumn { name: text(1)?, column: text(2)?, data_type: text(3)?, equals: text(4)? })
    })?;
    if key.is_empty() { Err(TtlError::NoPrimaryKey(rule.table.clone())) } else { Ok(key) }
}
