//! Differences between PostgreSQL versions, and server functions that pgrx does not declare.
//!
//! `since = "18"` holds for PostgreSQL 18 and later (build.rs).

use pgrx::pg_sys::{self, Datum, Oid};
use std::ffi::{c_char, c_int, c_void};

// An error raised in one of these jumps over the calling Rust frames, unless `pg_guard_ffi_boundary` wraps the call.
unsafe extern "C-unwind" {
    /// PostgreSQL's own planner and executor. Our hooks call them without a guard: on its way through Rust an error
    /// would lose its context and position. It jumps over the frame of the hook, which has nothing to clean up.
    pub fn standard_planner(
        query: *mut pg_sys::Query,
        text: *const c_char,
        options: c_int,
        parameters: pg_sys::ParamListInfo,
        #[cfg(since = "19")] explain: *mut pg_sys::ExplainState,
    ) -> *mut pg_sys::PlannedStmt;
    pub fn standard_ExecutorStart(query: *mut pg_sys::QueryDesc, flags: i32);
    pub fn standard_ExecutorFinish(query: *mut pg_sys::QueryDesc);
    #[cfg(not(since = "18"))]
    pub fn standard_ExecutorRun(
        query: *mut pg_sys::QueryDesc,
        direction: pg_sys::ScanDirection::Type,
        count: u64,
        once: bool,
    );
    #[cfg(since = "18")]
    pub fn standard_ExecutorRun(query: *mut pg_sys::QueryDesc, direction: pg_sys::ScanDirection::Type, count: u64);
    pub fn standard_ProcessUtility(
        statement: *mut pg_sys::PlannedStmt,
        text: *const c_char,
        is_read_only: bool,
        context: pg_sys::ProcessUtilityContext::Type,
        parameters: pg_sys::ParamListInfo,
        environment: *mut pg_sys::QueryEnvironment,
        receiver: *mut pg_sys::DestReceiver,
        completion: *mut pg_sys::QueryCompletion,
    );
    /// Deletes a tuple. Called for each row, without a guard, which would cost a twentieth of the call.
    #[cfg(not(since = "19"))]
    #[link_name = "heap_delete"]
    fn delete_tuple(
        relation: pg_sys::Relation,
        tid: *const pg_sys::ItemPointerData,
        command: pg_sys::CommandId,
        crosscheck: pg_sys::Snapshot,
        wait: bool,
        failure: *mut pg_sys::TM_FailureData,
        is_moving: bool,
    ) -> pg_sys::TM_Result::Type;
    #[cfg(since = "19")]
    #[link_name = "heap_delete"]
    fn delete_tuple(
        relation: pg_sys::Relation,
        tid: *const pg_sys::ItemPointerData,
        command: pg_sys::CommandId,
        options: u32,
        crosscheck: pg_sys::Snapshot,
        wait: bool,
        failure: *mut pg_sys::TM_FailureData,
    ) -> pg_sys::TM_Result::Type;
    /// Calls a function for the children of a plan state.
    #[cfg_attr(since = "16", link_name = "planstate_tree_walker_impl")]
    pub fn planstate_tree_walker(
        state: *mut pg_sys::PlanState,
        walker: unsafe extern "C-unwind" fn(*mut pg_sys::PlanState, *mut c_void) -> bool,
        context: *mut c_void,
    ) -> bool;
    /// Parse analysis of CREATE INDEX. The caller has locked the table.
    pub fn transformIndexStmt(
        relid: Oid,
        statement: *mut pg_sys::IndexStmt,
        text: *const c_char,
    ) -> *mut pg_sys::IndexStmt;
    /// The size of a value in bytes, including its header.
    pub fn datumGetSize(value: Datum, by_value: bool, length: i32) -> usize;
    /// Whether two values are equal byte by byte, however they are stored.
    pub fn datum_image_eq(one: Datum, other: Datum, by_value: bool, length: i32) -> bool;
    /// Whether the relation has a parent in `pg_inherits`.
    pub fn has_superclass(relid: Oid) -> bool;
    /// The ancestors of a partition.
    pub fn get_partition_ancestors(relid: Oid) -> *mut pg_sys::List;
    /// The children of a relation, which must exist.
    pub fn find_inheritance_children(relid: Oid, lock: pg_sys::LOCKMODE) -> *mut pg_sys::List;
    /// The sizes of a BRIN index.
    pub fn brinGetStats(index: pg_sys::Relation, stats: *mut BrinStats);
    pub fn enable_timeout_after(id: i32, delay_ms: i32);
    pub fn disable_timeout(id: i32, keep_indicator: bool);
    /// The SIGTERM handler: it ends the process at the next interrupt check, even inside a statement.
    #[cfg(not(since = "19"))]
    fn die(signal: i32);
    #[cfg(since = "19")]
    fn die(signal: i32, info: *const pg_sys::pg_signal_info);
}

