//! How fast a sweep may go: rows per second, WAL per second, and no faster than standbys can follow.

use crate::catalog::{Catalog, Rule};
use crate::error::TtlError;
use crate::guc::{self, ReplicaLag};
use crate::pg::shmem::{self, Hold};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{clock, process, spi};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How soon a lagging standby is checked again.
const LOOK_AT_STANDBYS: Duration = Duration::from_millis(200);

/// The most that one batch can cost its own sweep, in microseconds.
const LONGEST_DEBT: i64 = 10_000_000;

/// The most that it can cost all others: whoever has triggers that write a lot must not stop the whole server.
const LONGEST_SHARED_DEBT: i64 = 1_000_000;

/// How many bytes of WAL each sweep of a worker may write in a second if no limit is set: others still write and commit
/// beside it as usual.
const WORKER_WAL_RATE: i64 = 16 << 20;

/// The pace of one sweep.
#[derive(Default)]
pub struct Throttle {
    /// When the work done so far is paid for, at the rule's own rate.
    paid: Option<Instant>,
    /// When the WAL written so far is paid for by this sweep.
    paid_wal: Option<Instant>,
    /// The cost paid in advance for the next batch, in microseconds at the server's rate.
    advance: Cell<i64>,
}

impl Throttle {
    /// Returns how many rows one batch may remove, so that a rate is kept within every second or so.
    pub fn batch_limit(rule: &Rule) -> usize {
        let rates = [rule.options.max_rows_per_second, guc::max_rows_per_second()];
        rates.into_iter().flatten().map(|rate| rate.unsigned_abs() as usize).min().unwrap_or(usize::MAX)
    }

    /// Returns what the next batch has to wait for, and how long until it is worth asking again.
    pub fn hold(&self, rule: &Rule, catalog: &Catalog, scope: Scope) -> Result<Option<(Hold, Duration)>, Failure> {
        let (now, all) = (clock::steady(), shmem::paid());
        let left = |until: i64| Duration::from_micros(u64::try_from(until - now).unwrap_or(0));
        let own =
            |paid: Option<Instant>| paid.map_or(Duration::ZERO, |paid| paid.saturating_duration_since(Instant::now()));
        let rates = [
            (Hold::RuleRate, own(self.paid)),
            (Hold::Rate, guc::max_rows_per_second().map_or(Duration::ZERO, |_| left(all.rows))),
            (Hold::WalRate, wal_rate(scope).map_or(Duration::ZERO, |_| own(self.paid_wal))),
            (Hold::WalRate, guc::max_wal_per_second().map_or(Duration::ZERO, |_| left(all.wal))),
        ];
        if let Some(hold) = rates.into_iter().filter(|(_, left)| !left.is_zero()).max_by_key(|(_, left)| *left) {
            return Ok(Some(hold));
        }
        if let Some(most) = guc::max_replica_lag()
            && STANDBYS.with_borrow_mut(|standbys| scope.attempt(|| standbys.lag_beyond(most, catalog)))?
        {
            return Ok(Some((Hold::ReplicaLag, LOOK_AT_STANDBYS)));
        }
        // Two sweeps that ask at the same moment must not both continue: one pays before the other asks.
        if let Some(rate) = guc::max_rows_per_second() {
            let rows = i64::try_from(Self::batch_limit(rule)).unwrap_or(i64::MAX);
            let cost = micros(rows, rate.into());
            if !shmem::pay_in_advance(now, cost) {
                return Ok(Some((Hold::Rate, Duration::from_millis(10))));
            }
            self.advance.set(cost);
        }
        Ok(None)
    }

    /// Returns how long a batch should take, given the WAL it wrote. A burst of WAL delays other sessions' commits.
    pub fn time_of_wal(scope: Scope, bytes: i64) -> Duration {
        let rate = wal_rate(scope).filter(|_| guc::limits_workers_alone());
        rate.map_or(Duration::ZERO, |rate| duration(bytes, rate))
    }

    /// Records what a batch did. Other sweeps wait for it only a limited time, however much it was.
    pub fn spend(&mut self, rule: &Rule, scope: Scope, rows: i64, wal_bytes: i64) {
        let later =
            |paid: Option<Instant>, cost| Some(paid.map_or_else(Instant::now, |paid| paid.max(Instant::now())) + cost);
        if let Some(rate) = rule.options.max_rows_per_second {
            self.paid = later(self.paid, duration(rows, rate.into()));
        }
        if let Some(rate) = wal_rate(scope) {
            self.paid_wal = later(self.paid_wal, duration(wal_bytes, rate));
        }
        let rows = guc::max_rows_per_second().map_or(0, |rate| micros(rows, rate.into())) - self.advance.take();
        let wal = guc::max_wal_per_second().map_or(0, |rate| micros(wal_bytes, rate).min(LONGEST_SHARED_DEBT));
        if rows != 0 || wal != 0 {
            shmem::pay(clock::steady(), rows, wal);
        }
    }
}

