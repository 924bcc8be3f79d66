-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Status functions for users. Function bodies are bound to the objects they name, so that the schema can be renamed.
-- They run as their caller: ttl_states() decides which rules the caller may see.
CREATE FUNCTION @extschema@.ttl_summary() RETURNS TABLE (
    schema_name text,
    table_name text,
    column_name text,
    expire_after_seconds bigint,
    batch_size integer,
    active boolean,
    last_run timestamptz,
    time_since_last_run interval,
    rows_deleted_last_run bigint,
    total_rows_deleted bigint,
    index_name text,
    soft_delete_column text,
    cleanup_mode text,
    state text,
    next_run timestamptz,
    last_error text,
    last_error_at timestamptz,
    consecutive_failures integer,
    last_duration interval,
    blocked_rows bigint,
    lag interval,
    locked_rows bigint,
    skipped_parts text,
    expire_after interval,
    filter text,
    time_zone text,
    index_method text,
    unit text,
    hide_expired boolean,
    hold text,
    index_state text,
    index_concurrently boolean,
    purge_after interval,
    archive_to text,
    on_expire text,
    notify_channel text,
    partition_action text,
    run_every interval,
    run_window text,
    max_rows_per_second integer,
    max_rows_per_run bigint,
    total_partitions_removed bigint,
    rule_name text,
    clear_columns text[],
    emit_message boolean,
    rule_id bigint
)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp SET jit = off
BEGIN ATOMIC
    SELECT t.schema_name, t.table_name, t.column_name, t.expire_after_seconds,
           coalesce(t.batch_size, (SELECT @extschema@.ttl_default_batch_size())), t.active,
           t.last_run, now() - t.last_run, t.rows_deleted_last_run, t.total_rows_deleted,
           t.index_name, t.soft_delete_column,
           CASE WHEN t.soft_delete_column IS NOT NULL THEN 'soft_delete'
                WHEN t.clear_columns IS NOT NULL THEN 'clear'
                WHEN t.archive_to IS NOT NULL THEN 'archive'
                WHEN t.purges IS NOT NULL THEN 'purge'
                ELSE 'hard_delete'
           END,
           CASE WHEN NOT t.active THEN 'paused'
                WHEN resting.hold LIKE 'max_share_per_run:%' THEN 'held'
                WHEN resting.hold IS NOT NULL THEN 'restoring'
                WHEN t.last_error_code IS NOT NULL AND (t.blocked_rows = 0 OR t.consecutive_failures > 0) THEN 'error'
                WHEN rule.index_error IS NOT NULL OR index.state = 'missing' THEN 'error'
                WHEN t.blocked_rows > 0 THEN 'blocked'
                ELSE 'active'
           END,
           CASE WHEN t.active
                THEN greatest((SELECT @extschema@.ttl_next_pass()), @extschema@.ttl_due_at(t),
                              CASE WHEN t.run_every IS NOT NULL OR t.index_method = 'none' THEN @extschema@.ttl_next_due(t.id) END,
                              CASE WHEN NOT run_window.is_open THEN run_window.until END)
           END,
           coalesce(rule.last_error, rule.index_error,
                    CASE WHEN index.state = 'missing' THEN '42704: the index of the TTL rule was dropped, register the rule again' END),
           t.last_error_at,
           greatest(t.consecutive_failures, t.index_failures), t.last_duration,
           t.blocked_rows, late.lag, t.locked_rows, t.skipped_parts,
           t.expire_after, t.filter, t.time_zone, t.index_method, t.unit, t.hide_expired,
           CASE WHEN NOT t.active THEN NULL
                WHEN resting.hold IS NOT NULL THEN resting.hold
                WHEN (SELECT @extschema@.ttl_database_hold()) IS NOT NULL THEN (SELECT @extschema@.ttl_database_hold())
                WHEN sweep.hold IS NOT NULL THEN sweep.hold
                WHEN NOT run_window.is_open THEN 'run_window'
                WHEN @extschema@.ttl_waits_for_process(t.id) THEN 'max_worker_processes'
                WHEN t.concurrently AND index.state IN ('pending', 'building', 'invalid') AND @extschema@.ttl_is_large(index.relid)
                THEN 'concurrently'
                -- Reading the whole table took so long that the rule rests for longer than others.
                WHEN t.index_method = 'none' AND t.run_every IS NULL
                     AND @extschema@.ttl_next_due(t.id) > (SELECT @extschema@.ttl_next_pass())
                THEN 'index_method'
           END,
           index.state, t.concurrently, t.purge_after, t.archive_to, t.on_expire, t.notify_channel, t.partition_action,
           t.run_every, t.run_window, t.max_rows_per_second, t.max_rows_per_run, t.total_partitions_removed, t.rule_name, t.clear_columns, t.emit_message, t.id
    FROM @extschema@.ttl_index_table t
    JOIN @extschema@.ttl_states() AS rule ON rule.rule_id = t.id
    LEFT JOIN @extschema@.ttl_lags() AS late ON late.rule_id = t.id
    LEFT JOIN @extschema@.ttl_holds() AS resting ON resting.rule_id = t.id
    LEFT JOIN (SELECT rule_id, max(hold) AS hold FROM @extschema@.ttl_progress_slots() GROUP BY rule_id) AS sweep
           ON sweep.rule_id = t.id
    -- Many rules may share one window.
    LEFT JOIN (SELECT w.run_window AS given, w.time_zone, stands.is_open, stands.until
               FROM (SELECT DISTINCT r.run_window, r.time_zone FROM @extschema@.ttl_index_table r WHERE r.run_window IS NOT NULL) AS w
               CROSS JOIN LATERAL @extschema@.ttl_run_window(w.run_window, w.time_zone, now()) AS stands) AS run_window
           ON run_window.given = t.run_window AND run_window.time_zone = t.time_zone
    LEFT JOIN LATERAL (
        SELECT CASE WHEN t.index_method = 'none' THEN 'none'
                    WHEN t.index_name IS NULL THEN 'missing'
                    WHEN i.indexrelid IS NULL THEN 'pending'
                    WHEN i.indisvalid THEN 'valid'
                    WHEN t.concurrently AND rule.index_error IS NULL THEN 'building'
                    ELSE 'invalid'
               END AS state,
               rule.relid
        FROM (SELECT CASE
                  WHEN t.index_name IS NULL THEN NULL
                  WHEN EXISTS (SELECT FROM pg_index k WHERE k.indexrelid = rule.index_relid AND k.indrelid = rule.relid)
                  THEN rule.index_relid
                  ELSE @extschema@.ttl_index_oid(rule.relid, rule.index_relid, t.index_name) END) AS bound (relid)
        LEFT JOIN pg_index i ON i.indexrelid = bound.relid) AS index ON true
    ORDER BY t.schema_name, t.table_name, t.column_name, t.rule_name NULLS FIRST
    ;
