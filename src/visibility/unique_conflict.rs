//! A hidden row must not block a new row with the same key: before a row is written, expired rows that it would
//! conflict with are removed. If one cannot be removed, the statement fails, so that no write is lost.
//!
//! A live row is kept live until the transaction ends, by the lock that an update would take: otherwise it could expire
//! between this check and the one PostgreSQL makes when it writes. Only `ON CONFLICT DO NOTHING` locks no rows; its
//! rows are rechecked after the statement has run.

use super::PRESENT;
use crate::cascade::{self, Change as Cascade};
use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::condition::Condition;
use crate::pg::existing::{Existing, Outcome};
use crate::pg::memo::Memo;
use crate::pg::order::Order;
use crate::pg::pending::PendingRow;
use crate::pg::plan::{Plan, Rows};
use crate::pg::planner::ENGINE_TAG;
use crate::pg::relation::{self, Lock, Shape};
use crate::pg::transaction::without_details;
use crate::pg::trigger::{Change, NewRow};
use crate::pg::unique_conflict::{self, Constraint, Next};
use crate::pg::{access, executor, identity, login};
use crate::{index, sandbox};
use pgrx::pg_sys::Oid;
use std::cell::{Cell, OnceCell};
use std::rc::Rc;

/// How to free a key in a table.
struct Room {
    relid: Oid,
    owner: Oid,
    /// Whether planning a statement on the table may call user code.
    is_risky: bool,
    /// The condition for an expired row.
    expired: Condition,
    constraints: Vec<Constraint>,
    way: Way,
    /// Tells quickly that nothing has expired, if there is an index for it.
    order: Option<Order>,
}

/// How to remove an expired row.
enum Way {
    /// Directly from the heap: no trigger, rule or policy has a say in a DELETE.
    Heap,
    /// By a statement run as the owner, planned on first use.
    Statement(String, OnceCell<Plan>),
    /// Not at all.
    Never,
}

/// For how many rows of a statement a check that nothing in the table has expired stays good. Rows that other sessions
/// let expire meanwhile count as expired after this statement.
const ROWS_AT_A_TIME: u32 = 100;

/// A table, a statement, and for how many more of its rows nothing in the table has expired.
type Clear = (Oid, (i64, u32, u32), u32);

thread_local! {
    static CLEAR: Cell<Option<Clear>> = const { Cell::new(None) };
    static ROOMS: Memo<(i64, Oid), Option<Room>> = Memo::new();
}

/// Removes the expired rows in the way of a change, and returns the row to write.
pub fn made_room<'a>(change: &'a Change<'_>) -> Result<NewRow<'a>, TtlError> {
    let rule_id = change.argument().and_then(|id| id.parse().ok()).ok_or(TtlError::NotOurTrigger)?;
    if !sandbox::is_under_way_in(change.relid())
        && let Some(room) = room_in(rule_id, change.relid())?.as_ref()
        && !room.is_clear(change)
    {
        let mut has_conflict = false;
        for constraint in room.constraints.iter().filter(|constraint| constraint.concerns(change)) {
            let mut failure = None;
            constraint.probe(change, &mut |existing| {
                room.settle(constraint, existing, &mut has_conflict).unwrap_or_else(|error| {
                    failure = Some(error);
                    Next::Continue
                })
            });
            failure.map_or(Ok(()), Err)?;
        }
        if !has_conflict {
            executor::keep_pending(rule_id, change);
        }
    }
    Ok(change.row())
}