/// The sizes of a BRIN index, in blocks: of a range of the table, and of the index's own map of ranges.
#[repr(C)]
#[derive(Default)]
pub struct BrinStats {
    pub range: u32,
    pub map: u32,
}

unsafe extern "C" {
    pub fn kill(pid: i32, signal: i32) -> i32;
    #[cfg(target_os = "linux")]
    fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
}

/// The time since the machine was started, including the time it slept; `None` where that is not known.
pub fn time_since_boot() -> Option<std::time::Duration> {
    #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
    {
        const CLOCK_BOOTTIME: i32 = 7;
        let mut time = [0; 2];
        // SAFETY: on 64 bits, a timespec is two integers of that size.
        let is_known = unsafe { clock_gettime(CLOCK_BOOTTIME, &mut time) } == 0;
        is_known.then(|| std::time::Duration::new(time[0].unsigned_abs(), time[1] as u32))
    }
    #[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
    None
}

/// Defines a hook `planner`, which has one more argument since 19. `$before` and `$after` run around `$next`, or around
/// PostgreSQL's own planner.
macro_rules! planner_hook {
    ($next:expr, $before:expr, $after:expr) => {
        unsafe extern "C-unwind" fn planner(
            query: *mut pg_sys::Query,
            text: *const c_char,
            options: c_int,
            parameters: pg_sys::ParamListInfo,
            #[cfg(since = "19")] explain: *mut pg_sys::ExplainState,
        ) -> *mut pg_sys::PlannedStmt {
            // SAFETY: called by PostgreSQL, with a query that is ours to change. No value here has a destructor.
            unsafe {
                let begun = $before(query, text);
                #[cfg(not(since = "19"))]
                let plan = match $next {
                    Some(next) => next(query, text, options, parameters),
                    None => compat::standard_planner(query, text, options, parameters),
                };
                #[cfg(since = "19")]
                let plan = match $next {
                    Some(next) => next(query, text, options, parameters, explain),
                    None => compat::standard_planner(query, text, options, parameters, explain),
                };
                $after(begun, plan);
                plan
            }
        }
    };
}
pub(super) use planner_hook;

/// The hook that is called once the indexes of a relation are known to the planner.
#[cfg(since = "19")]
pub(super) use pg_sys::{build_simple_rel_hook as on_relation_info, build_simple_rel_hook_type as RelationInfoHook};
#[cfg(not(since = "19"))]
pub(super) use pg_sys::{get_relation_info_hook as on_relation_info, get_relation_info_hook_type as RelationInfoHook};

