-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Rules follow their tables: rules written into the catalog are bound to objects, and DDL brings names up to date.
--
-- All of it is written in Rust and finds the extension's tables by itself, so that their schema can be renamed. It
-- works in every session, whether the library is preloaded or not.
CREATE TRIGGER ttl_count_version
    BEFORE UPDATE OF schema_name, table_name, column_name, rule_name, expire_after, active, batch_size, soft_delete_column, clear_columns, filter,
                     filter_columns, expression_columns, expression_type, time_zone, unit, index_method, "concurrently",
                     hide_expired, purge_after, archive_to, on_expire, notify_channel, emit_message, partition_action, run_every, run_window,
                     max_rows_per_second, max_rows_per_run, index_name
    ON @extschema@.ttl_index_table FOR EACH ROW EXECUTE FUNCTION @extschema@.ttl_count_version();
ALTER TABLE @extschema@.ttl_index_table ENABLE ALWAYS TRIGGER ttl_count_version;

CREATE TRIGGER ttl_tell_of_drop
    BEFORE DELETE ON @extschema@.ttl_index_table FOR EACH ROW EXECUTE FUNCTION @extschema@.ttl_tell_of_drop();
ALTER TABLE @extschema@.ttl_index_table ENABLE ALWAYS TRIGGER ttl_tell_of_drop;

-- Any user may insert rules, for a restore. Rules from users without rights here each pass the checks of a
-- registration.
CREATE TRIGGER ttl_take_in
    BEFORE INSERT ON @extschema@.ttl_index_table FOR EACH ROW EXECUTE FUNCTION @extschema@.ttl_take_in();
ALTER TABLE @extschema@.ttl_index_table ENABLE ALWAYS TRIGGER ttl_take_in;
CREATE TRIGGER ttl_take_in
    BEFORE INSERT ON @extschema@.ttl_worker_off FOR EACH ROW EXECUTE FUNCTION @extschema@.ttl_take_in();
ALTER TABLE @extschema@.ttl_worker_off ENABLE ALWAYS TRIGGER ttl_take_in;

CREATE TRIGGER ttl_bind
    AFTER INSERT OR UPDATE OF schema_name, table_name, column_name, rule_name, soft_delete_column, clear_columns, filter_columns,
                              expression_columns, index_name, archive_to, on_expire
    ON @extschema@.ttl_index_table FOR EACH ROW EXECUTE FUNCTION @extschema@.ttl_bind();
ALTER TABLE @extschema@.ttl_index_table ENABLE ALWAYS TRIGGER ttl_bind;

CREATE FUNCTION @extschema@.ttl_follow_ddl() RETURNS event_trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_follow_ddl';

CREATE EVENT TRIGGER ttl_follow_alter ON ddl_command_end
    -- ALTER VIEW and the like rename tables, too. CREATE TABLE and CREATE SCHEMA may add foreign keys to other tables.
    WHEN TAG IN ('ALTER TABLE', 'ALTER VIEW', 'ALTER MATERIALIZED VIEW', 'ALTER FOREIGN TABLE', 'ALTER INDEX',
                 'CREATE INDEX', 'ALTER SCHEMA', 'ALTER TYPE', 'ALTER DOMAIN', 'ALTER FUNCTION', 'ALTER ROUTINE',
                 'ALTER PROCEDURE', 'ALTER OPERATOR', 'ALTER EXTENSION', 'CREATE FUNCTION', 'CREATE TABLE', 'CREATE SCHEMA',
                 'CREATE TRIGGER', 'CREATE RULE')
    EXECUTE FUNCTION @extschema@.ttl_follow_ddl();
CREATE EVENT TRIGGER ttl_follow_drop ON sql_drop EXECUTE FUNCTION @extschema@.ttl_follow_ddl();
ALTER EVENT TRIGGER ttl_follow_alter ENABLE ALWAYS;
ALTER EVENT TRIGGER ttl_follow_drop ENABLE ALWAYS;

SET LOCAL search_path = @extschema@, pg_temp;
