//! How late the sweeping of a rule is.

use super::batch::is_about_rows;
use super::scan::Scan;
use super::statement::Statements;
use super::{cutoff, in_sandbox, leaf};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::planner::MARK;
use crate::pg::spi;
use crate::pg::transaction::subtransaction;
use pgrx::datum::Interval;

/// How long ago the oldest expired row that is still there expired. `None` if there is none, or no index to tell.
pub fn of(rule: &Rule) -> Result<Option<Interval>, TtlError> {
    in_sandbox(rule, || {
        let cutoff = cutoff::of(rule)?;
        let mut queries = Vec::new();
        for leaf in leaf::find(rule, &cutoff.literal)?.sweepable {
            let Some(leaf) = leaf.observe(rule)? else { continue };
            let statements = Statements::new(rule, &cutoff.literal, &leaf.name);
            if Scan::begin(rule, &leaf, statements.clone())?.is_ordered() {
                queries.push(format!("({})", statements.earliest()));
            }
        }
        if queries.is_empty() {
            return Ok(None);
        }
        let earliest = rule.expiry.instant_of(&format!("least({})", queries.join(", ")));
        let sql = format!("{MARK}SELECT $1 - {earliest}");
        // The filter may fail on a row: the sweep deals with that.
        match subtransaction(|| spi::read(&sql, &[cutoff.instant.into()], |row| row.get(1))) {
            Ok(lag) => Ok(lag.into_iter().next().flatten()),
            Err(failure) if is_about_rows(&failure) => Ok(None),
            Err(failure) => failure.raise(),
        }
    })
}
