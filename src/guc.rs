//! Every setting of the extension.

use crate::pg::planner;
use crate::pg::setting::{self, Quantity};
use crate::pg::transaction::{self, Limits};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};
use std::ffi::{CStr, CString};
use std::ops::RangeInclusive;
use std::time::Duration;

/// Whether workers sweep at all.
static ENABLED: GucSetting<bool> = GucSetting::<bool>::new(true);
/// Seconds between two passes of a worker.
static NAPTIME: GucSetting<i32> = GucSetting::<i32>::new(60);
/// Rows per batch for rules without a batch size of their own.
static BATCH_SIZE: GucSetting<i32> = GucSetting::<i32>::new(10_000);
/// Milliseconds that a batch should take, for rules without a batch size of their own; 0 means any time.
static TARGET_BATCH_TIME: GucSetting<i32> = GucSetting::<i32>::new(10);
/// Milliseconds that a sweep pauses between two batches.
static BATCH_DELAY: GucSetting<i32> = GucSetting::<i32>::new(0);
/// Workers that may sweep one database at the same time.
static MAX_WORKERS: GucSetting<i32> = GucSetting::<i32>::new(2);
/// Workers that may sweep one table at the same time; 0 means half as many as there are CPUs.
static MAX_WORKERS_PER_TABLE: GucSetting<i32> = GucSetting::<i32>::new(0);
/// Milliseconds a sweep waits for a lock on a table.
static LOCK_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(1_000);
/// Milliseconds that a worker's batch may take, including user code in it; 0 means no limit.
static BATCH_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(300_000);
/// Minutes that the history of a sweep is kept.
static HISTORY_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(7 * 24 * 60);

/// Rows per second that all sweeps of the server together may remove; 0 means no limit.
static MAX_ROWS_PER_SECOND: GucSetting<i32> = GucSetting::<i32>::new(0);
/// Kilobytes of WAL per second that all sweeps of the server together may write; 0 means no limit, -1 a limit for each sweep
/// of a worker by itself.
static MAX_WAL_PER_SECOND: GucSetting<i32> = GucSetting::<i32>::new(-1);
/// How far a standby or slot may lag before sweeps wait: bytes or a time, with a unit; empty means any lag.
static MAX_REPLICA_LAG: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// The share of its table that a rule may take at once, unless somebody has agreed to more; 0 means any.
static MAX_SHARE_PER_RUN: GucSetting<f64> = GucSetting::<f64>::new(0.0);
/// Seconds that the wall clock may jump ahead; 0 means any time.
static MAX_CLOCK_JUMP: GucSetting<i32> = GucSetting::<i32>::new(3_600);

/// The replication origin under which batches are committed; empty means none.
static REPLICATION_ORIGIN: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// Whether sweeping stays off after a point-in-time recovery until a user switches it on.
static HOLD_AFTER_RECOVERY: GucSetting<bool> = GucSetting::<bool>::new(true);

/// How sweeps go through the rows of a table; for developers.
static DEBUG_SCAN: GucSetting<DebugScan> = GucSetting::<DebugScan>::new(DebugScan::Auto);

/// How sweeps go through the rows of a table: as they choose, by the index as far as there is one, or by blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum DebugScan {
    Auto,
    Index,
    Blocks,
}

/// Whether expired rows are hidden from this session even if its role may see them.
static HIDE_EXPIRED: GucSetting<bool> = GucSetting::<bool>::new(true);

pub fn init() {
    transaction::install(Limits { lock_timeout, batch_timeout_ms });
    let planned = c"Hides expired rows of tables whose rules say so.";
    let shown = c"Only the owner of a table and superusers see its hidden rows when this is off.";
    planner::define_setting(c"pg_ttl_index.hide_expired", planned, shown, &HIDE_EXPIRED);
    define_switches();
    define_numbers();
    define_texts();
    crate::pg::access::reserve_setting_prefix(c"pg_ttl_index");
}