/// Defines this hook as `relation_info`; since 19 it is called for other entries of a query, too. `$after` gets the relation
/// and its OID, after `$next`.
macro_rules! relation_info_hook {
    ($next:expr, $after:expr) => {
        /// Called for every relation of a query once its indexes are known.
        #[cfg(not(since = "19"))]
        #[pg_guard]
        unsafe extern "C-unwind" fn relation_info(
            root: *mut pg_sys::PlannerInfo,
            relid: Oid,
            is_parent: bool,
            relation: *mut pg_sys::RelOptInfo,
        ) {
            // SAFETY: called by PostgreSQL while it plans a query that has the relation.
            unsafe {
                if let Some(next) = $next {
                    pg_sys::ffi::pg_guard_ffi_boundary(|| next(root, relid, is_parent, relation));
                }
                ($after)(relation, relid);
            }
        }

        /// Called for every relation of a query once its indexes are known.
        #[cfg(since = "19")]
        #[pg_guard]
        unsafe extern "C-unwind" fn relation_info(
            root: *mut pg_sys::PlannerInfo,
            relation: *mut pg_sys::RelOptInfo,
            entry: *mut pg_sys::RangeTblEntry,
        ) {
            // SAFETY: called by PostgreSQL while it plans a query that has the relation.
            unsafe {
                if let Some(next) = $next {
                    pg_sys::ffi::pg_guard_ffi_boundary(|| next(root, relation, entry));
                }
                if (*entry).rtekind == pg_sys::RTEKind::RTE_RELATION {
                    ($after)(relation, (*entry).relid);
                }
            }
        }
    };
}
pub(super) use relation_info_hook;

/// Defines a hook `run` for ExecutorRun, which has one more argument before 18. `$before` and `$after` run around it.
macro_rules! executor_run_hook {
    ($next:expr, $before:expr, $after:expr) => {
        #[cfg(not(since = "18"))]
        unsafe extern "C-unwind" fn run(
            query: *mut pg_sys::QueryDesc,
            direction: pg_sys::ScanDirection::Type,
            count: u64,
            once: bool,
        ) {
            // SAFETY: called by PostgreSQL with a started query. No value here has a destructor.
            unsafe {
                let begun = $before(query);
                $next(query, direction, count, once);
                $after(begun);
            }
        }

        #[cfg(since = "18")]
        unsafe extern "C-unwind" fn run(
            query: *mut pg_sys::QueryDesc,
            direction: pg_sys::ScanDirection::Type,
            count: u64,
        ) {
            // SAFETY: called by PostgreSQL with a started query. No value here has a destructor.
            unsafe {
                let begun = $before(query);
                $next(query, direction, count);
                $after(begun);
            }
        }
    };
}
pub(super) use executor_run_hook;

/// Makes SIGTERM end the process as it ends a backend.
pub fn handle_sigterm() {
    // SAFETY: `die` is a signal handler.
    unsafe {
        #[cfg(not(since = "18"))]
        pg_sys::pqsignal(pg_sys::SIGTERM as i32, Some(die));
        #[cfg(since = "18")]
        pg_sys::pqsignal_be(pg_sys::SIGTERM as i32, Some(die));
    }
}

/// The wait event shown in `pg_stat_activity`, with our own name where the version allows it.
pub fn wait_event() -> u32 {
    #[cfg(since = "17")]
    {
        static EVENT: once_cell::sync::OnceCell<u32> = once_cell::sync::OnceCell::new();
        // SAFETY: registers a name, once per process.
        *EVENT.get_or_init(|| unsafe { pg_sys::WaitEventExtensionNew(c"PgTtlIndexRest".as_ptr()) })
    }
    #[cfg(not(since = "17"))]
    pg_sys::PG_WAIT_EXTENSION
}

/// The local transaction ID of the current transaction.
pub fn local_transaction() -> u32 {
    // SAFETY: a process has a PGPROC entry from its start to its end.
    unsafe {
        #[cfg(not(since = "17"))]
        return (*pg_sys::MyProc).lxid;
        #[cfg(since = "17")]
        return (*pg_sys::MyProc).vxid.lxid;
    }
}

/// Whether a role may create objects in a schema.
///
/// # Safety
/// Within a transaction.
pub unsafe fn may_create_in(namespace: Oid, role: Oid) -> bool {
    let mode = pg_sys::ACL_CREATE as pg_sys::AclMode;
    // SAFETY: as promised by the caller.
    let acl = unsafe {
        #[cfg(not(since = "16"))]
        let acl = pg_sys::pg_namespace_aclcheck(namespace, role, mode);
        #[cfg(since = "16")]
        let acl = pg_sys::object_aclcheck(pg_sys::NamespaceRelationId, namespace, role, mode);
        acl
    };
    acl == pg_sys::AclResult::ACLCHECK_OK
}

