//! A hidden row that is still there must not be in the way of a new one with its key: before a row is written, expired rows that it
//! would collide with are removed. What cannot be removed fails the statement, so that no write is lost.
//!
//! A row that is live is kept so until the transaction ends, by a lock that an update of it would take, too: otherwise it could
//! expire between this look and the one that PostgreSQL takes when it writes. Only `ON CONFLICT DO NOTHING` locks no rows; it is
//! looked after when the statement has run.

use super::PRESENT;
use crate::cascade::{self, Change as Cascade};
use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::pg::condition::Condition;
use crate::pg::existing::{Existing, Outcome};
use crate::pg::memo::Memo;
use crate::pg::order::Order;
use crate::pg::pending::PendingRow;
use crate::pg::plan::{Places, Plan};
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

/// How room is made in a table.
struct Room {
    relid: Oid,
    owner: Oid,
    /// Whether planning a statement about the table may call code of users.
    is_risky: bool,
    /// What holds for a row that has expired.
    expired: Condition,
    constraints: Vec<Constraint>,
    way: Way,
    /// Tells quickly that nothing has expired, if there is an index for it.
    order: Option<Order>,
}

/// How an expired row is removed.
enum Way {
    /// From the heap: nobody has a say about a DELETE.
    Heap,
    /// By a statement of the owner's, planned when it is first needed.
    Statement(String, OnceCell<Plan>),
    /// Not at all.
    Never,
}

/// For how many rows of a statement it is taken for granted that nothing in the table has expired, once that was seen. What
/// others let expire meanwhile is as if they did so after this statement.
const ROWS_AT_A_TIME: u32 = 100;

/// For how many more rows of a statement nothing in a table has expired.
type Clear = (Oid, (i64, u32, u32), u32);

thread_local! {
    static CLEAR: Cell<Option<Clear>> = const { Cell::new(None) };
    static ROOMS: Memo<(i64, Oid), Option<Room>> = Memo::new();
}

/// The row as it is to be written, when nothing that has expired is in its way any more.
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

/// Looks again at rows that a statement was to write, and may have done nothing about: each was written, or something live is in its
/// way. If there is neither, an expired row was that came between the look of the trigger and that of PostgreSQL, and may be gone
/// again by now.
pub fn recheck_pending(rule_id: i64, rows: &[PendingRow]) {
    let look = || {
        for row in rows {
            let room = room_in(rule_id, row.relid())?;
            let Some(room) = room.as_ref() else { continue };
            // What is written expired is as if it never was.
            if row.ask(|row| room.has_expired(row)) {
                continue;
            }
            // Expressions of indexes run as whoever writes, as they do when PostgreSQL writes.
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
            // Anybody who may make triggers on a table can give them any number.
            let rule = rule.filter(|rule| relation::tree(rule.relid).contains(&relid));
            Ok((about, rule.map(|rule| Room::of(&rule, relid)).transpose()?))
        }),
    })
}

impl Room {
    /// What it takes is made in the session of whoever writes. There the owner's functions may have been compiled for another search
    /// path, so none of them may be called as the owner: not even by the planner, which simplifies what indexes and statistics are on.
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

    /// Whether nothing in the table has expired, so that nothing can be in the way of a row. A statement that would pass over a
    /// row in its way, and lose its write, takes nothing for granted.
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

    /// As the owner, as a sweep would, and with the same condition. It calls nothing of users.
    fn has_expired(&self, existing: &Existing) -> bool {
        identity::sandboxed_as(self.owner, || existing.meets(&self.expired))
    }

    /// Sees to a row that is in the way of another.
    fn settle(&self, constraint: &Constraint, existing: &Existing, has_conflict: &mut bool) -> Result<Next, TtlError> {
        let outcome = if self.has_expired(existing) {
            self.remove(constraint, existing)?
        } else if !super::is_visible(self.relid, existing) {
            // Another rule hides it, and another trigger sees to it.
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
        let refused =
            || TtlError::HiddenKey { constraint: constraint.name.clone(), is_exclusion: constraint.is_exclusion };
        match &self.way {
            Way::Never => Err(refused()),
            // A row of the very statement that is running can be locked, which tells, but not deleted.
            Way::Heap => match existing.lock() {
                Outcome::Done => Ok(existing.delete()),
                Outcome::Own => Err(refused()),
                outcome => Ok(outcome),
            },
            Way::Statement(sql, plan) => {
                let deferred = cascade::deferred(self.relid)?;
                // In a session of somebody else the owner's code may have been compiled for another search path; and triggers that
                // are deferred would run as whoever commits.
                let is_mechanical = !self.is_risky && cascade::is_mechanical(self.relid)?;
                let is_owners = access::is_member_of(self.owner);
                if !(is_owners || is_mechanical)
                    || deferred.triggers
                    // Outside a sandbox, code of users could leave something that runs later, as whoever writes.
                    || (deferred.references && !is_mechanical)
                    || cascade::check(self.relid, self.owner, Cascade::Delete).is_err()
                {
                    return Err(refused());
                }
                let path = Catalog::open()?.with_rights(|| login::search_path(self.owner))?;
                let plan = || plan.get_or_init(|| Plan::for_rows(sql));
                let delete = || identity::with_users_path(&path, || plan().run(Places::These(&[existing.tid()])));
                // A sandbox lets nothing be deferred; a foreign key that is, is checked when the transaction commits.
                let remove = || match deferred.references {
                    true => identity::acting_as(self.owner, delete),
                    false => identity::sandboxed_as(self.owner, delete),
                };
                // A foreign key that refuses tells of other columns of the row.
                let removed = if is_owners { remove() } else { without_details(remove) };
                if removed > 0 {
                    return Ok(Outcome::Done);
                }
                // Somebody else has removed or changed it; or a trigger keeps it, or an old snapshot does not see it.
                match existing.lock() {
                    Outcome::Done if access::has_old_snapshot() => Err(TtlError::ExpiredMeanwhile),
                    Outcome::Done => Err(refused()),
                    outcome => Ok(outcome),
                }
            }
        }
    }
}

/// The index of the rule in a relation, if that has every row of the rule.
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
        // A sweep leaves the parts of other owners alone, too.
        if !rule.options.makes_room() || rule.state.hold.is_some() || shape.owner() != rule.owner || !shape.is_heap() {
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
