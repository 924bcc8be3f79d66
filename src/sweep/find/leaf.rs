//! The physical relations that hold a rule's rows. A `ctid` means nothing across them, so each is swept on its own.

use super::range;
use crate::cascade::{self, Change};
use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::names::Regclass;
use crate::pg::relation::{self, Lock, Shape};
use crate::pg::{access, bound, simple, spi, storage};
use crate::rule::{PartitionAction, Update};
use crate::sweep::partition::{self, Part};
use pgrx::pg_sys::Oid;
use std::collections::{HashMap, VecDeque};

/// One relation with rows of its own.
pub struct Leaf {
    pub relid: Oid,
    /// Qualified and quoted.
    pub name: String,
    /// Why it is not dropped or detached as a whole, if the rule does that.
    pub kept_by: Vec<String>,
    /// Its shape when the statements for it were prepared.
    shape: Option<Shape>,
}

#[derive(Default)]
pub struct Leaves {
    /// Partitions that go as a whole.
    pub whole: VecDeque<Part>,
    /// Partitions that are being detached, each with its parent.
    pub pending: Vec<(Oid, Oid)>,
    pub sweepable: VecDeque<Leaf>,
    /// Whether there may be whole partitions, but nothing has checked yet what keeps them from going.
    pub are_undecided: bool,
    /// Relations that cannot be swept, each with the reason.
    pub skipped: Vec<(Leaf, String)>,
    /// The names of partitions that can hold no expired row.
    pub out_of_reach: Vec<String>,
}

impl Leaf {
    fn new(relid: Oid, name: String) -> Self {
        Self { relid, name, kept_by: Vec::new(), shape: None }
    }

    /// Records the leaf's present shape. Returns `None` if it is no longer what the rule was loaded for.
    pub fn observe(self, rule: &Rule) -> Result<Option<Self>, TtlError> {
        let Some(shape) = relation::lock(self.relid, Lock::Read) else { return Ok(None) };
        if !shape.is_heap() {
            storage::check(self.relid)?;
            return Ok(None);
        }
        // Another table may have its old name by now. Changes of columns show in the rule's version.
        let is_same = shape.owner() == rule.owner
            && shape.qualified_name() == self.name
            && shape.belongs_to(self.relid, rule.relid);
        Ok(is_same.then_some(Self { shape: Some(shape), ..self }))
    }

    /// Locks the relation and returns whether it is unchanged. Statements name the relation and its columns, and are
    /// replanned when something changes: if a name meant something else by then, they would remove other rows. So each
    /// transaction first takes its lock, and continues only if everything still has its old name.
    pub fn is_unchanged_for_reading(&self) -> bool {
        relation::lock(self.relid, Lock::Read) == self.shape
    }

    pub fn is_unchanged_for_changing(&self) -> bool {
        relation::lock(self.relid, Lock::Change) == self.shape
    }
}

impl Leaf {
    /// Whether searching for expired rows here may run user code. Call it after [`Self::observe`].
    pub fn search_runs_user_code(&self, rule: &Rule) -> bool {
        let Some(shape) = &self.shape else { return true };
        let is_simple = |filter: &String| simple::is_simple(filter, |column| shape.type_of(column));
        rule.attnum.is_none() || shape.is_risky_to_plan() || !rule.options.filter.as_ref().is_none_or(is_simple)
    }

    /// Whether removing rows here may run user code, beyond searching for them.
    pub fn removal_runs_user_code(&self, rule: &Rule) -> bool {
        rule.updates() || rule.options.delivers() || !self.shape.as_ref().is_some_and(Shape::is_plain)
    }

    /// Returns this relation if a DELETE by its owner would do nothing but remove rows from its heap.
    pub fn plain_heap(&self, rule: &Rule) -> Option<Oid> {
        (!self.removal_runs_user_code(rule) && access::may_delete(self.relid)).then_some(self.relid)
    }

    /// Whether a statement that says it has removed a row may not have: a trigger can take an update back, and a rewrite
    /// rule can remove other rows instead.
    pub fn can_undo(&self, rule: &Rule) -> bool {
        let can_take_back = |shape: &Shape| rule.updates() && (shape.has_triggers() || !shape.is_plain());
        self.shape.as_ref().is_some_and(|shape| shape.has_rules() || can_take_back(shape))
    }

    /// Whether rows must be locked before a statement removes them: it may not tell which ones it has removed, or reads
    /// what they were before.
    pub fn must_lock(&self, rule: &Rule) -> bool {
        self.can_undo(rule) || (rule.clears() && rule.options.delivers())
    }

