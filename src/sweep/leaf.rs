//! The physical relations a rule's rows are in. A `ctid` means nothing across them, so each is swept on its own.

use super::partition::{self, Part};
use crate::cascade::{self, Change};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::names::Regclass;
use crate::pg::relation::{self, Lock, Shape};
use crate::pg::{access, simple, spi, storage};
use crate::rule::PartitionAction;
use pgrx::pg_sys::Oid;
use std::collections::VecDeque;

/// One relation with rows of its own.
pub struct Leaf {
    pub relid: Oid,
    /// Qualified and quoted.
    pub name: String,
    /// Why it does not go as a whole, if it could have.
    pub kept_by: Vec<String>,
    /// What it looked like when the statements for it were prepared.
    shape: Option<Shape>,
}

#[derive(Default)]
pub struct Leaves {
    /// Partitions that go as a whole.
    pub whole: VecDeque<Part>,
    /// Partitions that are being detached, each with its parent.
    pub pending: Vec<(Oid, Oid)>,
    pub sweepable: VecDeque<Leaf>,
    /// Whether there may be some, and nobody has looked what speaks against it.
    pub are_undecided: bool,
    /// Relations that cannot be swept, each with the reason.
    pub skipped: Vec<(Leaf, String)>,
}

impl Leaf {
    fn new(relid: Oid, name: String) -> Self {
        Self { relid, name, kept_by: Vec::new(), shape: None }
    }

    /// Takes down its present shape. `None` if it is not what the rule was loaded for any more.
    pub fn observe(self, rule: &Rule) -> Result<Option<Self>, TtlError> {
        let Some(shape) = relation::lock(self.relid, Lock::Read) else { return Ok(None) };
        if !shape.is_heap() {
            storage::check(self.relid)?;
            return Ok(None);
        }
        // Under its old name there may be another table by now. What became of columns, the rule's version tells.
        let is_same = shape.owner() == rule.owner
            && shape.qualified_name() == self.name
            && shape.belongs_to(self.relid, rule.relid);
        Ok(is_same.then_some(Self { shape: Some(shape), ..self }))
    }

    /// Statements name the relation and its columns, and are planned anew when something changes: were a name to mean
    /// something else by then, they would remove other rows. So each transaction first takes its lock, and goes on only
    /// if everything still has the name it had.
    pub fn is_unchanged_for_reading(&self) -> bool {
        relation::lock(self.relid, Lock::Read) == self.shape
    }

    pub fn is_unchanged_for_changing(&self) -> bool {
        relation::lock(self.relid, Lock::Change) == self.shape
    }
}

impl Leaf {
    /// Whether looking for expired rows here may run code of users. To be called when it has been observed.
    pub fn search_runs_user_code(&self, rule: &Rule) -> bool {
        let Some(shape) = &self.shape else { return true };
        let is_simple = |filter: &String| simple::is_simple(filter, |column| shape.type_of(column));
        rule.attnum.is_none() || shape.is_risky_to_plan() || !rule.options.filter.as_ref().is_none_or(is_simple)
    }

    /// Whether removing rows here may run code of users, beyond looking for them.
    pub fn removal_runs_user_code(&self, rule: &Rule) -> bool {
        rule.mark.is_some() || rule.options.has_audience() || !self.shape.as_ref().is_some_and(Shape::is_plain)
    }

    /// This relation, if a DELETE by its owner would do nothing but remove rows from its heap.
    pub fn plain_heap(&self, rule: &Rule) -> Option<Oid> {
        (!self.removal_runs_user_code(rule) && access::may_delete(self.relid)).then_some(self.relid)
    }

    /// Refuses to go on if removing rows here would run triggers of tables that somebody else owns. To be called with this
    /// relation's lock held.
    pub fn check_cascades(&self, rule: &Rule) -> Result<(), TtlError> {
        if !self.shape.as_ref().is_some_and(Shape::has_triggers) {
            return Ok(());
        }
        let change = rule.options.soft_delete_column.as_deref().map_or(Change::Delete, Change::Update);
        cascade::check(self.relid, rule.owner, change)
    }
}

