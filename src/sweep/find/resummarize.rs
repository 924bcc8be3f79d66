//! Keeps a BRIN index worth reading.
//!
//! PostgreSQL widens the summary of a block range when rows arrive, but does not narrow it when they go. So every range
//! that ever held an expired row would be read by every sweep, for ever.

use super::leaf::Leaf;
use crate::error::TtlError;
use crate::index::{self, SHORT_HEAP};
use crate::pg::plan::{BY_TID, Plan, Rows};
use crate::pg::{brin, identity, spi};
use crate::sweep::LONGEST_SEARCH;
use crate::sweep::statement::Statements;
use pgrx::pg_sys::Oid;
use std::ops::Range;
use std::time::Instant;

/// The ranges that a BRIN index did not rule out.
pub struct Unpruned {
    pub index: Oid,
    pub ranges: Vec<Range<u32>>,
}

/// Summarizes those ranges again that hold nothing expired any more, for a limited time. Call it as the table's owner.
///
/// Where every row is visible to all and vacuum has nothing to do, a new summary covers just the rows that are there. If
/// the index has none of them up to the cutoff, later sweeps skip the range, and do not summarize it again. Without a
/// summary a range is read: an error in between loses nothing.
pub fn resummarize(leaf: &Leaf, statements: &Statements, unpruned: &Unpruned) -> Result<(), TtlError> {
    let (started, size) = (Instant::now(), brin::pages_per_range(unpruned.index));
    // Summarizing one range cannot be interrupted, and keeps vacuum waiting.
    if size > SHORT_HEAP {
        return Ok(());
    }
    let predicate = index::predicate(unpruned.index)?;
    for range in unpruned.ranges.iter().flat_map(|joined| split(joined, size)) {
        if started.elapsed() >= LONGEST_SEARCH {
            break;
        }
        let sql = || statements.indexed_in_blocks(range.start, range.end, predicate.as_deref());
        let find = || Plan::for_search(&sql(), BY_TID).find(Rows::All, 1);
        if brin::is_clean(leaf.relid, range.clone()) && find().tids.is_empty() {
            let args = [unpruned.index.into(), i64::from(range.start).into()];
            // Vacuum holds the lock that this needs, and sweeps do not wait for it.
            identity::with_settings(&[(c"lock_timeout", c"50ms")], || {
                spi::query("SELECT brin_desummarize_range($1::oid::regclass, $2)", &args, |_| Ok(()))?;
                spi::query("SELECT brin_summarize_range($1::oid::regclass, $2)", &args, |_| Ok(()))
            })?;
        }
    }
    Ok(())
}

/// Divides joined ranges into those of the index.
fn split(joined: &Range<u32>, size: u32) -> impl Iterator<Item = Range<u32>> + use<> {
    let end = joined.end;
    (joined.start..end).step_by(size as usize).map(move |start| start..start.saturating_add(size).min(end))
}
