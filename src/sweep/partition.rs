//! Partitions of which every row has expired: they go as a whole, if nobody has anything to say about their rows.

use super::leaf::Leaf;
use super::{Step, Sweep, audience, in_sandbox};
use crate::catalog::{Catalog, Claim, Rule};
use crate::error::TtlError;
use crate::guc;
use crate::pg::names::Regclass;
use crate::pg::relation::{self, Held, Lock};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{spi, statement};
use crate::rule::PartitionAction;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

/// A partition that cannot hold a row beyond the cutoff, with everything below it.
pub struct Part {
    pub relid: Oid,
    /// Qualified and quoted.
    pub name: String,
    parent: Oid,
    /// The relations in it that have rows.
    pub leaves: Vec<Leaf>,
}

/// What became of a part.
pub enum Removal {
    Done,
    /// It goes by rows after all.
    ByRows(Part),
    /// Somebody is in it.
    InUse(Part),
    Ended(Step),
}

enum Verdict {
    Go,
    ByRows,
    InUse,
    End(Step),
}

impl Part {
    pub fn new(relid: Oid, name: String, parent: Oid) -> Self {
        Self { relid, name, parent, leaves: Vec::new() }
    }

    /// Drops or detaches the partition. `cutoff` is that of the sweep.
    pub fn remove(self, rule: &Rule, catalog: &Catalog, scope: Scope, cutoff: &str) -> Result<Removal, Failure> {
        let is_drop = rule.options.partition_action == PartitionAction::Drop;
        // Detaching concurrently has transactions of its own, which only a worker can have.
        let removed = if !is_drop && scope == Scope::Transaction && statement::can_run_alone() {
            self.detach(rule, catalog, cutoff)
        } else if is_in_use(self.relid, scope)? {
            Ok(Verdict::InUse)
        } else {
            scope.attempt(|| self.remove_at_once(rule, catalog, scope, cutoff))
        };
        match removed {
            Ok(Verdict::Go) => Ok(Removal::Done),
            Ok(Verdict::ByRows) => Ok(Removal::ByRows(self)),
            Ok(Verdict::InUse) => Ok(Removal::InUse(self)),
            Ok(Verdict::End(step)) => Ok(Removal::Ended(step)),
            // What depends on a partition says no to a drop. Who wants it detached wants to keep its rows.
            Err(failure) if is_drop && !failure.is_cancel && !is_about_locks(&failure) => Ok(Removal::ByRows(self)),
            Err(failure) => Err(failure),
        }
    }

    /// Under locks that nobody else shares.
    fn remove_at_once(&self, rule: &Rule, catalog: &Catalog, scope: Scope, cutoff: &str) -> Result<Verdict, TtlError> {
        // The parent first, as queries do. A worker does not wait for a part while it holds that.
        in_sandbox(rule, || Ok(relation::lock(self.parent, Lock::Drop)))?;
        if scope == Scope::Transaction && !relation::try_lock_tree(self.relid) {
            return Ok(Verdict::InUse);
        }
        let verdict = self.judge(rule, catalog, cutoff, Lock::Drop)?;
        if !matches!(verdict, Verdict::Go) {
            return Ok(verdict);
        }
        let parent = Regclass(self.parent).qualified_name().unwrap_or_default();
        let command = match rule.options.partition_action {
            PartitionAction::Drop => format!("DROP TABLE {}", self.name),
            _ => format!("ALTER TABLE {parent} DETACH PARTITION {}", self.name),
        };
        in_sandbox(rule, || spi::execute(&command, &[]))?;
        // The lock is on the relation; its name may have come to mean another when a schema was renamed.
        if relation::has_parent(self.relid) {
            return Err(TtlError::AnotherPart(self.name.clone()));
        }
        self.record(rule, catalog)?;
        Ok(verdict)
    }