/// Returns how many bytes of WAL one sweep may write in a second. Nobody has to wait for a manual sweep that was not told to
/// be slow.
fn wal_rate(scope: Scope) -> Option<i64> {
    let is_worker = scope == Scope::Transaction;
    guc::max_wal_per_second().or_else(|| (is_worker && guc::limits_workers_alone()).then_some(WORKER_WAL_RATE))
}

/// Returns the time that an amount takes at a rate per second.
fn duration(amount: i64, rate: i64) -> Duration {
    Duration::from_micros(micros(amount, rate).unsigned_abs())
}

/// Returns the cost of an amount, in microseconds, at a rate per second.
fn micros(amount: i64, rate: i64) -> i64 {
    (amount.saturating_mul(1_000_000) / rate.max(1)).min(LONGEST_DEBT)
}

thread_local! {
    static STANDBYS: RefCell<Standbys> = RefCell::new(Standbys::default());
}

/// What this process knows about standbys and slots.
#[derive(Default)]
struct Standbys {
    looked_at: Option<Instant>,
    lagged: bool,
    /// Past ends of WAL with their times, from the first that the slowest standby has not reached. The server's views
    /// show no time for slots, nor for a standby that has stopped.
    ends: VecDeque<(Instant, i64)>,
}

impl Standbys {
    fn lag_beyond(&mut self, most: ReplicaLag, catalog: &Catalog) -> Result<bool, TtlError> {
        let now = Instant::now();
        if self.looked_at.is_none_or(|at| now - at >= LOOK_AT_STANDBYS) {
            let behind = replication(catalog)?;
            self.looked_at = Some(now);
            self.lagged = behind.is_some_and(|(reached, end)| match most {
                ReplicaLag::Bytes(most) => end - reached > most,
                ReplicaLag::Time(most) => {
                    self.watch(now, end, most);
                    self.late_by(now, reached) > most
                }
            });
        }
        Ok(self.lagged)
    }

    /// Records where WAL ends now. Positions older than the allowed lag are not needed.
    fn watch(&mut self, now: Instant, end: i64, most: Duration) {
        if self.ends.back().is_none_or(|(_, last)| *last < end) {
            self.ends.push_back((now, end));
        }
        while self.ends.get(1).is_some_and(|(at, _)| now - *at > most) {
            self.ends.pop_front();
        }
    }

    /// Returns how long ago WAL ended where the slowest standby is now. Never more than the real lag.
    fn late_by(&mut self, now: Instant, reached: i64) -> Duration {
        while self.ends.front().is_some_and(|(_, end)| *end <= reached) {
            self.ends.pop_front();
        }
        self.ends.front().map_or(Duration::ZERO, |(at, _)| now - *at)
    }
}

/// Records the end of WAL if the lag limit needs it, so that a sweep can tell how late standbys are when it begins.
/// Call it regularly.
pub fn watch_log() {
    if let Some(ReplicaLag::Time(most)) = guc::max_replica_lag() {
        STANDBYS.with_borrow_mut(|standbys| standbys.watch(Instant::now(), process::wal_end(), most));
    }
}

/// Returns how far the slowest standby or slot has got, and where WAL ends, in bytes; `None` if there is none. Runs as
/// the catalog's owner, because not every role may read these views.
fn replication(catalog: &Catalog) -> Result<Option<(i64, i64)>, TtlError> {
    let found = catalog.with_rights(|| {
        spi::read(
            "SELECT pg_wal_lsn_diff(min(at), '0/0')::bigint, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint
             FROM (SELECT coalesce(replay_lsn, flush_lsn, write_lsn, sent_lsn)
                   FROM pg_stat_replication WHERE state IN ('catchup', 'streaming')
                   UNION ALL
                   SELECT coalesce(confirmed_flush_lsn, restart_lsn) FROM pg_replication_slots
                   WHERE NOT active AND wal_status <> 'lost') AS standby (at)",
            &[],
            |row| Ok(row.get(1)?.zip(row.get(2)?)),
        )
    })?;
    Ok(found.into_iter().flatten().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_is_late_since_the_log_went_beyond_where_it_is() {
        let mut standbys = Standbys::default();
        let start = Instant::now();
        let mut late = |second: u64, reached, end| {
            let now = start + Duration::from_secs(second);
            standbys.watch(now, end, Duration::from_secs(60));
            standbys.late_by(now, reached).as_secs()
        };
        assert_eq!(late(0, 100, 100), 0, "it has everything");
        assert_eq!(late(10, 100, 200), 0, "nobody can tell since when");
        assert_eq!(late(15, 100, 300), 5);
        assert_eq!(late(20, 200, 300), 5, "it lacks what came after second 10");
        assert_eq!(late(90, 200, 300), 75, "also when nothing is written any more");
        assert_eq!(late(91, 300, 300), 0);
        for second in 100..1000 {
            late(second, 300, 300 + second as i64);
        }
        assert!(late(1000, 300, 2000) > 60);
        assert!(standbys.ends.len() < 70, "no more is known than is needed");
    }
}
