//! Where expired rows go: to an archive, to a function, to a channel. Checked when a rule is registered, delivered when rows go.

mod archive;

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::key::{self, KeyColumn};
use crate::pg::spi;
use crate::rule::Options;
use crate::sandbox::{UnderWay, in_sandbox};
use crate::table::{Table, table_oid};
pub use archive::Archive;
use pgrx::pg_sys::Oid;
use serde_json::json;

/// What PostgreSQL takes as the payload of a NOTIFY, in bytes.
const LONGEST_PAYLOAD: usize = 7_999;

const LARGEST_PIECE: usize = 64 << 20;

/// What is said of a rule on an expression.
const LONGEST_NAME: usize = 1_000;

/// What a removal returns of its rows.
#[derive(Clone, Default)]
pub struct Delivery {
    /// The archive, and the columns that are copied.
    pub archive: Option<(String, Vec<String>)>,
    /// Whether the rows themselves are asked for.
    pub wants_rows: bool,
    /// The columns of the primary key, if the range of keys is asked for.
    pub keys: Option<Vec<String>>,
}

/// Rows that a statement has removed, and their range, as JSON.
#[derive(Debug, Default)]
pub struct Taken {
    pub rows: Option<String>,
    pub range: Option<String>,
}

/// Checks the archive and the function that a rule names.
pub fn check(table: &Table, options: &Options) -> Result<(), TtlError> {
    if let Some(archive) = &options.archive_to {
        let archive = Table::describe(table_oid(archive)?).map_err(|error| match error {
            TtlError::NotATable { name, kind } => TtlError::ArchiveKind { name, kind },
            TtlError::TemporaryTable => TtlError::ArchiveTemporary,
            error => error,
        })?;
        archive.check_storage()?;
        Archive::check_apart(archive.relid, table.relid)?;
        Archive::open(archive.relid, table.relid, table.owner)?;
    }
    if let Some(function) = &options.on_expire {
        let allowed = spi::query(
            "SELECT has_function_privilege($1, $2::regprocedure, 'EXECUTE')",
            &[table.owner.into(), format!("{function}(regclass, jsonb)").into()],
            |row| row.get(1),
        )?;
        if allowed != [Some(true)] {
            return Err(TtlError::FunctionPermission(function.clone()));
        }
    }
    Ok(())
}

/// Refuses an archive from which rows would come back to the table. `id` is the rule's, if it has one already.
pub fn check_end(catalog: &Catalog, table: Oid, options: &Options, id: Option<i64>) -> Result<(), TtlError> {
    let Some(archive) = &options.archive_to else { return Ok(()) };
    Archive::check_end(catalog, table_oid(archive)?, table, id)
}

/// Opens the archive of a rule for the rows of a relation, and says what its removals are to return.
pub fn open(rule: &Rule, relid: Oid) -> Result<(Option<Archive>, Option<Delivery>), TtlError> {
    if !rule.options.delivers() {
        return Ok((None, None));
    }
    let archive = rule.archive.map(|archive| Archive::open(archive, relid, rule.owner)).transpose()?;
    let delivery = Delivery {
        archive: archive.as_ref().map(|archive| (archive.name.clone(), archive.columns.clone())),
        wants_rows: rule.options.on_expire.is_some(),
        keys: rule.options.notify_channel.as_ref().map(|_| key::primary(relid)).transpose()?.map(names),
    };
    Ok((archive, Some(delivery)))
}

fn names(key: Vec<KeyColumn>) -> Vec<String> {
    key.into_iter().map(|column| column.name).collect()
}

/// Puts arrays together, which have come of rows that had to be removed one by one, but for what PostgreSQL could not hold in one
/// value.
fn pieces<'a>(arrays: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    for elements in arrays.map(|array| &array[1..array.len() - 1]) {
        match pieces.last_mut() {
            Some(piece) if piece.len() + elements.len() < LARGEST_PIECE => {
                piece.push_str(", ");
                piece.push_str(elements);
            }
            _ => pieces.push(elements.to_owned()),
        }
    }
    pieces.into_iter().map(|piece| format!("[{piece}]")).collect()
}

/// Calls the function of a rule with rows that go, in their transaction: if it fails, they stay.
pub fn call(rule: &Rule, taken: &[Taken]) -> Result<(), TtlError> {
    let Some(function) = &rule.options.on_expire else { return Ok(()) };
    let call = format!("SELECT {function}($1::regclass, $2::jsonb)");
    // What it does to the table is not the sweep's doing.
    let _paused = UnderWay::pause();
    for rows in pieces(taken.iter().filter_map(|taken| taken.rows.as_deref())) {
        in_sandbox(rule, || spi::execute(&call, &[rule.relid.into(), rows.into()]))?;
    }
    Ok(())
}

/// Tells who listens of a batch, when it commits.
pub fn tell(rule: &Rule, relation: &str, removed: i64, taken: &[Taken]) -> Result<(), TtlError> {
    if removed == 0 {
        return Ok(());
    }
    let range = match taken {
        [taken] => taken.range.as_deref(),
        _ => None,
    };
    let action = match (&rule.predicate.mark, &rule.archive) {
        (Some(_), _) => "mark",
        (None, Some(_)) => "archive",
        (None, None) => "delete",
    };
    notify(rule, relation, action, Some(removed), range)
}

/// Sends a notification, if the rule has a channel for it.
pub fn notify(
    rule: &Rule,
    relation: &str,
    action: &str,
    count: Option<i64>,
    range: Option<&str>,
) -> Result<(), TtlError> {
    let Some(channel) = &rule.options.notify_channel else { return Ok(()) };
    let (table, rule) = (&rule.table, &rule.name[..rule.name.floor_char_boundary(LONGEST_NAME)]);
    let facts =
        json!({ "table": table, "rule": rule, "relation": relation, "action": action, "count": count }).to_string();
    // The range is put in as it came from the server, so that no digit of a number is lost.
    let full = range.map(|range| format!("{},\"range\":{range}}}", &facts[..facts.len() - 1]));
    let payload = full.filter(|full| full.len() <= LONGEST_PAYLOAD).unwrap_or(facts);
    spi::execute("SELECT pg_notify($1, $2)", &[channel.as_str().into(), payload.into()])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{LARGEST_PIECE, pieces};

    #[test]
    fn arrays_are_put_together_but_for_what_is_too_much() {
        assert_eq!(pieces(["[1, 2]", "[3]"].into_iter()), ["[1, 2, 3]"]);
        let large = format!("[\"{}\"]", "x".repeat(LARGEST_PIECE / 2));
        let lengths: Vec<_> =
            pieces([large.as_str(), "[1]", &large, &large].into_iter()).iter().map(String::len).collect();
        assert_eq!(lengths.len(), 3, "{lengths:?}");
        assert!(pieces(std::iter::empty()).is_empty());
    }
}
