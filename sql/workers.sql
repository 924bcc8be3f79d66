-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

-- A database that gets the extension now has no rows to save from a past recovery.
INSERT INTO @extschema@.ttl_recovery SELECT id FROM @extschema@.ttl_last_recovery() AS id WHERE id IS NOT NULL;

-- One row per worker, and one for this database if something keeps it from being swept. Workers are identified by their
-- backend type, which a session cannot assume as it can an application name.
CREATE FUNCTION @extschema@.ttl_worker_status() RETURNS TABLE (
    worker_pid integer,
    application_name text,
    state text,
    backend_start timestamptz,
    state_change timestamptz,
    query_start timestamptz,
    database_name text,
    activity text
)
    STABLE LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT a.pid, a.application_name, a.state, a.backend_start, a.state_change, a.query_start, a.datname::text,
           CASE WHEN pg_has_role(session_user, 'pg_read_all_stats', 'USAGE') THEN a.query END
    FROM pg_stat_activity a
    WHERE a.backend_type = 'pg_ttl_index worker'
    UNION ALL
    SELECT NULL, NULL, 'held: ' || held.because, NULL, NULL, NULL, current_database(), NULL
    FROM @extschema@.ttl_database_hold() AS held (because) WHERE held.because IS NOT NULL
    ORDER BY 4
    ;
END;

-- Runs as its caller: shows the sweeps of the rules that the caller may see.
CREATE FUNCTION @extschema@.ttl_progress() RETURNS TABLE (
    pid integer,
    schema_name text,
    table_name text,
    column_name text,
    phase text,
    rows_removed bigint,
    estimated_rows bigint,
    batches bigint,
    rows_per_second double precision,
    started_at timestamptz,
    relation regclass,
    hold text,
    plan text,
    workers integer,
    rule_name text,
    done double precision,
    time_left interval
)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT s.pid, t.schema_name, t.table_name, t.column_name,
           CASE WHEN s.is_building THEN 'building' WHEN s.hold IS NOT NULL THEN 'waiting' WHEN s.batches = 0 THEN 'looking' ELSE 'removing' END,
           s.rows_removed, s.estimated_rows, s.batches,
           s.rows_removed / nullif(extract(epoch FROM clock_timestamp() - s.started_at), 0)::double precision,
           s.started_at, s.relid::regclass, s.hold, s.plan, s.workers, t.rule_name,
           -- By the planner's estimate, which may be too low.
           CASE WHEN s.estimated_rows > 0 THEN least(s.rows_removed::double precision / s.estimated_rows::double precision, 1) END,
           -- At most thirty years: an estimate can be anything.
           CASE WHEN s.estimated_rows > 0 AND s.rows_removed > 0
                THEN make_interval(secs => least(extract(epoch FROM clock_timestamp() - s.started_at)::double precision
                                                 * greatest(s.estimated_rows - s.rows_removed, 0)::double precision
                                                 / s.rows_removed::double precision, 1e9)) END
    FROM @extschema@.ttl_progress_slots() s JOIN @extschema@.ttl_index_table t ON t.id = s.rule_id
    ;
END;

CREATE VIEW @extschema@.ttl_progress AS SELECT * FROM @extschema@.ttl_progress();

SET LOCAL search_path = @extschema@, pg_temp;
