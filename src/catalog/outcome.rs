//! Results of sweeps: counters in the rule's row, and a history.

use super::{Catalog, Rule};
use crate::error::TtlError;
use crate::guc;
use crate::pg::shmem::Path;
use crate::pg::spi;
use crate::pg::transaction::Failure;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::pg_sys::Oid;
use serde::Deserialize;

/// Who asked for a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initiator {
    Worker,
    Runner,
    Procedure,
}

impl Initiator {
    fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Runner => "ttl_runner",
            Self::Procedure => "ttl_sweep",
        }
    }
}

/// What is known about the rows of a rule that could not be removed.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Blocked {
    /// Whether sweeps skip them for now.
    pub rests: bool,
    /// The type and the last of their values, if known.
    pub up_to: Option<String>,
    /// A digest of the objects that may block them.
    pub under: Option<String>,
}

/// The longest time in seconds that blocked rows are skipped: in general, and if other sessions had locked rows.
const LONGEST_REST: f64 = 600.0;
const LONGEST_REST_OF_LOCKED: f64 = 60.0;

/// Returns SQL for a backoff, in seconds, that doubles with every earlier failure.
fn rest(first: &str, failures: &str, longest: &str) -> String {
    format!("interval '1 second' * least({first} * power(2, least({failures}, 20)), {longest})")
}

/// How a sweep ended.
pub struct Outcome<'a> {
    pub rule_id: i64,
    /// The version of the rule as loaded: a rule changed since then does not inherit its old errors.
    pub version: i64,
    pub initiator: Initiator,
    pub started_at: TimestampWithTimeZone,
    pub rows: i64,
    /// Partitions that were dropped or detached.
    pub partitions: i64,
    pub batches: i64,
    pub blocked_rows: i64,
    /// Whether the sweep skipped rows that were blocked before.
    pub left_blocked: bool,
    /// Whether `blocked_rows` add to those that were blocked before.
    pub adds_blocked: bool,
    pub locked_rows: i64,
    pub wal_bytes: i64,
    /// How the sweep went through the rows.
    pub paths: &'a [Path],
    /// Parts of the table that the sweep could not work on, by name and reason.
    pub skipped: Option<String>,
    /// Why rows are blocked.
    pub blocked_by: Option<&'a Failure>,
    /// Why the sweep as a whole ended early.
    pub failure: Option<&'a Failure>,
    /// Whether the sweep reached the last expired row.
    pub complete: bool,
    /// Whether the sweep did all that one sweep has to do: it is complete, or has reached its limit.
    pub is_whole: bool,
}

impl Outcome<'_> {
    /// Returns the SQLSTATE and message of what went wrong.
    fn error(&self) -> (Option<String>, Option<String>) {
        let error = self.failure.or(self.blocked_by);
        error.map(|failure| (failure.sqlstate(), failure.message.clone())).unzip()
    }
}

impl Catalog {
    /// Returns how many rows per second the sweeps of a rule have removed, as far as the history tells.
    pub fn rows_per_second(&self, rule_id: i64) -> Result<Option<f64>, TtlError> {
        let sql = format!(
            "SELECT sum(rows_removed)::double precision / nullif(extract(epoch FROM sum(finished_at - started_at)), 0)::double precision
             FROM {}.ttl_history_log WHERE rule_id = $1 AND rows_removed > 0",
            self.schema
        );
        let found = self.with_rights(|| spi::read(&sql, &[rule_id.into()], |row| row.get(1)))?;
        Ok(found.into_iter().flatten().next())
    }

