//! Where expired rows go: an archive, a function, a channel. Checked at registration, delivered when rows are removed.

mod archive;

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::key::{self, KeyColumn};
use crate::pg::spi;
use crate::rule::Options;
use crate::sandbox::{UnderWay, in_sandbox};
use crate::table::{Table, table_oid};
pub use archive::Archive;
use pgrx::JsonB;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys::Oid;
use serde_json::{Value, json};

/// The longest payload that NOTIFY accepts, in bytes.
const LONGEST_PAYLOAD: usize = 7_999;

const LARGEST_PIECE: usize = 64 << 20;

/// The longest rule name in a notification: a rule on an expression has its text as name.
const LONGEST_NAME: usize = 1_000;

/// The data that a removal returns about its rows.
#[derive(Clone, Default)]
pub struct Delivery {
    /// The archive and the copied columns.
    pub archive: Option<(String, Vec<String>)>,
    /// Whether the rows themselves are needed.
    pub wants_rows: bool,
    /// The columns of the primary key, if the range of keys is needed.
    pub keys: Option<Vec<String>>,
}

/// The rows that a statement has removed, and their range, as JSON.
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

/// Refuses an archive from which rows would come back to the table. `id` is the rule's ID, if it has one already.
pub fn check_end(catalog: &Catalog, table: Oid, options: &Options, id: Option<i64>) -> Result<(), TtlError> {
    let Some(archive) = &options.archive_to else { return Ok(()) };
    Archive::check_end(catalog, table_oid(archive)?, table, id)
}

/// Opens a rule's archive for the rows of a relation, and returns what its removals must return.
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

/// Joins arrays of rows that had to be removed one by one, up to the size that PostgreSQL can hold in one value.
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

/// Calls a rule's function with removed rows, in their transaction: if the function fails, the rows stay.
pub fn call(rule: &Rule, taken: &[Taken]) -> Result<(), TtlError> {
    let Some(function) = &rule.options.on_expire else { return Ok(()) };
    let call = format!("SELECT {function}($1::regclass, $2::jsonb)");
    // Changes that the function makes to the table are not the sweep's.
    let _paused = UnderWay::pause();
    for rows in pieces(taken.iter().filter_map(|taken| taken.rows.as_deref())) {
        in_sandbox(rule, || spi::execute(&call, &[rule.relid.into(), rows.into()]))?;
    }
    Ok(())
}

/// Tells listeners and streams of changes of a batch when it commits.
pub fn tell(
    rule: &Rule,
    relation: &str,
    removed: i64,
    cutoff: Option<TimestampWithTimeZone>,
    taken: &[Taken],
) -> Result<(), TtlError> {
    if removed == 0 {
        return Ok(());
    }
    let range = match taken {
        [taken] => taken.range.as_deref(),
        _ => None,
    };
    let action = match (&rule.predicate.update, &rule.archive) {
        (Some(update), _) => update.name(),
        (None, Some(_)) => "archive",
        (None, None) => "delete",
    };
    if rule.options.emit_message {
        let args = [JsonB(facts(rule, relation, action, Some(removed))).into(), cutoff.into()];
        spi::execute(EMIT, &args)?;
    }
    notify(rule, relation, action, Some(removed), range)
}

/// SQL that writes a message with facts and the cutoff to the log.
const EMIT: &str = "SELECT pg_logical_emit_message(true, 'pg_ttl_index', ($1 || jsonb_build_object(
     'cutoff', to_char($2 AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')))::text)";

fn facts(rule: &Rule, relation: &str, action: &str, count: Option<i64>) -> Value {
    let column = &rule.name[..rule.name.floor_char_boundary(LONGEST_NAME)];
    json!({ "table": rule.table, "rule": column, "rule_name": rule.rule_name, "relation": relation, "action": action,
            "count": count })
}

/// Sends a notification, if the rule has a channel.
pub fn notify(
    rule: &Rule,
    relation: &str,
    action: &str,
    count: Option<i64>,
    range: Option<&str>,
) -> Result<(), TtlError> {
    let Some(channel) = &rule.options.notify_channel else { return Ok(()) };
    let facts = facts(rule, relation, action, count).to_string();
    // The range is inserted as it came from the server, so that no digit of a number is lost.
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
