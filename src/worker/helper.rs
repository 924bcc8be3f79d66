//! A helper: it sweeps one rule with a backlog to its end, so that the others do not wait.

use super::database::{self, Advance, LOOK_UP};
use super::{LIBRARY, TYPE};
use crate::catalog::Trigger;
use crate::guc;
use crate::pg::board::{self, Role};
use crate::pg::process;
use crate::pg::transaction::Scope;
use crate::sweep::{Step, Sweep};
use pgrx::bgworkers::{BackgroundWorker, BackgroundWorkerBuilder, DynamicBackgroundWorker};
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;

/// Starts a helper in this database.
pub fn start(rule_id: i64) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new("pg_ttl_index helper")
        .set_type(TYPE)
        .set_library(LIBRARY)
        .set_function("pg_ttl_index_helper_main")
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
pub extern "C-unwind" fn pg_ttl_index_helper_main(argument: pg_sys::Datum) {
    process::attach_signal_handlers();
    let rule_id: Option<i64> = BackgroundWorker::get_extra().parse().ok();
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(Oid::from(argument.value() as u32)), None);
    process::pin_worker_settings();
    if !database::may_stay() || board::take_slot(Role::Helper).is_none() {
        return;
    }
    let Ok((catalog, rules)) = database::load_rules() else { return };
    let mut sound = rules.into_iter().filter_map(|(rule, opening)| Some((rule.ok()?, opening)));
    let Some((rule, opening)) = sound.find(|(rule, _)| Some(rule.id) == rule_id) else { return };
    let closes_at = opening.map(|opening| opening.until);
    process::report_activity(Some(&format!("sweeping {rule}")));
    let Ok(Some(mut sweep)) = Sweep::begin(&catalog, rule, Trigger::Worker, Scope::Transaction) else { return };
    let end = loop {
        process::reload_configuration();
        if !guc::enabled() || !database::may_stay() {
            break Ok(Step::Outdated);
        }
        match database::advance(&mut sweep, closes_at) {
            Ok(Advance::Went) if guc::batch_delay().is_zero() => {}
            Ok(Advance::Went) => process::idle(guc::batch_delay()),
            Ok(Advance::Wait(wait)) => process::idle(wait.min(LOOK_UP)),
            Ok(Advance::Ended(end)) => break Ok(end),
            Err(failure) => break Err(failure),
        }
    };
    database::finish(sweep, &end);
}
