//! Finds expired rows in a leaf, each once, without locking them.

use super::leaf::Leaf;
use super::resummarize::Unpruned;
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::guc::{self, DebugScan};
use crate::index::{self, SHORT_HEAP};
use crate::pg::plan::{BY_TID, Found, IN_ORDER, Plan, Rows, Tid, position};
use crate::pg::shmem::Path;
use crate::pg::transaction::{Failure, subtransaction};
use crate::pg::{brin, spi};
use crate::sweep::remove::{ONE_BY_ONE, is_about_rows};
use crate::sweep::statement::{Statements, Which};
use pgrx::pg_sys::BlockIdData;
use std::collections::{HashSet, VecDeque};
use std::ops::Range;

/// Rows that share one value come in one harvest. If there are more of them than this, the scan goes through the heap
/// instead, where it can stop anywhere.
const MOST_TIES: usize = 100_000;

/// Returns how many rows that share the last value a batch may have beyond its size. If there are more, they are found
/// first and divided.
pub fn most_ties(wanted: usize) -> usize {
    wanted / 10
}

/// A scan leaves the index if a block of the heap has, on average, this many times as many expired rows as a block that the
/// index leads to. Where rows are deleted as they are found, reading two live rows costs less than an index entry and the visit
/// that it leads to. By SQL, one statement removes rows in order, and two by blocks.
const DENSE: f64 = 0.45;
const SCATTERED: f64 = 1.5;

/// How many expired rows are worth several processes, and how many there must be in a block, beside those of a block
/// that an index leads to.
const LARGE: i64 = 1_000_000;
const SHAREABLE: f64 = 0.3;

/// The most blocks that one query reads, so that a cancel or a change of settings never waits long.
const MOST_BLOCKS: u32 = 16_384;

pub struct Scan {
    statements: Statements,
    path: Path,
    /// What a BRIN index has left over, if the scan goes by that.
    unpruned: Option<Unpruned>,
    position: Position,
    is_estimated: bool,
    /// What makes it leave the index.
    leaves_index_at: f64,
    /// Whether rows have to be found in expiry order, because the sweep may end before it has found them all.
    keeps_order: bool,
    /// Whether the last search found rows, so that there are probably more.
    is_fruitful: bool,
    /// Whether other processes may sweep some of the blocks.
    can_share: bool,
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
    /// The last row by TID, or by value if the scan is in order.
    pub last: Option<Tid>,
    pub value: Option<String>,
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

fn in_blocks(sql: &str) -> Found {
    Plan::for_search(sql, BY_TID).find(Rows::All, 0)
}

/// Returns the block ranges that can hold expired rows by a BRIN index, if there is one.
fn unpruned(rule: &Rule, leaf: &Leaf, cutoff: &str) -> Result<Option<Unpruned>, TtlError> {
    let Some(index) = index::pruning(rule, leaf.relid)? else { return Ok(None) };
    let cutoff = Plan::for_search(&format!("SELECT {cutoff}"), &[]);
    let ranges = cutoff.value(&[]).and_then(|cutoff| brin::ranges_up_to(index, &cutoff));
    Ok(ranges.map(|ranges| Unpruned { index, ranges }))
}

enum Position {
    /// In expiry order, behind the last value found.
    Ordered {
        watermark: Option<String>,
    },
    /// By heap blocks, from `next` to `end`, and then in later ranges, up to the end of the heap when the scan began;
    /// `after` is the last offset seen in block `next`.
    Blocks {
        next: u32,
        end: u32,
        step: u32,
        after: u16,
        later: VecDeque<Range<u32>>,
    },
    Exhausted,
}

impl Scan {
    /// Chooses how to scan: by an index in expiry order, by what a BRIN index leaves over, or through the heap.
    pub fn begin(rule: &Rule, leaf: &Leaf, cutoff: &str, statements: Statements) -> Result<Self, TtlError> {
        let goes_by_blocks = guc::debug_scan() == DebugScan::Blocks;
        let is_served = !goes_by_blocks && index::serving(rule, leaf.relid)?.is_some();
        let unpruned = if is_served || goes_by_blocks { None } else { unpruned(rule, leaf, cutoff)? };
        let (path, position) = if is_served {
            (Path::Index, Position::Ordered { watermark: None })
        } else if let Some(Unpruned { ranges, .. }) = &unpruned {
            (Path::Ranges, Position::in_ranges(ranges.iter().cloned()))
        } else {
            (Path::Blocks, Position::whole_heap(leaf)?)
        };
        let keeps_order = rule.options.max_rows_per_run.is_some() || guc::debug_scan() == DebugScan::Index;
        Ok(Self {
            statements,
            path,
            unpruned,
            position,
            is_estimated: false,
            leaves_index_at: if leaf.removal_runs_user_code(rule) { SCATTERED } else { DENSE },
            keeps_order,
            is_fruitful: false,
            can_share: false,
        })
    }