    /// Records that a rule's index could not be built. The next attempt backs off like a failing sweep.
    pub fn record_build_failure(&self, rule: &Rule, failure: &Failure) -> Result<(), TtlError> {
        let sql = format!(
            "WITH failed AS (
                 UPDATE {schema}.ttl_index_table
                 SET index_failures = index_failures + 1, index_retry_at = clock_timestamp()
                         + {rest}
                 WHERE id = $1 AND version = $2 RETURNING id)
             INSERT INTO {schema}.ttl_state (rule_id, index_error) SELECT id, $3 FROM failed
             ON CONFLICT (rule_id) DO UPDATE SET index_error = excluded.index_error",
            rest = rest("2", "index_failures", "600"),
            schema = self.schema
        );
        let args = [rule.id.into(), rule.version.into(), failure.to_string().into()];
        self.with_rights(|| spi::execute(&sql, &args)).map(|_| ())
    }

    /// Adds a batch to the counters, in the batch's own transaction: a batch that is rolled back is not counted.
    pub fn record_batch(&self, rule_id: i64, rows: i64, first: bool) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {}.ttl_index_table
             SET last_run = clock_timestamp(), total_rows_deleted = total_rows_deleted + $2,
                 rows_deleted_last_run = CASE WHEN $3 THEN $2 ELSE rows_deleted_last_run + $2 END
             WHERE id = $1",
            self.schema
        );
        self.with_rights(|| spi::execute_kept(&sql, &[rule_id.into(), rows.into(), first.into()])).map(|_| ())
    }

    /// Counts a partition that was dropped or detached, in the transaction that did it.
    pub fn record_partition(&self, rule_id: i64) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {}.ttl_index_table
             SET last_run = clock_timestamp(), total_partitions_removed = total_partitions_removed + 1 WHERE id = $1",
            self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[rule_id.into()])).map(|_| ())
    }

    /// Records that all blocked rows of a rule were tried, and when to retry: after a delay that doubles each time.
    pub fn rest_blocked(&self, rule: &Rule, blocked: &Blocked, has_locked: bool) -> Result<(), TtlError> {
        let sql = format!(
            "WITH blocked AS (
                 UPDATE {schema}.ttl_index_table
                 SET blocked_tries = blocked_tries + 1,
                     blocked_retry_at = clock_timestamp() + {rest}
                 WHERE id = $1 AND version = $2 RETURNING id)
             INSERT INTO {schema}.ttl_state (rule_id, blocked_up_to, blocked_under) SELECT id, $3, $4 FROM blocked
             ON CONFLICT (rule_id) DO UPDATE SET blocked_up_to = excluded.blocked_up_to, blocked_under = excluded.blocked_under",
            rest = rest("$5", "blocked_tries", "$6"),
            schema = self.schema
        );
        let args = [
            rule.id.into(),
            rule.version.into(),
            blocked.up_to.as_deref().into(),
            blocked.under.as_deref().into(),
            guc::naptime().as_secs_f64().max(2.0).into(),
            if has_locked { LONGEST_REST_OF_LOCKED } else { LONGEST_REST }.into(),
        ];
        self.with_rights(|| spi::execute(&sql, &args)).map(|_| ())
    }

    /// Records that more rows are blocked, up to this value.
    pub fn add_blocked(&self, rule: &Rule, up_to: &str) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {schema}.ttl_state s SET blocked_up_to = $3 FROM {schema}.ttl_index_table t
             WHERE s.rule_id = $1 AND t.id = $1 AND t.version = $2",
            schema = self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[rule.id.into(), rule.version.into(), up_to.into()])).map(|_| ())
    }

    /// Records that no rows are blocked.
    pub fn forget_blocked(&self, rule: &Rule) -> Result<(), TtlError> {
        let sql = format!(
            "UPDATE {}.ttl_index_table
             SET blocked_retry_at = NULL, blocked_tries = 0
             WHERE id = $1 AND version = $2",
            self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[rule.id.into(), rule.version.into()])).map(|_| ())
    }

    /// Returns a digest of what may block removing rows from these relations or adding them; it changes with that.
    pub fn digest_of_obstacles(&self, rule: &Rule, relids: Vec<Oid>) -> Result<Option<String>, TtlError> {
        let sql = "SELECT md5(string_agg(fact, ',' ORDER BY fact)) FROM (
                       SELECT format('t%s.%s.%s', t.oid, t.xmin, p.xmin)
                       FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE t.tgrelid = ANY ($1)
                       UNION ALL SELECT format('r%s.%s', oid, xmin) FROM pg_rewrite WHERE ev_class = ANY ($1)
                       UNION ALL SELECT format('c%s.%s', oid, xmin) FROM pg_constraint WHERE conrelid = ANY ($1)
                       UNION ALL SELECT format('f%s.%s', oid, xmin) FROM pg_proc
                                 WHERE oid = to_regprocedure($2 || '(regclass, jsonb)')) AS facts (fact)";
        let args = [relids.into(), rule.options.on_expire.as_deref().into()];
        Ok(spi::read(sql, &args, |row| row.get(1))?.into_iter().next().flatten())
    }

    /// Adds a sweep to the history. Waits for no lock.
    pub fn record_history(&self, outcome: &Outcome<'_>) -> Result<(), TtlError> {
        let history = format!(
            "INSERT INTO {schema}.ttl_history_log (rule_id, schema_name, table_name, column_name, rule_name, initiator, started_at,
                 finished_at, rows_removed, batches, blocked_rows, locked_rows, status, error, wal_bytes,
                 partitions_removed, error_code, plan)
             SELECT id, schema_name, table_name, column_name, rule_name, $2, $3, clock_timestamp(), $4, $5, $6, $7, $8, $9, $10, $11, $12, $13
             FROM {schema}.ttl_index_table WHERE id = $1",
            schema = self.schema
        );
        let status = match (outcome.failure, outcome.complete) {
            (Some(_), _) => "failed",
            (None, true) => "done",
            (None, false) => "stopped",
        };
        let paths: Vec<_> = outcome.paths.iter().map(|path| path.name()).collect();
        let plan = (!paths.is_empty()).then(|| paths.join(", "));
        let (code, message) = outcome.error();
        let text = code.as_ref().zip(message.as_ref()).map(|(code, message)| format!("{code}: {message}"));
        let args = [
            outcome.rule_id.into(),
            outcome.initiator.name().into(),
            outcome.started_at.into(),
            outcome.rows.into(),
            outcome.batches.into(),
            outcome.blocked_rows.into(),
            outcome.locked_rows.into(),
            status.into(),
            text.into(),
            outcome.wal_bytes.into(),
            outcome.partitions.into(),
            code.into(),
            plan.into(),
        ];
        self.with_rights(|| spi::execute(&history, &args)).map(|_| ())
    }

    /// Records a sweep that did something, failed, or found more or fewer obstacles than the one before.
    pub fn record_outcome(&self, outcome: &Outcome<'_>) -> Result<(), TtlError> {
        let (code, message) = outcome.error();
        let failed = outcome.failure.is_some();
        // A failing rule waits 2, 4, 8, … seconds, up to 10 minutes.
        let update = format!(
            "WITH rule AS (UPDATE {schema}.ttl_index_table
             SET last_run = clock_timestamp(),
                 rows_deleted_last_run = CASE WHEN $4 = 0 THEN 0 ELSE rows_deleted_last_run END,
                 last_duration = clock_timestamp() - $9,
                 swept_at = CASE WHEN $12 THEN $9 ELSE swept_at END,
                 last_error_at = CASE WHEN $2 IS NOT NULL THEN clock_timestamp() WHEN $13 THEN last_error_at END,
                 last_error_code = CASE WHEN $2 IS NULL AND $13 THEN last_error_code ELSE $2 END,
                 blocked_rows = CASE WHEN $14 THEN blocked_rows + $5 WHEN $8 THEN $5 ELSE greatest(blocked_rows, $5) END,
                 locked_rows = $6, skipped_parts = $7,
                 consecutive_failures = CASE WHEN $10 THEN consecutive_failures + 1 ELSE 0 END,
                 retry_at = CASE WHEN $10 THEN clock_timestamp()
                            + {rest} END
             WHERE id = $1 AND version = $11 RETURNING id)
             INSERT INTO {schema}.ttl_state (rule_id, last_error) SELECT id, $3 FROM rule
             WHERE $2 IS NOT NULL OR NOT $13 AND EXISTS (SELECT FROM {schema}.ttl_state WHERE rule_id = $1 AND last_error IS NOT NULL)
             ON CONFLICT (rule_id) DO UPDATE SET last_error = excluded.last_error",
            rest = rest("2", "consecutive_failures", "600"),
            schema = self.schema
        );
        let prune =
            format!("DELETE FROM {}.ttl_history_log WHERE finished_at < now() - $1 * interval '1 second'", self.schema);
        self.with_rights(|| {
            spi::execute(
                &update,
                &[
                    outcome.rule_id.into(),
                    code.into(),
                    message.into(),
                    outcome.rows.into(),
                    outcome.blocked_rows.into(),
                    outcome.locked_rows.into(),
                    outcome.skipped.clone().into(),
                    outcome.complete.into(),
                    outcome.started_at.into(),
                    failed.into(),
                    outcome.version.into(),
                    outcome.is_whole.into(),
                    outcome.left_blocked.into(),
                    outcome.adds_blocked.into(),
                ],
            )?;
            self.record_history(outcome)?;
            spi::execute(&prune, &[guc::history_retention().as_secs_f64().into()])?;
            Ok(())
        })
    }
}
