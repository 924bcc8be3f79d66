//! Finding expired rows in a leaf, each once, without locking them.

use super::leaf::Leaf;
use super::statement::Statements;
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::index::{self, Wanted};
use crate::pg::plan::{Places, Plan, Tid};
use crate::pg::{identity, spi};
use pgrx::pg_sys::Oid;

/// Rows that share one value come in one harvest. If there are more of them than this, the scan goes through the heap
/// instead, where it can stop anywhere.
const MOST_TIES: usize = 100_000;

/// Blocks that one query reads at most, so that a cancel or a change of settings never waits long.
const MOST_BLOCKS: u32 = 16_384;

/// A heap of so many blocks, 128 MB as a rule, is read through while an index for it is being made.
pub const FEW_BLOCKS: u32 = 16_384;

pub struct Scan {
    statements: Statements,
    position: Position,
    is_estimated: bool,
}

/// Places of rows that had expired, and how many the planner expects in all, if it was asked.
pub struct Harvest {
    pub tids: Vec<Tid>,
    pub estimate: i64,
}

enum Position {
    /// In the order of expiry, behind the last value that was found.
    Ordered {
        watermark: Option<String>,
    },
    /// By blocks of the heap, from the next one to the end as it was at the start.
    Blocks {
        next: u32,
        end: u32,
        step: u32,
    },
    Exhausted,
}

impl Scan {
    /// Chooses the way: an index that has the order of expiry, or the heap.
    pub fn begin(rule: &Rule, leaf: &Leaf, statements: Statements) -> Result<Self, TtlError> {
        let position = match serving_index(rule, leaf.relid)? {
            Some(_) => Position::Ordered { watermark: None },
            None => Position::whole_heap(leaf)?,
        };
        Ok(Self { statements, position, is_estimated: false })
    }

    /// Whether it would read so much that an index which is on its way is worth waiting for.
    pub fn is_long(&self) -> bool {
        matches!(self.position, Position::Blocks { end, .. } if end > FEW_BLOCKS)
    }

    pub fn is_exhausted(&self) -> bool {
        matches!(self.position, Position::Exhausted)
    }

    /// The next places, about as many as are wanted.
    pub fn next(&mut self, wanted: usize, leaf: &Leaf) -> Result<Harvest, TtlError> {
        let tids = self.next_tids(wanted, leaf)?;
        let mut estimate = 0;
        if !self.is_estimated && !self.is_exhausted() {
            self.is_estimated = true;
            estimate = self.statements.estimate()?;
        }
        Ok(Harvest { tids, estimate })
    }

    fn next_tids(&mut self, wanted: usize, leaf: &Leaf) -> Result<Vec<Tid>, TtlError> {
        match &mut self.position {
            Position::Exhausted => Ok(Vec::new()),
            Position::Ordered { watermark } => {
                let most = wanted + MOST_TIES;
                let sql = self.statements.in_order(watermark.as_deref(), wanted);
                let settings = [(c"enable_seqscan", c"off"), (c"enable_bitmapscan", c"off"), (c"enable_sort", c"off")];
                // The settings are for the planner alone: functions in the filter run under the usual ones.
                let found = identity::with_settings(&settings, || Plan::for_search(&sql)).find(Places::Anywhere, most);
                if found.tids.len() == most {
                    self.position = Position::whole_heap(leaf)?;
                } else if found.tids.len() < wanted {
                    self.position = Position::Exhausted;
                } else {
                    *watermark = found.last;
                }
                Ok(found.tids)
            }
            Position::Blocks { next, end, step } => {
                let to = next.saturating_add(*step).min(*end);
                let sql = self.statements.in_blocks(*next, to);
                let settings =
                    [(c"enable_seqscan", c"off"), (c"enable_bitmapscan", c"off"), (c"enable_indexscan", c"off")];
                let found = identity::with_settings(&settings, || Plan::for_search(&sql)).find(Places::Anywhere, 0);
                *next = to;
                *step = match found.tids.len() {
                    few if few < wanted / 2 => step.saturating_mul(2).min(MOST_BLOCKS),
                    many if many > wanted => (*step / 2).max(1),
                    _ => *step,
                };
                if to == *end {
                    self.position = Position::Exhausted;
                }
                Ok(found.tids)
            }
        }
    }
}

/// The index of a relation that has the rows of a rule in the order of expiry.
pub fn serving_index(rule: &Rule, relid: Oid) -> Result<Option<Oid>, TtlError> {
    let unmarked = rule.unmarked();
    let conditions: Vec<_> = rule.options.filter.iter().chain(&unmarked).map(|c| format!("({c})")).collect();
    index::serving(&Wanted {
        relid,
        key: &rule.expiry.compared(),
        method: "btree",
        condition: (!conditions.is_empty()).then(|| conditions.join(" AND ")).as_deref(),
        at_once: true,
        guarantee: None,
    })
}

/// How many blocks the heap of a leaf has.
pub fn blocks(leaf: &Leaf) -> Result<u32, TtlError> {
    let blocks = spi::read(
        "SELECT pg_relation_size($1, 'main') / current_setting('block_size')::bigint",
        &[leaf.relid.into()],
        |row| Ok(row.get::<i64>(1)?.unwrap_or_default()),
    )?;
    Ok(u32::try_from(blocks.into_iter().next().unwrap_or_default()).unwrap_or(u32::MAX))
}

impl Position {
    fn whole_heap(leaf: &Leaf) -> Result<Self, TtlError> {
        match blocks(leaf)? {
            0 => Ok(Self::Exhausted),
            end => Ok(Self::Blocks { next: 0, end, step: 128 }),
        }
    }
}
