//! Locks, privileges, catalog lookups and session state.

use super::compat;
use pgrx::pg_sys;
use std::ffi::{CStr, CString};

/// Takes AccessExclusiveLock on relations, as dropping them or an object on them does.
pub fn lock_exclusively(relids: &[pg_sys::Oid]) {
    // SAFETY: takes locks of this transaction; a relation may be gone.
    relids
        .iter()
        .for_each(|relid| unsafe { pg_sys::LockRelationOid(*relid, pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE) });
}

/// Takes AccessShareLock on relations, never waiting for one lock while holding another.
pub fn lock_for_reading(relids: &[pg_sys::Oid]) {
    let mode = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    // SAFETY: takes and releases locks of this transaction; a relation may be gone.
    unsafe {
        let is_locked = |relid: &pg_sys::Oid| pg_sys::ConditionalLockRelationOid(*relid, mode);
        while let Some(place) = relids.iter().position(|relid| !is_locked(relid)) {
            relids[..place].iter().for_each(|relid| pg_sys::UnlockRelationOid(*relid, mode));
            pg_sys::LockRelationOid(relids[place], mode);
            pg_sys::UnlockRelationOid(relids[place], mode);
        }
    }
}

/// Keeps other sessions from dropping, altering or registering `relid` until the transaction ends; reads and writes
/// continue.
pub fn lock_against_ddl(relid: pg_sys::Oid) {
    // SAFETY: takes a heavyweight lock, released at transaction end; the OID need not exist.
    unsafe { pg_sys::LockRelationOid(relid, pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE) };
}

/// Raises PostgreSQL's own error for a command that writes if in recovery or in a read-only transaction.
pub fn refuse_if_read_only(command: &str) {
    let Ok(command) = CString::new(command) else { return };
    // SAFETY: both read session state and raise an ordinary error.
    unsafe {
        pg_sys::PreventCommandDuringRecovery(command.as_ptr());
        pg_sys::PreventCommandIfReadOnly(command.as_ptr());
    }
}

/// The current `TimeZone`.
pub fn session_time_zone() -> String {
    // SAFETY: TimeZone always exists; the string is copied before anything can change it.
    unsafe { CStr::from_ptr(pg_sys::GetConfigOption(c"TimeZone".as_ptr(), false, false)) }
        .to_string_lossy()
        .into_owned()
}

/// The current `search_path`.
pub fn search_path() -> CString {
    // SAFETY: always exists; the string is copied before anything can change it.
    unsafe { CStr::from_ptr(pg_sys::GetConfigOption(c"search_path".as_ptr(), false, false)) }.to_owned()
}

/// Makes a misspelt setting an error instead of a silent placeholder.
pub fn reserve_setting_prefix(prefix: &CStr) {
    // SAFETY: called once, while the library is loaded.
    unsafe {
        pg_sys::MarkGUCPrefixReserved(prefix.as_ptr());
    }
}

/// Whether the server is in binary upgrade mode, where `pg_upgrade` must find no activity but its own.
pub fn in_binary_upgrade() -> bool {
    // SAFETY: set once at server start.
    unsafe { pg_sys::IsBinaryUpgrade }
}

/// The current time, in microseconds since 1970.
pub fn unix_micros() -> i64 {
    let from_2000 = i64::from(pgrx::datum::datetime_support::clock_timestamp());
    from_2000 + i64::from(pg_sys::POSTGRES_EPOCH_JDATE - pg_sys::UNIX_EPOCH_JDATE) * 86_400_000_000
}

/// The role whose privileges are in force.
pub fn current_role() -> pg_sys::Oid {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::GetUserId() }
}

/// Whether the current role may delete from the relation.
pub fn may_delete(relid: pg_sys::Oid) -> bool {
    // SAFETY: looks into the catalog caches.
    unsafe {
        let acl = pg_sys::pg_class_aclcheck(relid, pg_sys::GetUserId(), pg_sys::ACL_DELETE as pg_sys::AclMode);
        acl == pg_sys::AclResult::ACLCHECK_OK
    }
}

/// Whether the current role may read every column and every row of the relation.
pub fn may_read_all(relid: pg_sys::Oid) -> bool {
    // SAFETY: both look into the catalog caches.
    unsafe {
        let acl = pg_sys::pg_class_aclcheck(relid, pg_sys::GetUserId(), pg_sys::ACL_SELECT as pg_sys::AclMode);
        let policies = pg_sys::check_enable_rls(relid, pg_sys::InvalidOid, true);
        acl == pg_sys::AclResult::ACLCHECK_OK && policies != pg_sys::CheckEnableRlsResult::RLS_ENABLED as i32
    }
}

/// Whether the transaction keeps the snapshot it started with (REPEATABLE READ and above).
pub fn has_old_snapshot() -> bool {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// Whether the current role has the privileges of `role`, as superusers always do.
pub fn is_member_of(role: pg_sys::Oid) -> bool {
    // SAFETY: looks into the catalog caches.
    unsafe { pg_sys::has_privs_of_role(pg_sys::GetUserId(), role) }
}

/// Whether the current role is the session's own, rather than one that a function has switched to.
pub fn is_sessions_own_role() -> bool {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::GetUserId() == pg_sys::GetOuterUserId() }
}

/// Whether every session loads this library, from either list of preloaded libraries.
pub fn is_in_every_session() -> bool {
    let setting = |name: &CStr| {
        // SAFETY: a server setting that always exists; the string is copied.
        unsafe { CStr::from_ptr(pg_sys::GetConfigOption(name.as_ptr(), false, false)) }.to_string_lossy().into_owned()
    };
    [c"shared_preload_libraries", c"session_preload_libraries"]
        .iter()
        .any(|name| setting(name).split(',').any(|library| library.trim().trim_matches('"') == "pg_ttl_index"))
}

