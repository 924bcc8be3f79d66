//! Removes the rows that a search found, if they are still expired.

use super::{Done, is_about_rows};
use crate::catalog::Rule;
use crate::delivery::Taken;
use crate::error::TtlError;
use crate::pg::plan::{Deleted, Plan, Rows, Tid, Wanted, position};
use crate::pg::transaction::{Failure, subtransaction};
use crate::pg::{chain, identity, origin};
use crate::sweep::find::leaf::Leaf;
use crate::sweep::find::scan::{NextRows, Reached, Scan, most_ties};
use crate::sweep::statement::{Statements, Which};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;
use std::cell::OnceCell;
use std::collections::HashSet;

/// A range of blocks is worth reading as a whole if it holds at least this many rows of the batch per block.
const ROWS_PER_BLOCK: usize = 4;

pub struct Remover {
    relid: Oid,
    /// The relation, if deleting from it only removes rows from its heap.
    plain: Option<Oid>,
    look: Prepared,
    look_in_range: Prepared,
    next: Prepared,
    next_values: Prepared,
    lock: Prepared,
    remove: Prepared,
    remove_within: Prepared,
    delivers: bool,
    archives: bool,
    /// Whether rows must be locked before they are removed.
    must_lock: bool,
    /// Whether the search for rows runs no code of users.
    is_harmless: bool,
    /// Whether a row may still be there although a statement says that it was removed.
    can_be_undone: bool,
}

/// A statement that is planned on first use: most batches need only one.
struct Prepared {
    sql: String,
    which: Which,
    plan: OnceCell<Plan>,
}

impl Prepared {
    fn new(sql: String, which: Which) -> Self {
        Self { sql, which, plan: OnceCell::new() }
    }

    fn plan(&self) -> &Plan {
        self.plan.get_or_init(|| match self.which {
            Which::Listed => Plan::for_rows(&self.sql),
            Which::Ranged => Plan::for_range(&self.sql),
            Which::Beyond => Plan::for_rows_beyond(&self.sql),
            Which::Within => Plan::for_rows_within(&self.sql),
        })
    }
}

impl Remover {
    pub fn new(statements: &Statements, leaf: &Leaf, rule: &Rule) -> Self {
        Self {
            relid: leaf.relid,
            plain: leaf.plain_heap(rule),
            look: Prepared::new(statements.look(Which::Listed), Which::Listed),
            look_in_range: Prepared::new(statements.look(Which::Ranged), Which::Ranged),
            next: Prepared::new(statements.next_in_order(), Which::Beyond),
            next_values: Prepared::new(statements.next_values(), Which::Beyond),
            lock: Prepared::new(statements.lock(), Which::Listed),
            remove: Prepared::new(statements.remove(Which::Listed), Which::Listed),
            remove_within: Prepared::new(statements.remove(Which::Within), Which::Within),
            delivers: statements.delivers(),
            archives: rule.archive.is_some(),
            must_lock: leaf.must_lock(rule),
            is_harmless: rule.calls_nothing_of_users() && !leaf.search_runs_user_code(rule),
            can_be_undone: leaf.can_undo(rule),
        }
    }

    /// Whether the next rows of a scan can be removed as they are found.
    pub fn can_remove_as_found(&self, scan: &Scan) -> bool {
        self.plain.is_some() || (scan.is_ordered() && !self.must_lock)
    }

    /// Removes the next rows of a scan as they are found: from the heap, or by an SQL statement that finds them itself.
    pub fn remove_as_found(&self, scan: &Scan, wanted: usize) -> Done {
        match (self.plain, scan.next_rows()) {
            (Some(relid), Some(next)) => self.delete_as_found(relid, next, wanted),
            (None, Some(NextRows::Beyond(value))) => self.remove_beyond(value, wanted),
            _ => Done::default(),
        }
    }

    /// Removes the next rows by one statement that does not lock them first. Fails if it does not remove just the rows
    /// that were there a moment ago, whatever the reason: finding that out takes locks.
    fn remove_beyond(&self, value: &str, wanted: usize) -> Done {
        let most = wanted + most_ties(wanted);
        let (found, last) = self.next_values.plan().count(Rows::Beyond(value, wanted as i64));
        let mut done = Done::default();
        // If too many rows share a value, they are searched for again.
        if let Some(last) = last.as_deref().filter(|_| found < most) {
            let (removed, taken) = self.take(&self.remove_within, Rows::Within(value, last));
            if removed != found {
                kept().raise();
            }
            done = Done { removed: removed as i64, taken, ..done };
        }
        Done { reached: Some(Reached { seen: found.min(most), last: None, value: last }), ..done }
    }

    /// Deletes the next rows from the heap: the row version that was judged is the one deleted. Rows that the heap
    /// cannot delete at once are left to SQL statements.
    fn delete_as_found(&self, relid: Oid, next: NextRows<'_>, wanted: usize) -> Done {
        let deleted = match &next {
            NextRows::Beyond(value) => {
                let rows = Rows::Beyond(value, wanted as i64);
                self.delete(&self.next, rows, relid, Wanted::Upto(wanted + most_ties(wanted)))
            }
            NextRows::Between(first, last) => {
                self.delete(&self.look_in_range, Rows::Between(first, last), relid, Wanted::Upto(wanted))
            }
        };
        let mut done = Done { removed: deleted.tids.len() as i64, ..Done::default() };
        let reached = Reached { seen: deleted.seen(), last: deleted.last, value: deleted.value };
        // If too many rows share a value, they are searched for again.
        let will_come_again = matches!(next, NextRows::Beyond(_)) && reached.seen == wanted + most_ties(wanted);
        if !deleted.left.is_empty() && !will_come_again {
            done.add(self.remove_with_sql(&deleted.left));
        }
        Done { reached: Some(reached), ..done }
    }

