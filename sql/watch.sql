-- Users may create operators and functions in the extension's schema: nothing of theirs is found while this is read.
SET LOCAL search_path = pg_catalog, pg_temp;

-- What people and machines watch. Both views call functions as whoever reads them, so that they show what that role may see.

-- A line for each rule, for a terminal and \watch.
CREATE VIEW @extschema@.ttl_overview AS
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
CREATE VIEW @extschema@.ttl_metrics AS
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
                  least(sum(greatest(p.estimated_rows - p.rows_removed, 0)), 9223372036854775807)::bigint AS backlog_rows
           FROM @extschema@.ttl_progress() p GROUP BY 1, 2, 3, 4) AS sweep
       ON (sweep.schema_name, sweep.table_name, sweep.column_name) = (s.schema_name, s.table_name, s.column_name)
      AND sweep.rule_name IS NOT DISTINCT FROM s.rule_name
CROSS JOIN (SELECT count(*) FILTER (WHERE w.worker_pid IS NOT NULL AND w.database_name = pg_catalog.current_database()) AS workers
            FROM @extschema@.ttl_worker_status() w) AS process;

-- What is wrong in this database, and what to do about it, as far as whoever asks may see.
CREATE FUNCTION @extschema@.ttl_doctor() RETURNS TABLE (subject text, finding text, advice text, statement text)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp SET jit = off
BEGIN ATOMIC
    WITH rule AS MATERIALIZED (
        SELECT s.*, c.oid AS relid, c.reltuples, c.relpages, named.name, named.call,
               pg_catalog.format('%s (%s)', named.name, concat_ws(', ', s.column_name, s.rule_name)) AS subject,
               CASE WHEN s.rule_name IS NULL THEN '' ELSE pg_catalog.format(', rule_name => %L', s.rule_name) END AS more
        FROM @extschema@.ttl_summary() s
        CROSS JOIN LATERAL (
            SELECT pg_catalog.format('%I.%I', s.schema_name, s.table_name) AS name,
                   pg_catalog.format('%L, %L', pg_catalog.format('%I.%I', s.schema_name, s.table_name), s.column_name) AS call) AS named
        LEFT JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.to_regclass(named.name)),
    advised (place, subject, finding, advice, statement) AS (
        SELECT 1, 'server', 'The library is not preloaded: nothing sweeps by itself after a restart, and no row is hidden.',
               'Append it to shared_preload_libraries, and restart the server.',
               pg_catalog.format('ALTER SYSTEM SET shared_preload_libraries = %s', pg_catalog.concat_ws(', ', nullif(libraries.preloaded, ''), 'pg_ttl_index'))
        -- Not everybody may read this setting.
        FROM (SELECT CASE WHEN pg_catalog.pg_has_role('pg_read_all_settings', 'USAGE')
                          THEN pg_catalog.current_setting('shared_preload_libraries') END AS preloaded) AS libraries
        WHERE libraries.preloaded !~ '\mpg_ttl_index\M'
        UNION ALL
        SELECT 2, 'database', 'Automatic sweeping is switched off since ' || off.since || '.', 'Switch it on.', 'SELECT ttl_start_worker()'
        FROM @extschema@.ttl_worker_off off WHERE off.because IS NULL
        UNION ALL
        SELECT 3, 'database',
               CASE held.because WHEN 'clock' THEN 'The clock of the server has jumped ahead.'
                                 WHEN 'recovery' THEN 'The database comes from a point-in-time recovery: nothing is removed until somebody says so.'
                                 ELSE 'Nothing is swept: ' || held.because || '.' END,
               'If all is as it should be, say so.', 'SELECT ttl_start_worker()'
        FROM @extschema@.ttl_database_hold() AS held (because) WHERE held.because IN ('clock', 'recovery')
        UNION ALL
        SELECT 4, 'server', 'Rules wait for a background process: all of max_worker_processes are in use.',
               'Raise the setting, and restart the server.',
               'ALTER SYSTEM SET max_worker_processes = ' || (pg_catalog.current_setting('max_worker_processes')::integer + 8)
        WHERE EXISTS (SELECT FROM rule WHERE hold = 'max_worker_processes')
        UNION ALL
        SELECT 10, rule.subject, 'The index of the rule is gone, so that each sweep reads the whole table.',
               'Have it made again.', pg_catalog.format('SELECT ttl_alter_index(%s, index_method => %L%s)', rule.call, rule.index_method, rule.more)
        FROM rule WHERE rule.index_state = 'missing'
        UNION ALL
        SELECT 11, rule.subject, 'The rule fails: ' || rule.last_error || '.', 'Mend what the message says; the rule tries again by itself, or at once if it is altered.',
               pg_catalog.format('SELECT * FROM ttl_preview(%s%s)', rule.call, rule.more)
        FROM rule WHERE rule.state = 'error' AND rule.index_state <> 'missing'
        UNION ALL
        SELECT 12, rule.subject, pg_catalog.format('%s expired rows cannot be removed: %s.', rule.blocked_rows, coalesce(rule.last_error, 'see the preview')),
               'The preview names the foreign key or trigger that keeps them.', pg_catalog.format('SELECT relation, blockers FROM ttl_preview(%s%s)', rule.call, rule.more)
        FROM rule WHERE rule.blocked_rows > 0 AND rule.state <> 'error'
        UNION ALL
        SELECT 13, rule.subject, CASE rule.state WHEN 'held' THEN 'The rule would take more of its table than max_share_per_run allows, and is held.'
                                                 ELSE 'The rule comes from a restore that is not over.' END,
               'Look at the preview; if it is right, let the rule go on.', pg_catalog.format('SELECT ttl_resume(%s%s)', rule.call, rule.more)
        FROM rule WHERE rule.state IN ('held', 'restoring')
        UNION ALL
        SELECT 14, rule.subject, pg_catalog.format('Expired rows have waited for %s%s.', pg_catalog.date_trunc('second', rule.lag), coalesce(', now for ' || rule.hold, '')),
               CASE WHEN rule.hold IS NOT NULL THEN 'Relax what the rule waits for, or sweep once by hand.' ELSE 'Sweep once by hand, and look at ttl_progress meanwhile.' END,
               pg_catalog.format('CALL ttl_sweep(%L)', rule.name)
        FROM rule WHERE rule.active AND rule.state = 'active' AND rule.lag > greatest(interval '15 minutes', rule.run_every * 2)
        UNION ALL
        SELECT 20, rule.subject, 'The table is not in the order of the column (correlation ' || round(stats.correlation::numeric, 2) || '), so that a BRIN index rules out few blocks.',
               'Use a btree index, or sweep without one.', pg_catalog.format('SELECT ttl_alter_index(%s, index_method => ''btree''%s)', rule.call, rule.more)
        FROM rule JOIN pg_catalog.pg_stats stats
               ON (stats.schemaname, stats.tablename, stats.attname) = (rule.schema_name, rule.table_name, rule.column_name) AND NOT stats.inherited
        WHERE rule.index_method = 'brin' AND pg_catalog.abs(stats.correlation) < 0.9 AND rule.relpages > 1000
        UNION ALL
        SELECT 21, rule.subject, pg_catalog.format('Each sweep reads the whole table (%s), because the rule has no index.', pg_catalog.pg_size_pretty(rule.relpages::bigint * 8192)),
               'If rows come in the order of the column, a BRIN index costs next to nothing.', pg_catalog.format('SELECT ttl_alter_index(%s, index_method => ''brin''%s)', rule.call, rule.more)
        FROM rule WHERE rule.index_method = 'none' AND rule.relpages > 100000
        UNION ALL
        SELECT 22, rule.subject, 'The index has the rows that the filter keeps, too, so that each sweep looks at expired rows that stay.',
               'With a filter that is immutable, the index can be partial. Without one, run the rule less often.',
               pg_catalog.format('SELECT ttl_alter_index(%s, run_every => interval ''1 hour''%s)', rule.call, rule.more)
        FROM rule JOIN pg_catalog.pg_index i ON i.indrelid = rule.relid
        JOIN pg_catalog.pg_class k ON k.oid = i.indexrelid AND k.relname = rule.index_name
        WHERE rule.filter IS NOT NULL AND i.indpred IS NULL AND rule.relpages > 1000 AND rule.run_every IS NULL
        UNION ALL
        SELECT 30, rule.subject, pg_catalog.format('The table has %s dead rows beside %s live ones: vacuum is far behind.', t.n_dead_tup, t.n_live_tup),
               'Vacuum it, and have autovacuum come earlier.', pg_catalog.format('VACUUM (ANALYZE) %s', rule.name)
        FROM rule JOIN pg_catalog.pg_stat_all_tables t ON t.relid = rule.relid
        WHERE t.n_dead_tup > 100000 AND t.n_dead_tup > t.n_live_tup
        UNION ALL
        SELECT 31, 'server', pg_catalog.format('Process %s has kept a snapshot since %s: what is removed meanwhile still takes space.', a.pid, a.xact_start),
               'End it if nobody needs it.', pg_catalog.format('SELECT pg_terminate_backend(%s)', a.pid)
        FROM pg_catalog.pg_stat_activity a
        WHERE a.backend_xmin IS NOT NULL AND a.xact_start < pg_catalog.now() - interval '1 hour' AND a.datname = pg_catalog.current_database()
          AND a.backend_type = 'client backend' AND EXISTS (SELECT FROM rule)
        UNION ALL
        SELECT 32, 'server', pg_catalog.format('Replication slot %s is not in use and keeps %s of write-ahead log.', r.slot_name,
                              pg_catalog.pg_size_pretty(pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), r.restart_lsn))),
               'Drop it if its consumer is gone.', pg_catalog.format('SELECT pg_drop_replication_slot(%L)', r.slot_name)
        FROM pg_catalog.pg_replication_slots r
        -- A standby has no end of log of its own.
        WHERE NOT r.active AND EXISTS (SELECT FROM rule)
          AND CASE WHEN pg_catalog.pg_is_in_recovery() THEN false
                   ELSE pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), r.restart_lsn) > 1073741824 END)
    SELECT advised.subject, advised.finding, advised.advice, advised.statement FROM advised ORDER BY advised.place, advised.subject;
END;

SET LOCAL search_path = @extschema@, pg_temp;
