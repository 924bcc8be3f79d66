//! Those who have a rule's expired rows, or hear of them: the archive, the function, the channel.

use super::batch::Done;
use super::in_sandbox;
use super::leaf::Leaf;
use super::statement::Audience;
use crate::archive::Archive;
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::spi;
use pgrx::pg_sys::Oid;
use serde_json::json;

/// What PostgreSQL takes as the payload of a NOTIFY, in bytes.
const LONGEST_PAYLOAD: usize = 7_999;

/// Opens the archive of a rule for the rows of a leaf, and says what its removals are to return.
pub fn open(rule: &Rule, leaf: &Leaf) -> Result<(Option<Archive>, Option<Audience>), TtlError> {
    if !rule.options.has_audience() {
        return Ok((None, None));
    }
    let archive = rule.archive.map(|relid| Archive::open(relid, leaf.relid, rule.owner)).transpose()?;
    let audience = Audience {
        archive: archive.as_ref().map(|archive| (archive.name.clone(), archive.columns.clone())),
        wants_rows: rule.hook.is_some(),
        keys: rule.options.notify_channel.as_ref().map(|_| key_columns(leaf.relid)).transpose()?,
    };
    Ok((archive, Some(audience)))
}

fn key_columns(relid: Oid) -> Result<Vec<String>, TtlError> {
    spi::read(
        "SELECT a.attname::text FROM pg_index i
         CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, position)
         JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
         WHERE i.indrelid = $1 AND i.indisprimary AND k.position <= i.indnkeyatts
         ORDER BY k.position",
        &[relid.into()],
        |row| Ok(row.get(1)?.unwrap_or_default()),
    )
}

/// Tells of a batch, in its transaction: if that fails, the rows stay.
pub fn tell(rule: &Rule, leaf: &Leaf, done: &Done) -> Result<(), TtlError> {
    if done.removed == 0 {
        return Ok(());
    }
    if let (Some(_), Some(function)) = (rule.hook, &rule.options.on_expire) {
        let arrays = done.taken.iter().filter_map(|taken| taken.rows.as_deref());
        let rows: Vec<_> = arrays.map(|array| &array[1..array.len() - 1]).collect();
        let call = format!("SELECT {function}($1::regclass, $2::jsonb)");
        let args = [rule.relid.into(), format!("[{}]", rows.join(", ")).into()];
        in_sandbox(rule, || spi::execute(&call, &args))?;
    }
    let range = match done.taken.as_slice() {
        [taken] => taken.range.as_deref(),
        _ => None,
    };
    let action = match (&rule.mark, &rule.archive) {
        (Some(_), _) => "mark",
        (None, Some(_)) => "archive",
        (None, None) => "delete",
    };
    notify(rule, &leaf.name, action, Some(done.removed), range)
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
    let (table, rule) = (&rule.table, &rule.name);
    let facts =
        json!({ "table": table, "rule": rule, "relation": relation, "action": action, "count": count }).to_string();
    // The range is put in as it came from the server, so that no digit of a number is lost.
    let full = range.map(|range| format!("{},\"range\":{range}}}", &facts[..facts.len() - 1]));
    let payload = full.filter(|full| full.len() <= LONGEST_PAYLOAD).unwrap_or(facts);
    spi::execute("SELECT pg_notify($1, $2)", &[channel.as_str().into(), payload.into()])?;
    Ok(())
}