/// Rechecks rows that a statement was to write but may have skipped: each must have been written, or have a live row in
/// its way. Otherwise an expired row came between the trigger's check and PostgreSQL's, and may be gone again by now.
pub fn recheck_pending(rule_id: i64, rows: &[PendingRow]) {
    let look = || {
        for row in rows {
            let room = room_in(rule_id, row.relid())?;
            let Some(room) = room.as_ref() else { continue };
            // A row that was already expired when written is as if it never existed.
            if row.ask(|row| room.has_expired(row)) {
                continue;
            }
            // Index expressions run as the writing role, as they do when PostgreSQL writes.
            let is_live = |existing: &Existing| !room.has_expired(existing);
            let met: Vec<bool> =
                room.constraints.iter().filter_map(|constraint| row.meets_another(constraint, is_live)).collect();
            if !met.is_empty() && !met.contains(&true) {
                return Err(TtlError::ExpiredMeanwhile);
            }
        }
        Ok(())
    };
    look().unwrap_or_else(|error: TtlError| error.raise());
}

fn room_in(rule_id: i64, relid: Oid) -> Result<Rc<Option<Room>>, TtlError> {
    ROOMS.with(|memo| match memo.get(&(rule_id, relid)) {
        Some(room) => Ok(room),
        None => memo.remember(&(rule_id, relid), || {
            // Without a catalog nothing is hidden.
            let Some(catalog) = Catalog::open_if_served()? else { return Ok((Catalog::watched()?, None)) };
            let rule = catalog.rule_with_id(rule_id)?.filter(|rule| rule.options.hide_expired);
            let about = vec![catalog.relid, relid, rule.as_ref().map_or(relid, |rule| rule.relid)];
            // Anyone who may create triggers on a table can give them any rule ID.
            let rule = rule.filter(|rule| relation::tree(rule.relid).contains(&relid));
            Ok((about, rule.map(|rule| Room::of(&rule, relid)).transpose()?))
        }),
    })
}

impl Room {
    /// Runs in the writer's session. The owner's functions may have been compiled there for another search path, so
    /// none may be called as the owner, not even by the planner, which simplifies expressions of indexes and
    /// statistics.
    fn of(rule: &Rule, relid: Oid) -> Result<Self, TtlError> {
        let shape = relation::lock(relid, Lock::Read).ok_or(TtlError::UnknownTable(relid.to_u32()))?;
        let expired = rule.predicate.expired_at(PRESENT);
        let is_trusted = access::is_member_of(rule.owner);
        let is_risky = shape.is_risky_to_plan();
        let order = if is_risky && !is_trusted { None } else { order_of(rule, relid)? };
        Ok(Self {
            relid,
            owner: rule.owner,
            is_risky,
            way: Way::of(rule, relid, &shape, &expired),
            order,
            expired: identity::sandboxed_as(rule.owner, || Condition::read(relid, &expired))?,
            constraints: unique_conflict::constraints(relid),
        })
    }

    /// Whether nothing in the table has expired, so that nothing can be in the way of a row. A statement that would
    /// skip a row on conflict, and lose its write, takes nothing for granted.
    fn is_clear(&self, change: &Change<'_>) -> bool {
        let Some(order) = &self.order else { return false };
        if executor::has_conflict_clause() {
            return false;
        }
        let statement = executor::statement();
        let left = match CLEAR.get() {
            Some((relid, same, left)) if relid == self.relid && same == statement => left,
            _ => 0,
        };
        if left == 0 && !order.is_clear(change) {
            return false;
        }
        let left = if left == 0 { ROWS_AT_A_TIME } else { left };
        CLEAR.set(Some((self.relid, statement, left - 1)));
        true
    }

    /// Whether a row has expired. Evaluated as the owner with the condition of a sweep, which calls no user code.
    fn has_expired(&self, existing: &Existing) -> bool {
        identity::sandboxed_as(self.owner, || existing.meets(&self.expired))
    }

    /// Handles a row that is in the way of another.
    fn settle(&self, constraint: &Constraint, existing: &Existing, has_conflict: &mut bool) -> Result<Next, TtlError> {
        let outcome = if self.has_expired(existing) {
            self.remove(constraint, existing)?
        } else if !super::is_visible(self.relid, existing) {
            // Another rule hides the row, and that rule's trigger handles it.
            Outcome::Done
        } else if executor::note_conflict(self.relid, existing.tid()) || !constraint.is_immediate {
            *has_conflict = true;
            Outcome::Done
        } else {
            existing.lock()
        };
        Ok(if outcome == Outcome::Changed { Next::Again } else { Next::Continue })
    }