    /// Whether what a batch changes has to be checked: other tables may change, too, or keys.
    pub fn must_check_changes(&self, rule: &Rule) -> bool {
        rule.clears() || self.shape.as_ref().is_some_and(Shape::has_triggers)
    }

    /// Fails if removing rows here would run triggers of tables that have another owner, or clear columns of keys: a key
    /// may have come after the rule. Call it with this relation locked.
    pub fn check_changes(&self, rule: &Rule) -> Result<(), TtlError> {
        let updated = rule.options.updated_columns();
        if let Some(Update::Clear(cleared)) = &rule.predicate.update {
            let to_null = updated.iter().zip(cleared).filter(|(_, it)| it.is_null()).map(|(name, _)| name.clone());
            cascade::check_cleared(self.relid, &updated, &to_null.collect::<Vec<_>>())?;
        }
        let change = if rule.updates() { Change::Update(&updated) } else { Change::Delete };
        cascade::check(self.relid, rule.owner, change)
    }
}

/// A relation below the rule's table, and how it relates to its parent.
struct Node {
    leaf: Leaf,
    parent: Oid,
    /// Whether it has rows of its own.
    has_rows: bool,
    /// Why it cannot be swept.
    obstacle: Option<String>,
    is_pending: bool,
    /// Whether it is partitioned off by a range of the rule's column, and by that column alone.
    is_ranged: bool,
    is_alone: bool,
    is_by_updated: bool,
}

/// The properties that a relation passes down to those below it.
#[derive(Clone, Copy, Default)]
struct Above {
    /// The partition that goes as a whole, or is being detached, and its parent.
    part: Option<(Oid, Oid)>,
    is_pending: bool,
    is_ranged: bool,
    is_by_updated: bool,
}

const BY_UPDATED: &str = "is partitioned by a column that the rule updates";
const PENDING: &str = "is being detached";

/// Finds the leaves that can hold rows up to the cutoff. Does not touch partitions that cannot, by their lower bound.
/// With `leaves_parts`, whole partitions are left to another worker, so what keeps them from going is not checked.
pub fn find(rule: &Rule, cutoff: &str, leaves_parts: bool) -> Result<Leaves, TtlError> {
    // The kind of the table may have changed since it was registered.
    storage::check(rule.relid)?;
    let root = Leaf::new(rule.relid, rule.table.clone());
    let updated = rule.options.updated_columns();
    let is_by_updated = !updated.is_empty() && bound::is_partition_key_above(rule.relid, &updated)?;
    if !rule.has_children {
        return Ok(if is_by_updated {
            Leaves { skipped: vec![(root, BY_UPDATED.into())], ..Leaves::default() }
        } else {
            Leaves { sweepable: VecDeque::from([root]), ..Leaves::default() }
        });
    }
    let goes_by_parts = rule.options.partition_action != PartitionAction::Delete;
    let nodes = nodes(rule)?;
    let ranged: Vec<_> = nodes.iter().filter(|node| node.is_ranged).map(|node| node.leaf.relid).collect();
    let ranges = range::judge(rule, &ranged, cutoff)?;
    let mut leaves = Leaves::default();
    let (mut parts, mut seen): (Vec<Part>, HashMap<Oid, Above>) = (Vec::new(), HashMap::new());
    if !rule.is_partitioned {
        leaves.sweepable.push_back(root);
    }
    seen.insert(rule.relid, Above { is_by_updated, ..Above::default() });
    for node in nodes {
        let range = ranges.get(&node.leaf.relid).copied().filter(|_| node.is_ranged);
        // A relation that is left out takes everything below it along.
        let Some(above) = seen.get(&node.parent).copied() else { continue };
        if seen.contains_key(&node.leaf.relid) {
            continue;
        }
        if range.is_some_and(|range| !range.can_hold) {
            leaves.out_of_reach.push(node.leaf.name);
            continue;
        }
        let itself = Some((node.leaf.relid, node.parent));
        let is_whole = goes_by_parts && node.is_alone && range.is_some_and(|range| range.is_past);
        // A partition that is being detached is a part by itself, not of one that goes as a whole.
        let part = if node.is_pending { itself } else { above.part.or(itself.filter(|_| is_whole)) };
        let here = Above {
            part,
            is_pending: above.is_pending || node.is_pending,
            is_ranged: above.is_ranged || node.is_ranged,
            is_by_updated: above.is_by_updated || node.is_by_updated,
        };
        seen.insert(node.leaf.relid, here);
        if node.has_rows {
            leaves.add(rule, node, here, &mut parts);
        }
    }
    leaves.are_undecided = leaves_parts && !parts.is_empty();
    if !leaves.are_undecided {
        leaves.sort_out(rule, parts, cutoff)?;
    }
    Ok(leaves)
}