/// Begins an index scan.
///
/// # Safety
/// Relation and index are open, and the snapshot outlives the scan.
pub unsafe fn index_beginscan(
    relation: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    // SAFETY: as promised by the caller.
    unsafe {
        #[cfg(not(since = "18"))]
        return pg_sys::index_beginscan(relation, index, snapshot, keys, 0);
        #[cfg(since = "18")]
        return pg_sys::index_beginscan(
            relation,
            index,
            snapshot,
            std::ptr::null_mut(),
            keys,
            0,
            #[cfg(since = "19")]
            0,
        );
    }
}

/// Begins an index scan that fills a bitmap.
///
/// # Safety
/// The index is open, and the snapshot outlives the scan.
pub unsafe fn index_beginscan_bitmap(
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    // SAFETY: as promised by the caller.
    unsafe {
        #[cfg(not(since = "18"))]
        return pg_sys::index_beginscan_bitmap(index, snapshot, keys);
        #[cfg(since = "18")]
        return pg_sys::index_beginscan_bitmap(index, snapshot, std::ptr::null_mut(), keys);
    }
}

/// Creates an empty bitmap that takes about this many kilobytes.
pub fn tbm_create(kilobytes: i32) -> *mut pg_sys::TIDBitmap {
    // SAFETY: allocates in the current memory context.
    unsafe { pg_sys::tbm_create((i64::from(kilobytes) * 1024) as _, std::ptr::null_mut()) }
}

/// Calls `take` with every block in a bitmap, in ascending order.
///
/// # Safety
/// The bitmap is complete.
pub unsafe fn for_each_block(bitmap: *mut pg_sys::TIDBitmap, mut take: impl FnMut(u32)) {
    // SAFETY: as promised by the caller; a result is valid until the next.
    unsafe {
        #[cfg(not(since = "18"))]
        {
            let blocks = pg_sys::tbm_begin_iterate(bitmap);
            while let Some(found) = pg_sys::tbm_iterate(blocks).as_ref() {
                take(found.blockno);
            }
            pg_sys::tbm_end_iterate(blocks);
        }
        #[cfg(since = "18")]
        {
            let (blocks, mut found) = (pg_sys::tbm_begin_private_iterate(bitmap), pg_sys::TBMIterateResult::default());
            while pg_sys::tbm_private_iterate(blocks, &mut found) {
                take(found.blockno);
            }
            pg_sys::tbm_end_private_iterate(blocks);
        }
    }
}

/// Creates an index, checking permissions and that the table is not in use.
///
/// # Safety
/// The statement was analyzed for the relation, which is locked.
pub unsafe fn define_index(relid: Oid, statement: *mut pg_sys::IndexStmt) {
    let (none, is_alter, check_rights, check_use, skip, quiet) = (pg_sys::InvalidOid, false, true, true, false, false);
    // SAFETY: as promised by the caller.
    unsafe {
        pg_sys::DefineIndex(
            #[cfg(since = "19")]
            std::ptr::null_mut(),
            relid,
            statement,
            none,
            none,
            none,
            #[cfg(since = "16")]
            -1,
            is_alter,
            check_rights,
            check_use,
            skip,
            quiet,
        );
    }
}

/// Runs a portal to completion.
///
/// # Safety
/// The portal was started.
pub unsafe fn portal_run(portal: pg_sys::Portal, receiver: *mut pg_sys::DestReceiver) {
    let is_top_level = true;
    // SAFETY: as promised by the caller.
    unsafe {
        pg_sys::PortalRun(
            portal,
            std::ffi::c_long::MAX,
            is_top_level,
            #[cfg(not(since = "18"))]
            true,
            receiver,
            receiver,
            std::ptr::null_mut(),
        );
    }
}

