//! What share of its table a sweep would take. Statistics may be old, so rows are counted, or blocks are sampled.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::planner::ENGINE_TAG;
use crate::pg::transaction::subtransaction;
use crate::pg::{estimate, spi};
use crate::sandbox::in_sandbox;
use crate::sweep::find::{cutoff, leaf, scan};
use crate::sweep::remove::is_about_rows;
use crate::sweep::statement::Statements;

/// How many blocks are read, of all relations together and of each at least.
const BLOCKS: u32 = 2_000;
const BLOCKS_OF_EACH: u32 = 16;

/// Fewer rows than these are no sample.
const FEW: i64 = 1_000;

/// Returns the share of all its rows that the next sweep of a rule would take.
pub fn of(rule: &Rule) -> Result<f64, TtlError> {
    in_sandbox(rule, || {
        let cutoff = cutoff::of(rule)?.literal;
        let leaves = leaf::find(rule, &cutoff, false)?;
        let (mut gone, mut all) = (0.0, 0.0);
        for part in &leaves.whole {
            let rows = estimate::rows(&format!("{ENGINE_TAG}SELECT FROM {}", part.name)) as f64;
            (gone, all) = (gone + rows, all + rows);
        }
        let blocks = (BLOCKS / u32::try_from(leaves.sweepable.len().max(1)).unwrap_or(BLOCKS)).max(BLOCKS_OF_EACH);
        for leaf in leaves.sweepable {
            if let Some(leaf) = leaf.observe(rule)? {
                let size = scan::blocks(&leaf)?;
                let percent = (size > blocks).then(|| 100.0 * f64::from(blocks) / f64::from(size));
                let statements = Statements::new(rule, &cutoff, &leaf.name);
                let mut counted = count(&statements, percent)?;
                let mut scale = percent.map_or(1.0, |percent| 100.0 / percent);
                // A few rows in many blocks say nothing.
                if percent.is_some() && counted.1 < FEW {
                    (counted, scale) = (count(&statements, None)?, 1.0);
                }
                (gone, all) = (gone + counted.0 as f64 * scale, all + counted.1 as f64 * scale);
            }
        }
        for (leaf, _) in leaves.skipped {
            all += estimate::rows(&format!("{ENGINE_TAG}SELECT FROM ONLY {}", leaf.name)) as f64;
        }
        let gone = rule.options.max_rows_per_run.map_or(gone, |most| gone.min(most as f64));
        Ok(if all > 0.0 { (gone / all).min(1.0) } else { 0.0 })
    })
}

/// Counts the rows that would go, and all rows. A filter that fails on a row takes none away; if the expression fails, the
/// planner has to guess.
fn count(statements: &Statements, percent: Option<f64>) -> Result<(i64, i64), TtlError> {
    let read = |is_filtered| {
        let counted = spi::read(&statements.share(percent, is_filtered), &[], |row| {
            Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default()))
        })?;
        Ok(counted.into_iter().next().unwrap_or_default())
    };
    match subtransaction(|| read(true)) {
        Err(failure) if is_about_rows(&failure) => match subtransaction(|| read(false)) {
            Err(failure) if is_about_rows(&failure) => Ok((statements.estimate(), statements.estimate_all())),
            counted => counted.or_else(|failure| failure.raise()),
        },
        counted => counted.or_else(|failure| failure.raise()),
    }
}
