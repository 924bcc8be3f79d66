//! Finds expired rows in a leaf, each once, without locking them.

use super::leaf::Leaf;
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::index::{self, SHORT_HEAP};
use crate::pg::identity::Setting;
use crate::pg::plan::{Found, Plan, Rows, Tid, position};
use crate::pg::transaction::{Failure, subtransaction};
use crate::pg::{identity, spi};
use crate::sweep::remove::{ONE_BY_ONE, is_about_rows};
use crate::sweep::statement::{Statements, Which};
use pgrx::pg_sys::BlockIdData;

/// Rows that share one value come in one harvest. If there are more of them than this, the scan goes through the heap
/// instead, where it can stop anywhere.
const MOST_TIES: usize = 100_000;

/// Returns how many rows that share the last value a batch may have beyond its size. If there are more, they are found
/// first and divided.
pub fn most_ties(wanted: usize) -> usize {
    wanted / 10
}

/// The most blocks that one query reads, so that a cancel or a change of settings never waits long.
const MOST_BLOCKS: u32 = 16_384;

pub struct Scan {
    statements: Statements,
    position: Position,
    is_estimated: bool,
    /// Whether the last search found rows, so that there are probably more.
    is_fruitful: bool,
}

/// The rows that a batch looks at next if it finds its rows itself.
pub enum NextRows<'a> {
    Beyond(&'a str),
    /// Both ends included.
    Between(Tid, Tid),
}

/// How far a batch that finds its rows itself has got.
#[derive(Debug)]
pub struct Reached {
    pub seen: usize,
    /// The last row, and its value.
    pub last: Option<(Tid, Option<String>)>,
}

/// TIDs of rows that had expired.
#[derive(Default)]
pub struct Harvest {
    pub tids: Vec<Tid>,
    /// How many rows the planner expects in all, if it was asked.
    pub estimate: i64,
    /// TIDs of rows on which the filter or the expression fails, and the failure.
    pub poisoned: Vec<Tid>,
    pub poisoned_by: Option<Failure>,
}

/// How a search treats rows on which the filter or the expression fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Care {
    /// The search fails, too.
    None,
    /// The search skips blocks that have such a row.
    Blocks,
    /// The search finds these rows.
    Rows,
}

