//! Starting the workers that a database worker employs: helpers and builders.

use super::database::may_stay;
use super::schedule::{self, Opening};
use super::{LIBRARY, TYPE};
use crate::catalog::{Broken, Catalog, Rule, State};
use crate::pg::process;
use crate::pg::shmem::{self, Role};
use crate::pg::transaction::{Failure, Scope, subtransaction};
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, BackgroundWorkerStatus, DynamicBackgroundWorker};
use pgrx::pg_sys::{Datum, Oid};
use pgrx::prelude::*;
use std::ffi::CStr;

/// Starts a worker in this database that runs `function` and receives `number`. Returns `None` if no process is free.
pub fn start(name: &str, function: &str, number: i64) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new(name)
        .set_type(TYPE)
        .set_library(LIBRARY)
        .set_function(function)
        .set_argument(process::current_database().into_datum())
        .set_extra(&number.to_string())
        .set_notify_pid(process::pid())
        .enable_spi_access()
        .set_restart_time(None)
        .load_dynamic()
        .ok()
}

pub fn has_ended(worker: &DynamicBackgroundWorker) -> bool {
    matches!(worker.pid(), Err(BackgroundWorkerStatus::Stopped))
}

/// Settings that `ALTER DATABASE` or `ALTER ROLE` may have changed and that decide whether a transaction can sweep.
const SETTINGS: [process::Pinned; 10] = [
    (c"default_transaction_read_only", c"off"),
    (c"default_transaction_isolation", c"read committed"),
    (c"default_transaction_deferrable", c"off"),
    (c"statement_timeout", c"0"),
    (c"idle_in_transaction_session_timeout", c"0"),
    (c"session_replication_role", c"origin"),
    (c"search_path", c"pg_catalog, pg_temp"),
    (c"plan_cache_mode", c"auto"),
    // Otherwise the planner looks at every table's constraints, and calls functions in them.
    (c"constraint_exclusion", c"partition"),
    // In a deadlock with a user's session, such as one that drops the extension, the worker gives way.
    (c"deadlock_timeout", c"50ms"),
];

/// Applies a worker's settings, and its name in `pg_stat_activity`.
pub fn pin_settings(application: &'static CStr) {
    process::pin_settings(SETTINGS.into_iter().chain([(c"application_name", application)]).collect());
}

/// Connects a helper or builder, and returns the number it received; `None` if it is no longer wanted.
pub fn begin(argument: Datum, application: &'static CStr, role: impl FnOnce(i64) -> Role) -> Option<i64> {
    process::attach_signal_handlers();
    let number = BackgroundWorker::get_extra().parse().ok()?;
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(Oid::from(argument.value() as u32)), None);
    pin_settings(application);
    (may_stay() && shmem::take_slot(role(number)).is_some()).then_some(number)
}

/// A rule, or why it cannot be swept, and the state of its window.
pub type Loaded = (Result<Rule, Broken>, Option<Opening>);

/// Loads the catalog and the rules that workers may sweep: all of them, or one.
pub fn load_rules(rule_id: Option<i64>) -> Result<(Catalog, Vec<Loaded>), Failure> {
    Scope::Transaction.attempt(|| {
        let catalog = Catalog::open()?;
        let mut loaded = Vec::new();
        for rule in catalog.rules_for_workers(rule_id)? {
            loaded.push(match rule {
                Ok(rule) => with_opening(rule),
                Err(broken) => (Err(broken), None),
            });
        }
        Ok((catalog, loaded))
    })
}

/// Adds the state of its window to a rule. An unknown time zone breaks only that rule.
fn with_opening(rule: Rule) -> Loaded {
    if rule.options.run_window.is_none() {
        return (Ok(rule), None);
    }
    match subtransaction(|| schedule::opening_of(&rule)) {
        Ok(opening) => (Ok(rule), opening),
        Err(failure) => {
            let is_known = rule.state.last_error.as_deref() == Some(&failure.to_string());
            let Rule { id: rule_id, version, state: State { is_due, .. }, .. } = rule;
            (Err(Broken { rule_id, version, failure, is_due, is_known, is_held: false }), None)
        }
    }
}
