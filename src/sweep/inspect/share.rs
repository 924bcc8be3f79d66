//! What share of its table a sweep would take. Statistics may be old, so rows are counted, or those in a sample of blocks.

use crate::catalog::{Blocked, Rule};
use crate::error::TtlError;
use crate::pg::estimate;
use crate::pg::plan::{Plan, Rows};
use crate::pg::planner::ENGINE_TAG;
use crate::sandbox::in_sandbox;
use crate::sweep::find::scan::{at, attempt, blocks};
use crate::sweep::find::{cutoff, leaf};
use crate::sweep::remove::blocked;
use crate::sweep::statement::Statements;

/// About how many blocks are read of all relations together, in runs that are spread over each.
const BLOCKS: u32 = 2_000;
const RUN: u32 = 16;

/// Fewer rows than these are no sample.
const FEW: f64 = 1_000.0;

/// If the filter or the expression fails more often than this, nobody knows which rows would go: all might.
const MOST_FAILURES: u32 = 1_000;

/// No block has a row beyond this number.
const LAST_ROW: u16 = 2_047;

/// The rows of a table, and those of them that would go.
#[derive(Clone, Copy, Default)]
struct Counted {
    gone: f64,
    all: f64,
}

/// A relation whose rows are counted, by blocks.
struct Heap {
    plan: Plan,
    blocks: u32,
}

/// Returns the share of all its rows that the next sweep of a rule would take. `left` are the blocked rows that it leaves
/// alone.
pub fn of(rule: &Rule, left: Option<&Blocked>) -> Result<f64, TtlError> {
    in_sandbox(rule, || {
        let cutoff = cutoff::of(rule)?.literal;
        let leaves = leaf::find(rule, &cutoff, false)?;
        let expected = |from: &str| estimate::rows(&format!("{ENGINE_TAG}SELECT FROM {from}")) as f64;
        let whole: f64 = leaves.whole.iter().map(|part| expected(&part.name)).sum();
        let stays: f64 = leaves.out_of_reach.iter().map(|name| expected(name)).sum();
        let skipped: f64 = leaves.skipped.iter().map(|(leaf, _)| expected(&format!("ONLY {}", leaf.name))).sum();
        let after = blocked::value(rule, left.and_then(|left| left.up_to.as_deref()));
        let mut heaps = Vec::new();
        for leaf in leaves.sweepable {
            if let Some(leaf) = leaf.observe(rule)? {
                let statements = Statements::new(rule, &cutoff, &leaf.name).searching_after(after.clone());
                heaps.push(Heap { plan: Plan::for_range(&statements.share()), blocks: blocks(&leaf)? });
            }
        }
        let Some(rows) = count(&heaps)? else { return Ok(1.0) };
        // Whole partitions go whatever the limit on rows is.
        let gone = whole + rule.options.max_rows_per_run.map_or(rows.gone, |most| rows.gone.min(most as f64));
        let all = whole + stays + skipped + rows.all;
        Ok(if all > 0.0 { (gone / all).min(1.0) } else { 0.0 })
    })
}

/// Counts the rows of all heaps; `None` if too many cannot be judged.
fn count(heaps: &[Heap]) -> Result<Option<Counted>, TtlError> {
    let all: f64 = heaps.iter().map(|heap| f64::from(heap.blocks)).sum();
    let share = f64::from(BLOCKS) / all.max(1.0);
    let (sample, seen) = match read(heaps, share) {
        Some(read) => read,
        None => return Ok(None),
    };
    // A few rows in many blocks say nothing.
    if share < 1.0 && seen < FEW {
        return Ok(read(heaps, 1.0).map(|(counted, _)| counted));
    }
    Ok(Some(sample))
}

/// Reads this share of the blocks of each heap, but at least one run. Returns what that means for all blocks, and how many
/// rows were seen.
fn read(heaps: &[Heap], share: f64) -> Option<(Counted, f64)> {
    let (mut total, mut seen, mut failures) = (Counted::default(), 0.0, 0);
    for Heap { plan, blocks } in heaps.iter().filter(|heap| heap.blocks > 0) {
        let runs = ((f64::from(*blocks) * share / f64::from(RUN)).ceil() as u32).clamp(1, blocks.div_ceil(RUN));
        let (mut here, mut looked) = (Counted::default(), 0);
        for run in 0..runs {
            let from = (u64::from(*blocks) * u64::from(run) / u64::from(runs)) as u32;
            let next = (u64::from(*blocks) * u64::from(run + 1) / u64::from(runs)) as u32;
            // As many blocks as all runs together need to cover a whole heap.
            let to = if share < 1.0 { next.min(from + RUN) } else { next };
            let counted = between(plan, (from, 0), (to - 1, LAST_ROW), &mut failures)?;
            (here.gone, here.all, looked) = (here.gone + counted.gone, here.all + counted.all, looked + to - from);
        }
        let scale = f64::from(*blocks) / f64::from(looked);
        (total.gone, total.all) = (total.gone + here.gone * scale, total.all + here.all * scale);
        seen += here.all;
    }
    Some((total, seen))
}

/// Counts the rows between two places. A row that cannot be judged is one that stays; it is found by halving.
fn between(plan: &Plan, from: (u32, u16), to: (u32, u16), failures: &mut u32) -> Option<Counted> {
    let look = || plan.row(Rows::Between(&at(from.0, from.1), &at(to.0, to.1)));
    if let Ok(columns) = attempt(look) {
        let count = |place: usize| columns.get(place)?.as_ref()?.parse().ok();
        return Some(Counted { gone: count(0).unwrap_or_default(), all: count(1).unwrap_or_default() });
    }
    *failures += 1;
    if *failures > MOST_FAILURES {
        return None;
    }
    let (last, next) = match (to.0 - from.0, to.1 - from.1) {
        (0, 0) => return Some(Counted { gone: 0.0, all: 1.0 }),
        (0, rows) => ((from.0, from.1 + rows / 2), (from.0, from.1 + rows / 2 + 1)),
        (blocks, _) => ((from.0 + blocks / 2, LAST_ROW), (from.0 + blocks / 2 + 1, 0)),
    };
    let (one, other) = (between(plan, from, last, failures)?, between(plan, next, to, failures)?);
    Some(Counted { gone: one.gone + other.gone, all: one.all + other.all })
}
