//! A helper: sweeps rules of one owner that may run that owner's code or that have a backlog.

use super::turn::{Job, Turn, Work, finish, report_broken, take_turn};
use super::{TURN, start};
use crate::guc;
use crate::pg::entry::worker_main;
use crate::pg::process;
use crate::pg::shmem::{self, Role, Share, Swept};
use crate::sweep::{Advance, Step, Sweep};
use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long an idle helper stays: another pass may come soon.
const LINGER: Duration = Duration::from_secs(5);
/// The age at which a helper exits: unknown state that user code left in the process ends with it.
const LIFE: Duration = Duration::from_secs(60);

/// Returns the usual maximum number of helpers: with the database worker at most `max_workers`, but at least one.
pub fn most() -> usize {
    guc::max_workers().saturating_sub(1).max(1)
}

/// Starts a helper for an owner's rules in this database.
pub fn start(owner: u32) -> Option<DynamicBackgroundWorker> {
    start::start("pg_ttl_index helper", "pg_ttl_index_helper_main", owner.into())
}

worker_main!(pg_ttl_index_helper_main, run);

fn run(argument: pg_sys::Datum) {
    let role = |owner: i64| Role::Helper { owner: owner as u32 };
    let Some(owner) = start::begin(argument, c"pg_ttl_index helper", role) else { return };
    let mut queue = VecDeque::new();
    help(owner as u32, &mut queue);
    queue.into_iter().for_each(Job::abandon);
    shmem::give_back_tasks();
}

/// Sweeps until nothing is left to do, or another owner or database needs the process.
fn help(owner: u32, queue: &mut VecDeque<Job>) {
    let started = Instant::now();
    let mut busy_at = started;
    let database: Oid = process::current_database();
    let is_turn_over = || started.elapsed() >= TURN && shmem::somebody_waits();
    loop {
        process::reload_configuration();
        // Without a database worker, nothing would notice user code that never ends.
        if !guc::enabled() || !shmem::has_worker(database) {
            return;
        }
        if let Some(rule_id) = shmem::take_task() {
            match load(rule_id, owner) {
                Some(job) => queue.push_back(job),
                None => shmem::end_task(rule_id, Swept::default()),
            }
        }
        if queue.is_empty()
            && let Some(share) = shmem::take_share()
        {
            shmem::end_share(share, sweep_share(share, owner).is_some());
            busy_at = Instant::now();
            continue;
        }
        let Some(job) = next(queue) else {
            let is_over = busy_at.elapsed() >= LINGER || started.elapsed() >= LIFE || shmem::somebody_waits();
            if queue.is_empty() && is_over || shmem::is_in_the_way(most()) || is_turn_over() {
                return;
            }
            process::report_activity(None);
            let waits = queue.iter().map(|job| job.not_before.saturating_duration_since(Instant::now()));
            process::idle(waits.fold(Duration::from_secs(1), Duration::min));
            continue;
        };
        serve(job, queue);
        busy_at = Instant::now();
        if shmem::is_in_the_way(most()) || is_turn_over() {
            return;
        }
    }
}

/// Returns the next job that is ready.
fn next(queue: &mut VecDeque<Job>) -> Option<Job> {
    let place = queue.iter().position(|job| job.not_before <= Instant::now())?;
    queue.remove(place)
}

/// Loads the current version of a rule that this helper was given. Returns `None` if the rule must not be swept.
fn load(rule_id: i64, owner: u32) -> Option<Job> {
    let (catalog, mut rules) = start::load_rules(Some(rule_id)).ok()?;
    let (rule, opening) = rules.pop()?;
    match rule {
        Ok(rule) if rule.owner.to_u32() != owner || opening.is_some_and(|opening| !opening.is_open) => None,
        Ok(rule) => Some(Job::new(catalog, rule, opening.map(|opening| opening.until))),
        Err(broken) => {
            report_broken(&catalog, (rule_id, broken.version), &broken.failure, broken.is_known);
            None
        }
    }
}

/// Sweeps a share to its end, unless its leader goes, or rules or other databases need the process. Returns `None` if
/// something is left of it.
fn sweep_share(share: Share, owner: u32) -> Option<()> {
    let Job { work: Work::Due(catalog, rule), closes_at, .. } = load(share.rule_id, owner)? else { return None };
    process::report_activity(Some(&format!("sweeping blocks {} to {} of {rule}", share.from, share.to)));
    let mut sweep = Sweep::begin_share(&catalog, *rule, &share).ok()??;
    let end = loop {
        process::reload_configuration();
        let is_led = shmem::report_gain(share, sweep.gain());
        let is_wanted = || shmem::has_task() || shmem::is_in_the_way(most()) || shmem::somebody_waits();
        if !guc::enabled() || !is_led || !shmem::has_worker(process::current_database()) || is_wanted() {
            break Ok(Step::Outdated);
        }
        match sweep.advance(i64::MAX, closes_at) {
            Ok(Advance::Went) if guc::batch_delay().is_zero() => {}
            Ok(Advance::Went) => process::idle(guc::batch_delay()),
            Ok(Advance::Wait(wait)) => process::idle(wait),
            Ok(Advance::Ended(end)) => break Ok(end),
            Err(failure) => break Err(failure),
        }
    };
    shmem::report_gain(share, sweep.gain());
    let is_complete = end == Ok(Step::Finished) && sweep.tally.blocked == 0;
    finish(sweep, &end);
    is_complete.then_some(())
}

/// Gives a job its turn, and queues it again behind the others if it has not ended.
fn serve(job: Job, queue: &mut VecDeque<Job>) {
    let (rule_id, closes_at) = (job.rule().id, job.closes_at);
    shmem::begin_turn(rule_id, job.rule().version);
    let turn = take_turn(job, false);
    shmem::end_turn();
    match turn {
        Turn::Ended(swept) => shmem::end_task(rule_id, swept),
        Turn::NeedsHelper => shmem::end_task(rule_id, Swept::default()),
        Turn::More(sweep, wait) => {
            let not_before = Instant::now() + wait;
            queue.push_back(Job { work: Work::Begun(sweep), closes_at, not_before, begun: None });
        }
    }
}
