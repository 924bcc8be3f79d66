//! Where the rows of a relation are stored: in its own heap, or by another access method or extension.

use super::names::Regclass;
use super::{access, citus, relation, spi};
use crate::error::TtlError;
use pgrx::pg_sys::{self, Oid};
use std::collections::HashMap;
use std::ffi::{CStr, c_char};

/// How another extension stores the rows of a relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// In shards of Citus.
    CitusTable,
    /// In a shard of Citus, which decides when and where its rows move.
    Shard,
    /// In another table, by TimescaleDB.
    CompressedChunk,
    /// In its own heap, by TimescaleDB; but statements on it do more than on other tables.
    Chunk,
}

impl Kept {
    /// Returns the reason why rows cannot be removed from the relation's heap, if any.
    pub fn obstacle(self) -> Option<&'static str> {
        match self {
            Self::CitusTable => Some("is a Citus table"),
            Self::Shard => Some("is a shard of a Citus table"),
            Self::CompressedChunk => Some("is a compressed chunk"),
            Self::Chunk => None,
        }
    }
}

/// How other extensions store the rows of a relation, as of now and not as of the transaction's start.
pub fn kept(relid: Oid) -> Result<Option<Kept>, TtlError> {
    Ok(kept_of(&[relid])?.remove(&relid))
}

/// Returns the relations whose rows cannot be removed from their heap, each with the reason. Registration and every
/// sweep use this one decision.
pub fn obstacles(relids: &[Oid]) -> Result<HashMap<Oid, String>, TtlError> {
    let kept = kept_of(relids)?;
    let reason = |relid: &Oid| kept.get(relid).and_then(|kept| kept.obstacle()).map(str::to_owned);
    Ok(relids.iter().filter_map(|relid| Some((*relid, reason(relid).or_else(|| other_method(*relid))?))).collect())
}

/// Refuses a relation whose rows cannot be removed from its heap.
pub fn check(relid: Oid) -> Result<(), TtlError> {
    check_all(&[relid])
}

/// Like [`check`], for a relation and all its descendants.
pub fn check_tree(relid: Oid) -> Result<(), TtlError> {
    check_all(&relation::tree(relid))
}

fn check_all(relids: &[Oid]) -> Result<(), TtlError> {
    let mut found = obstacles(relids)?;
    match relids.iter().find_map(|relid| Some((*relid, found.remove(relid)?))) {
        Some((relid, reason)) => Err(not_a_heap(relid, reason)),
        None => Ok(()),
    }
}

pub fn not_a_heap(relid: Oid, reason: String) -> TtlError {
    TtlError::NotAHeap { name: Regclass(relid).qualified_name().unwrap_or_default(), reason }
}

/// Refuses a hypertable, of which an index built concurrently would not cover every row: its index consists of those of
/// its chunks, and TimescaleDB does not build these concurrently.
pub fn check_concurrent_index(relid: Oid) -> Result<(), TtlError> {
    if !has_timescaledb() {
        return Ok(());
    }
    let sql = format!(
        "SELECT FROM timescaledb_information.hypertables h
         JOIN pg_namespace n ON n.nspname = h.hypertable_schema
         JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = h.hypertable_name
         WHERE c.oid = {}",
        relid.to_u32()
    );
    match spi::with_latest_snapshot(|| spi::peek(&sql, |_| Ok(())))?.is_empty() {
        true => Ok(()),
        false => Err(TtlError::ConcurrentHypertable(access::relation_name(relid).unwrap_or_default())),
    }
}

/// Returns the reason if the relation is a foreign table or does not use the heap access method.
fn other_method(relid: Oid) -> Option<String> {
    // SAFETY: the tuple is valid until it is released; the name is copied.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as _, pg_sys::Datum::from(relid));
        if tuple.is_null() {
            return None;
        }
        let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>();
        let (kind, method) = ((*form).relkind, (*form).relam);
        pg_sys::ReleaseSysCache(tuple);
        if kind == pg_sys::RELKIND_FOREIGN_TABLE as c_char {
            return Some("is a foreign table".into());
        }
        if kind != pg_sys::RELKIND_RELATION as c_char || method == pg_sys::HEAP_TABLE_AM_OID {
            return None;
        }
        let name = pg_sys::get_am_name(method);
        let name = if name.is_null() { c"none" } else { CStr::from_ptr(name) };
        Some(format!("has access method {}", name.to_string_lossy()))
    }
}

fn kept_of(relids: &[Oid]) -> Result<HashMap<Oid, Kept>, TtlError> {
    let mut kept = chunks(relids)?;
    for relid in relids {
        if citus::is_table(*relid)? {
            kept.insert(*relid, Kept::CitusTable);
        } else if citus::is_shard(*relid)? {
            kept.insert(*relid, Kept::Shard);
        }
    }
    Ok(kept)
}

/// Returns which of the relations are chunks of hypertables.
fn chunks(relids: &[Oid]) -> Result<HashMap<Oid, Kept>, TtlError> {
    if !has_timescaledb() {
        return Ok(HashMap::new());
    }
    // A chunk inherits from its hypertable.
    let children: Vec<_> = relids.iter().filter(|relid| relation::has_parent(**relid)).collect();
    if children.is_empty() {
        return Ok(HashMap::new());
    }
    let children = children.iter().map(|relid| relid.to_u32().to_string()).collect::<Vec<_>>().join(",");
    let sql = format!(
        "SELECT c.oid, bool_or(k.is_compressed)
         FROM timescaledb_information.chunks k
         JOIN pg_namespace n ON n.nspname = k.chunk_schema
         JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = k.chunk_name
         WHERE c.oid = ANY ('{{{children}}}'::oid[])
         GROUP BY c.oid"
    );
    let found = spi::with_latest_snapshot(|| {
        spi::peek(&sql, |row| Ok((row.get::<Oid>(1)?.unwrap_or_default(), row.get::<bool>(2)?.unwrap_or_default())))
    })?;
    let kept = |is_compressed| if is_compressed { Kept::CompressedChunk } else { Kept::Chunk };
    Ok(found.into_iter().map(|(relid, is_compressed)| (relid, kept(is_compressed))).collect())
}

/// Whether TimescaleDB is installed. A user could create views in a schema of that name; these would run their code as
/// the role that registers a rule, so they do not count.
fn has_timescaledb() -> bool {
    [c"chunks", c"hypertables"].into_iter().all(|view| {
        // SAFETY: looks into the catalog caches; the tuple is valid until it is released.
        unsafe {
            let schema = pg_sys::get_namespace_oid(c"timescaledb_information".as_ptr(), true);
            let view = pg_sys::get_relname_relid(view.as_ptr(), schema);
            let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as _, pg_sys::Datum::from(view));
            if tuple.is_null() {
                return false;
            }
            let owner = (*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>()).relowner;
            pg_sys::ReleaseSysCache(tuple);
            pg_sys::superuser_arg(owner)
        }
    })
}
