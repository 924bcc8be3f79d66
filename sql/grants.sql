-- Who may do what. The functions that register check ownership of the table themselves, so anyone may call them; the
-- catalog is written through them alone.
REVOKE ALL ON FUNCTION ttl_rename_filter(oid, oid, text, smallint[], text[]) FROM PUBLIC;
REVOKE ALL ON FUNCTION ttl_bind() FROM PUBLIC;
REVOKE ALL ON FUNCTION ttl_follow_ddl() FROM PUBLIC;

-- A user sees the rules on tables they own or may read; pg_monitor sees all. pg_dump reads the sequence too.
GRANT SELECT ON ttl_index_table, ttl_index_table_id_seq, ttl_binding, ttl_summary TO PUBLIC;
ALTER TABLE ttl_index_table ENABLE ROW LEVEL SECURITY;
ALTER TABLE ttl_binding ENABLE ROW LEVEL SECURITY;
CREATE POLICY readable_table ON ttl_binding FOR SELECT USING (
    pg_has_role('pg_monitor', 'USAGE')
    OR has_any_column_privilege(relid, 'SELECT')
    OR EXISTS (SELECT FROM pg_class c WHERE c.oid = relid AND pg_has_role(c.relowner, 'USAGE')));
CREATE POLICY readable_table ON ttl_index_table FOR SELECT USING (
    EXISTS (SELECT FROM ttl_binding b WHERE b.rule_id = id));
