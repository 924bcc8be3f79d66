//! What a backend remembers about tables, until one of them, or a rule on it, changes.

use super::{access, relation};
use pgrx::pg_sys::Oid;
use pgrx::{pg_guard, pg_sys};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;

/// Entries by key, each with the relations it is about.
pub struct Memo<K, V> {
    entries: RefCell<HashMap<K, Entry<V>>>,
    /// How many changes had been noticed when the entries were last looked through.
    seen: Cell<usize>,
}

type Entry<V> = (Vec<Oid>, Rc<V>);

/// Relations that have changed, in the order it was noticed. `InvalidOid` is all of them.
struct Changes {
    forgotten: usize,
    latest: Vec<Oid>,
}

thread_local! {
    static CHANGES: RefCell<Changes> = const { RefCell::new(Changes { forgotten: 0, latest: Vec::new() }) };
    static IS_LISTENING: Cell<bool> = const { Cell::new(false) };
}

/// Beyond this many changes that one has not seen it is cheaper to forget everything.
const MOST_CHANGES: usize = 1000;

impl<K: Eq + Hash + Clone, V> Memo<K, V> {
    pub fn new() -> Self {
        Self { entries: RefCell::new(HashMap::new()), seen: Cell::new(0) }
    }

    /// What is remembered under a key.
    pub fn get(&self, key: &K) -> Option<Rc<V>> {
        // SAFETY: hears of what other sessions have committed, which happens at other times by itself.
        unsafe { pg_sys::AcceptInvalidationMessages() };
        self.forget_changed();
        self.entries.borrow().get(key).map(|(_, value)| Rc::clone(value))
    }

    /// Remembers what `make` finds out about relations; `InvalidOid` is any relation. What changes while it is at it is not remembered.
    pub fn remember<E>(&self, key: &K, make: impl FnOnce() -> Result<(Vec<Oid>, V), E>) -> Result<Rc<V>, E> {
        listen();
        self.forget_changed();
        let (relids, value) = make()?;
        let value = Rc::new(value);
        self.entries.borrow_mut().insert(key.clone(), (relids, Rc::clone(&value)));
        self.forget_changed();
        Ok(value)
    }

    /// Forgets what is remembered under a key.
    pub fn remove(&self, key: &K) {
        self.entries.borrow_mut().remove(key);
    }

    fn forget_changed(&self) {
        let news = CHANGES.with_borrow(|changes| {
            let seen = self.seen.replace(changes.forgotten + changes.latest.len());
            seen.checked_sub(changes.forgotten).map(|known| changes.latest[known..].to_vec())
        });
        // Nothing of PostgreSQL runs while the entries are borrowed, but for freeing plans.
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

/// Has every backend forget what it remembers about a relation, and plan anew what it has planned for it, when this transaction commits.
pub fn forget(relid: Oid) {
    // SAFETY: registers an invalidation message; does nothing about a relation that is gone.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as i32, pg_sys::Datum::from(relid));
        if !tuple.is_null() {
            pg_sys::CacheInvalidateRelcacheByTuple(tuple);
            pg_sys::ReleaseSysCache(tuple);
        }
    }
}

/// The same for everything.
pub fn forget_all() {
    // SAFETY: registers an invalidation message.
    unsafe { pg_sys::CacheInvalidateRelcacheAll() };
}

/// The same for a relation and all that inherit from it.
pub fn forget_tree(relid: Oid) {
    // What was dropped has told of it.
    if access::relation_name(relid).is_none() {
        return;
    }
    relation::tree(relid).into_iter().for_each(forget);
}

fn listen() {
    if !IS_LISTENING.replace(true) {
        // SAFETY: registered once a process, for good.
        unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(notice_change), pg_sys::Datum::null()) };
    }
}

/// Called whenever PostgreSQL hears that a relation has changed, in the middle of anything: only takes it down.
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
