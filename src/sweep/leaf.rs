//! The physical relations a rule's rows are in. A `ctid` means nothing across them, so each is swept on its own.

use crate::catalog::Rule;
use crate::error::TtlError;
use crate::pg::relation::{self, Lock, Shape};
use crate::pg::{access, spi};
use pgrx::pg_sys::Oid;
use std::collections::VecDeque;

/// One relation with rows of its own.
pub struct Leaf {
    pub relid: Oid,
    /// Qualified and quoted.
    pub name: String,
    /// What it looked like when the statements for it were prepared.
    shape: Option<Shape>,
}

pub struct Leaves {
    pub sweepable: VecDeque<Leaf>,
    /// Relations that cannot be swept, each with the reason.
    pub skipped: Vec<String>,
}

impl Leaf {
    /// Takes down its present shape. `None` if it is not what the rule was loaded for any more.
    pub fn observe(self, rule: &Rule) -> Result<Option<Self>, TtlError> {
        let Some(shape) = relation::lock(self.relid, Lock::Read) else { return Ok(None) };
        if !shape.is_heap() {
            return Err(TtlError::NotAHeap(self.name));
        }
        // Under its old name there may be another table by now. What became of columns, the rule's version tells.
        let is_same = shape.owner() == rule.owner && shape.qualified_name() == self.name;
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
    /// This relation, if a DELETE by its owner would do nothing but remove rows from its heap.
    pub fn plain_heap(&self, rule: &Rule) -> Option<Oid> {
        let is_plain = rule.mark.is_none() && self.shape.as_ref().is_some_and(Shape::is_plain);
        (is_plain && access::may_delete(self.relid)).then_some(self.relid)
    }

    /// Refuses to go on if removing rows here would run triggers of tables that somebody else owns: behind a foreign
    /// key's action they fire with our rights, not with their owner's. To be called with this relation's lock held, so
    /// that no foreign key can come; those tables are locked too, so that no trigger can.
    pub fn check_cascades(&self, rule: &Rule) -> Result<(), TtlError> {
        if !self.shape.as_ref().is_some_and(Shape::has_triggers) {
            return Ok(());
        }
        const OTHERS: &str = "WITH RECURSIVE cascade (relid) AS (
                 SELECT conrelid FROM pg_constraint
                 WHERE contype = 'f' AND confrelid = $1 AND confdeltype IN ('c', 'n', 'd')
                 UNION
                 SELECT k.conrelid FROM cascade JOIN pg_constraint k ON k.confrelid = cascade.relid
                 WHERE k.contype = 'f' AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd')))
             SELECT c.oid, format('%I.%I', n.nspname, c.relname), EXISTS (
                        SELECT FROM pg_trigger t
                        WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & 66 = 0)
             FROM cascade JOIN pg_class c ON c.oid = cascade.relid JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.relowner <> $2";
        let args = [self.relid.into(), rule.owner.into()];
        for relid in spi::query(OTHERS, &args, |row| Ok(row.get::<Oid>(1)?.unwrap_or_default()))? {
            relation::lock(relid, Lock::Change);
        }
        let found = spi::query(OTHERS, &args, |row| {
            Ok((row.get::<String>(2)?.unwrap_or_default(), row.get(3)?.unwrap_or_default()))
        })?;
        match found.into_iter().find(|(_, has_after_triggers)| *has_after_triggers) {
            Some((table, _)) => Err(TtlError::CascadeTriggers(table)),
            None => Ok(()),
        }
    }
}

/// Finds the leaves that can hold rows up to the cutoff. Partitions that cannot, by their lower bound, are not touched.
pub fn find(rule: &Rule, cutoff: &str) -> Result<Leaves, TtlError> {
    if !rule.has_children {
        let leaf = Leaf { relid: rule.relid, name: rule.table.clone(), shape: None };
        return Ok(Leaves { sweepable: VecDeque::from([leaf]), skipped: Vec::new() });
    }
    let source = rule.expiry.source();
    let sql = format!(
        "WITH RECURSIVE tree (relid, attnum) AS (
             SELECT $1, $2
             UNION ALL
             SELECT i.inhrelid, a.attnum
             FROM tree
             JOIN pg_inherits i ON i.inhparent = tree.relid AND NOT i.inhdetachpending
             JOIN pg_class c ON c.oid = i.inhrelid
             LEFT JOIN pg_attribute parent ON parent.attrelid = tree.relid AND parent.attnum = tree.attnum
             LEFT JOIN pg_attribute a ON a.attrelid = i.inhrelid AND a.attname = parent.attname
             LEFT JOIN pg_partitioned_table k
                    ON k.partrelid = tree.relid AND k.partstrat = 'r' AND k.partattrs[0] = tree.attnum
             WHERE CASE WHEN k.partrelid IS NULL THEN true
                        ELSE coalesce((regexp_match(pg_get_expr(c.relpartbound, 0),
                                                    '^FOR VALUES FROM \\(''?([0-9a-f][^'',)]*)'))[1]::{type_name} <= {cutoff}, true)
                   END)
         SELECT DISTINCT c.oid, format('%I.%I', n.nspname, c.relname),
                CASE WHEN c.relkind = 'f' THEN 'is a foreign table'
                     WHEN am.amname <> 'heap' THEN format('has access method %s', am.amname)
                     WHEN c.relowner <> $3 THEN 'has another owner'
                END
         FROM tree
         JOIN pg_class c ON c.oid = tree.relid AND c.relkind <> 'p'
         JOIN pg_namespace n ON n.oid = c.relnamespace
         LEFT JOIN pg_am am ON am.oid = c.relam
         ORDER BY 2",
        type_name = source.type_name(),
    );
    let key = rule.attnum.filter(|_| source.compares_value());
    let found = spi::read(&sql, &[rule.relid.into(), key.into(), rule.owner.into()], |row| {
        let leaf = Leaf { relid: row.get(1)?.unwrap_or_default(), name: row.get(2)?.unwrap_or_default(), shape: None };
        Ok((leaf, row.get::<String>(3)?))
    })?;
    let mut leaves = Leaves { sweepable: VecDeque::new(), skipped: Vec::new() };
    for (leaf, obstacle) in found {
        match obstacle {
            None => leaves.sweepable.push_back(leaf),
            Some(obstacle) => leaves.skipped.push(format!("{} {obstacle}", leaf.name)),
        }
    }
    Ok(leaves)
}