/// Returns all relations below the rule's table, parents first.
fn nodes(rule: &Rule) -> Result<Vec<Node>, TtlError> {
    let sql = format!(
        "WITH RECURSIVE tree (relid, attnum, parent, is_pending, is_ranged, is_alone, is_by_updated, depth) AS (
             SELECT $1, $2, NULL::oid, false, false, false, false, 0
             UNION ALL
             SELECT i.inhrelid, a.attnum, tree.relid, i.inhdetachpending, k.partrelid IS NOT NULL, k.partnatts = 1,
                    cardinality($4) > 0 AND {is_by_updated}, tree.depth + 1
             FROM tree
             JOIN pg_inherits i ON i.inhparent = tree.relid
             LEFT JOIN pg_attribute parent ON parent.attrelid = tree.relid AND parent.attnum = tree.attnum
             LEFT JOIN pg_attribute a ON a.attrelid = i.inhrelid AND a.attname = parent.attname
             LEFT JOIN pg_partitioned_table k
                    ON k.partrelid = tree.relid AND k.partstrat = 'r' AND k.partattrs[0] = tree.attnum
                   AND (SELECT o.opcdefault AND o.opcnamespace = 'pg_catalog'::regnamespace
                        FROM pg_opclass o WHERE o.oid = k.partclass[0]))
         SELECT c.oid, format('%I.%I', n.nspname, c.relname), tree.parent, c.relkind <> 'p',
                CASE WHEN c.relowner <> $3 THEN 'has another owner' END,
                tree.is_pending, tree.is_ranged, tree.is_alone, tree.is_by_updated
         FROM tree
         JOIN pg_class c ON c.oid = tree.relid
         JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE tree.depth > 0 ORDER BY tree.depth, 2",
        is_by_updated = bound::partition_key_sql("tree.relid", "$4"),
    );
    let key = rule.attnum.filter(|_| rule.predicate.expiry.source().compares_value());
    let updated = rule.options.updated_columns();
    let mut nodes = spi::read(&sql, &[rule.relid.into(), key.into(), rule.owner.into(), updated.into()], |row| {
        let is = |ordinal| Ok::<bool, pgrx::spi::Error>(row.get(ordinal)?.unwrap_or_default());
        Ok(Node {
            leaf: Leaf::new(row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default()),
            parent: row.get(3)?.unwrap_or_default(),
            has_rows: is(4)?,
            obstacle: row.get(5)?,
            is_pending: is(6)?,
            is_ranged: is(7)?,
            is_alone: is(8)?,
            is_by_updated: is(9)?,
        })
    })?;
    let mut obstacles = storage::obstacles(&nodes.iter().map(|node| node.leaf.relid).collect::<Vec<_>>())?;
    for node in &mut nodes {
        node.obstacle = obstacles.remove(&node.leaf.relid).or(node.obstacle.take());
    }
    Ok(nodes)
}

/// Adds a leaf to its part, which is created on first use.
fn find_part(parts: &mut Vec<Part>, (relid, parent): (Oid, Oid), leaf: Option<Leaf>) {
    let place = parts.iter().position(|part| part.relid == relid).unwrap_or_else(|| {
        let name = Regclass(relid).qualified_name().unwrap_or_default();
        parts.push(Part::new(relid, name, parent));
        parts.len() - 1
    });
    parts[place].leaves.extend(leaf);
}

impl Leaves {
    /// Puts a relation with rows where it belongs.
    fn add(&mut self, rule: &Rule, node: Node, here: Above, parts: &mut Vec<Part>) {
        let mut leaf = node.leaf;
        let obstacle = node.obstacle.or_else(|| here.is_by_updated.then(|| BY_UPDATED.into()));
        if rule.options.partition_action != PartitionAction::Delete && !here.is_ranged {
            leaf.kept_by.push(format!("partition {} is not one by a range of the column", leaf.name));
        }
        match (here.part, obstacle) {
            // It is no longer the table's. A rule that detaches completes the detach; any other rule reports it.
            (Some(part), _) if here.is_pending => {
                if rule.options.partition_action != PartitionAction::Detach {
                    self.skipped.push((leaf, PENDING.into()));
                } else if !self.pending.contains(&part) {
                    self.pending.push(part);
                }
            }
            (part, Some(obstacle)) => {
                self.skipped.push((leaf, obstacle));
                part.into_iter().for_each(|part| find_part(parts, part, None));
            }
            (Some(part), None) => find_part(parts, part, Some(leaf)),
            (None, None) => self.sweepable.push_back(leaf),
        }
    }

    /// Lets parts without obstacles go as a whole, the oldest first; the others go by rows.
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