    /// Without keeping anybody from the table, where PostgreSQL can. Between the judgement and the deed nobody can rename or
    /// alter the relations; the rule may change, but nothing is lost by detaching.
    fn detach(&self, rule: &Rule, catalog: &Catalog, cutoff: &str) -> Result<Verdict, Failure> {
        let scope = Scope::Transaction;
        let (verdict, parent, has_default, held) = scope.attempt(|| {
            let held = in_sandbox(rule, || Ok([self.parent, self.relid].map(Held::against_ddl)))?;
            let verdict = self.judge(rule, catalog, cutoff, Lock::Read)?;
            let parent = Regclass(self.parent).qualified_name().unwrap_or_default();
            Ok((verdict, parent, self.has_default_sibling()?, held))
        })?;
        let done = match verdict {
            // PostgreSQL would have to lock that one.
            Verdict::Go if has_default => scope.attempt(|| self.remove_at_once(rule, catalog, scope, cutoff)),
            Verdict::Go => {
                let detach = format!("ALTER TABLE {parent} DETACH PARTITION {} CONCURRENTLY", self.name);
                statement::run_alone(&detach, rule.owner, guc::lock_timeout())
                    .and_then(|()| scope.attempt(|| self.record(rule, catalog)))
                    .map(|()| Verdict::Go)
            }
            verdict => Ok(verdict),
        };
        if done.is_err() {
            held.into_iter().for_each(Held::was_released);
        }
        done
    }

    fn record(&self, rule: &Rule, catalog: &Catalog) -> Result<(), TtlError> {
        catalog.record_partition(rule.id)?;
        let action = if rule.options.partition_action == PartitionAction::Drop { "drop" } else { "detach" };
        audience::notify(rule, &self.name, action, None, None)
    }

    /// Whether it may go, with the locks of parent and part held, and then the rule's.
    fn judge(&self, rule: &Rule, catalog: &Catalog, cutoff: &str, lock: Lock) -> Result<Verdict, TtlError> {
        let is_there = in_sandbox(rule, || {
            let (parent, part) = (relation::lock(self.parent, lock), relation::lock(self.relid, lock));
            Ok(parent.is_some()
                && part
                    .is_some_and(|part| part.qualified_name() == self.name && part.belongs_to(self.relid, rule.relid)))
        })?;
        if !is_there {
            return Ok(Verdict::End(Step::Outdated));
        }
        match catalog.claim(rule)? {
            Claim::Held => {}
            Claim::Busy => return Ok(Verdict::End(Step::Busy)),
            Claim::Changed => return Ok(Verdict::End(Step::Outdated)),
        }
        match in_sandbox(rule, || obstacles(rule, &[self.relid], cutoff))?.as_slice() {
            [(relid, parent, obstacles)] if (*relid, *parent) == (self.relid, self.parent) => {
                Ok(if obstacles.is_empty() { Verdict::Go } else { Verdict::ByRows })
            }
            _ => Ok(Verdict::End(Step::Outdated)),
        }
    }

    fn has_default_sibling(&self) -> Result<bool, TtlError> {
        let found = spi::query(
            "SELECT partdefid <> 0 FROM pg_partitioned_table WHERE partrelid = $1",
            &[self.parent.into()],
            |row| row.get(1),
        )?;
        Ok(found == [Some(true)])
    }
}

/// Whether somebody is in a partition, before a worker waits for its parent, and others behind it.
fn is_in_use(relid: Oid, scope: Scope) -> Result<bool, Failure> {
    Ok(scope == Scope::Transaction && !scope.attempt(|| Ok(relation::try_lock_tree(relid)))?)
}

/// Whether somebody was in the way, in one way or the other.
fn is_about_locks(failure: &Failure) -> bool {
    [PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED].contains(&failure.code)
}

impl Sweep {
    /// The next partition that is only half detached, if that is what the rule does.
    pub(super) fn pending(&mut self) -> Option<(Oid, Oid)> {
        let detaches = self.rule.options.partition_action == PartitionAction::Detach;
        self.leaves.pending.pop().filter(|_| detaches)
    }

