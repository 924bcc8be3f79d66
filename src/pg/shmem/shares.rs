//! Parts of a large heap that other processes sweep for the process that sweeps a rule, its leader.

use super::{Role, SHMEM, Shared, Slot, is_preloaded, myself, own_owner, set_latch, worker_of};

pub(super) const SHARES: usize = 64;

/// A range of blocks, `to` excluded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    pub rule_id: i64,
    pub version: i64,
    pub relid: u32,
    pub from: u32,
    pub to: u32,
}

/// What the sweep of a share has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gain {
    pub rows: i64,
    pub batches: i64,
    pub locked: i64,
    pub wal_bytes: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Free,
    Waiting,
    Taken,
    /// The leader has to sweep an incomplete share itself.
    Ended {
        is_complete: bool,
    },
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offer {
    share: Share,
    database: u32,
    owner: u32,
    /// 0 if it has gone.
    leader: i32,
    taker: i32,
    /// What the taker has done so far.
    gain: Gain,
    state: State,
}

impl Offer {
    fn is_of(&self, (pid, database): (i32, u32), rule_id: i64) -> bool {
        (self.leader, self.database, self.share.rule_id) == (pid, database, rule_id) && self.state != State::Free
    }
}

/// The most processes that may be at work in this database, and those that may sweep one rule.
pub struct Most {
    pub here: usize,
    pub of_rule: usize,
}

/// Offers a share to the helpers of an owner. Returns `false` if there is no room, if an earlier offer of this process
/// waits, or if there are already as many processes at work as there may be.
pub fn offer_share(owner: u32, share: Share, most: Most) -> bool {
    if !is_preloaded() {
        return false;
    }
    let (pid, database) = myself();
    let mut shared = SHMEM.exclusive();
    let is_at_work = |slot: &&Slot| {
        slot.pid != 0 && slot.database == database && matches!(slot.role, Role::Database | Role::Helper { .. })
    };
    let own = || shared.shares.iter().filter(|offer| offer.is_of((pid, database), share.rule_id));
    let is_enough = 1 + own().filter(|offer| offer.state == State::Taken).count() >= most.of_rule;
    let waits = own().any(|offer| offer.state == State::Waiting);
    if waits || is_enough || shared.slots.iter().filter(is_at_work).count() >= most.here {
        return false;
    }
    let Some(free) = shared.shares.iter_mut().find(|offer| offer.state == State::Free) else { return false };
    *free = Offer { share, database, owner, leader: pid, state: State::Waiting, ..Offer::default() };
    let is_helper = |slot: &&Slot| slot.pid != 0 && slot.database == database && slot.role == Role::Helper { owner };
    let mut wanted: Vec<i32> = shared.slots.iter().filter(is_helper).map(|slot| slot.pid).collect();
    wanted.push(worker_of(&shared, database));
    drop(shared);
    wanted.into_iter().for_each(set_latch);
    true
}

/// Returns the owners whose shares wait for a helper in this database.
pub fn owners_of_shares() -> Vec<u32> {
    let (_, database) = myself();
    let waits = |offer: &&Offer| offer.database == database && offer.state == State::Waiting;
    SHMEM.share().shares.iter().filter(waits).map(|offer| offer.owner).collect()
}

/// Takes a share that waits for a helper of this one's owner.
pub fn take_share() -> Option<Share> {
    let (pid, database) = myself();
    let mut shared = SHMEM.exclusive();
    let owner = own_owner(&shared)?;
    let is_for_us =
        |offer: &&mut Offer| offer.database == database && offer.owner == owner && offer.state == State::Waiting;
    let offer = shared.shares.iter_mut().find(is_for_us)?;
    (offer.taker, offer.state) = (pid, State::Taken);
    Some(offer.share)
}

/// Publishes what has been done of a share that this process has taken. Returns whether its leader is still there.
pub fn report_gain(share: Share, gain: Gain) -> bool {
    let (pid, _) = myself();
    let mut shared = SHMEM.exclusive();
    let offer = shared.shares.iter_mut().find(|offer| offer.taker == pid && offer.share == share);
    offer.is_some_and(|offer| {
        offer.gain = gain;
        offer.leader != 0
    })
}

/// Tells the leader that the sweep of a share has ended.
pub fn end_share(share: Share, is_complete: bool) {
    let (pid, _) = myself();
    let mut leader = 0;
    let mut shared = SHMEM.exclusive();
    for offer in shared.shares.iter_mut().filter(|offer| offer.taker == pid && offer.share == share) {
        leader = offer.leader;
        end(offer, is_complete);
    }
    drop(shared);
    set_latch(leader);
}

fn end(offer: &mut Offer, is_complete: bool) {
    if offer.leader == 0 {
        *offer = Offer::default();
    } else {
        (offer.taker, offer.state) = (0, State::Ended { is_complete });
    }
}

/// The shares that this process has given away in a sweep.
#[derive(Default)]
pub struct Given {
    pub gains: Vec<Gain>,
    /// Shares that nobody has taken, or that were not finished: they are this process's own again.
    pub returned: Vec<Share>,
    pub are_outstanding: bool,
}

/// Collects what has become of the shares of a rule that this process leads.
pub fn collect_shares(rule_id: i64) -> Given {
    let (myself, mut given) = (myself(), Given::default());
    for offer in SHMEM.exclusive().shares.iter_mut().filter(|offer| offer.is_of(myself, rule_id)) {
        match offer.state {
            State::Taken => {
                given.are_outstanding = true;
                continue;
            }
            State::Ended { is_complete: true } => {}
            _ => given.returned.push(offer.share),
        }
        given.gains.push(offer.gain);
        *offer = Offer::default();
    }
    given
}

/// Gives up the shares of a rule that this process leads: whoever has one stops. Returns what they have done so far.
pub fn leave_shares(rule_id: i64) -> Vec<Gain> {
    let (myself, mut gains) = (myself(), Vec::new());
    for offer in SHMEM.exclusive().shares.iter_mut().filter(|offer| offer.is_of(myself, rule_id)) {
        gains.push(offer.gain);
        lose_leader(offer);
    }
    gains
}

fn lose_leader(offer: &mut Offer) {
    if offer.state == State::Taken {
        offer.leader = 0;
    } else {
        *offer = Offer::default();
    }
}

/// Cleans up after a process that has exited.
pub(super) fn orphan_shares(shared: &mut Shared, slot: &Slot) {
    for offer in shared.shares.iter_mut().filter(|offer| offer.state != State::Free) {
        if offer.taker == slot.pid {
            end(offer, false);
        }
        if offer.leader == slot.pid {
            lose_leader(offer);
        }
    }
}
