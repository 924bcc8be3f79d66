//! A helper: it sweeps one rule with a backlog to its end, so that the others do not wait.

use super::database::{LOOK_UP, may_stay};
use super::hire;
use super::turn::{Advance, advance, finish};
use crate::catalog::Trigger;
use crate::guc;
use crate::pg::process;
use crate::pg::transaction::Scope;
use crate::sweep::{Step, Sweep};
use pgrx::bgworkers::DynamicBackgroundWorker;
use pgrx::prelude::*;

/// Starts a helper in this database.
pub fn start(rule_id: i64) -> Option<DynamicBackgroundWorker> {
    hire::start("pg_ttl_index helper", "pg_ttl_index_helper_main", rule_id)
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn pg_ttl_index_helper_main(argument: pg_sys::Datum) {
    let Some((catalog, rule, opening)) = hire::begin(argument) else { return };
    if opening.is_some_and(|opening| !opening.is_open) {
        return;
    }
    let closes_at = opening.map(|opening| opening.until);
    process::report_activity(Some(&format!("sweeping {rule}")));
    let Ok(Some(mut sweep)) = Sweep::begin(&catalog, rule, Trigger::Worker, Scope::Transaction) else { return };
    let end = loop {
        process::reload_configuration();
        if !guc::enabled() || !may_stay() {
            break Ok(Step::Outdated);
        }
        match advance(&mut sweep, closes_at) {
            Ok(Advance::Went) if guc::batch_delay().is_zero() => {}
            Ok(Advance::Went) => process::idle(guc::batch_delay()),
            Ok(Advance::Wait(wait)) => process::idle(wait.min(LOOK_UP)),
            Ok(Advance::Ended(end)) => break Ok(end),
            Err(failure) => break Err(failure),
        }
    };
    finish(sweep, &end);
}
