-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;


-- The trigger that binds rules leaves out a rule whose table or column is missing, with a WARNING. Version 3.0.0
-- compared local times in the server's time zone.
INSERT INTO @extschema@.ttl_index_table (schema_name, table_name, column_name, expire_after, active, created_at, updated_at, last_run,
                             batch_size, rows_deleted_last_run, total_rows_deleted, index_name, soft_delete_column,
                             index_created_by_extension, time_zone)
SELECT old.schema_name, old.table_name, old.column_name, make_interval(secs => old.expire_after_seconds), old.active, old.created_at,
       coalesce(old.updated_at, old.created_at), old.last_run, old.batch_size, coalesce(old.rows_deleted_last_run, 0),
       coalesce(old.total_rows_deleted, 0), i.relname, old.soft_delete_column,
       old.index_created_by_extension AND i.relname IS NOT NULL, current_setting('TimeZone')
FROM pg_temp.ttl_rules_of_3 AS old
LEFT JOIN pg_namespace n ON n.nspname = old.schema_name
LEFT JOIN pg_class i ON i.relnamespace = n.oid AND i.relname = old.index_name AND i.relkind IN ('i', 'I')
ORDER BY old.schema_name, old.table_name, old.column_name;
DROP TABLE pg_temp.ttl_rules_of_3;
SELECT @extschema@.ttl_adopt();
-- A recovery into either version holds sweeping.
DELETE FROM @extschema@.ttl_recovery;
SELECT @extschema@.ttl_wake();

SET LOCAL search_path = @extschema@, pg_temp;
