//! What a backend caches about tables, until one of them or a rule on it changes.

use super::{access, relation};
use pgrx::pg_sys::Oid;
use pgrx::{pg_guard, pg_sys};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;

/// Cache entries by key, each with the relations it depends on.
pub struct Memo<K, V> {
    entries: RefCell<HashMap<K, Entry<V>>>,
    /// How many changes had been recorded when the entries were last checked.
    seen: Cell<usize>,
}

type Entry<V> = (Vec<Oid>, Rc<V>);

/// Changed relations, in the order in which the backend learned of them. `InvalidOid` stands for all relations.
struct Changes {
    forgotten: usize,
    latest: Vec<Oid>,
}

thread_local! {
    static CHANGES: RefCell<Changes> = const { RefCell::new(Changes { forgotten: 0, latest: Vec::new() }) };
    static IS_LISTENING: Cell<bool> = const { Cell::new(false) };
}

/// Has PostgreSQL's caches forget what other sessions have changed.
pub fn hear_of_changes() {
    // SAFETY: processes invalidations from other sessions, as also happens at other times.
    unsafe { pg_sys::AcceptInvalidationMessages() };
}

/// Beyond this many unseen changes it is cheaper to forget everything.
const MOST_CHANGES: usize = 1000;

impl<K: Eq + Hash + Clone, V> Memo<K, V> {
    pub fn new() -> Self {
        Self { entries: RefCell::new(HashMap::new()), seen: Cell::new(0) }
    }

    /// Returns the entry for a key.
    pub fn get(&self, key: &K) -> Option<Rc<V>> {
        hear_of_changes();
        self.forget_changed();
        self.entries.borrow().get(key).map(|(_, value)| Rc::clone(value))
    }

    /// Caches what `make` finds out about relations; `InvalidOid` stands for any relation. If one of them changes while
    /// it runs, the result is not cached.
    pub fn remember<E>(&self, key: &K, make: impl FnOnce() -> Result<(Vec<Oid>, V), E>) -> Result<Rc<V>, E> {
        listen();
        self.forget_changed();
        let (relids, value) = make()?;
        let value = Rc::new(value);
        self.entries.borrow_mut().insert(key.clone(), (relids, Rc::clone(&value)));
        self.forget_changed();
        Ok(value)
    }

    /// Forgets the entry for a key.
    pub fn remove(&self, key: &K) {
        self.entries.borrow_mut().remove(key);
    }

    fn forget_changed(&self) {
        let news = CHANGES.with_borrow(|changes| {
            let seen = self.seen.replace(changes.forgotten + changes.latest.len());
            seen.checked_sub(changes.forgotten).map(|known| changes.latest[known..].to_vec())
        });
        // No PostgreSQL code runs while the entries are borrowed, except to free plans.
        match news {
            Some(news) if news.is_empty() => {}
            Some(news) if !news.contains(&pg_sys::InvalidOid) => {
                self.entries.borrow_mut().retain(|_, (relids, _)| {
                    !relids.iter().any(|relid| *relid == pg_sys::InvalidOid || news.contains(relid))
                });
            }
            _ => self.entries.borrow_mut().clear(),
        }
    }
}

/// Makes every backend forget its entries for a relation and replan what uses it, once this transaction commits.
pub fn forget(relid: Oid) {
    // SAFETY: registers an invalidation message; does nothing if the relation is gone.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as _, pg_sys::Datum::from(relid));
        if !tuple.is_null() {
            pg_sys::CacheInvalidateRelcacheByTuple(tuple);
            pg_sys::ReleaseSysCache(tuple);
        }
    }
}

/// Like [`forget`], for all relations.
pub fn forget_all() {
    // SAFETY: registers an invalidation message.
    unsafe { pg_sys::CacheInvalidateRelcacheAll() };
}

/// Like [`forget`], for a relation and all its descendants.
pub fn forget_tree(relid: Oid) {
    // Dropping a relation has already sent an invalidation.
    if access::relation_name(relid).is_none() {
        return;
    }
    relation::tree(relid).into_iter().for_each(forget);
}

fn listen() {
    if !IS_LISTENING.replace(true) {
        // SAFETY: registered once per process, for good.
        unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(notice_change), pg_sys::Datum::null()) };
    }
}

/// Records that a relation has changed. PostgreSQL may call this in the middle of anything, so it does nothing else.
#[pg_guard]
unsafe extern "C-unwind" fn notice_change(_argument: pg_sys::Datum, relid: Oid) {
    CHANGES.with_borrow_mut(|changes| {
        if changes.latest.len() >= MOST_CHANGES {
            changes.forgotten += changes.latest.len();
            changes.latest.clear();
        }
        changes.latest.push(relid);
    });
}
