-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

-- What people and machines watch. Both views call functions as whoever reads them, so that they show what that role may see.

-- A line for each rule, for a terminal and \watch.
CREATE VIEW @extschema@.ttl_overview AS
SELECT CASE WHEN pg_table_is_visible(t.relid) THEN quote_ident(s.table_name)
            ELSE format('%I.%I', s.schema_name, s.table_name) END AS table_name,
       s.column_name, s.rule_name,
       s.expire_after AS ttl,
       CASE WHEN s.partition_action = 'delete' THEN replace(s.cleanup_mode, 'hard_delete', 'delete')
            ELSE s.partition_action || ' partition' END AS action,
       s.state || coalesce(': ' || s.hold, '') AS state,
       date_trunc('second', s.lag) AS lag,
       s.total_rows_deleted AS removed,
       date_trunc('second', s.next_run - now()) AS next_run
FROM @extschema@.ttl_summary() s
LEFT JOIN LATERAL (
    SELECT c.oid AS relid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = s.schema_name AND c.relname = s.table_name) AS t ON true;

-- For scraping. Names, units and types are an interface: they stay.
CREATE VIEW @extschema@.ttl_metrics AS
SELECT current_database() AS datname, s.schema_name, s.table_name, s.column_name, coalesce(s.rule_name, '') AS rule_name,
       s.state, coalesce(split_part(s.hold, ':', 1), '') AS hold,
       date_part('epoch', s.lag) AS lag_seconds,
       s.total_rows_deleted AS removed_rows,
       s.total_partitions_removed AS removed_partitions,
       s.blocked_rows, s.locked_rows, s.consecutive_failures,
       date_part('epoch', clock_timestamp() - t.swept_at) AS since_success_seconds,
       sweep.backlog_rows,
       process.workers,
       NOT EXISTS (SELECT FROM @extschema@.ttl_worker_off) AS is_switched_on,
       coalesce(@extschema@.ttl_database_hold(), '') AS database_hold,
       coalesce(date_part('epoch', s.run_every), 0) AS run_every_seconds
FROM @extschema@.ttl_summary() s
JOIN @extschema@.ttl_index_table t ON t.id = s.rule_id
LEFT JOIN (SELECT p.schema_name, p.table_name, p.column_name, p.rule_name,
                  CASE WHEN sum(p.estimated_rows) > 0 THEN least(sum(CASE WHEN p.estimated_rows > 0 THEN greatest(p.estimated_rows - p.rows_removed, 0) END), 9223372036854775807)::bigint END AS backlog_rows
           FROM @extschema@.ttl_progress() p GROUP BY 1, 2, 3, 4) AS sweep
       ON (sweep.schema_name, sweep.table_name, sweep.column_name) = (s.schema_name, s.table_name, s.column_name)
      AND sweep.rule_name IS NOT DISTINCT FROM s.rule_name
CROSS JOIN (SELECT count(*) FILTER (WHERE w.worker_pid IS NOT NULL AND w.database_name = current_database()) AS workers
            FROM @extschema@.ttl_worker_status() w) AS process;

-- What is wrong in this database, and what to do about it, as far as whoever asks may see.
CREATE FUNCTION @extschema@.ttl_doctor() RETURNS TABLE (subject text, finding text, advice text, statement text)
    STABLE LANGUAGE sql SET search_path = pg_catalog, pg_temp SET jit = off