END;

CREATE VIEW @extschema@.ttl_summary AS SELECT * FROM @extschema@.ttl_summary();

-- Also runs as its caller: row-level security on the log decides, and error messages are for owners and monitors.
CREATE FUNCTION @extschema@.ttl_history() RETURNS TABLE (
    id bigint,
    rule_id bigint,
    schema_name text,
    table_name text,
    column_name text,
    initiator text,
    started_at timestamptz,
    finished_at timestamptz,
    rows_removed bigint,
    partitions_removed bigint,
    batches bigint,
    blocked_rows bigint,
    locked_rows bigint,
    wal_bytes bigint,
    status text,
    error text,
    plan text,
    rule_name text
)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT l.id, l.rule_id, l.schema_name, l.table_name, l.column_name, l.initiator, l.started_at, l.finished_at, l.rows_removed,
           l.partitions_removed, l.batches, l.blocked_rows, l.locked_rows, l.wal_bytes, l.status, coalesce(e.error, l.error_code),
           l.plan, l.rule_name
    FROM @extschema@.ttl_history_log l LEFT JOIN @extschema@.ttl_history_errors() AS e ON e.id = l.id
    ORDER BY l.id;
END;

CREATE VIEW @extschema@.ttl_history AS SELECT *, finished_at - started_at AS duration FROM @extschema@.ttl_history();

SET LOCAL search_path = @extschema@, pg_temp;
