//! Citus tables, if Citus is installed. Citus keeps their rows in shards, on this node or on others.

use super::identity::with_settings;
use super::memo::Memo;
use super::{access, spi};
use crate::error::TtlError;
use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr;

thread_local! {
    static TABLES: Memo<Oid, bool> = Memo::new();
}

/// Returns a Citus catalog table; `None` in a database without Citus, at the cost of one cache lookup. Only superusers
/// can create tables in this schema.
fn catalog(name: &CStr) -> Option<Oid> {
    // SAFETY: looks into the catalog caches.
    let relid = unsafe { pg_sys::get_relname_relid(name.as_ptr(), pg_sys::Oid::from(pg_sys::PG_CATALOG_NAMESPACE)) };
    (relid != pg_sys::InvalidOid).then_some(relid)
}

/// Whether a relation is a Citus table of any kind, by the latest snapshot.
pub fn is_table(relid: Oid) -> Result<bool, TtlError> {
    if catalog(c"pg_dist_partition").is_none() {
        return Ok(false);
    }
    let sql = format!("SELECT FROM pg_catalog.pg_dist_partition WHERE logicalrelid = {}", relid.to_u32());
    Ok(!spi::with_latest_snapshot(|| spi::peek(&sql, |_| Ok(())))?.is_empty())
}

/// Whether a relation is a Citus shard: its name is the name of the table, shortened if need be, and the shard number.
pub fn is_shard(relid: Oid) -> Result<bool, TtlError> {
    if catalog(c"pg_dist_shard").is_none() {
        return Ok(false);
    }
    let Some(name) = access::relation_name(relid) else { return Ok(false) };
    let Some((beginning, Ok(number))) = name.rsplit_once('_').map(|(name, number)| (name, number.parse::<i64>()))
    else {
        return Ok(false);
    };
    let sql = format!("SELECT logicalrelid::oid FROM pg_catalog.pg_dist_shard WHERE shardid = {number}");
    let tables = spi::with_latest_snapshot(|| spi::peek(&sql, |row| Ok(row.get::<Oid>(1)?.unwrap_or_default())))?;
    let has_shard = |table: Oid| {
        let is_shortened = name.len() == pg_sys::NAMEDATALEN as usize - 1;
        access::namespace_of(table) == access::namespace_of(relid)
            && (is_shortened || access::relation_name(table).as_deref() == Some(beginning))
    };
    Ok(tables.into_iter().any(has_shard))
}

/// Whether a relation is a Citus table. This is cached: Citus invalidates the relcache of a table that it takes over.
pub fn is_distributed(relid: Oid) -> bool {
    let Some(partitions) = catalog(c"pg_dist_partition").filter(|_| relid.to_u32() >= pg_sys::FirstNormalObjectId)
    else {
        return false;
    };
    TABLES.with(|memo| match memo.get(&relid) {
        Some(is_table) => *is_table,
        None => {
            let found = memo.remember(&relid, || Ok((vec![relid, partitions], is_table(relid)?)));
            *found.unwrap_or_else(|error: TtlError| error.raise())
        }
    })
}

/// Whether a query uses a Citus table. Citus then plans it, understands only its original shape, and has the parts on
/// local relations planned as separate queries.
///
/// # Safety
/// `query` is valid.
pub unsafe fn is_concerned(query: *mut pg_sys::Query) -> bool {
    // SAFETY: as promised by the caller.
    catalog(c"pg_dist_partition").is_some() && unsafe { has_table(query.cast(), ptr::null_mut()) }
}

/// A tree walker that visits every node of a query, and range table entries before their contents.
#[pg_guard]
unsafe extern "C-unwind" fn has_table(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: the casts follow the node's tag.
    unsafe {
        if node.is_null() {
            return false;
        }
        match (*node).type_ {
            pg_sys::NodeTag::T_RangeTblEntry => {
                let entry = &*node.cast::<pg_sys::RangeTblEntry>();
                entry.rtekind == pg_sys::RTEKind::RTE_RELATION && is_distributed(entry.relid)
            }
            pg_sys::NodeTag::T_Query => {
                let flags = pg_sys::QTW_EXAMINE_RTES_BEFORE as i32;
                pg_sys::query_tree_walker(node.cast(), Some(has_table), state, flags)
            }
            _ => pg_sys::expression_tree_walker(node, Some(has_table), state),
        }
    }
}

/// Runs `work`, which calls no user code, with shards visible in `pg_class`: Citus hides them from most queries on it,
/// and a rule may have followed its table into a shard.
pub fn seeing_shards<T>(work: impl FnOnce() -> T) -> T {
    let name = c"citus.override_table_visibility";
    // SAFETY: a setting that need not exist.
    let is_there = unsafe { !pg_sys::GetConfigOption(name.as_ptr(), true, false).is_null() };
    if is_there { with_settings(&[(name, c"off")], work) } else { work() }
}
