-- Who may do what. The functions that register check ownership of the table themselves, so anyone may call them; the
-- catalog is written through them alone.
REVOKE ALL ON FUNCTION ttl_tell_of_drop(), ttl_forget(oid), ttl_wake(), ttl_start_worker(), ttl_stop_worker() FROM PUBLIC;
REVOKE ALL ON FUNCTION ttl_bind(), ttl_adopt() FROM PUBLIC;
REVOKE ALL ON FUNCTION ttl_count_version() FROM PUBLIC;
REVOKE ALL ON FUNCTION ttl_follow_ddl() FROM PUBLIC;
REVOKE ALL ON FUNCTION ttl_attnums(oid, text[]), ttl_ready_index(oid, text, boolean), ttl_hook(text)
    FROM PUBLIC;

-- A user sees the rules on tables they own or may read; pg_monitor sees all. pg_dump reads all of this.
GRANT SELECT ON ttl_index_table, ttl_index_table_id_seq, ttl_binding, ttl_worker_off, ttl_summary,
    ttl_history_log, ttl_history, ttl_progress TO PUBLIC;
ALTER TABLE ttl_index_table ENABLE ROW LEVEL SECURITY;
ALTER TABLE ttl_binding ENABLE ROW LEVEL SECURITY;
ALTER TABLE ttl_history_log ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable_table ON ttl_binding FOR SELECT USING (
    pg_has_role('pg_monitor', 'USAGE')
    OR has_any_column_privilege(relid, 'SELECT')
    OR EXISTS (SELECT FROM pg_class c WHERE c.oid = relid AND pg_has_role(c.relowner, 'USAGE')));
CREATE POLICY readable_table ON ttl_index_table FOR SELECT USING (
    EXISTS (SELECT FROM ttl_binding b WHERE b.rule_id = id));
CREATE POLICY readable_table ON ttl_history_log FOR SELECT USING (
    pg_has_role('pg_monitor', 'USAGE') OR EXISTS (SELECT FROM ttl_binding b WHERE b.rule_id = ttl_history_log.rule_id));

-- A worker is wanted from now on.
SELECT ttl_wake();
