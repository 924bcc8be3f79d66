//! A builder: it makes the index of one rule, and may have to wait long for others while it does.

use super::database::{self, report_broken};
use super::{LIBRARY, TYPE};
use crate::pg::board::{self, Role};
use crate::pg::process;
use crate::sweep::build;
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, DynamicBackgroundWorker};
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;

/// Starts a builder in this database.
pub fn start(rule_id: i64) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new("pg_ttl_index builder")
        .set_type(TYPE)
        .set_library(LIBRARY)
        .set_function("pg_ttl_index_builder_main")
        .set_argument(process::current_database().into_datum())
        .set_extra(&rule_id.to_string())
        .set_notify_pid(process::pid())
        .enable_spi_access()
        .set_restart_time(None)
        .load_dynamic()
        .ok()
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pg_ttl_index_builder_main(argument: pg_sys::Datum) {
    process::attach_signal_handlers();
    let rule_id: Option<i64> = BackgroundWorker::get_extra().parse().ok();
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(Oid::from(argument.value() as u32)), None);
    process::pin_worker_settings();
    if !database::may_stay() || board::take_slot(Role::Helper).is_none() {
        return;
    }
    let Ok((catalog, rules)) = database::load_rules() else { return };
    let mut sound = rules.into_iter().filter_map(|(rule, _)| rule.ok());
    let Some(rule) = sound.find(|rule| Some(rule.id) == rule_id) else { return };
    process::report_activity(Some(&format!("making the index for {rule}")));
    match build::run(&catalog, &rule) {
        // The rule can be swept by it at once.
        Ok(()) => board::wake(),
        Err(failure) => {
            let is_known = rule.last_error.as_deref() == Some(&failure.to_string());
            report_broken(&catalog, (rule.id, rule.version), &failure, is_known);
        }
    }
}
