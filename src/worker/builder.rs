//! A builder: it makes the index of one rule, and may have to wait long for others while it does.

use super::start;
use crate::index::build;
use crate::pg::entry::worker_main;
use crate::pg::process;
use crate::pg::shmem::{self, Role};
use crate::pg::transaction::Scope;
use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::prelude::*;

/// Starts a builder in this database.
pub fn start(rule_id: i64) -> Option<DynamicBackgroundWorker> {
    start::start("pg_ttl_index builder", "pg_ttl_index_builder_main", rule_id)
}

worker_main!(pg_ttl_index_builder_main, run);

fn run(argument: pg_sys::Datum) {
    let Some(rule_id) = start::begin(argument, c"pg_ttl_index builder", |_| Role::Builder) else { return };
    let Ok((catalog, mut rules)) = start::load_rules(Some(rule_id)) else { return };
    let Some((Ok(rule), _)) = rules.pop() else { return };
    process::report_activity(Some(&format!("making the index for {rule}")));
    match build::run(&catalog, &rule) {
        // The rule can be swept by it at once.
        Ok(true) => shmem::wake(),
        Ok(false) => {}
        // Somebody wants the table: the worker begins again.
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