fn define_switches() {
    let switch = |name, about, setting| {
        GucRegistry::define_bool_guc(name, about, c"", setting, GucContext::Sighup, GucFlags::default());
    };
    switch(c"pg_ttl_index.enabled", c"Lets workers remove expired rows.", &ENABLED);
    let about = c"Switches sweeping off after a point-in-time recovery until ttl_start_worker() is called.";
    switch(c"pg_ttl_index.hold_after_recovery", about, &HOLD_AFTER_RECOVERY);
}

/// A numeric setting: its name, what it does, where its value is, its range, and its unit.
type Number = (&'static CStr, &'static CStr, &'static GucSetting<i32>, RangeInclusive<i32>, GucFlags);

#[rustfmt::skip]
const NUMBERS: [Number; 12] = [
    (c"pg_ttl_index.naptime", c"Sets how long a worker rests between two passes over its rules.",
        &NAPTIME, 1..=7 * 24 * 3600, GucFlags::UNIT_S),
    (c"pg_ttl_index.batch_size", c"Sets the usual number of rows in a batch for rules without a batch size of their own.",
        &BATCH_SIZE, 1..=i32::MAX, GucFlags::empty()),
    (c"pg_ttl_index.target_batch_time", c"Sets how long a batch should take for rules without a batch size of their own.",
        &TARGET_BATCH_TIME, 0..=60_000, GucFlags::UNIT_MS),
    (c"pg_ttl_index.batch_delay", c"Sets how long a sweep rests between two batches.",
        &BATCH_DELAY, 0..=3_600_000, GucFlags::UNIT_MS),
    (c"pg_ttl_index.max_workers", c"Sets how many workers may sweep one database at the same time.",
        &MAX_WORKERS, 1..=64, GucFlags::empty()),
    (c"pg_ttl_index.max_workers_per_table", c"Sets how many workers may sweep one table at the same time.",
        &MAX_WORKERS_PER_TABLE, 0..=64, GucFlags::empty()),
    (c"pg_ttl_index.lock_timeout", c"Sets how long a sweep waits for a lock on a table.",
        &LOCK_TIMEOUT, 1..=i32::MAX, GucFlags::UNIT_MS),
    (c"pg_ttl_index.batch_timeout", c"Sets how long a batch of a worker may take before its rule fails.",
        &BATCH_TIMEOUT, 0..=i32::MAX, GucFlags::UNIT_MS),
    (c"pg_ttl_index.history_retention", c"Sets how long the history of a sweep is kept.",
        &HISTORY_RETENTION, 0..=i32::MAX, GucFlags::UNIT_MIN),
    (c"pg_ttl_index.max_rows_per_second", c"Sets how many rows all sweeps of the server may remove in a second.",
        &MAX_ROWS_PER_SECOND, 0..=i32::MAX, GucFlags::empty()),
    (c"pg_ttl_index.max_wal_per_second", c"Sets how much write-ahead log all sweeps of the server may write in a second.",
        &MAX_WAL_PER_SECOND, -1..=i32::MAX, GucFlags::UNIT_KB),
    (c"pg_ttl_index.max_clock_jump", c"Sets how far the clock may jump ahead before sweeping stops.",
        &MAX_CLOCK_JUMP, 0..=i32::MAX, GucFlags::UNIT_S),
];

fn define_numbers() {
    for (name, about, setting, range, unit) in NUMBERS {
        GucRegistry::define_int_guc(name, about, c"", setting, *range.start(), *range.end(), GucContext::Sighup, unit);
    }
    GucRegistry::define_float_guc(
        c"pg_ttl_index.max_share_per_run",
        c"Sets what share of its table a rule may take at once before it is held.",
        c"",
        &MAX_SHARE_PER_RUN,
        0.0,
        1.0,
        GucContext::Sighup,
        GucFlags::default(),
    );
}

fn define_texts() {
    setting::define_quantity(
        c"pg_ttl_index.max_replica_lag",
        c"Sets how far a standby or replication slot may lag before sweeps wait.",
        c"An amount of write-ahead log or a time, with a unit; empty does not wait.",
        &MAX_REPLICA_LAG,
    );
    setting::define_origin(
        c"pg_ttl_index.replication_origin",
        c"Sets the replication origin under which batches are committed.",
        c"Streams of changes can leave them out; empty means no origin.",
        &REPLICATION_ORIGIN,
    );
    GucRegistry::define_enum_guc(
        c"pg_ttl_index.debug_scan",
        c"Makes sweeps go by the index or by blocks, whatever is faster.",
        c"",
        &DEBUG_SCAN,
        GucContext::Suset,
        GucFlags::default(),
    );
}

pub fn enabled() -> bool {
    ENABLED.get()
}

pub fn hold_after_recovery() -> bool {
    HOLD_AFTER_RECOVERY.get()
}

pub fn naptime() -> Duration {
    Duration::from_secs(NAPTIME.get().unsigned_abs().into())
}

pub fn batch_size() -> i32 {
    BATCH_SIZE.get()
}

/// How long a batch should take; zero means any time.
pub fn target_batch_time() -> Duration {
    Duration::from_millis(TARGET_BATCH_TIME.get().unsigned_abs().into())
}

pub fn batch_delay() -> Duration {
    Duration::from_millis(BATCH_DELAY.get().unsigned_abs().into())
}

/// How many workers may sweep one table: by default, half of the CPUs are left to others.
pub fn max_workers_per_table() -> usize {
    let half = || std::thread::available_parallelism().map_or(1, |cpus| (cpus.get() / 2).max(1));
    let most = MAX_WORKERS_PER_TABLE.get().unsigned_abs() as usize;
    if most == 0 { half() } else { most }.min(max_workers())
}

pub fn max_workers() -> usize {
    MAX_WORKERS.get().unsigned_abs() as usize
}

pub fn lock_timeout() -> Duration {
    Duration::from_millis(LOCK_TIMEOUT.get().unsigned_abs().into())
}

pub fn batch_timeout_ms() -> i32 {
    BATCH_TIMEOUT.get()
}

pub fn history_retention() -> Duration {
    Duration::from_secs(u64::from(HISTORY_RETENTION.get().unsigned_abs()) * 60)
}

pub fn max_rows_per_second() -> Option<i32> {
    Some(MAX_ROWS_PER_SECOND.get()).filter(|rate| *rate > 0)
}

/// Returns the limit of all sweeps together in bytes, if one is set.
pub fn max_wal_per_second() -> Option<i64> {
    Some(i64::from(MAX_WAL_PER_SECOND.get()) * 1024).filter(|rate| *rate > 0)
}

/// Whether each sweep of a worker keeps to a limit of its own, because none is set.
pub fn limits_workers_alone() -> bool {
    MAX_WAL_PER_SECOND.get() < 0
}

/// How far standbys may lag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaLag {
    Bytes(i64),
    Time(Duration),
}

pub fn max_replica_lag() -> Option<ReplicaLag> {
    let text = MAX_REPLICA_LAG.get()?;
    match setting::quantity(&text)? {
        Quantity::Kilobytes(amount) => Some(ReplicaLag::Bytes(i64::from(amount) * 1024)),
        Quantity::Milliseconds(time) => Some(ReplicaLag::Time(Duration::from_millis(time.unsigned_abs().into()))),
    }
}

pub fn max_share_per_run() -> Option<f64> {
    Some(MAX_SHARE_PER_RUN.get()).filter(|share| *share > 0.0)
}

pub fn max_clock_jump() -> Option<Duration> {
    Some(Duration::from_secs(MAX_CLOCK_JUMP.get().unsigned_abs().into())).filter(|most| !most.is_zero())
}

pub fn replication_origin() -> Option<CString> {
    REPLICATION_ORIGIN.get().filter(|name| !name.is_empty())
}

pub fn debug_scan() -> DebugScan {
    DEBUG_SCAN.get()
}

pub fn shows_expired() -> bool {
    !HIDE_EXPIRED.get()
}
