-- What people and machines watch. Both views call functions as whoever reads them, so that they show what that role may see.

-- A line for each rule, for a terminal and \watch.
CREATE VIEW ttl_overview AS
SELECT CASE WHEN pg_catalog.pg_table_is_visible(t.relid) THEN pg_catalog.quote_ident(s.table_name)
            ELSE pg_catalog.format('%I.%I', s.schema_name, s.table_name) END AS table_name,
       s.column_name, s.rule_name,
       s.expire_after AS ttl,
       CASE WHEN s.partition_action = 'delete' THEN pg_catalog.replace(s.cleanup_mode, 'hard_delete', 'delete')
            ELSE s.partition_action || ' partition' END AS action,
       s.state || coalesce(': ' || s.hold, '') AS state,
       pg_catalog.date_trunc('second', s.lag) AS lag,
       s.total_rows_deleted AS removed,
       pg_catalog.date_trunc('second', s.next_run - pg_catalog.now()) AS next_run
FROM @extschema@.ttl_summary() s
LEFT JOIN LATERAL (
    SELECT c.oid AS relid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = s.schema_name AND c.relname = s.table_name) AS t ON true;

-- For scraping. Names, units and types are an interface: they stay.
CREATE VIEW ttl_metrics AS
SELECT pg_catalog.current_database() AS datname, s.schema_name, s.table_name, s.column_name, coalesce(s.rule_name, '') AS rule_name,
       s.state, coalesce(pg_catalog.split_part(s.hold, ':', 1), '') AS hold,
       pg_catalog.date_part('epoch', s.lag) AS lag_seconds,
       s.total_rows_deleted AS removed_rows,
       s.total_partitions_removed AS removed_partitions,
       s.blocked_rows, s.locked_rows, s.consecutive_failures,
       pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - t.swept_at) AS since_success_seconds,
       sweep.backlog_rows,
       process.workers,
       NOT EXISTS (SELECT FROM @extschema@.ttl_worker_off) AS is_switched_on,
       coalesce(@extschema@.ttl_database_hold(), '') AS database_hold
FROM @extschema@.ttl_summary() s
JOIN @extschema@.ttl_index_table t ON (t.schema_name, t.table_name, t.column_name) = (s.schema_name, s.table_name, s.column_name)
                                  AND t.rule_name IS NOT DISTINCT FROM s.rule_name
LEFT JOIN (SELECT p.schema_name, p.table_name, p.column_name, p.rule_name,
                  sum(greatest(p.estimated_rows - p.rows_removed, 0))::bigint AS backlog_rows
           FROM @extschema@.ttl_progress() p GROUP BY 1, 2, 3, 4) AS sweep
       ON (sweep.schema_name, sweep.table_name, sweep.column_name) = (s.schema_name, s.table_name, s.column_name)
      AND sweep.rule_name IS NOT DISTINCT FROM s.rule_name
CROSS JOIN (SELECT count(*) FILTER (WHERE w.worker_pid IS NOT NULL AND w.database_name = pg_catalog.current_database()) AS workers
            FROM @extschema@.ttl_worker_status() w) AS process;