    /// Restricts the scan to some blocks, if any are given, and says whether other processes may sweep some of them.
    pub fn restrict(&mut self, range: Option<Range<u32>>, can_share: bool) {
        self.can_share = can_share;
        if let Some(range) = range {
            (self.path, self.unpruned) = (Path::Blocks, None);
            self.position = Position::in_ranges(std::iter::once(range));
        }
    }

    /// Returns the second half of the blocks that are left, if it has at least this many.
    pub fn half(&self, least: u32) -> Option<Range<u32>> {
        let Position::Blocks { next, end, later, .. } = &self.position else { return None };
        let middle = next + (end - next).div_ceil(2);
        (later.is_empty() && end - middle >= least).then_some(middle..*end)
    }

    /// Ends the scan before this block.
    pub fn end_at(&mut self, block: u32) {
        if let Position::Blocks { end, .. } = &mut self.position {
            *end = block;
        }
    }

    /// Returns what a BRIN index has left over, once the scan has gone through all of it.
    pub fn take_unpruned(&mut self) -> Option<Unpruned> {
        self.unpruned.take().filter(|unpruned| self.is_exhausted() && !unpruned.ranges.is_empty())
    }

    /// How the scan goes through the leaf.
    pub fn path(&self) -> Path {
        self.path
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
        let Position::Blocks { next, end, later, .. } = &self.position else { return false };
        end - next + later.iter().map(|range| range.end - range.start).sum::<u32>() > SHORT_HEAP
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
        let Some(Reached { seen, last, value }) = reached else { return };
        self.is_fruitful = *seen > 0;
        match (&mut self.position, last) {
            (Position::Ordered { .. }, _) if *seen < wanted => self.position = Position::Exhausted,
            // All rows with the last value were seen, unless there are too many: then they are searched for again.
            (Position::Ordered { watermark }, _) if *seen < wanted + most_ties(wanted) => watermark.clone_from(value),
            (Position::Ordered { .. }, _) => self.is_fruitful = false,
            (Position::Blocks { next, after, .. }, Some(tid)) if *seen >= wanted => {
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
        let was_ordered = self.is_ordered();
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
                let tids = in_blocks(&self.statements.in_blocks(from, to)).tids;
                self.go_on_in_blocks(to, tids.len(), wanted);
                Harvest { tids, ..Harvest::default() }
            }
            (Position::Blocks { next, end, step, .. }, care) => {
                let (from, step) = (*next, (*step).min(end - next));
                self.look_closely_in_blocks(from, step, wanted, care)?
            }
        };
        if !self.is_estimated && !self.is_exhausted() {
            self.is_estimated = true;
            harvest.estimate = self.statements.estimate();
            if self.is_ordered() && !self.keeps_order && self.statements.after.is_none() {
                self.leave_index_if_dense(&harvest, leaf)?;
            }
        }
        // Rows are found once: a scan that has left the index finds these again.
        if was_ordered && self.is_by_blocks() {
            harvest = Harvest { estimate: harvest.estimate, ..Harvest::default() };
        }
        self.is_fruitful = !harvest.tids.is_empty() && care == Care::None;
        Ok(harvest)
    }