/// Resets the page counters of a bitmap heap scan, and since 18 those of its parallel workers.
pub fn forget_pages(scan: &mut pg_sys::BitmapHeapScanState) {
    // SAFETY: null, or what the workers have counted.
    #[cfg(since = "18")]
    if let Some(workers) = unsafe { scan.sinstrument.as_mut() } {
        workers.num_workers = 0;
    }
    #[cfg(not(since = "18"))]
    let pages = (&mut scan.exact_pages, &mut scan.lossy_pages);
    #[cfg(since = "18")]
    let pages = (&mut scan.stats.exact_pages, &mut scan.stats.lossy_pages);
    (*pages.0, *pages.1) = (0, 0);
}

/// Deletes a row from its heap. Does not wait for another transaction that holds it. An error jumps over the caller's frame.
///
/// # Safety
/// The relation is a heap, open and locked for changes, `command` is the current command, and the caller is called by
/// PostgreSQL and has nothing to clean up.
pub unsafe fn heap_delete(
    relation: pg_sys::Relation,
    tid: pg_sys::ItemPointerData,
    command: pg_sys::CommandId,
) -> pg_sys::TM_Result::Type {
    let (mut failure, wait, nothing) = (pg_sys::TM_FailureData::default(), false, std::ptr::null_mut());
    // SAFETY: as promised by the caller.
    unsafe {
        delete_tuple(
            relation,
            &raw const tid,
            command,
            #[cfg(since = "19")]
            0,
            nothing,
            wait,
            &mut failure,
            #[cfg(not(since = "19"))]
            false,
        )
    }
}

/// Deletes a tuple, and waits for a transaction that is changing it.
///
/// # Safety
/// The relation is a heap, open and locked for writing.
pub unsafe fn heap_delete_waiting(
    relation: pg_sys::Relation,
    mut tid: pg_sys::ItemPointerData,
    command: pg_sys::CommandId,
) -> pg_sys::TM_Result::Type {
    let (mut failure, wait, nothing) = (pg_sys::TM_FailureData::default(), true, std::ptr::null_mut());
    // SAFETY: as promised by the caller.
    unsafe {
        pg_sys::heap_delete(
            relation,
            &raw mut tid,
            command,
            #[cfg(since = "19")]
            0,
            nothing,
            wait,
            &mut failure,
            #[cfg(not(since = "19"))]
            false,
        )
    }
}

/// Forgets which buffers a node of a plan has used.
pub fn forget_buffers(instrument: &mut NodeInstrumentation) {
    #[cfg(since = "19")]
    let instrument = &mut instrument.instr;
    instrument.bufusage = pg_sys::BufferUsage::default();
    instrument.need_bufusage = false;
}

#[cfg(not(since = "19"))]
type NodeInstrumentation = pg_sys::Instrumentation;
#[cfg(since = "19")]
type NodeInstrumentation = pg_sys::NodeInstrumentation;

/// The number of a replication origin.
pub type OriginId = u16;

/// No replication origin.
pub const NO_ORIGIN: OriginId = 0;

/// Has this session use a replication origin.
///
/// # Safety
/// In a transaction, and no other origin is in use.
pub unsafe fn replorigin_session_setup(origin: OriginId) {
    // SAFETY: as promised by the caller.
    unsafe {
        #[cfg(not(since = "16"))]
        pg_sys::replorigin_session_setup(origin);
        #[cfg(since = "16")]
        pg_sys::replorigin_session_setup(origin, 0);
    }
}

/// The replication origin with which this process marks what it writes to the log.
pub fn session_origin() -> OriginId {
    // SAFETY: a variable of this process alone.
    unsafe {
        #[cfg(not(since = "19"))]
        return pg_sys::replorigin_session_origin;
        #[cfg(since = "19")]
        return pg_sys::replorigin_xact_state.origin;
    }
}

/// Marks what this process writes to the log from now on, and its commits with a time.
pub fn set_session_origin(origin: OriginId, time: pg_sys::TimestampTz) {
    // SAFETY: variables of this process alone.
    unsafe {
        #[cfg(not(since = "19"))]
        {
            pg_sys::replorigin_session_origin = origin;
            pg_sys::replorigin_session_origin_timestamp = time;
        }
        #[cfg(since = "19")]
        {
            pg_sys::replorigin_xact_state.origin = origin;
            pg_sys::replorigin_xact_state.origin_timestamp = time;
        }
    }
}
