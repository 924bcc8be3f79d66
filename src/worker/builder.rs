//! Builder workers. Each builds the index of one rule, and may wait a long time for other transactions.

use super::start::has_ended;
use super::{TURN, start};
use crate::catalog::Rule;
use crate::guc;
use crate::index::build;
use crate::pg::entry::worker_main;
use crate::pg::process;
use crate::pg::shmem::{self, Role};
use crate::pg::transaction::Scope;
use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;
use std::collections::HashMap;
use std::time::Instant;

/// The builders running in this database, by rule ID.
#[derive(Default)]
pub struct Builders(HashMap<i64, Builder>);

struct Builder {
    owner: Oid,
    relid: Oid,
    process: DynamicBackgroundWorker,
    started: Instant,
    /// Whether the build runs user code for each row, which may take arbitrarily long.
    runs_user_code: bool,
}

impl Builder {
    /// Whether it can give way to a sweeping worker: it has had its turn, and waits for a lock or runs user code.
    fn may_wait(&self) -> bool {
        let is_waiting = || self.process.pid().is_ok_and(process::waits_for_lock);
        self.started.elapsed() >= TURN && (self.runs_user_code || is_waiting())
    }
}

impl Builders {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Starts a builder for a rule, unless a sweeping worker waits for a process. A few builders run at a time beside
    /// the sweeping workers, because builders mostly wait. An owner without a builder gets one, however long those of
    /// other owners take.
    pub fn start_for(&mut self, rule: &Rule) {
        let has_one = self.0.values().any(|builder| builder.owner == rule.owner);
        let may_start = (self.0.len() < guc::max_workers() || !has_one) && !shmem::anybody_waits();
        // Rules on one column may want the same index, and a builder would take that of another for a leftover.
        let is_building = self.0.values().any(|builder| builder.relid == rule.relid);
        if may_start && !is_building {
            let is_harmless = Scope::Transaction.attempt(|| Ok(rule.calls_nothing_of_users()));
            let runs_user_code = !is_harmless.unwrap_or(false);
            let builder = |process| {
                (
                    rule.id,
                    Builder { owner: rule.owner, relid: rule.relid, process, started: Instant::now(), runs_user_code },
                )
            };
            self.0.extend(start(rule.id).map(builder));
        }
    }

    /// Terminates a builder that can give way if a sweeping worker needs its process; the build starts again later.
    /// Returns whether a builder has ended: a user may have stopped it while its index is still wanted.
    pub fn see_off(&mut self) -> bool {
        if let Some(builder) = self.0.values().find(|builder| builder.may_wait())
            && shmem::make_way_of_builder()
            && let Ok(pid) = builder.process.pid()
        {
            process::terminate(pid);
        }
        let before = self.0.len();
        self.0.retain(|_, builder| !has_ended(&builder.process));
        self.0.len() < before
    }

    pub fn end_all(&mut self) {
        for (_, builder) in self.0.drain() {
            builder.process.terminate();
        }
    }
}

/// Starts a builder in this database.
fn start(rule_id: i64) -> Option<DynamicBackgroundWorker> {
    start::start("pg_ttl_index builder", "pg_ttl_index_builder_main", rule_id)
}

worker_main!(pg_ttl_index_builder_main, run);

fn run(argument: pg_sys::Datum) {
    let Some(rule_id) = start::begin(argument, c"pg_ttl_index builder", |_| Role::Builder) else { return };
    let Ok((catalog, mut rules)) = start::load_rules(Some(rule_id)) else { return };
    let Some((Ok(rule), _)) = rules.pop() else { return };
    process::report_activity(Some(&format!("making the index for {rule}")));
    match build::run(&catalog, &rule) {
        // The rule can be swept with the new index at once.
        Ok(true) => shmem::wake(),
        Ok(false) => {}
        // Another session needs the table: the database worker starts the build again.
        Err(failure) if failure.is_cancel => {}
        Err(failure) => {
            if rule.state.index_error.as_deref() != Some(&failure.to_string()) {
                log!("TTL rule on {rule}: its index could not be made: {failure}");
            }
            let record = Scope::Transaction.attempt(|| catalog.record_build_failure(&rule, &failure));
            record.unwrap_or_else(|failure| log!("TTL rule on {rule}: that could not be recorded: {failure}"));
        }
    }
}
