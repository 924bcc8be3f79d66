//! Workers for one rule, that the worker of a database hires.

use super::database::{load_rules, may_stay};
use super::schedule::Opening;
use super::{LIBRARY, TYPE};
use crate::catalog::{Catalog, Rule};
use crate::pg::board::{self, Role};
use crate::pg::process;
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, DynamicBackgroundWorker};
use pgrx::pg_sys::{Datum, Oid};
use pgrx::prelude::*;

/// Starts a worker in this database whose main function has this name.
pub fn start(name: &str, function: &str, rule_id: i64) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new(name)
        .set_type(TYPE)
        .set_library(LIBRARY)
        .set_function(function)
        .set_argument(process::current_database().into_datum())
        .set_extra(&rule_id.to_string())
        .set_notify_pid(process::pid())
        .enable_spi_access()
        .set_restart_time(None)
        .load_dynamic()
        .ok()
}

/// Connects such a worker, and finds its rule; `None` if it is not wanted any more.
pub fn begin(argument: Datum) -> Option<(Catalog, Rule, Option<Opening>)> {
    process::attach_signal_handlers();
    let rule_id: Option<i64> = BackgroundWorker::get_extra().parse().ok();
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(Oid::from(argument.value() as u32)), None);
    process::pin_worker_settings();
    if !may_stay() || board::take_slot(Role::Helper).is_none() {
        return None;
    }
    let (catalog, rules) = load_rules().ok()?;
    let mut sound = rules.into_iter().filter_map(|(rule, opening)| Some((rule.ok()?, opening)));
    let (rule, opening) = sound.find(|(rule, _)| Some(rule.id) == rule_id)?;
    Some((catalog, rule, opening))
}