    /// Whether there is one.
    pub(super) fn has_pending(&self) -> bool {
        self.rule.options.partition_action == PartitionAction::Detach && !self.leaves.pending.is_empty()
    }

    pub(super) fn finalize(&mut self, pending: (Oid, Oid)) -> Result<Step, Failure> {
        if is_in_use(pending.0, self.scope)? {
            let name = self.scope.attempt(|| Ok(Regclass(pending.0).qualified_name()))?;
            self.late = Some(in_use(name.unwrap_or_default()));
            return Ok(Step::Removed(0));
        }
        match self.scope.attempt(|| finalize(&self.rule, &self.catalog, pending)) {
            Ok(()) => self.tally.partitions += 1,
            Err(failure) => self.put_off(failure)?,
        }
        Ok(Step::Removed(0))
    }

    /// Leaves whole partitions for the next sweep, and goes on with the rest: all who use the table wait while we wait for it. Nor
    /// can a table have two partitions that are half detached.
    fn put_off(&mut self, failure: Failure) -> Result<(), Failure> {
        if failure.is_cancel {
            return Err(failure);
        }
        self.leaves.whole.clear();
        self.late = Some(failure);
        Ok(())
    }

    /// Has a partition go as a whole.
    pub(super) fn remove_part(&mut self, part: Part) -> Result<Step, Failure> {
        match part.remove(&self.rule, &self.catalog, self.scope, &self.cutoff) {
            Ok(Removal::Done) => self.tally.partitions += 1,
            Ok(Removal::ByRows(part)) => self.leaves.sweepable.extend(part.leaves),
            Ok(Removal::InUse(part)) => self.late = Some(in_use(part.name)),
            Ok(Removal::Ended(step)) => return Ok(step),
            Err(failure) => self.put_off(failure)?,
        }
        Ok(Step::Removed(0))
    }
}

fn in_use(name: String) -> Failure {
    TtlError::PartInUse(name).into()
}

/// Ends the detaching that somebody, an earlier sweep as a rule, was interrupted in.
fn finalize(rule: &Rule, catalog: &Catalog, (relid, parent): (Oid, Oid)) -> Result<(), TtlError> {
    let (Some(name), Some(parent)) = (Regclass(relid).qualified_name(), Regclass(parent).qualified_name()) else {
        return Ok(());
    };
    let command = format!("ALTER TABLE {parent} DETACH PARTITION {name} FINALIZE");
    in_sandbox(rule, || spi::execute(&command, &[]))?;
    Part::new(relid, name, pgrx::pg_sys::InvalidOid).record(rule, catalog)
}

/// Why a rule takes away rows and never a partition, whatever it is asked for.
pub fn objections(rule: &Rule) -> Vec<&'static str> {
    let options = &rule.options;
    let reasons = [
        ("filter", options.filter.is_some()),
        ("soft_delete_column", options.soft_delete_column.is_some()),
        ("archive_to", options.archive().is_some()),
        ("on_expire", options.on_expire.is_some()),
    ];
    reasons.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option).collect()
}

/// The upper bound of a partition `c` by range, as SQL; NULL if it has none of this type.
pub fn upper_bound(type_name: &str) -> String {
    bound(" TO \\(''?([0-9-]", type_name)
}

/// The lower bound, likewise.
pub fn lower_bound(type_name: &str) -> String {
    bound("^FOR VALUES FROM \\(''?([0-9a-f]", type_name)
}

fn bound(beginning: &str, type_name: &str) -> String {
    format!("(regexp_match(pg_get_expr(c.relpartbound, 0), '{beginning}[^'',)]*)'))[1]::{type_name}")
}

