//! How late the sweeping of a rule is, read from the first entries of its index. No user code runs for it, so no user
//! can exploit the caller's rights or time.

use crate::catalog::{Catalog, Probe};
use crate::error::TtlError;
use crate::pg::access;
use crate::pg::plan::Plan;
use crate::pg::probe::{self, Value};
use crate::pg::transaction::subtransaction;
use crate::rule::{Unit, instant};
use pgrx::datum::{DatumWithOid, Interval, Timestamp, TimestampWithTimeZone};
use pgrx::pg_sys;

const MICROS_PER_DAY: i64 = 86_400_000_000;

/// Returns, by rule ID, how long ago the oldest expired row that is still there expired, for the rules that the current
/// role may see. Leaves out rules without such a row, and rules for which this cannot be told at once.
pub fn of_visible_rules(catalog: &Catalog) -> Result<Vec<(i64, Interval)>, TtlError> {
    let mut calendars = Calendars::default();
    let mut lags = Vec::new();
    for rule in catalog.probes()? {
        lags.extend(of(&rule, &mut calendars).map(|lag| (rule.id, lag)));
    }
    Ok(lags)
}

fn of(rule: &Probe, calendars: &mut Calendars) -> Option<Interval> {
    let values = probe::first_values(rule.index, |value| instant_of(value, rule.unit.as_deref()).is_some())?;
    let oldest =
        values.iter().filter_map(|value| instant_of(value, rule.unit.as_deref())).min_by_key(Oldest::micros)?;
    let (months, days, micros) = (rule.ttl.months(), rule.ttl.days(), rule.ttl.micros());
    match oldest {
        Oldest::Instant(oldest) if months == 0 && days == 0 => {
            let late = access::unix_micros().checked_sub(micros)?.checked_sub(oldest).filter(|late| *late >= 0)?;
            Interval::new(0, i32::try_from(late / MICROS_PER_DAY).ok()?, late % MICROS_PER_DAY).ok()
        }
        // The time zone may no longer be known.
        _ => subtransaction(|| Ok(calendars.lag(rule, oldest))).ok().flatten(),
    }
}

/// An instant, in microseconds since 1970, or a local time.
#[derive(Clone, Copy)]
enum Oldest {
    Instant(i64),
    Local(i64),
}

impl Oldest {
    fn micros(&self) -> i64 {
        match self {
            Self::Instant(micros) | Self::Local(micros) => *micros,
        }
    }
}

/// Returns the time that a value stands for, if a row can expire by it.
fn instant_of(value: &Value, unit: Option<&str>) -> Option<Oldest> {
    let finite =
        |micros: i64| micros.checked_add(instant::POSTGRES_EPOCH).filter(|_| micros != i64::MAX && micros != i64::MIN);
    match value {
        Value::Instant(micros) => finite(*micros).map(Oldest::Instant),
        Value::Local(micros) => finite(*micros).map(Oldest::Local),
        Value::Number(digits) => instant::of_unix(digits, Unit::parse(unit?)?).map(Oldest::Instant),
        Value::Uuid(uuid) if unit == Some("ulid") => instant::of_ulid(uuid).map(Oldest::Instant),
        Value::Uuid(uuid) => instant::of_uuid_v7(uuid).map(Oldest::Instant),
    }
}

/// Statements for lags that depend on a time zone, planned on first use.
#[derive(Default)]
struct Calendars {
    of_instant: Option<Plan>,
    of_local: Option<Plan>,
}

impl Calendars {
    fn lag(&mut self, rule: &Probe, oldest: Oldest) -> Option<Interval> {
        let (plan, oldest): (_, DatumWithOid<'_>) = match oldest {
            Oldest::Instant(micros) => {
                let instant = TimestampWithTimeZone::try_from(micros - instant::POSTGRES_EPOCH).ok()?;
                (self.of_instant.get_or_insert_with(|| plan("$4", pg_sys::TIMESTAMPTZOID)), instant.into())
            }
            Oldest::Local(micros) => {
                let local = Timestamp::try_from(micros - instant::POSTGRES_EPOCH).ok()?;
                let in_zone = "pg_catalog.timezone($1, $4)";
                (self.of_local.get_or_insert_with(|| plan(in_zone, pg_sys::TIMESTAMPOID)), local.into())
            }
        };
        let calendar = Interval::new(rule.ttl.months(), rule.ttl.days(), 0).ok()?;
        let clock = Interval::new(0, 0, rule.ttl.micros()).ok()?;
        plan.call::<Interval>(&[rule.time_zone.as_str().into(), calendar.into(), clock.into(), oldest]).1
    }
}

fn plan(oldest: &str, type_oid: pg_sys::Oid) -> Plan {
    let sql = format!(
        "SELECT CASE WHEN oldest OPERATOR(pg_catalog.<=) cutoff THEN cutoff OPERATOR(pg_catalog.-) oldest END
         FROM (SELECT {oldest} AS oldest,
                      pg_catalog.timezone($1, pg_catalog.timezone($1, pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.-) $2)
                          OPERATOR(pg_catalog.-) $3 AS cutoff OFFSET 0) AS known"
    );
    Plan::new(&sql, &mut [pg_sys::TEXTOID, pg_sys::INTERVALOID, pg_sys::INTERVALOID, type_oid])
}