    pub fn remove_together(&self, tids: &[Tid]) -> Done {
        let mut sorted = tids.to_vec();
        sorted.sort_unstable_by_key(position);
        let deleted = self.plain.map_or_else(Vec::new, |relid| self.delete_from_heap(relid, &sorted));
        let mut done = Done { removed: deleted.len() as i64, ..Done::default() };
        if deleted.len() < sorted.len() {
            let mut deleted = deleted.iter().map(position).peekable();
            sorted.retain(|tid| deleted.next_if_eq(&position(tid)).is_none());
            done.add(self.remove_with_sql(&sorted));
        }
        done
    }

    /// Deletes rows straight from the heap and returns their TIDs. Rows that cannot be deleted at once are left.
    fn delete_from_heap(&self, relid: Oid, sorted: &[Tid]) -> Vec<Tid> {
        let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return Vec::new() };
        let blocks = (position(last).0 - position(first).0) as usize + 1;
        if sorted.len() < ROWS_PER_BLOCK * blocks {
            return self.delete(&self.look, Rows::Listed(sorted), relid, Wanted::Listed(sorted)).tids;
        }
        // As in a table filled in time order: reading the whole range is cheaper than fetching each TID.
        self.delete(&self.look_in_range, Rows::Between(first, last), relid, Wanted::Listed(sorted)).tids
    }

    fn delete(&self, search: &Prepared, rows: Rows<'_>, relid: Oid, wanted: Wanted<'_>) -> Deleted {
        let delete = || search.plan().delete(rows, relid, wanted);
        if self.is_harmless { origin::marked(delete) } else { delete() }
    }

    fn remove_with_sql(&self, tids: &[Tid]) -> Done {
        // We hold the locks of these rows now: changing them does not wait, and only this transaction can change them.
        let ours = self.lock.plan().find(Rows::Listed(tids), 0).tids;
        let (mut removed, taken) =
            if ours.is_empty() { (0, Vec::new()) } else { self.take(&self.remove, Rows::Listed(&ours)) };
        let mut locked = 0;
        if ours.len() < tids.len() {
            // Other sessions have locked the rest, or have updated or deleted it; then it is no longer there.
            let held: HashSet<_> = ours.iter().map(position).collect();
            let others: Vec<_> = tids.iter().filter(|tid| !held.contains(&position(tid))).copied().collect();
            locked = self.look.plan().run(Rows::Listed(&others)) as i64;
        }
        let mut blocked = Vec::new();
        if removed < ours.len() || self.can_be_undone {
            // A trigger or rule may have kept a row, changed it, or taken its mark back: a row that is still expired is
            // blocked, wherever its latest version is.
            blocked = self.look.plan().find(Rows::Listed(&chain::latest(self.relid, &ours)), 0).tids;
            let most = ours.len().saturating_sub(blocked.len());
            // A row that is not gone must not be delivered: fail, so that the batch is divided.
            if removed > most && self.delivers {
                kept().raise();
            }
            removed = removed.min(most);
        }
        let blocked_by = (!blocked.is_empty()).then(kept);
        Done { removed: removed as i64, locked, blocked, blocked_by, taken, ..Done::default() }
    }

    /// Removes rows with one of the statements, and returns their number and what to deliver.
    fn take(&self, removal: &Prepared, rows: Rows<'_>) -> (usize, Vec<Taken>) {
        if !self.delivers {
            return (removal.plan().run(rows), Vec::new());
        }
        let mut columns = removal.plan().row(rows).into_iter();
        let mut count = || columns.next().flatten().and_then(|count| count.parse::<usize>().ok());
        let (removed, archived) = (count().unwrap_or_default(), count());
        // No row may end up in neither table: one that a trigger kept out of the archive stays where it is.
        if archived.is_some_and(|archived| archived != removed) {
            if self.archives { TtlError::ArchiveRefused.raise() } else { kept().raise() }
        }
        let (rows, range) = (columns.next().flatten(), columns.next().flatten());
        (removed, if removed > 0 { vec![Taken { rows, range }] } else { Vec::new() })
    }

    /// Removes each row in a subtransaction of its own, in which `then` also runs. All of them together wait no longer
    /// for locks than one of them may: other sessions wait meanwhile for the rows that are gone.
    pub fn remove_one_by_one(&self, tids: &[Tid], then: impl Fn(&Done) -> Result<(), TtlError>) -> Done {
        let mut total = Done::default();
        let mut patience = c"100ms";
        for tid in tids {
            let done = subtransaction(|| {
                identity::with_settings(&[(c"lock_timeout", patience)], || {
                    let done = self.remove_together(&[*tid]);
                    then(&done).map(|()| done)
                })
            });
            total.add(done.unwrap_or_else(|failure| {
                if failure.code == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE {
                    patience = c"1ms";
                }
                if is_about_rows(&failure) { Done::blocked(*tid, failure) } else { failure.raise() }
            }));
        }
        total
    }
}

fn kept() -> Failure {
    let code = PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION;
    Failure::new(code, "a trigger or rule of the table keeps the row")
}
