//! What the next sweep of a rule would do, relation by relation.

use super::statement::Look;
use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::guc;
use crate::index::{self, SHORT_HEAP};
use crate::pg::names::Regclass;
use crate::pg::transaction::subtransaction;
use crate::pg::{identity, spi};
use crate::rule::{IndexMethod, PartitionAction};
use crate::sandbox::in_sandbox;
use crate::sweep::find::leaf::{self, Leaf};
use crate::sweep::find::scan::{Care, Scan};
use crate::sweep::find::{cutoff, scan};
use crate::sweep::partition::Part;
use crate::sweep::remove::is_about_rows;
use crate::sweep::size::Size;
use crate::sweep::statement::Statements;
use pgrx::datum::{Interval, TimestampWithTimeZone};

/// How much of a relation is read before an estimate has to do. All relations share one budget.
#[derive(Clone, Copy)]
struct Budget {
    /// Rows that are counted one by one.
    rows: i64,
    /// Blocks that are read where no index helps.
    blocks: u32,
    /// Blocks that are sampled from a larger relation.
    sampled: u32,
}

impl Budget {
    fn for_each_of(relations: usize) -> Self {
        let share = |all: u32, least: u32| (all / u32::try_from(relations.max(1)).unwrap_or(u32::MAX)).max(least);
        Self { rows: share(100_000, 1_000).into(), blocks: share(SHORT_HEAP, 64), sampled: share(2_000, 64) }
    }
}

/// What a rule without an index has to expect: see `worker::schedule`.
const SELDOM: &str = "there is no index: workers read the whole table, for at most a twentieth of the time";

#[derive(Default)]
pub struct Preview {
    /// Qualified and quoted.
    pub relation: String,
    pub cutoff: Option<TimestampWithTimeZone>,
    pub rows: i64,
    pub is_exact: bool,
    /// The first value that would be removed, as text.
    pub oldest_value: Option<String>,
    pub bytes: i64,
    /// The share of these rows in all rows of the relation.
    pub share: Option<f64>,
    /// How the sweep would proceed.
    pub plan: &'static str,
    /// What may keep rows from being removed, or the relation from going as a whole.
    pub blockers: Vec<String>,
    /// Values that are not instants; their rows never expire.
    pub unreadable: Option<i64>,
    /// The expected duration, at the speed of the rule's past sweeps.
    pub duration: Option<Interval>,
}

/// Previews every relation that the next sweep would look into. Only reads.
pub fn of(catalog: &Catalog, rule: &Rule) -> Result<Vec<Preview>, TtlError> {
    if let Err(error) = rule.check_owner() {
        let (relation, blockers) = (rule.table.clone(), vec![error.to_string()]);
        return Ok(vec![Preview { relation, plan: "nothing", blockers, is_exact: true, ..Preview::default() }]);
    }
    let rate = catalog.rows_per_second(rule.id)?;
    let limits = [rule.options.max_rows_per_second, guc::max_rows_per_second()];
    let rate = limits.into_iter().flatten().map(f64::from).chain(rate).reduce(f64::min).filter(|_| rate.is_some());
    in_sandbox(rule, || {
        let cutoff = cutoff::of(rule)?;
        let leaves = leaf::find(rule, &cutoff.literal, false)?;
        let budget = Budget::for_each_of(leaves.sweepable.len());
        let mut previews = Vec::new();
        for (relid, parent) in leaves.pending {
            let name = Regclass(relid).qualified_name().unwrap_or_default();
            previews.push(Preview::of_part(rule, Part::new(relid, name, parent))?);
        }
        for part in leaves.whole {
            previews.push(Preview::of_part(rule, part)?);
        }
        for leaf in leaves.sweepable {
            if let Some(leaf) = leaf.observe(rule)? {
                previews.push(Preview::of_leaf(rule, leaf, &cutoff.literal, rate, budget)?);
            }
        }
        for (leaf, reason) in leaves.skipped {
            let blockers = vec![format!("{} {reason}", leaf.name)];
            previews.push(Preview {
                relation: leaf.name,
                plan: "nothing",
                blockers,
                is_exact: true,
                ..Preview::default()
            });
        }
        if previews.is_empty() {
            let relation = rule.table.clone();
            previews.push(Preview { relation, plan: "nothing", is_exact: true, ..Preview::default() });
        }
        Ok(previews.into_iter().map(|preview| Preview { cutoff: cutoff.instant, ..preview }).collect())
    })
}

