//! The running sweeps and index builds, as shown to users.

use super::{SHMEM, Shared, is_preloaded, myself};
use crate::pg::process;
use pgrx::pg_sys::Oid;

/// What a sweep waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    RuleRate,
    Rate,
    WalRate,
    ReplicaLag,
}

impl Hold {
    /// The option or setting that makes it wait.
    pub fn name(self) -> &'static str {
        match self {
            Self::RuleRate => "max_rows_per_second",
            Self::Rate => "pg_ttl_index.max_rows_per_second",
            Self::WalRate => "pg_ttl_index.max_wal_per_second",
            Self::ReplicaLag => "pg_ttl_index.max_replica_lag",
        }
    }
}

/// How a sweep goes through the rows of a relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// In expiry order, by a btree index.
    Index,
    /// Through the block ranges that a BRIN index does not rule out.
    Ranges,
    /// Through the whole heap.
    Blocks,
}

impl Path {
    pub fn name(self) -> &'static str {
        match self {
            Self::Index => "rows by index",
            Self::Ranges => "rows by block ranges",
            Self::Blocks => "rows by blocks",
        }
    }
}

/// A running sweep or index build.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    pub pid: i32,
    pub database: u32,
    pub rule_id: i64,
    /// The current leaf.
    pub relid: u32,
    pub rows: i64,
    pub batches: i64,
    /// The planner's estimate of expired rows at the start; 0 if there is none.
    pub estimate: i64,
    pub started_at: i64,
    pub hold: Option<Hold>,
    /// How it goes through the current leaf, once that is known.
    pub path: Option<Path>,
    /// Whether this is an index build and not a sweep.
    pub is_building: bool,
    /// Whether this is a share of a sweep that another process leads.
    pub is_share: bool,
    /// How many processes take part in the sweep.
    pub workers: i32,
}

/// Publishes the progress of a sweep of this process, if there is room.
pub fn report(progress: Progress) {
    if is_preloaded() {
        show(&mut SHMEM.exclusive(), progress);
    }
}

/// Claims the index build of a rule until this process exits; `false` if it is taken or there is no room to show it.
pub fn claim_building(progress: Progress) -> bool {
    if !is_preloaded() {
        return true;
    }
    let (_, database) = myself();
    let mut shared = SHMEM.exclusive();
    let is_same = |sweep: &Progress| {
        sweep.pid != 0 && sweep.is_building && sweep.database == database && sweep.rule_id == progress.rule_id
    };
    !shared.sweeps.iter().any(is_same) && show(&mut shared, progress)
}

fn show(shared: &mut Shared, progress: Progress) -> bool {
    let (pid, database) = myself();
    let is_it = |sweep: &Progress| sweep.pid == pid && sweep.rule_id == progress.rule_id;
    let place = shared.sweeps.iter().position(is_it).or_else(|| shared.sweeps.iter().position(|sweep| sweep.pid == 0));
    if let Some(place) = place {
        shared.sweeps[place] = Progress { pid, database, ..progress };
    }
    place.is_some()
}

/// Terminates the processes that build indexes on a table of this database.
pub fn end_builders_on(relid: Oid) {
    if !is_preloaded() {
        return;
    }
    let (_, database) = myself();
    let is_one = |sweep: &&Progress| {
        sweep.pid != 0 && sweep.is_building && sweep.database == database && sweep.relid == relid.to_u32()
    };
    // A process removes its entry before it exits, and needs the lock for that. While we hold the lock, the process
    // still exists and is still building.
    let shared = SHMEM.share();
    shared.sweeps.iter().filter(is_one).for_each(|sweep| process::terminate(sweep.pid));
}

/// Removes the entry of a sweep of this process.
pub fn report_end(rule_id: i64) {
    if !is_preloaded() {
        return;
    }
    let (pid, _) = myself();
    for sweep in SHMEM.exclusive().sweeps.iter_mut().filter(|sweep| sweep.pid == pid && sweep.rule_id == rule_id) {
        *sweep = Progress::default();
    }
}

/// The running sweeps and index builds. Shares are added to the sweep that they belong to.
pub fn sweeps() -> Vec<Progress> {
    if !is_preloaded() {
        return Vec::new();
    }
    with_shares(SHMEM.share().sweeps.iter().filter(|sweep| sweep.pid != 0).copied())
}

fn with_shares(all: impl Iterator<Item = Progress>) -> Vec<Progress> {
    let (shares, mut sweeps): (Vec<_>, Vec<_>) =
        all.map(|sweep| Progress { workers: 1, ..sweep }).partition(|sweep| sweep.is_share);
    for share in shares {
        let is_leader = |sweep: &&mut Progress| {
            (sweep.database, sweep.rule_id, sweep.is_building) == (share.database, share.rule_id, false)
        };
        match sweeps.iter_mut().find(is_leader) {
            Some(leader) => {
                leader.rows += share.rows;
                leader.batches += share.batches;
                leader.workers += 1;
            }
            // Its leader has gone.
            None => sweeps.push(share),
        }
    }
    sweeps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_for_the_sweep_they_belong_to() {
        let sweep = |pid, rule_id, is_share| Progress { pid, rule_id, rows: 10, is_share, ..Progress::default() };
        let all = [sweep(1, 7, true), sweep(2, 7, false), sweep(3, 8, false), sweep(4, 9, true)];
        let shown = with_shares(all.into_iter());
        let shown: Vec<_> = shown.iter().map(|sweep| (sweep.pid, sweep.rows, sweep.workers)).collect();
        assert_eq!(shown, [(2, 20, 2), (3, 10, 1), (4, 10, 1)]);
    }
}