    fn remove(&self, constraint: &Constraint, existing: &Existing) -> Result<Outcome, TtlError> {
        let refused = || {
            let kind = if constraint.is_exclusion { TtlError::HiddenExclusion } else { TtlError::HiddenKey };
            kind(constraint.name.clone())
        };
        // A clock that is wrong must not cost a row.
        if Catalog::open()?.is_clock_in_doubt()? {
            return Err(refused());
        }
        match &self.way {
            Way::Never => Err(refused()),
            // Locking reveals a row of the running statement itself, which cannot be deleted.
            Way::Heap => match existing.lock() {
                Outcome::Done => Ok(existing.delete()),
                Outcome::Own => Err(refused()),
                outcome => Ok(outcome),
            },
            Way::Statement(sql, plan) => {
                let deferred = cascade::deferred(self.relid)?;
                // In another role's session, the owner's code may have been compiled for another search path; and
                // deferred triggers would run as the committing role.
                let is_mechanical = !self.is_risky && cascade::is_mechanical(self.relid)?;
                let is_owners = access::is_member_of(self.owner);
                if !(is_owners || is_mechanical)
                    || deferred.triggers
                    // Outside a sandbox, user code could leave something behind that runs later as the writing role.
                    || (deferred.references && !is_mechanical)
                    || cascade::check(self.relid, self.owner, Cascade::Delete).is_err()
                {
                    return Err(refused());
                }
                let path = Catalog::open()?.with_rights(|| login::search_path(self.owner))?;
                let plan = || plan.get_or_init(|| Plan::for_rows(sql));
                let delete = || identity::with_users_path(&path, || plan().run(Rows::Listed(&[existing.tid()])));
                // A sandbox lets nothing be deferred; a deferred foreign key is checked when the transaction commits.
                let remove = || match deferred.references {
                    true => identity::acting_as(self.owner, delete),
                    false => identity::sandboxed_as(self.owner, delete),
                };
                // A foreign key that refuses reveals other columns of the row in its error.
                let removed = if is_owners { remove() } else { without_details(remove) };
                if removed > 0 {
                    return Ok(Outcome::Done);
                }
                // Another session removed or changed it, a trigger keeps it, or an old snapshot does not see it.
                match existing.lock() {
                    Outcome::Done if access::has_old_snapshot() => Err(TtlError::ExpiredMeanwhile),
                    Outcome::Done => Err(refused()),
                    outcome => Ok(outcome),
                }
            }
        }
    }
}

/// Returns the rule's index on a relation, if it contains every row of the rule.
fn order_of(rule: &Rule, relid: Oid) -> Result<Option<Order>, TtlError> {
    identity::sandboxed_as(rule.owner, || {
        let Some(index) = index::serving(rule, relid)? else { return Ok(None) };
        let is_later = format!(
            "{} OPERATOR(pg_catalog.>) {}",
            rule.predicate.expiry.compared(),
            rule.predicate.expiry.cutoff_at(PRESENT)
        );
        Ok(Order::by(index, Condition::read(relid, &is_later)?))
    })
}

impl Way {
    fn of(rule: &Rule, relid: Oid, shape: &Shape, expired: &str) -> Self {
        // A sweep skips partitions and children of other owners, too.
        if !rule.options.frees_keys() || rule.state.hold.is_some() || shape.owner() != rule.owner || !shape.is_heap() {
            return Self::Never;
        }
        if shape.is_plain() && identity::sandboxed_as(rule.owner, || access::may_delete(relid)) {
            return Self::Heap;
        }
        let table = shape.qualified_name();
        let sql = format!("{ENGINE_TAG}DELETE FROM ONLY {table} WHERE ctid = ANY ($1) AND ({expired}) IS TRUE");
        Self::Statement(sql, OnceCell::new())
    }
}
