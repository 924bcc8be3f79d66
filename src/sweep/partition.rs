//! Drops or detaches partitions whose rows have all expired, if nothing needs to see the single rows.

use super::find::leaf::Leaf;
use super::find::range::Bounds;
use super::remove::is_about_rows;
use super::{Step, Sweep};
use crate::catalog::{Catalog, Claim, Rule};
use crate::delivery;
use crate::error::TtlError;
use crate::guc;
use crate::pg::names::Regclass;
use crate::pg::relation::{self, Held, Lock};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{identity, login, process, spi, statement};
use crate::rule::PartitionAction;
use crate::sandbox::in_sandbox;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use std::time::Duration;

/// A partition that cannot hold a row beyond the cutoff, and everything below it.
pub struct Part {
    pub relid: Oid,
    /// Qualified and quoted.
    pub name: String,
    parent: Oid,
    /// The relations in it that store rows.
    pub leaves: Vec<Leaf>,
}

/// How often, and at what interval, a worker checks again whether a partition is in use. No session queues behind the
/// worker meanwhile.
const SHORT_WAITS: usize = 5;
const SHORT_WAIT: Duration = Duration::from_millis(20);

/// The result of removing a part.
pub enum Removal {
    Done,
    /// It has to be removed row by row after all.
    ByRows(Part),
    /// PostgreSQL refused to drop it, for a reason that the checks could not foresee.
    Refused(Part, Failure),
    /// Another session is using it.
    InUse(Part),
    Ended(Step),
}

enum Decision {
    Go,
    ByRows,
    InUse,
    End(Step),
}

impl Part {
    pub fn new(relid: Oid, name: String, parent: Oid) -> Self {
        Self { relid, name, parent, leaves: Vec::new() }
    }

    /// Drops or detaches the partition. `cutoff` is the sweep's cutoff.
    pub fn remove(self, rule: &Rule, catalog: &Catalog, scope: Scope, cutoff: &str) -> Result<Removal, Failure> {
        let is_drop = rule.options.partition_action == PartitionAction::Drop;
        let mut removed = self.try_remove(rule, catalog, scope, cutoff);
        // A session that only takes a quick look at the table, at its summary say, is soon out of the way.
        for _ in 0..SHORT_WAITS {
            if scope != Scope::Transaction || !matches!(removed, Ok(Decision::InUse)) {
                break;
            }
            process::idle(SHORT_WAIT);
            removed = self.try_remove(rule, catalog, scope, cutoff);
        }
        match removed {
            Ok(Decision::Go) => Ok(Removal::Done),
            Ok(Decision::ByRows) => Ok(Removal::ByRows(self)),
            Ok(Decision::InUse) => Ok(Removal::InUse(self)),
            Ok(Decision::End(step)) => Ok(Removal::Ended(step)),
            // A rule that detaches means to keep the rows, so it never falls back to deleting them.
            Err(failure) if is_drop && is_about_rows(&failure) && !is_about_locks(&failure) => {
                Ok(Removal::Refused(self, failure))
            }
            Err(failure) => Err(failure),
        }
    }

    fn try_remove(&self, rule: &Rule, catalog: &Catalog, scope: Scope, cutoff: &str) -> Result<Decision, Failure> {
        let is_drop = rule.options.partition_action == PartitionAction::Drop;
        // DETACH PARTITION CONCURRENTLY uses transactions of its own, which only a worker can start.
        if !is_drop && scope == Scope::Transaction {
            self.detach(rule, catalog, cutoff)
        } else if is_in_use(self.relid, scope)? {
            Ok(Decision::InUse)
        } else {
            scope.attempt(|| self.remove_at_once(rule, catalog, scope, cutoff))
        }
    }

