//! The key by which a caller names a row.

use crate::error::TtlError;
use crate::pg::key::KeyColumn;
use serde_json::Value;

/// The key by which a caller names a row.
pub enum Key<'a> {
    /// The value of a single-column key.
    Text(&'a str),
    /// An object with every column of the key.
    Json(Value),
}

impl Key<'_> {
    /// Reads a key from JSON text. Text that cannot be read is not an object, and so not a key.
    pub fn of_json(text: &str) -> Self {
        Self::Json(serde_json::from_str(text).unwrap_or_default())
    }

    /// Returns the text of each column, in key order.
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

/// Returns a value as text. A number with a fraction or beyond 64 bits may have lost digits: it must be a string.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(_) => Some(value.to_string()),
        Value::Number(number) if !number.is_f64() => Some(number.to_string()),
        _ => None,
    }
}
