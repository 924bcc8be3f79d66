//! One large heap, swept by several processes.
//!
//! The process that sweeps a rule leads: when its sweep has lasted for a while, it gives away half of the blocks that
//! are left. Whoever takes them sweeps just these, batch by batch, and counts each batch in the rule's row, but the
//! leader alone records the sweep. What others could not finish, for whatever reason, the leader does itself.

use super::find::cutoff;
use super::find::leaf::{self, Leaf};
use super::{Sweep, Tally};
use crate::catalog::{Catalog, Initiator, Rule};
use crate::guc;
use crate::pg::shmem::{self, Gain, Given, Most, Share};
use crate::pg::transaction::{Failure, Scope};
use crate::sandbox::in_sandbox;
use pgrx::pg_sys::Oid;

/// The fewest blocks that are worth another process.
const LEAST_BLOCKS: u32 = 1_024;

impl Sweep {
    /// Begins the sweep of a share. Returns `None` if the rule has changed since the share was given away.
    pub fn begin_share(catalog: &Catalog, rule: Rule, share: &Share) -> Result<Option<Self>, Failure> {
        if rule.version != share.version {
            return Ok(None);
        }
        let begun = Self::begin(catalog, rule, Initiator::Worker, Scope::Transaction, false)?;
        Ok(begun.map(|sweep| {
            let relid = Oid::from(share.relid);
            let leaf = sweep.leaves.sweepable.into_iter().find(|leaf| leaf.relid == relid);
            let leaves = leaf::Leaves { sweepable: leaf.into_iter().collect(), ..leaf::Leaves::default() };
            Self { leaves, range: Some(share.from..share.to), is_share: true, ..sweep }
        }))
    }

    /// Returns what the sweep of a share has done.
    pub fn gain(&self) -> Gain {
        let Tally { rows, batches, locked, wal_bytes, .. } = self.tally;
        Gain { rows, batches, locked, wal_bytes }
    }

    /// Whether other processes have shares of this sweep.
    pub fn is_shared(&self) -> bool {
        self.gave_away
    }

    pub(super) fn add_gains(&mut self, gains: Vec<Gain>) {
        for gain in gains {
            self.tally.rows += gain.rows;
            self.tally.batches += gain.batches;
            self.tally.locked += gain.locked;
            self.tally.wal_bytes += gain.wal_bytes;
        }
    }

    /// Whether other processes may sweep parts of this leaf. Limits of the rule count for all that is swept, and what
    /// runs user code is left to one process.
    pub(super) fn can_share(&self, leaf: &Leaf) -> bool {
        let options = &self.rule.options;
        self.initiator == Initiator::Worker
            && !self.is_share
            && self.left.is_none()
            && options.max_rows_per_second.is_none()
            && options.max_rows_per_run.is_none()
            && guc::max_workers_per_table() > 1
            && shmem::is_preloaded()
            && !leaf.removal_runs_user_code(&self.rule)
    }

    /// Gives away half of the blocks that are left, if they are many and a process for them is allowed. Whoever gets a share
    /// does not ask whether the sweep may take so much.
    pub fn share(&mut self) {
        if self.may_be_held() {
            return;
        }
        let Some(work) = self.work.as_ref().filter(|work| !work.is_careful && self.can_share(&work.leaf)) else {
            return;
        };
        let Some(range) = work.scan.half(LEAST_BLOCKS) else { return };
        let (rule, relid) = (&self.rule, work.leaf.relid);
        let share =
            Share { rule_id: rule.id, version: rule.version, relid: relid.to_u32(), from: range.start, to: range.end };
        let most = Most { here: guc::max_workers(), of_rule: guc::max_workers_per_table() };
        if shmem::offer_share(rule.owner.to_u32(), share, most) {
            self.gave_away = true;
            if let Some(work) = &mut self.work {
                work.scan.end_at(share.from);
            }
        }
    }

    /// Collects what others have done, once this process has done its own part. Returns whether to go on waiting.
    pub(super) fn awaits_shares(&mut self) -> Result<bool, Failure> {
        if !self.gave_away {
            return Ok(false);
        }
        let Given { gains, returned, are_outstanding } = shmem::collect_shares(self.rule.id);
        self.add_gains(gains);
        self.returned.extend(returned);
        self.gave_away = are_outstanding;
        Ok(are_outstanding && self.returned.is_empty())
    }

    /// Returns a leaf whose blocks in `range` have come back.
    pub(super) fn next_returned(&mut self) -> Result<Option<Leaf>, Failure> {
        let Some(share) = self.returned.pop() else { return Ok(None) };
        let (rule, relid) = (&self.rule, Oid::from(share.relid));
        let leaves = self.scope.attempt(|| in_sandbox(rule, || leaf::find(rule, &cutoff::of(rule)?.literal, false)))?;
        match leaves.sweepable.into_iter().find(|leaf| leaf.relid == relid) {
            Some(leaf) => {
                self.range = Some(share.from..share.to);
                Ok(Some(leaf))
            }
            // The leaf has gone.
            None => self.next_returned(),
        }
    }
}