    /// Drops or detaches the partition in one transaction, under exclusive locks.
    fn remove_at_once(&self, rule: &Rule, catalog: &Catalog, scope: Scope, cutoff: &str) -> Result<Decision, TtlError> {
        // Lock the parent first, as queries do. A worker does not wait for the part while it holds the parent's lock.
        in_sandbox(rule, || Ok(relation::lock(self.parent, Lock::Drop)))?;
        if scope == Scope::Transaction && !relation::try_lock_tree(self.relid) {
            return Ok(Decision::InUse);
        }
        let verdict = self.judge(rule, catalog, cutoff, Lock::Drop)?;
        if !matches!(verdict, Decision::Go) {
            return Ok(verdict);
        }
        let parent = Regclass(self.parent).qualified_name().unwrap_or_default();
        let command = match rule.options.partition_action {
            PartitionAction::Drop => format!("DROP TABLE {}", self.name),
            _ => format!("ALTER TABLE {parent} DETACH PARTITION {}", self.name),
        };
        let path = catalog.with_rights(|| login::search_path(rule.owner))?;
        in_sandbox(rule, || identity::with_users_path(&path, || spi::execute(&command, &[])))?;
        // The lock is on the relation: if a schema was renamed, the name may mean another relation by now.
        if relation::has_parent(self.relid) {
            return Err(TtlError::AnotherPart(self.name.clone()));
        }
        self.record(rule, catalog)?;
        Ok(verdict)
    }