/// Finds the leaves that can hold rows up to the cutoff. Partitions that cannot, by their lower bound, are not touched. Where
/// partitions are left to others anyway, what speaks against their going as a whole is not asked.
pub fn find(rule: &Rule, cutoff: &str, leaves_parts: bool) -> Result<Leaves, TtlError> {
    // What the table is may have changed since it was registered.
    storage::check(rule.relid)?;
    if !rule.has_children {
        let leaf = Leaf::new(rule.relid, rule.table.clone());
        return Ok(Leaves { sweepable: VecDeque::from([leaf]), ..Leaves::default() });
    }
    let source = rule.expiry.source();
    let type_name = source.type_name();
    // In a range of one column every row is below the upper bound.
    let is_whole = match source.can_expire_from("bound.lower") {
        Some(can_expire) if rule.options.partition_action != PartitionAction::Delete => {
            format!("k.partnatts = 1 AND bound.upper <= {cutoff} AND {can_expire}")
        }
        _ => "false".into(),
    };
    // A partition that is being detached is a part by itself, and not of one that goes as a whole.
    let sql = format!(
        "WITH RECURSIVE tree (relid, attnum, part, parent, is_pending, is_ranged) AS (
             SELECT $1, $2, NULL::oid, NULL::oid, false, false
             UNION ALL
             SELECT i.inhrelid, a.attnum,
                    CASE WHEN i.inhdetachpending THEN i.inhrelid WHEN tree.part IS NOT NULL THEN tree.part
                         WHEN {is_whole} THEN i.inhrelid END,
                    CASE WHEN i.inhdetachpending OR tree.part IS NULL THEN tree.relid ELSE tree.parent END,
                    tree.is_pending OR i.inhdetachpending, tree.is_ranged OR k.partrelid IS NOT NULL
             FROM tree
             JOIN pg_inherits i ON i.inhparent = tree.relid
             JOIN pg_class c ON c.oid = i.inhrelid
             LEFT JOIN pg_attribute parent ON parent.attrelid = tree.relid AND parent.attnum = tree.attnum
             LEFT JOIN pg_attribute a ON a.attrelid = i.inhrelid AND a.attname = parent.attname
             LEFT JOIN pg_partitioned_table k
                    ON k.partrelid = tree.relid AND k.partstrat = 'r' AND k.partattrs[0] = tree.attnum
                   AND (SELECT o.opcdefault AND o.opcnamespace = 'pg_catalog'::regnamespace
                        FROM pg_opclass o WHERE o.oid = k.partclass[0])
             CROSS JOIN LATERAL (SELECT CASE WHEN k.partrelid IS NOT NULL THEN {lower} END AS lower,
                                        CASE WHEN k.partrelid IS NOT NULL THEN {upper} END AS upper) AS bound
             WHERE coalesce(bound.lower <= {cutoff}, true))
         SELECT DISTINCT c.oid, format('%I.%I', n.nspname, c.relname),
                CASE WHEN c.relowner <> $3 THEN 'has another owner' END,
                tree.part, tree.parent, tree.is_pending, tree.is_ranged
         FROM tree
         JOIN pg_class c ON c.oid = tree.relid AND c.relkind <> 'p'
         JOIN pg_namespace n ON n.oid = c.relnamespace
         ORDER BY 2",
        lower = partition::lower_bound(type_name),
        upper = partition::upper_bound(type_name),
    );
    let key = rule.attnum.filter(|_| source.compares_value());
    let found = spi::read(&sql, &[rule.relid.into(), key.into(), rule.owner.into()], |row| {
        let mut leaf = Leaf::new(row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default());
        if rule.options.partition_action != PartitionAction::Delete && row.get(7)? != Some(true) {
            leaf.kept_by.push(format!("partition {} is not one by a range of the column", leaf.name));
        }
        Ok((leaf, row.get::<String>(3)?, row.get::<Oid>(4)?.zip(row.get::<Oid>(5)?), row.get(6)?.unwrap_or(false)))
    })?;
    let mut leaves = Leaves::default();
    let mut parts: Vec<Part> = Vec::new();
    let mut obstacles = storage::obstacles(&found.iter().map(|(leaf, ..)| leaf.relid).collect::<Vec<_>>())?;
    for (leaf, other_owner, part, is_pending) in found {
        match (part, obstacles.remove(&leaf.relid).or(other_owner)) {
            // It is not the table's any more.
            (Some(pending), _) if is_pending => {
                if !leaves.pending.contains(&pending) {
                    leaves.pending.push(pending);
                }
            }
            (part, Some(obstacle)) => {
                leaves.skipped.push((leaf, obstacle));
                part.into_iter().for_each(|part| find_part(&mut parts, part, None));
            }
            (Some(part), None) => find_part(&mut parts, part, Some(leaf)),
            (None, None) => leaves.sweepable.push_back(leaf),
        }
    }
    leaves.are_undecided = leaves_parts && !parts.is_empty();
    if !leaves.are_undecided {
        leaves.sort_out(rule, parts, cutoff)?;
    }
    Ok(leaves)
}

/// Every relation below the rule's table that has rows of its own and its owner.
pub fn all(rule: &Rule) -> Result<Vec<Oid>, TtlError> {
    spi::read(
        "SELECT c.oid FROM pg_partition_tree($1) AS tree JOIN pg_class c ON c.oid = tree.relid
         WHERE c.relkind = 'r' AND c.relowner = $2",
        &[rule.relid.into(), rule.owner.into()],
        |row| Ok(row.get(1)?.unwrap_or_default()),
    )
}

/// Adds a leaf to its part.
fn find_part(parts: &mut Vec<Part>, (relid, parent): (Oid, Oid), leaf: Option<Leaf>) {
    let place = parts.iter().position(|part| part.relid == relid).unwrap_or_else(|| {
        let name = Regclass(relid).qualified_name().unwrap_or_default();
        parts.push(Part::new(relid, name, parent));
        parts.len() - 1
    });
    parts[place].leaves.extend(leaf);
}

impl Leaves {
    /// Parts that nothing keeps from going as a whole do so, the oldest first; others go by rows.
    fn sort_out(&mut self, rule: &Rule, mut parts: Vec<Part>, cutoff: &str) -> Result<(), TtlError> {
        if parts.is_empty() {
            return Ok(());
        }
        let objections: Vec<_> =
            partition::objections(rule).iter().map(|option| format!("goes by rows: {option}")).collect();
        let relids: Vec<_> = parts.iter().map(|part| part.relid).collect();
        for (relid, _, obstacles) in partition::obstacles(rule, &relids, cutoff)? {
            let Some(place) = parts.iter().position(|part| part.relid == relid) else { continue };
            let part = parts.swap_remove(place);
            let reasons: Vec<_> = objections.iter().chain(&obstacles).cloned().collect();
            if reasons.is_empty() {
                self.whole.push_back(part);
            } else {
                let reasons: Vec<_> =
                    reasons.iter().map(|reason| format!("partition {} {reason}", part.name)).collect();
                self.sweepable.extend(part.leaves.into_iter().map(|leaf| Leaf { kept_by: reasons.clone(), ..leaf }));
            }
        }
        Ok(())
    }
}
