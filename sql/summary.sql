-- What users look at. The function runs as its caller, so row-level security on the catalog decides what it shows.
CREATE FUNCTION ttl_summary() RETURNS TABLE (
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
    hide_expired boolean
)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.schema_name, t.table_name, t.column_name, t.expire_after_seconds,
           coalesce(t.batch_size, @extschema@.ttl_default_batch_size()), t.active,
           t.last_run, now() - t.last_run, t.rows_deleted_last_run, t.total_rows_deleted,
           t.index_name, t.soft_delete_column,
           CASE WHEN t.soft_delete_column IS NULL THEN 'hard_delete' ELSE 'soft_delete' END,
           CASE WHEN NOT t.active THEN 'paused'
                WHEN t.last_error IS NOT NULL AND (t.blocked_rows = 0 OR t.consecutive_failures > 0) THEN 'error'
                WHEN t.blocked_rows > 0 THEN 'blocked'
                ELSE 'active'
           END,
           CASE WHEN t.active THEN greatest(@extschema@.ttl_next_pass(), t.retry_at) END,
           t.last_error_code || ': ' || t.last_error, t.last_error_at, t.consecutive_failures, t.last_duration,
           t.blocked_rows, @extschema@.ttl_lag(t.id), t.locked_rows, t.skipped_parts,
           t.expire_after, t.filter, t.time_zone, t.index_method, t.unit, t.hide_expired
    FROM @extschema@.ttl_index_table t
    ORDER BY t.schema_name, t.table_name, t.column_name
$$;

CREATE VIEW ttl_summary AS SELECT * FROM ttl_summary();

-- As its caller, too: row-level security on the log decides.
CREATE FUNCTION ttl_history() RETURNS SETOF ttl_history_log
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS 'SELECT * FROM @extschema@.ttl_history_log ORDER BY id';

CREATE VIEW ttl_history AS SELECT *, finished_at - started_at AS duration FROM ttl_history();
