//! What the next sweep of a rule would do.

use super::scan::Scan;
use super::statement::Statements;
use super::{cutoff, in_sandbox, leaf};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::spi;
use pgrx::datum::TimestampWithTimeZone;

/// Rows are counted one by one up to this many in a leaf; beyond, the planner's estimate has to do.
const COUNTED: i64 = 100_000;

#[derive(Default)]
pub struct Preview {
    pub cutoff: Option<TimestampWithTimeZone>,
    pub rows: i64,
    pub is_exact: bool,
    /// The first value to go, as text.
    pub oldest_value: Option<String>,
    pub bytes: i64,
    /// How the rows are going to be found.
    pub plan: String,
    /// What may keep rows from being removed.
    pub blockers: Vec<String>,
    /// Values that are no instants, so that their rows never expire.
    pub unreadable: Option<i64>,
}

/// Reads, and nothing else.
pub fn of(rule: &Rule) -> Result<Preview, TtlError> {
    in_sandbox(rule, || {
        let cutoff = cutoff::of(rule)?;
        let leaves = leaf::find(rule, &cutoff.literal)?;
        let mut preview = Preview { cutoff: cutoff.instant, is_exact: true, ..Preview::default() };
        preview.blockers = blockers(rule)?;
        preview.blockers.extend(leaves.skipped);
        let (mut by_index, mut by_blocks) = (0, 0);
        for leaf in leaves.sweepable {
            let Some(leaf) = leaf.observe(rule)? else { continue };
            let statements = Statements::new(rule, &cutoff.literal, &leaf.name);
            *(if Scan::begin(rule, &leaf, statements.clone())?.is_ordered() {
                &mut by_index
            } else {
                &mut by_blocks
            }) += 1;
            preview.add(&statements)?;
        }
        preview.plan = match (by_index, by_blocks) {
            (0, 0) => "nothing to look through".into(),
            (_, 0) => "rows by index".into(),
            (0, _) => "rows by blocks".into(),
            (some, others) => format!("rows by index in {some} parts, by blocks in {others}"),
        };
        Ok(preview)
    })
}

impl Preview {
    fn add(&mut self, statements: &Statements) -> Result<(), TtlError> {
        let counted = spi::read(&statements.count(COUNTED), &[], |row| {
            Ok((row.get(1)?.unwrap_or_default(), row.get::<String>(2)?, row.get(3)?.unwrap_or_default()))
        })?;
        let (mut rows, oldest, mut bytes): (i64, _, i64) = counted.into_iter().next().unwrap_or_default();
        if rows > COUNTED {
            let estimate = statements.estimate()?.max(rows);
            bytes = (i128::from(bytes) * i128::from(estimate) / i128::from(rows)) as i64;
            rows = estimate;
            self.is_exact = false;
        }
        self.rows += rows;
        self.bytes += bytes;
        if let Some(unreadable) = statements.count_unreadable(COUNTED) {
            let counted = spi::read(&unreadable, &[], |row| row.get(1))?;
            *self.unreadable.get_or_insert(0) += counted.into_iter().flatten().next().unwrap_or(0);
        }
        // Of several leaves, the earliest: they are of one type, so the server compares them.
        self.oldest_value = match (self.oldest_value.take(), oldest) {
            (Some(one), Some(other)) => spi::read(&statements.earlier(&one, &other), &[], |row| row.get(1))?.remove(0),
            (one, other) => one.or(other),
        };
        Ok(())
    }
}

/// Foreign keys that do not cascade, and triggers.
fn blockers(rule: &Rule) -> Result<Vec<String>, TtlError> {
    let event = if rule.mark.is_some() { 16 } else { 8 };
    let foreign_keys = if rule.mark.is_some() { "" } else { "ar" };
    spi::read(
        "SELECT format('foreign key %I of table %s', k.conname, k.conrelid::regclass)
         FROM pg_constraint k
         WHERE k.contype = 'f' AND k.confrelid = $1 AND strpos($2, k.confdeltype::text) > 0 AND k.conparentid = 0
         UNION ALL
         SELECT format('trigger %I', t.tgname) FROM pg_trigger t
         WHERE t.tgrelid = $1 AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & $3 <> 0
         ORDER BY 1",
        &[rule.relid.into(), foreign_keys.into(), event.into()],
        |row| Ok(row.get(1)?.unwrap_or_default()),
    )
}
