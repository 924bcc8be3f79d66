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
    last_error text,
    last_error_at timestamptz,
    expire_after interval,
    filter text,
    time_zone text,
    index_method text
)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.schema_name, t.table_name, t.column_name, t.expire_after_seconds,
           coalesce(t.batch_size, @extschema@.ttl_default_batch_size()), t.active,
           t.last_run, now() - t.last_run, t.rows_deleted_last_run, t.total_rows_deleted,
           t.index_name, t.soft_delete_column,
           CASE WHEN t.soft_delete_column IS NULL THEN 'hard_delete' ELSE 'soft_delete' END,
           CASE WHEN NOT t.active THEN 'paused' WHEN t.last_error IS NOT NULL THEN 'error' ELSE 'active' END,
           t.last_error_code || ': ' || t.last_error, t.last_error_at,
           t.expire_after, t.filter, t.time_zone, t.index_method
    FROM @extschema@.ttl_index_table t
    ORDER BY t.schema_name, t.table_name, t.column_name
$$;

CREATE VIEW ttl_summary AS SELECT * FROM ttl_summary();
