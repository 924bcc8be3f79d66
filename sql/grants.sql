-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Who may do what. The functions that register rules check ownership of the table themselves, so anyone may call them;
-- the catalog is written only through them.
REVOKE ALL ON FUNCTION @extschema@.ttl_tell_of_drop(), @extschema@.ttl_forget(oid), @extschema@.ttl_wake(), @extschema@.ttl_start_worker(), @extschema@.ttl_stop_worker() FROM PUBLIC;
REVOKE ALL ON FUNCTION @extschema@.ttl_bind(), @extschema@.ttl_take_in(), @extschema@.ttl_adopt() FROM PUBLIC;
REVOKE ALL ON FUNCTION @extschema@.ttl_count_version() FROM PUBLIC;
REVOKE ALL ON FUNCTION @extschema@.ttl_follow_ddl() FROM PUBLIC;
REVOKE ALL ON FUNCTION @extschema@.ttl_attnums(oid, text[]), @extschema@.ttl_ready_index(oid, text, boolean), @extschema@.ttl_on_expire_oid(text),
    @extschema@.ttl_defaults(oid, smallint[]), @extschema@.ttl_default_marks(oid, smallint[]) FROM PUBLIC;

-- Rule definitions are no secret, like those of indexes and constraints, so everybody can dump them. Their status is
-- for roles that may read the table and for pg_monitor; error messages are for the owner and pg_monitor.
GRANT SELECT ON @extschema@.ttl_index_table, @extschema@.ttl_worker_off, @extschema@.ttl_summary, @extschema@.ttl_overview, @extschema@.ttl_history, @extschema@.ttl_progress TO PUBLIC;
GRANT SELECT ON @extschema@.ttl_metrics TO pg_monitor;
-- Everybody can restore them, too: see ttl_take_in.
GRANT INSERT ON @extschema@.ttl_index_table, @extschema@.ttl_worker_off TO PUBLIC;
GRANT SELECT (id, rule_id, schema_name, table_name, column_name, initiator, started_at, finished_at, rows_removed, partitions_removed,
              batches, blocked_rows, locked_rows, wal_bytes, plan, status, error_code, rule_name) ON @extschema@.ttl_history_log TO PUBLIC;
ALTER TABLE @extschema@.ttl_history_log ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable_table ON @extschema@.ttl_history_log FOR SELECT USING (
    pg_has_role('pg_monitor', 'USAGE') OR rule_id = ANY (ARRAY(SELECT rule_id FROM @extschema@.ttl_states())));

-- Shown by \df, \d and \dx+.
COMMENT ON TABLE @extschema@.ttl_index_table IS 'TTL rules as they were registered, and their counters';
COMMENT ON TABLE @extschema@.ttl_binding IS 'what the names in TTL rules stand for in this database';
COMMENT ON TABLE @extschema@.ttl_state IS 'what errors of TTL rules say, and how far their rows are blocked';
COMMENT ON TABLE @extschema@.ttl_history_log IS 'sweeps that did something or failed; see the view ttl_history';
COMMENT ON TABLE @extschema@.ttl_worker_off IS 'has a row while automatic sweeping is switched off';
COMMENT ON TABLE @extschema@.ttl_clock IS 'the clock that sweeps go by';
COMMENT ON TABLE @extschema@.ttl_recovery IS 'point-in-time recoveries that this database has taken note of';
COMMENT ON VIEW @extschema@.ttl_summary IS 'TTL rules that you may see, and how they are doing';
COMMENT ON VIEW @extschema@.ttl_overview IS 'TTL rules that you may see, a line each';
COMMENT ON VIEW @extschema@.ttl_metrics IS 'TTL rules and workers as numbers, for scraping';
COMMENT ON VIEW @extschema@.ttl_history IS 'sweeps that did something or failed';
COMMENT ON VIEW @extschema@.ttl_progress IS 'sweeps under way';
COMMENT ON EVENT TRIGGER ttl_follow_alter IS 'keeps TTL rules in line with their tables';
COMMENT ON EVENT TRIGGER ttl_follow_drop IS 'removes TTL rules with their tables';
DO $$
DECLARE
    described record;
BEGIN
    FOR described IN
        SELECT p.oid::regprocedure AS function, p.prokind, coalesce(c.comment, 'internal to pg_ttl_index') AS comment
        FROM pg_depend d
        JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
        JOIN pg_extension e ON d.refclassid = 'pg_extension'::regclass AND e.oid = d.refobjid AND e.extname = 'pg_ttl_index'
        LEFT JOIN (VALUES
            ('ttl_create_index', 'registers a TTL rule on a column or expression of a table'),
            ('ttl_alter_index', 'changes what is given of a TTL rule'),
            ('ttl_drop_index', 'removes a TTL rule, and its index if the extension made it'),
            ('ttl_pause', 'pauses TTL rules of a table'),
            ('ttl_resume', 'resumes TTL rules of a table'),
            ('ttl_preview', 'tells what the next sweep of a table would do'),
            ('ttl_runner', 'sweeps now, inside the transaction; returns the rows removed'),
            ('ttl_sweep', 'sweeps now, committing every batch'),
            ('ttl_get', 'tells the seconds until a row expires; -1 never, -2 not there'),
            ('ttl_set', 'has a row expire after a time'),
            ('ttl_expire_at', 'has a row expire at an instant'),
            ('ttl_touch', 'restarts the clock of a row'),
            ('ttl_persist', 'has a row never expire'),
            ('ttl_enable_touch', 'has every UPDATE of a row restart its clock'),
            ('ttl_disable_touch', 'has UPDATEs leave the clocks of rows alone'),
            ('ttl_start_worker', 'switches automatic sweeping on in this database'),
            ('ttl_stop_worker', 'switches automatic sweeping off in this database'),
            ('ttl_worker_status', 'shows the workers of all databases'),
            ('ttl_summary', 'TTL rules that you may see, and how they are doing'),
            ('ttl_doctor', 'says what is wrong with TTL rules, and what to do about it'),
            ('ttl_history', 'sweeps that did something or failed'),
            ('ttl_progress', 'sweeps under way'),
            ('ttl_instant', 'reads an instant from text, a number or a uuid'),
            ('ttl_rfc3339', 'writes an instant as RFC 3339 text'))
            AS c (name, comment) ON c.name = p.proname
        WHERE d.deptype = 'e'
    LOOP
        EXECUTE format('COMMENT ON %s %s IS %L', CASE described.prokind WHEN 'p' THEN 'PROCEDURE' ELSE 'FUNCTION' END,
                       described.function, described.comment);
    END LOOP;
END
$$;

-- From now on, this database wants a worker.
SELECT @extschema@.ttl_wake();

SET LOCAL search_path = @extschema@, pg_temp;