/// Whether no relation in a schema has this name.
pub fn is_free_name(namespace: pg_sys::Oid, name: &str) -> bool {
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: looks into the catalog caches.
    unsafe { pg_sys::get_relname_relid(name.as_ptr(), namespace) == pg_sys::InvalidOid }
}

/// The schema of a relation.
pub fn namespace_of(relid: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: looks into the catalog caches.
    unsafe { pg_sys::get_rel_namespace(relid) }
}

/// Whether a role may create objects in a schema.
pub fn may_create_in(schema: &str, role: pg_sys::Oid) -> bool {
    let Ok(schema) = CString::new(schema) else { return false };
    // SAFETY: looks into the catalog caches.
    unsafe {
        let namespace = pg_sys::get_namespace_oid(schema.as_ptr(), true);
        compat::may_create_in(namespace, role)
    }
}

/// The name of a relation, without its schema.
pub fn relation_name(relid: pg_sys::Oid) -> Option<String> {
    // SAFETY: looks into the catalog caches; the string is copied.
    unsafe {
        let name = pg_sys::get_rel_name(relid);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// The schema and owner of a relation.
pub fn place_of(relid: pg_sys::Oid) -> Option<(String, pg_sys::Oid)> {
    // SAFETY: looks into the catalog caches; the tuple is valid until it is released, and the name is copied.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as _, pg_sys::Datum::from(relid));
        if tuple.is_null() {
            return None;
        }
        let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>();
        let (namespace, owner) = (form.relnamespace, form.relowner);
        pg_sys::ReleaseSysCache(tuple);
        let name = pg_sys::get_namespace_name(namespace);
        (!name.is_null()).then(|| (CStr::from_ptr(name).to_string_lossy().into_owned(), owner))
    }
}

/// The name of a column and its type under all domains; `None` if the column was dropped.
pub fn column(relid: pg_sys::Oid, attnum: i16) -> Option<(String, pg_sys::Oid)> {
    // SAFETY: looks into the catalog caches; the tuple is valid until it is released, and the name is copied.
    unsafe {
        let tuple = pg_sys::SearchSysCacheAttNum(relid, attnum);
        if tuple.is_null() {
            return None;
        }
        let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_attribute>();
        let name = CStr::from_ptr(form.attname.data.as_ptr()).to_string_lossy().into_owned();
        let type_oid = form.atttypid;
        pg_sys::ReleaseSysCache(tuple);
        Some((name, pg_sys::getBaseType(type_oid)))
    }
}

/// Whether the type of a column has an order, by a btree operator class of its own.
pub fn has_order(relid: pg_sys::Oid, attnum: i16) -> bool {
    // SAFETY: looks into the catalog and type caches.
    unsafe {
        let base = pg_sys::getBaseType(pg_sys::get_atttype(relid, attnum));
        let entry = pg_sys::lookup_type_cache(base, (pg_sys::TYPECACHE_EQ_OPR | pg_sys::TYPECACHE_LT_OPR) as i32);
        (*entry).eq_opr != pg_sys::InvalidOid && (*entry).lt_opr != pg_sys::InvalidOid
    }
}

/// Returns the name of a column's type under all domains, with its modifier.
pub fn base_type_name(relid: pg_sys::Oid, attnum: i16) -> Option<String> {
    let flags = pg_sys::FORMAT_TYPE_TYPEMOD_GIVEN | pg_sys::FORMAT_TYPE_FORCE_QUALIFY;
    // SAFETY: looks into the catalog caches; the name is copied.
    unsafe {
        let (mut type_oid, mut modifier, mut collation) = Default::default();
        let tuple = pg_sys::SearchSysCacheAttNum(relid, attnum);
        if tuple.is_null() {
            return None;
        }
        pg_sys::ReleaseSysCache(tuple);
        pg_sys::get_atttypetypmodcoll(relid, attnum, &mut type_oid, &mut modifier, &mut collation);
        let (base, modifier) = base_type_and_modifier(type_oid, modifier);
        let name = pg_sys::format_type_extended(base, modifier, flags as u16);
        Some(CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// The type under all domains.
pub fn base_type(type_oid: pg_sys::Oid) -> pg_sys::Oid {
    // SAFETY: looks into the type cache; an OID that is not a type raises an ordinary error.
    unsafe { pg_sys::getBaseType(type_oid) }
}

/// The type under all domains, with its type modifier.
pub fn base_type_and_modifier(type_oid: pg_sys::Oid, mut modifier: i32) -> (pg_sys::Oid, i32) {
    // SAFETY: looks into the type cache; an OID that is not a type raises an ordinary error.
    (unsafe { pg_sys::getBaseTypeAndTypmod(type_oid, &mut modifier) }, modifier)
}

/// Takes a transaction-level advisory lock if it is free, alone or with others. Users cannot take locks of this kind.
pub fn try_advisory_lock(class: u32, id: i64, is_shared: bool) -> bool {
    // SAFETY: a lock tag like those of pg_advisory_lock, which have 1 or 2 as their last field.
    unsafe {
        let tag = pg_sys::LOCKTAG {
            locktag_field1: pg_sys::MyDatabaseId.to_u32(),
            locktag_field2: class.wrapping_add((id >> 32) as u32),
            locktag_field3: id as u32,
            locktag_field4: 3,
            locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
            locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
        };
        let mode = if is_shared { pg_sys::ShareLock } else { pg_sys::ExclusiveLock };
        pg_sys::LockAcquire(&tag, mode as pg_sys::LOCKMODE, false, true)
            != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
    }
}

/// Whether the server is loading `shared_preload_libraries`.
pub fn is_preloading() -> bool {
    // SAFETY: reads a flag set by the postmaster.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}
