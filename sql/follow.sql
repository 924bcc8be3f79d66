-- Rules follow their tables: names are brought up to date, and rules on what was dropped go with it.
--
-- This is an event trigger in PL/pgSQL so that it works in every session, whether the library is preloaded or not.
-- It runs with the rights of the extension's owner and touches the catalog alone; the one thing that may run user
-- code, reading a filter again, happens as the table's owner in ttl_rename_filter.
CREATE FUNCTION ttl_follow_ddl() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    rule record;
BEGIN
    DELETE FROM @extschema@.ttl_index_table t USING @extschema@.ttl_binding b
    WHERE b.rule_id = t.id
      AND NOT EXISTS (SELECT FROM pg_attribute a
                      WHERE a.attrelid = b.relid AND a.attnum = b.attnum AND NOT a.attisdropped);

    UPDATE @extschema@.ttl_index_table t
    SET schema_name = n.nspname, table_name = c.relname, column_name = a.attname, index_name = i.relname,
        index_created_by_extension = t.index_created_by_extension AND i.relname IS NOT NULL
    FROM @extschema@.ttl_binding b
    JOIN pg_class c ON c.oid = b.relid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = b.relid AND a.attnum = b.attnum
    JOIN @extschema@.ttl_index_table named ON named.id = b.rule_id
    LEFT JOIN pg_class i ON i.oid = @extschema@.ttl_index_oid(b.relid, b.index_relid, named.index_name)
    WHERE t.id = b.rule_id
      AND (t.schema_name, t.table_name, t.column_name, t.index_name)
          IS DISTINCT FROM (n.nspname, c.relname, a.attname, i.relname);

    FOR rule IN
        SELECT t.id, t.filter, t.filter_columns, t.soft_delete_column, b.relid, b.filter_attnums, c.relowner,
               mark.attname AS mark_now, filter_now.names AS filter_columns_now
        FROM @extschema@.ttl_index_table t
        JOIN @extschema@.ttl_binding b ON b.rule_id = t.id
        JOIN pg_class c ON c.oid = b.relid
        LEFT JOIN pg_attribute mark
               ON mark.attrelid = b.relid AND mark.attnum = b.soft_delete_attnum AND NOT mark.attisdropped
        CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(f.attname::text ORDER BY used.position), '{}') AS names
            FROM unnest(b.filter_attnums) WITH ORDINALITY AS used (attnum, position)
            LEFT JOIN pg_attribute f ON f.attrelid = b.relid AND f.attnum = used.attnum AND NOT f.attisdropped
        ) AS filter_now
        WHERE (t.soft_delete_column, t.filter_columns) IS DISTINCT FROM (mark.attname, filter_now.names)
          AND b.faulty_columns IS DISTINCT FROM filter_now.names || mark.attname::text
    LOOP
        BEGIN
            IF rule.soft_delete_column IS NOT NULL AND rule.mark_now IS NULL THEN
                RAISE EXCEPTION 'soft delete column "%" was dropped', rule.soft_delete_column
                    USING ERRCODE = 'undefined_column';
            END IF;
            IF array_position(rule.filter_columns_now, NULL) IS NOT NULL THEN
                RAISE EXCEPTION 'column "%" of the filter was dropped',
                    rule.filter_columns[array_position(rule.filter_columns_now, NULL)]
                    USING ERRCODE = 'undefined_column';
            END IF;
            UPDATE @extschema@.ttl_index_table t
            SET soft_delete_column = rule.mark_now, filter_columns = rule.filter_columns_now,
                filter = @extschema@.ttl_rename_filter(
                    rule.relid, rule.relowner, rule.filter, rule.filter_attnums, rule.filter_columns)
            WHERE t.id = rule.id;
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            UPDATE @extschema@.ttl_binding b SET faulty_columns = rule.filter_columns_now || rule.mark_now::text
            WHERE b.rule_id = rule.id;
            -- The user's DDL goes through; the rule says why it no longer works, and a sweep under way notices.
            UPDATE @extschema@.ttl_index_table t
            SET last_error = SQLERRM, last_error_code = SQLSTATE, last_error_at = now(), version = t.version + 1
            WHERE t.id = rule.id AND (t.last_error, t.last_error_code) IS DISTINCT FROM (SQLERRM, SQLSTATE);
        END;
    END LOOP;
END
$$;

CREATE EVENT TRIGGER ttl_follow_alter ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'ALTER INDEX', 'ALTER SCHEMA', 'ALTER TYPE')
    EXECUTE FUNCTION ttl_follow_ddl();
CREATE EVENT TRIGGER ttl_follow_drop ON sql_drop EXECUTE FUNCTION ttl_follow_ddl();
ALTER EVENT TRIGGER ttl_follow_alter ENABLE ALWAYS;
ALTER EVENT TRIGGER ttl_follow_drop ENABLE ALWAYS;