impl Preview {
    /// Previews a partition that goes as a whole, without counting its rows.
    fn of_part(rule: &Rule, part: Part) -> Result<Self, TtlError> {
        let sizes = spi::read(
            "SELECT sum(greatest(c.reltuples, 0))::bigint, sum(pg_total_relation_size(c.oid))::bigint
             FROM pg_partition_tree($1) AS tree JOIN pg_class c ON c.oid = tree.relid WHERE c.relkind = 'r'",
            &[part.relid.into()],
            |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default())),
        )?;
        let (rows, bytes) = sizes.into_iter().next().unwrap_or_default();
        let plan = match rule.options.partition_action {
            PartitionAction::Detach => "detach partition",
            _ => "drop partition",
        };
        let (share, duration) = (Some(1.0), Interval::from_micros(0).into());
        Ok(Self { relation: part.name, rows, bytes, plan, share, duration, ..Self::default() })
    }

    fn of_leaf(rule: &Rule, leaf: Leaf, cutoff: &str, rate: Option<f64>, budget: Budget) -> Result<Self, TtlError> {
        let statements = Statements::new(rule, cutoff, &leaf.name);
        let (index, blocks) = (index::serving(rule, leaf.relid)?, scan::blocks(&leaf)?);
        let percent = (blocks > budget.blocks).then(|| 100.0 * f64::from(budget.sampled) / f64::from(blocks));
        let most = budget.rows + 1;
        let look = match (index, percent) {
            (Some(index), _) => Look::InOrder { most, is_partial: index::predicate(index)?.is_some() },
            (None, None) => Look::Whole { most },
            (None, Some(percent)) => Look::Sample { percent },
        };
        let mut scan = Scan::begin(rule, &leaf, cutoff, statements.clone())?;
        let mut preview = Self { plan: scan.path().name(), ..Self::default() };
        preview.blockers = blockers(rule, &leaf)?;
        let counted = subtransaction(|| {
            // The first rows tell the sweep, too, how to find the others.
            scan.next(Size::of(rule).rows(), &leaf, Care::None)?;
            let mut counted = Self { plan: scan.path().name(), is_exact: true, ..Self::default() };
            counted.count(&statements, look, most)?;
            counted.compare(&statements, percent)?;
            Ok(counted)
        });
        match counted {
            Ok(counted) => preview = Self { blockers: preview.blockers, ..counted },
            // A sweep would find the rows at fault; here an estimate is enough.
            Err(failure) if is_about_rows(&failure) => {
                (preview.rows, preview.is_exact) = (statements.estimate(), false);
                preview.blockers.push(format!("rows that the filter or the expression fails on: {failure}"));
            }
            Err(failure) => failure.raise(),
        }
        preview.blockers.extend(rule.missing.iter().map(|missing| missing.message.clone()));
        preview.blockers.extend(rule.state.hold.clone());
        preview.blockers.extend(leaf.kept_by);
        if rule.options.index_method == IndexMethod::None && scan.is_long() {
            preview.blockers.push(SELDOM.into());
        }
        preview.relation = leaf.name;
        preview.duration = rate.map(|rate| Interval::from_micros((preview.rows as f64 / rate * 1e6) as i64));
        Ok(preview)
    }

    fn count(&mut self, statements: &Statements, look: Look, most: i64) -> Result<(), TtlError> {
        // Use the index if there is one, as the sweep does.
        let settings: &[_] = match look {
            Look::InOrder { .. } => {
                &[(c"enable_seqscan", c"off"), (c"enable_bitmapscan", c"off"), (c"enable_sort", c"off")]
            }
            _ => &[],
        };
        let counted = identity::with_settings(settings, || {
            spi::read(&statements.count(look), &[], |row| {
                let number = |ordinal| Ok::<i64, pgrx::spi::Error>(row.get(ordinal)?.unwrap_or_default());
                Ok((number(1)?, number(2)?, row.get::<String>(3)?, number(4)?))
            })
        })?;
        let (seen, rows, oldest, bytes) = counted.into_iter().next().unwrap_or_default();
        let scale = match look {
            Look::Sample { percent } => 100.0 / percent,
            Look::InOrder { is_partial: false, .. } if seen >= most => {
                statements.estimate_expired() as f64 / seen as f64
            }
            _ if seen >= most => statements.estimate() as f64 / seen as f64,
            _ => 1.0,
        };
        self.is_exact = scale == 1.0;
        let scaled = |number: i64| (number as f64 * scale.max(1.0)) as i64;
        (self.rows, self.bytes, self.oldest_value) = (scaled(rows), scaled(bytes), oldest);
        Ok(())
    }

    /// Sets the share among all rows of the relation, and the number of unreadable values.
    fn compare(&mut self, statements: &Statements, percent: Option<f64>) -> Result<(), TtlError> {
        let counted = spi::read(&statements.count_all(percent), &[], |row| {
            Ok((row.get::<i64>(1)?.unwrap_or_default(), row.get::<i64>(2)?))
        })?;
        let (all, unreadable) = counted.into_iter().next().unwrap_or_default();
        let scale = percent.map_or(1.0, |percent| 100.0 / percent);
        let all = (all as f64 * scale).max(self.rows as f64);
        self.share = (all > 0.0).then(|| self.rows as f64 / all);
        self.unreadable = unreadable.map(|count| (count as f64 * scale) as i64);
        Ok(())
    }
}

/// Returns the foreign keys that do not cascade, and the triggers.
fn blockers(rule: &Rule, leaf: &Leaf) -> Result<Vec<String>, TtlError> {
    let event = if rule.updates() { 16 } else { 8 };
    let foreign_keys = if rule.updates() { "" } else { "ar" };
    spi::read(
        "SELECT format('foreign key %I of table %s', k.conname, k.conrelid::regclass)
         FROM pg_constraint k
         WHERE k.contype = 'f' AND k.confrelid = $1 AND strpos($2, k.confdeltype::text) > 0
         UNION
         SELECT format('trigger %I', t.tgname) FROM pg_trigger t
         WHERE t.tgrelid = $1 AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & $3 <> 0
         ORDER BY 1",
        &[leaf.relid.into(), foreign_keys.into(), event.into()],
        |row| Ok(row.get(1)?.unwrap_or_default()),
    )
}