BEGIN ATOMIC
    WITH own AS (SELECT quote_ident(n.nspname) AS home FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'pg_ttl_index'),
    rule AS MATERIALIZED (
        SELECT s.*, c.oid AS relid, c.reltuples, c.relpages, named.name, named.call, own.home,
               format('%s (%s)', named.name, concat_ws(', ', s.column_name, s.rule_name)) AS subject,
               CASE WHEN s.rule_name IS NULL THEN '' ELSE format(', rule_name => %L::text', s.rule_name) END AS more
        FROM own CROSS JOIN @extschema@.ttl_summary() s
        CROSS JOIN LATERAL (
            SELECT format('%I.%I', s.schema_name, s.table_name) AS name,
                   format('%L::regclass, %L::text', format('%I.%I', s.schema_name, s.table_name), s.column_name) AS call) AS named
        LEFT JOIN pg_class c ON c.oid = to_regclass(named.name)),
    advised (place, subject, finding, advice, statement) AS (
        SELECT 1, 'server', 'The library is not preloaded: nothing sweeps by itself after a restart, and no row is hidden.',
               'Append it to shared_preload_libraries, and restart the server.',
               'ALTER SYSTEM SET shared_preload_libraries = '
               || (SELECT string_agg(quote_literal(btrim(name, ' "')), ', ' ORDER BY place)
                   FROM unnest(string_to_array(nullif(libraries.preloaded, ''), ',') || '{pg_ttl_index}'::text[]) WITH ORDINALITY AS l (name, place))
        -- Not everybody may read this setting.
        FROM (SELECT CASE WHEN pg_has_role('pg_read_all_settings', 'USAGE')
                          THEN current_setting('shared_preload_libraries') END AS preloaded) AS libraries
        WHERE NOT 'pg_ttl_index' = ANY (regexp_split_to_array(libraries.preloaded, '[ ",]+'))
        UNION ALL
        SELECT 2, 'database', 'Automatic sweeping is switched off since ' || off.since || '.', 'Switch it on.', format('SELECT %s.ttl_start_worker()', own.home)
        FROM own CROSS JOIN @extschema@.ttl_worker_off off WHERE off.because IS NULL
        UNION ALL
        SELECT 2, 'server', 'The setting pg_ttl_index.enabled is off: no worker sweeps.', 'Switch it on, and reload the configuration.',
               'ALTER SYSTEM SET pg_ttl_index.enabled = on'
        WHERE current_setting('pg_ttl_index.enabled', true) = 'off'
        UNION ALL
        SELECT 3, 'database',
               CASE held.because WHEN 'clock' THEN 'The clock of the server has jumped ahead.'
                                 ELSE 'The database comes from a point-in-time recovery, so nothing is removed.' END,
               'If the data and the clock are right, switch sweeping on.', format('SELECT %s.ttl_start_worker()', own.home)
        FROM own CROSS JOIN @extschema@.ttl_database_hold() AS held (because) WHERE held.because IN ('clock', 'recovery')
        UNION ALL
        SELECT 4, 'server', 'Rules wait for a background process: all of max_worker_processes are in use.',
               'Raise the setting, and restart the server.',
               'ALTER SYSTEM SET max_worker_processes = ' || (current_setting('max_worker_processes')::integer + 8)
        WHERE EXISTS (SELECT FROM rule WHERE hold = 'max_worker_processes')
        UNION ALL
        SELECT 10, rule.subject, 'The index of the rule is gone, so that each sweep reads the whole table.',
               'Create it again.', format('SELECT %s.ttl_alter_index(%s, index_method => %L%s)', rule.home, rule.call, rule.index_method, rule.more)
        FROM rule WHERE rule.index_state = 'missing'
        UNION ALL
        SELECT 11, rule.subject, 'The rule fails: ' || rule.last_error || '.', 'Fix the cause. The rule retries by itself, or at once if you alter it.',
               format('SELECT * FROM %s.ttl_preview(%s%s)', rule.home, rule.call, rule.more)
        FROM rule WHERE rule.state = 'error' AND rule.index_state <> 'missing'
        UNION ALL
        SELECT 12, rule.subject, format('%s expired rows cannot be removed: %s.', rule.blocked_rows, coalesce(rule.last_error, 'see the preview')),
               'The preview names the foreign key or trigger that keeps them.', format('SELECT relation, blockers FROM %s.ttl_preview(%s%s)', rule.home, rule.call, rule.more)
        FROM rule WHERE rule.blocked_rows > 0 AND rule.state <> 'error'
        UNION ALL
        SELECT 13, rule.subject, CASE rule.state WHEN 'held' THEN 'The rule would take more of its table than max_share_per_run allows, and is held.'
                                                 ELSE 'The rule comes from a restore that is not over.' END,
               'Look at the preview; if it is right, let the rule go on.', format('SELECT %s.ttl_resume(%s%s)', rule.home, rule.call, rule.more)
        FROM rule WHERE rule.state IN ('held', 'restoring')
        UNION ALL
        SELECT 14, rule.subject, format('Expired rows have waited for %s%s.', date_trunc('second', rule.lag), coalesce(', now for ' || rule.hold, '')),
               CASE WHEN rule.hold IS NOT NULL THEN 'Relax what the rule waits for, or sweep once by hand.' ELSE 'Sweep once by hand, and look at ttl_progress meanwhile.' END,
               format('CALL %s.ttl_sweep(%L::regclass)', rule.home, rule.name)
        FROM rule WHERE rule.active AND rule.state = 'active' AND rule.hold IS DISTINCT FROM 'run_window' AND NOT pg_is_in_recovery()
          AND rule.lag > greatest(interval '15 minutes', rule.run_every * 2)
        UNION ALL
        SELECT 20, rule.subject, 'The table is not in the order of the column (correlation ' || round(stats.correlation::numeric, 2) || '), so that a BRIN index rules out few blocks.',
               'Use a btree index, or sweep without one.', format('SELECT %s.ttl_alter_index(%s, index_method => ''btree''%s)', rule.home, rule.call, rule.more)
        FROM rule JOIN pg_stats stats
               ON (stats.schemaname, stats.tablename, stats.attname) = (rule.schema_name, rule.table_name, rule.column_name) AND NOT stats.inherited
        WHERE rule.index_method = 'brin' AND abs(stats.correlation) < 0.9 AND rule.relpages > 1000
        UNION ALL
        SELECT 21, rule.subject, format('Each sweep reads the whole table (%s), because the rule has no index.', pg_size_pretty(rule.relpages * current_setting('block_size')::bigint)),
               'If rows come in the order of the column, a BRIN index costs next to nothing.', format('SELECT %s.ttl_alter_index(%s, index_method => ''brin''%s)', rule.home, rule.call, rule.more)
        FROM rule WHERE rule.index_method = 'none' AND rule.relpages > 100000
        UNION ALL
        SELECT 22, rule.subject, 'The index also contains rows that the filter keeps, so each sweep reads expired rows that stay.',
               'With a filter that is immutable, the index can be partial. Without one, run the rule less often.',
               format('SELECT %s.ttl_alter_index(%s, run_every => interval ''1 hour''%s)', rule.home, rule.call, rule.more)
        FROM rule JOIN pg_index i ON i.indrelid = rule.relid
        JOIN pg_class k ON k.oid = i.indexrelid AND k.relname = rule.index_name
        WHERE rule.filter IS NOT NULL AND i.indpred IS NULL AND rule.relpages > 1000 AND rule.run_every IS NULL
        UNION ALL
        SELECT 30, rule.subject, format('The table has %s dead rows beside %s live ones: vacuum is far behind.', t.n_dead_tup, t.n_live_tup),
               'Vacuum it, and let autovacuum run more often.', format('VACUUM (ANALYZE) %s', rule.name)
        FROM rule JOIN pg_stat_all_tables t ON t.relid = rule.relid
        WHERE t.n_dead_tup > 100000 AND t.n_dead_tup > t.n_live_tup
        UNION ALL
        SELECT 31, 'server', format('Process %s has kept a snapshot since %s: what is removed meanwhile still takes space.', a.pid, a.xact_start),
               'End it if nobody needs it.', format('SELECT pg_terminate_backend(%s)', a.pid)
        FROM pg_stat_activity a
        WHERE a.backend_xmin IS NOT NULL AND a.xact_start < now() - interval '1 hour' AND a.datname = current_database()
          AND a.backend_type = 'client backend' AND EXISTS (SELECT FROM rule)
        UNION ALL
        SELECT 32, 'server', format('Replication slot %s is not in use and keeps %s of write-ahead log.', r.slot_name,
                              pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn))),
               'Drop it if its consumer is gone.', format('SELECT pg_drop_replication_slot(%L)', r.slot_name)
        FROM pg_replication_slots r
        -- A standby has no end of log of its own.
        WHERE NOT r.active AND EXISTS (SELECT FROM rule)
          AND CASE WHEN pg_is_in_recovery() THEN false
                   ELSE pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn) > 1073741824 END)
    SELECT advised.subject, advised.finding, advised.advice, advised.statement FROM advised ORDER BY advised.place, advised.subject;
END;

SET LOCAL search_path = @extschema@, pg_temp;