    /// Goes on through the heap if its blocks have nearly as many expired rows on average as those that the index has led
    /// to. If they have more, the heap is not in expiry order, and the index would lead to each block again and again.
    fn leave_index_if_dense(&mut self, harvest: &Harvest, leaf: &Leaf) -> Result<(), TtlError> {
        let visited = harvest.tids.iter().map(|tid| position(tid).0).collect::<HashSet<_>>().len();
        let blocks = blocks(leaf)?;
        let (by_index, by_blocks) =
            (harvest.tids.len() as f64 / visited as f64, harvest.estimate as f64 / f64::from(blocks));
        // By blocks, several processes can sweep at once. They read the live rows, too, so that these must not be many.
        let is_worth_sharing = self.can_share && harvest.estimate >= LARGE && by_blocks > SHAREABLE * by_index;
        if by_blocks > self.leaves_index_at * by_index || is_worth_sharing {
            (self.path, self.position) = (Path::Blocks, Position::whole_heap(leaf)?);
        }
        Ok(())
    }

    fn find_in_order(&self, wanted: usize, is_filtered: bool) -> Found {
        let watermark = match &self.position {
            Position::Ordered { watermark } => watermark.as_deref(),
            _ => None,
        };
        let sql = self.statements.in_order(watermark, wanted, is_filtered);
        Plan::for_search(&sql, IN_ORDER).find(Rows::All, wanted + MOST_TIES)
    }

    fn go_on_in_order(&mut self, found: &Found, wanted: usize, leaf: &Leaf) -> Result<(), TtlError> {
        self.position = match found.tids.len() {
            most if most == wanted + MOST_TIES => {
                self.path = Path::Blocks;
                Position::whole_heap(leaf)?
            }
            few if few < wanted => Position::Exhausted,
            _ => Position::Ordered { watermark: found.last.clone() },
        };
        Ok(())
    }

    fn go_on_in_blocks(&mut self, to: u32, found: usize, wanted: usize) {
        let Position::Blocks { next, end, step, after, later } = &mut self.position else { return };
        (*next, *after) = (to, 0);
        *step = match found {
            few if few < wanted / 2 => step.saturating_mul(2).min(MOST_BLOCKS),
            many if many > wanted => (*step / 2).max(1),
            _ => *step,
        };
        if to == *end {
            match later.pop_front() {
                Some(range) => (*next, *end) = (range.start, range.end),
                None => self.position = Position::Exhausted,
            }
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
                (self.path, self.position) = (Path::Blocks, Position::whole_heap(leaf)?);
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
            match attempt(|| in_blocks(&self.statements.in_blocks(from, from + step))) {
                Ok(found) => break Harvest { tids: found.tids, ..Harvest::default() },
                Err(_) if step > 1 => step /= 2,
                Err(_) if care == Care::Blocks => break Harvest::default(),
                Err(_) => break self.judge(&in_blocks(&self.statements.all_in_blocks(from, from + 1)).tids),
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
pub fn attempt<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    subtransaction(|| Ok(work())).map_err(|failure| if is_about_rows(&failure) { failure } else { failure.raise() })
}

/// Returns the TID of a row in a block.
pub fn at(block: u32, number: u16) -> Tid {
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
        Ok(Self::in_ranges(std::iter::once(0..blocks(leaf)?)))
    }

    /// Begins at the first of these ranges.
    fn in_ranges(ranges: impl Iterator<Item = Range<u32>>) -> Self {
        let mut later: VecDeque<_> = ranges.filter(|range| !range.is_empty()).collect();
        match later.pop_front() {
            Some(first) => Self::Blocks { next: first.start, end: first.end, step: 128, after: 0, later },
            None => Self::Exhausted,
        }
    }
}