/// Settings for the planner only: functions in the filter run under the usual settings.
pub const IN_ORDER: [Setting<'_>; 3] =
    [(c"enable_seqscan", c"off"), (c"enable_bitmapscan", c"off"), (c"enable_sort", c"off")];
const BY_BLOCKS: [Setting<'_>; 3] =
    [(c"enable_seqscan", c"off"), (c"enable_bitmapscan", c"off"), (c"enable_indexscan", c"off")];

fn find(sql: &str, settings: &[Setting<'_>], most: usize) -> Found {
    identity::with_settings(settings, || Plan::for_search(sql)).find(Rows::All, most)
}

enum Position {
    /// In expiry order, behind the last value found.
    Ordered {
        watermark: Option<String>,
    },
    /// By heap blocks, from `next` to the end of the heap when the scan began; `after` is the last offset seen in block
    /// `next`.
    Blocks {
        next: u32,
        end: u32,
        step: u32,
        after: u16,
    },
    Exhausted,
}

impl Scan {
    /// Chooses how to scan: by an index in expiry order, or through the heap.
    pub fn begin(rule: &Rule, leaf: &Leaf, statements: Statements) -> Result<Self, TtlError> {
        let position = match index::serving(rule, leaf.relid)? {
            Some(_) => Position::Ordered { watermark: None },
            None => Position::whole_heap(leaf)?,
        };
        Ok(Self { statements, position, is_estimated: false, is_fruitful: false })
    }

    /// Whether the scan uses an index.
    pub fn is_ordered(&self) -> bool {
        matches!(self.position, Position::Ordered { .. })
    }

    /// Whether the scan reads the heap.
    pub fn is_by_blocks(&self) -> bool {
        matches!(self.position, Position::Blocks { .. })
    }

    /// Whether the scan would read so much that it is worth waiting for an index that is being built.
    pub fn is_long(&self) -> bool {
        matches!(self.position, Position::Blocks { end, .. } if end > SHORT_HEAP)
    }

    pub fn is_exhausted(&self) -> bool {
        matches!(self.position, Position::Exhausted)
    }

    /// Returns the rows to find and remove next in one visit, if there are more than a first search has found.
    pub fn next_rows(&self) -> Option<NextRows<'_>> {
        match &self.position {
            _ if !self.is_fruitful || self.statements.after.is_some() => None,
            Position::Ordered { watermark } => watermark.as_deref().map(NextRows::Beyond),
            Position::Blocks { next, end, after, .. } => {
                let to = next.saturating_add(MOST_BLOCKS).min(*end);
                Some(NextRows::Between(at(*next, after + 1), at(to - 1, u16::MAX)))
            }
            Position::Exhausted => None,
        }
    }

    /// Continues behind the rows that a batch has found itself.
    pub fn go_on(&mut self, reached: Option<&Reached>, wanted: usize) {
        let Some(Reached { seen, last }) = reached else { return };
        self.is_fruitful = *seen > 0;
        match (&mut self.position, last) {
            (Position::Ordered { .. }, _) if *seen < wanted => self.position = Position::Exhausted,
            // All rows with the last value were seen, unless there are too many: then they are searched for again.
            (Position::Ordered { watermark }, Some((_, value))) if *seen < wanted + most_ties(wanted) => {
                watermark.clone_from(value);
            }
            (Position::Ordered { .. }, _) => self.is_fruitful = false,
            (Position::Blocks { next, after, .. }, Some((tid, _))) if *seen >= wanted => {
                (*next, *after) = position(tid);
            }
            (Position::Blocks { next, end, .. }, _) => {
                let to = next.saturating_add(MOST_BLOCKS).min(*end);
                self.go_on_in_blocks(to, *seen, wanted);
            }
            (Position::Exhausted, _) => {}
        }
    }

    /// Returns the next TIDs, about as many as wanted.
    pub fn next(&mut self, wanted: usize, leaf: &Leaf, care: Care) -> Result<Harvest, TtlError> {
        let mut harvest = match (&self.position, care) {
            (Position::Exhausted, _) => Harvest::default(),
            (Position::Ordered { .. }, Care::None) => {
                let found = self.find_in_order(wanted, true);
                self.go_on_in_order(&found, wanted, leaf)?;
                Harvest { tids: found.tids, ..Harvest::default() }
            }
            (Position::Ordered { .. }, _) => self.look_closely_in_order(wanted, leaf)?,
            (Position::Blocks { next, end, step, .. }, Care::None) => {
                let (from, to) = (*next, next.saturating_add(*step).min(*end));
                let tids = find(&self.statements.in_blocks(from, to), &BY_BLOCKS, 0).tids;
                self.go_on_in_blocks(to, tids.len(), wanted);
                Harvest { tids, ..Harvest::default() }
            }
            (Position::Blocks { next, end, step, .. }, care) => {
                let (from, step) = (*next, (*step).min(end - next));
                self.look_closely_in_blocks(from, step, wanted, care)?
            }
        };
        self.is_fruitful = !harvest.tids.is_empty() && care == Care::None;
        if !self.is_estimated && !self.is_exhausted() {
            self.is_estimated = true;
            harvest.estimate = self.statements.estimate();
        }
        Ok(harvest)
    }

    fn find_in_order(&self, wanted: usize, is_filtered: bool) -> Found {
        let watermark = match &self.position {
            Position::Ordered { watermark } => watermark.as_deref(),
            _ => None,
        };
        find(&self.statements.in_order(watermark, wanted, is_filtered), &IN_ORDER, wanted + MOST_TIES)
    }

    fn go_on_in_order(&mut self, found: &Found, wanted: usize, leaf: &Leaf) -> Result<(), TtlError> {
        self.position = match found.tids.len() {
            most if most == wanted + MOST_TIES => Position::whole_heap(leaf)?,
            few if few < wanted => Position::Exhausted,
            _ => Position::Ordered { watermark: found.last.clone() },
        };
        Ok(())
    }

    fn go_on_in_blocks(&mut self, to: u32, found: usize, wanted: usize) {
        let Position::Blocks { next, end, step, after } = &mut self.position else { return };
        (*next, *after) = (to, 0);
        *step = match found {
            few if few < wanted / 2 => step.saturating_mul(2).min(MOST_BLOCKS),
            many if many > wanted => (*step / 2).max(1),
            _ => *step,
        };
        if to == *end {
            self.position = Position::Exhausted;
        }
    }

    /// Finds all expired rows, and then evaluates the filter on each.
    fn look_closely_in_order(&mut self, wanted: usize, leaf: &Leaf) -> Result<Harvest, TtlError> {
        match attempt(|| self.find_in_order(wanted, false)) {
            Ok(found) => {
                self.go_on_in_order(&found, wanted, leaf)?;
                Ok(self.judge(&found.tids))
            }
            // The value itself cannot be computed.
            Err(_) => {
                self.position = Position::whole_heap(leaf)?;
                Ok(Harvest::default())
            }
        }
    }

    /// Halves the range until it has no failing row, or is one block.
    fn look_closely_in_blocks(
        &mut self,
        from: u32,
        mut step: u32,
        wanted: usize,
        care: Care,
    ) -> Result<Harvest, TtlError> {
        let found = loop {
            match attempt(|| find(&self.statements.in_blocks(from, from + step), &BY_BLOCKS, 0)) {
                Ok(found) => break Harvest { tids: found.tids, ..Harvest::default() },
                Err(_) if step > 1 => step /= 2,
                Err(_) if care == Care::Blocks => break Harvest::default(),
                Err(_) => break self.judge(&find(&self.statements.all_in_blocks(from, from + 1), &BY_BLOCKS, 0).tids),
            }
        };
        if let Position::Blocks { step: usual, .. } = &mut self.position {
            *usual = step;
        }
        self.go_on_in_blocks(from + step, found.tids.len(), wanted);
        Ok(found)
    }

    /// Returns which of these TIDs hold rows to remove, and on which the filter or the expression fails. Only reads.
    fn judge(&self, tids: &[Tid]) -> Harvest {
        let look = Plan::for_rows(&self.statements.look(Which::Listed));
        let mut harvest = Harvest::default();
        let mut parts = vec![tids];
        while let Some(part) = parts.pop() {
            match (attempt(|| look.find(Rows::Listed(part), 0)), part) {
                (Ok(found), _) => harvest.tids.extend(found.tids),
                (Err(failure), [tid]) => {
                    harvest.poisoned.push(*tid);
                    harvest.poisoned_by = Some(failure);
                }
                (Err(_), part) if part.len() > ONE_BY_ONE => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                }
                (Err(_), part) => parts.extend(part.chunks(1).rev()),
            }
        }
        harvest
    }
}

/// Runs work that may fail on single rows. Raises any other failure again.
fn attempt<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    subtransaction(|| Ok(work())).map_err(|failure| if is_about_rows(&failure) { failure } else { failure.raise() })
}

fn at(block: u32, number: u16) -> Tid {
    Tid { ip_blkid: BlockIdData { bi_hi: (block >> 16) as u16, bi_lo: block as u16 }, ip_posid: number }
}

/// Returns the number of blocks in a leaf's heap.
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
            end => Ok(Self::Blocks { next: 0, end, step: 128, after: 0 }),
        }
    }
}
