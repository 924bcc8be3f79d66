//! Sweeps that a user asks for.

use super::{Advance, Step, Sweep, record_failure};
use crate::catalog::{Catalog, Initiator, Rule, State};
use crate::guc;
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{process, shmem};
use pgrx::pg_sys::Oid;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;
use std::time::{Duration, Instant};

/// How much a manual sweep may do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    pub rows: Option<i64>,
    pub time: Option<Duration>,
}

/// Sweeps the active rules of one table, or of every table whose owner's rights the caller has. Returns the rows
/// removed.
///
/// With a table given, the error of a failing rule is returned; without one, it is reported as a warning and the other
/// rules are still swept.
pub fn sweep(relid: Option<Oid>, initiator: Initiator, scope: Scope, limits: Limits) -> Result<i64, Failure> {
    shmem::with_session_slot(|| sweep_rules(relid, initiator, scope, limits))
}

fn sweep_rules(relid: Option<Oid>, initiator: Initiator, scope: Scope, limits: Limits) -> Result<i64, Failure> {
    let catalog = Catalog::open()?;
    catalog.check_clock()?;
    let started = Instant::now();
    let mut total = 0;
    for rule in catalog.active_rules(relid)? {
        let left = limits.rows.map_or(i64::MAX, |most| most - total);
        let time_left = limits.time.map_or(Duration::MAX, |most| most.saturating_sub(started.elapsed()));
        if left <= 0 || time_left.is_zero() {
            break;
        }
        if let Ok(Rule { state: State { hold: Some(hold), .. }, table, .. }) = &rule {
            let hint = "It is swept when that is over, or when ttl_resume says so.";
            ErrorReport::new(
                PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
                format!("TTL rule on {table} rests: {hold}"),
                function_name!(),
            )
            .set_hint(hint)
            .report(PgLogLevel::NOTICE);
            continue;
        }
        let id = rule.as_ref().map_or_else(|broken| broken.rule_id, |rule| rule.id);
        let swept = match rule {
            Ok(rule) => sweep_rule(&catalog, rule, initiator, scope, left, time_left),
            Err(broken) => {
                if relid.is_none() {
                    record_failure(&catalog, (id, broken.version), initiator, scope, &broken.failure)?;
                }
                Err(broken.failure)
            }
        };
        match swept {
            Ok(rows) => total += rows,
            Err(failure) if relid.is_some() => return Err(failure),
            Err(failure) => warning!("TTL rule {id} failed: {failure}"),
        }
    }
    Ok(total)
}

fn sweep_rule(
    catalog: &Catalog,
    rule: Rule,
    initiator: Initiator,
    scope: Scope,
    most: i64,
    time: Duration,
) -> Result<i64, Failure> {
    let started = Instant::now();
    let mut reported = started;
    let name = format!("TTL rule on {rule}");
    let Some(mut sweep) = Sweep::begin(catalog, rule, initiator, scope, false)? else { return Ok(0) };
    let end = loop {
        process::check_for_interrupts();
        let left = most - sweep.tally.rows;
        if left <= 0 || started.elapsed() >= time {
            break Ok(Step::Removed(0));
        }
        match sweep.advance(left, None) {
            Ok(Advance::Went) => {}
            Ok(Advance::Wait(wait)) => {
                process::rest(wait.min(time.saturating_sub(started.elapsed())));
                continue;
            }
            Ok(Advance::Ended(end)) => break Ok(end),
            Err(failure) => break Err(failure),
        }
        if scope == Scope::Procedure {
            if reported.elapsed() >= Duration::from_secs(1) {
                reported = Instant::now();
                notice!("{name}: {} rows removed so far", sweep.tally.rows);
            }
            process::rest(guc::batch_delay());
        }
    };
    let rows = sweep.tally.rows;
    if end == Ok(Step::Busy) {
        notice!("{name}: another session is sweeping it");
    } else if end == Ok(Step::Held) {
        notice!(
            "{name}: it would take more of the table than pg_ttl_index.max_share_per_run allows; ttl_resume lets it"
        );
    } else if scope == Scope::Procedure {
        notice!("{name}: {rows} rows removed");
    }
    sweep.finish(&end)?;
    end.map(|_| rows)
}