    /// Detaches the partition without blocking other sessions, where PostgreSQL can. Between the check and the command,
    /// no session can rename or alter the relations; the rule may change, but detaching loses no rows.
    fn detach(&self, rule: &Rule, catalog: &Catalog, cutoff: &str) -> Result<Decision, Failure> {
        let scope = Scope::Transaction;
        let (verdict, parent, has_default, held) = scope.attempt(|| {
            let held = in_sandbox(rule, || Ok([self.parent, self.relid].map(Held::against_ddl)))?;
            let verdict = self.judge(rule, catalog, cutoff, Lock::Read)?;
            let parent = Regclass(self.parent).qualified_name().unwrap_or_default();
            Ok((verdict, parent, self.has_default_sibling()?, held))
        })?;
        let done = match verdict {
            // PostgreSQL would have to lock the default partition, so it cannot detach concurrently.
            Decision::Go if has_default => scope.attempt(|| self.remove_at_once(rule, catalog, scope, cutoff)),
            Decision::Go => {
                let detach = format!("ALTER TABLE {parent} DETACH PARTITION {} CONCURRENTLY", self.name);
                statement::run_alone(&detach, rule.owner, guc::lock_timeout())
                    .and_then(|()| scope.attempt(|| self.record(rule, catalog)))
                    .map(|()| Decision::Go)
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
        delivery::notify(rule, &self.name, action, None, None)
    }

    /// Locks the parent, the part and then the rule, and decides whether the part may go.
    fn judge(&self, rule: &Rule, catalog: &Catalog, cutoff: &str, lock: Lock) -> Result<Decision, TtlError> {
        let is_there = in_sandbox(rule, || {
            let (parent, part) = (relation::lock(self.parent, lock), relation::lock(self.relid, lock));
            Ok(parent.is_some()
                && part
                    .is_some_and(|part| part.qualified_name() == self.name && part.belongs_to(self.relid, rule.relid)))
        })?;
        if !is_there {
            return Ok(Decision::End(Step::Outdated));
        }
        match catalog.claim(rule, false)? {
            Claim::Held => {}
            Claim::Busy => return Ok(Decision::End(Step::Busy)),
            Claim::Changed => return Ok(Decision::End(Step::Outdated)),
        }
        match in_sandbox(rule, || obstacles(rule, &[self.relid], cutoff))?.as_slice() {
            [(relid, parent, obstacles)] if (*relid, *parent) == (self.relid, self.parent) => {
                Ok(if obstacles.is_empty() { Decision::Go } else { Decision::ByRows })
            }
            _ => Ok(Decision::End(Step::Outdated)),
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

/// Whether another session uses a partition. Checked before a worker waits for the parent's lock, and other sessions
/// queue behind the worker.
fn is_in_use(relid: Oid, scope: Scope) -> Result<bool, Failure> {
    Ok(scope == Scope::Transaction && !scope.attempt(|| Ok(relation::try_lock_tree(relid)))?)
}

/// Whether a lock was in the way: by a timeout or by a deadlock.
fn is_about_locks(failure: &Failure) -> bool {
    [PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE, PgSqlErrorCode::ERRCODE_T_R_DEADLOCK_DETECTED].contains(&failure.code)
}

impl Sweep {
    pub(super) fn finalize(&mut self, pending: (Oid, Oid)) -> Result<Step, Failure> {
        if is_in_use(pending.0, self.scope)? {
            let name = self.scope.attempt(|| Ok(Regclass(pending.0).qualified_name()))?;
            self.deferred_failure = Some(in_use(name.unwrap_or_default()));
            return Ok(Step::Removed(0));
        }
        match self.scope.attempt(|| finalize(&self.rule, &self.catalog, pending)) {
            Ok(()) => self.tally.partitions += 1,
            Err(failure) => self.put_off(failure)?,
        }
        Ok(Step::Removed(0))
    }

    /// Leaves whole partitions to the next sweep and continues with the rest: while we wait for the table's lock, every
    /// session that uses the table waits, too. Nor can a table have two partitions that are half detached.
    fn put_off(&mut self, failure: Failure) -> Result<(), Failure> {
        if failure.is_cancel {
            return Err(failure);
        }
        self.leaves.whole.clear();
        self.deferred_failure = Some(failure);
        Ok(())
    }

    /// Drops or detaches a whole partition.
    pub(super) fn remove_part(&mut self, part: Part) -> Result<Step, Failure> {
        match part.remove(&self.rule, &self.catalog, self.scope, &self.cutoff) {
            Ok(Removal::Done) => self.tally.partitions += 1,
            Ok(Removal::ByRows(part)) => self.leaves.sweepable.extend(part.leaves),
            Ok(Removal::Refused(part, failure)) => {
                self.leaves.sweepable.extend(part.leaves);
                // In the caller's transaction, an error would bring the removed rows back.
                if self.scope == Scope::Subtransaction {
                    pgrx::warning!("partition {} was not dropped: {failure}", part.name);
                } else {
                    self.deferred_failure = Some(failure);
                }
            }
            Ok(Removal::InUse(part)) => self.deferred_failure = Some(in_use(part.name)),
            Ok(Removal::Ended(step)) => return Ok(step),
            Err(failure) => self.put_off(failure)?,
        }
        Ok(Step::Removed(0))
    }
}

fn in_use(name: String) -> Failure {
    TtlError::PartInUse(name).into()
}

/// Completes an interrupted detach, usually one that an earlier sweep began.
fn finalize(rule: &Rule, catalog: &Catalog, (relid, parent): (Oid, Oid)) -> Result<(), TtlError> {
    let (Some(name), Some(parent)) = (Regclass(relid).qualified_name(), Regclass(parent).qualified_name()) else {
        return Ok(());
    };
    let command = format!("ALTER TABLE {parent} DETACH PARTITION {name} FINALIZE");
    in_sandbox(rule, || spi::execute(&command, &[]))?;
    Part::new(relid, name, pgrx::pg_sys::InvalidOid).record(rule, catalog)
}

/// Returns the options that make a rule remove single rows and never a partition, whatever its `partition_action`.
pub fn objections(rule: &Rule) -> Vec<&'static str> {
    let options = &rule.options;
    let reasons = [
        ("filter", options.filter.is_some()),
        ("soft_delete_column", options.soft_delete_column.is_some()),
        ("clear_columns", options.clear_columns.is_some()),
        ("archive_to", options.archive().is_some()),
        ("on_expire", options.on_expire.is_some()),
    ];
    reasons.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option).collect()
}

/// Finds what keeps PostgreSQL from dropping the tree below `part`, as DROP does: collects all objects that would be
/// dropped with it, then takes the first object that depends on one of them and would not be dropped.
const DEPENDENT: &str = "
    WITH RECURSIVE gone (classid, objid, objsubid) AS (
        SELECT 'pg_class'::regclass::oid, below.oid, 0 FROM below WHERE below.part = part.relid
        UNION
        SELECT d.classid, d.objid, d.objsubid
        FROM gone CROSS JOIN LATERAL (
            SELECT * FROM pg_depend d WHERE d.refclassid = gone.classid AND d.refobjid = gone.objid OFFSET 0) AS d
        WHERE d.deptype IN ('a', 'i', 'P', 'S', 'x') AND (gone.objsubid = 0 OR d.refobjsubid = gone.objsubid))
    (SELECT format('is used by %s', pg_describe_object(d.classid, d.objid, d.objsubid))
     FROM gone CROSS JOIN LATERAL (
         SELECT * FROM pg_depend d WHERE d.refclassid = gone.classid AND d.refobjid = gone.objid OFFSET 0) AS d
     WHERE d.deptype = 'n' AND (gone.objsubid = 0 OR d.refobjsubid = gone.objsubid)
       AND NOT EXISTS (SELECT FROM gone AS other WHERE other.classid = d.classid AND other.objid = d.objid
                                                   AND other.objsubid IN (0, d.objsubid)))
    UNION ALL
    (SELECT format('belongs to extension %I', e.extname)
     FROM below JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = below.oid AND d.deptype = 'e'
     JOIN pg_extension e ON e.oid = d.refobjid WHERE below.part = part.relid)
    LIMIT 1";

/// Returns, for each relation that is still a partition, its parent and what keeps it from going as a whole. If these
/// are all the partitions of a parent, the last one stays.
pub fn obstacles(rule: &Rule, parts: &[Oid], cutoff: &str) -> Result<Vec<(Oid, Oid, Vec<String>)>, TtlError> {
    let source = rule.predicate.expiry.source();
    let bounds = Bounds::of(parts);
    let can_expire = source.can_expire_from("bound.lower").unwrap_or_else(|| "false".into());
    let sql = format!(
        "WITH bound AS {bounds},
         part AS (
             SELECT c.oid AS relid, i.inhparent AS parent, bound.upper, {can_expire} AS can_expire
             FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid AND NOT i.inhdetachpending
             LEFT JOIN bound ON bound.relid = c.oid
             WHERE c.oid = ANY ($1)),
         below AS (
             SELECT part.relid AS part, c.* FROM part CROSS JOIN LATERAL (
                 SELECT tree.relid::oid FROM pg_partition_tree(part.relid) AS tree) AS tree
             JOIN pg_class c ON c.oid = tree.relid)
         SELECT part.relid, part.parent, array_remove(ARRAY[
             CASE WHEN part.upper <= {cutoff} AND part.can_expire THEN NULL ELSE 'may have rows that have not expired' END,
             CASE WHEN NOT EXISTS (
                      SELECT FROM pg_inherits i JOIN pg_partitioned_table k ON k.partrelid = i.inhparent
                      LEFT JOIN bound ON bound.relid = i.inhrelid
                      WHERE i.inhparent = part.parent AND NOT i.inhdetachpending AND i.inhrelid <> part.relid
                        AND i.inhrelid <> k.partdefid
                        AND (i.inhrelid <> ALL ($1) OR bound.upper > part.upper))
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
             CASE WHEN $3 THEN ({DEPENDENT}) END], NULL)
         FROM part ORDER BY part.upper",
        bounds = Bounds::table(4, source.type_name()),
    );
    let is_drop = rule.options.partition_action == PartitionAction::Drop;
    // The present state counts, not the state from when the transaction began to wait for locks.
    let args = [
        parts.to_vec().into(),
        rule.owner.into(),
        is_drop.into(),
        bounds.relids.into(),
        bounds.lower.into(),
        bounds.upper.into(),
    ];
    spi::query(&sql, &args, |row| {
        Ok((
            row.get(1)?.unwrap_or_default(),
            row.get(2)?.unwrap_or_default(),
            row.get::<Vec<Option<String>>>(3)?.unwrap_or_default().into_iter().flatten().collect(),
        ))
    })
}