/// For each of these partitions that still is one: its parent, and what keeps it from going as a whole. Of partitions that
/// are all there is below their parent, the last stays.
pub fn obstacles(rule: &Rule, parts: &[Oid], cutoff: &str) -> Result<Vec<(Oid, Oid, Vec<String>)>, TtlError> {
    let source = rule.expiry.source();
    let upper = upper_bound(source.type_name());
    let can_expire = source.can_expire_from(&lower_bound(source.type_name())).unwrap_or_else(|| "false".into());
    let sql = format!(
        "WITH part AS (
             SELECT c.oid AS relid, i.inhparent AS parent, {upper} AS upper, {can_expire} AS can_expire
             FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid AND NOT i.inhdetachpending
             WHERE c.oid = ANY ($1)),
         below AS (
             SELECT part.relid AS part, c.* FROM part CROSS JOIN LATERAL (
                 SELECT tree.relid::oid FROM pg_partition_tree(part.relid) AS tree) AS tree
             JOIN pg_class c ON c.oid = tree.relid)
         SELECT part.relid, part.parent, array_remove(ARRAY[
             CASE WHEN part.upper <= {cutoff} AND part.can_expire THEN NULL ELSE 'may have rows that have not expired' END,
             CASE WHEN NOT EXISTS (
                      SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                      WHERE i.inhparent = part.parent AND NOT i.inhdetachpending AND i.inhrelid <> part.relid
                        AND pg_get_expr(c.relpartbound, 0) <> 'DEFAULT'
                        AND (c.oid <> ALL ($1) OR {upper} > part.upper))
                  THEN 'is the last partition' END,
             CASE WHEN (SELECT c.relowner <> $2 FROM pg_class c WHERE c.oid = part.parent) THEN 'is part of a table of another owner' END,
             CASE WHEN EXISTS (SELECT FROM pg_inherits i JOIN below ON below.oid = i.inhparent
                               WHERE i.inhdetachpending AND below.part = part.relid)
                  THEN 'has a partition that is being detached' END,
             (SELECT format('has part %s of another kind or owner', below.oid::regclass) FROM below
              WHERE below.part = part.relid AND (below.relowner <> $2 OR below.relkind NOT IN ('r', 'p')) LIMIT 1),
             (SELECT format('is referenced by foreign key %I of table %s', k.conname, k.conrelid::regclass)
              FROM pg_constraint k JOIN below ON below.oid = k.confrelid
              WHERE k.contype = 'f' AND below.part = part.relid LIMIT 1),
             (SELECT format('has trigger %I', t.tgname) FROM pg_trigger t JOIN below ON below.oid = t.tgrelid
              WHERE NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & 8 <> 0 AND below.part = part.relid LIMIT 1),
             CASE WHEN $3 THEN (
                 SELECT format('is used by %s', pg_describe_object(d.classid, d.objid, d.objsubid))
                 FROM pg_depend d
                 JOIN below ON (d.refclassid, d.refobjid) IN (('pg_class'::regclass, below.oid), ('pg_type'::regclass, below.reltype))
                 WHERE d.deptype = 'n' AND below.part = part.relid
                   AND d.classid IN ('pg_rewrite'::regclass, 'pg_proc'::regclass, 'pg_constraint'::regclass,
                                     'pg_policy'::regclass)
                   AND NOT EXISTS (SELECT FROM pg_constraint k WHERE d.classid = 'pg_constraint'::regclass
                                     AND k.oid = d.objid AND k.conrelid = below.oid)
                 LIMIT 1) END], NULL)
         FROM part ORDER BY part.upper"
    );
    let is_drop = rule.options.partition_action == PartitionAction::Drop;
    // What is true now counts, and not what was when the transaction began to wait for locks.
    spi::query(&sql, &[parts.to_vec().into(), rule.owner.into(), is_drop.into()], |row| {
        Ok((
            row.get(1)?.unwrap_or_default(),
            row.get(2)?.unwrap_or_default(),
            row.get::<Vec<Option<String>>>(3)?.unwrap_or_default().into_iter().flatten().collect(),
        ))
    })
}
