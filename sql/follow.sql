-- Rules follow their tables: names are brought up to date, and rules on what was dropped go with it.
--
-- This is an event trigger in PL/pgSQL so that it works in every session, whether the library is preloaded or not.
-- It runs with the rights of the extension's owner and touches the catalog alone; the one thing that may run user
-- code, reading an expression again, happens as the table's owner in ttl_rename_columns.
CREATE FUNCTION ttl_follow_ddl() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    rule record;
    names_now text[];
BEGIN
    DELETE FROM @extschema@.ttl_index_table t USING @extschema@.ttl_binding b
    WHERE b.rule_id = t.id
      AND EXISTS (SELECT FROM unnest(b.expression_attnums || b.attnum) AS used (attnum)
                  WHERE used.attnum IS NOT NULL
                    AND NOT EXISTS (SELECT FROM pg_attribute a
                                    WHERE a.attrelid = b.relid AND a.attnum = used.attnum AND NOT a.attisdropped));

    -- Another object may come to have the identifier of one that was dropped.
    UPDATE @extschema@.ttl_binding b
    SET archive_relid = (SELECT oid FROM pg_class WHERE oid = b.archive_relid), hook = (SELECT oid FROM pg_proc WHERE oid = b.hook)
    WHERE NOT EXISTS (SELECT FROM pg_class WHERE oid = b.archive_relid) AND b.archive_relid IS NOT NULL
       OR NOT EXISTS (SELECT FROM pg_proc WHERE oid = b.hook) AND b.hook IS NOT NULL;

    -- A restored rule comes before its index, and is bound to it when that comes.
    UPDATE @extschema@.ttl_binding b
    SET index_relid = @extschema@.ttl_ready_index(b.relid, t.index_name, t.concurrently)
    FROM @extschema@.ttl_index_table t
    WHERE t.id = b.rule_id AND b.index_relid IS NULL AND t.index_name IS NOT NULL
      AND @extschema@.ttl_ready_index(b.relid, t.index_name, t.concurrently) IS NOT NULL;

    UPDATE @extschema@.ttl_index_table t
    SET schema_name = now.schema_name, table_name = now.table_name, column_name = now.column_name,
        index_name = now.index_name, archive_to = now.archive_to, on_expire = now.on_expire,
        index_created_by_extension = t.index_created_by_extension AND now.index_name IS NOT NULL
    FROM (SELECT b.rule_id, n.nspname::text AS schema_name, c.relname::text AS table_name,
                 coalesce(a.attname::text, named.column_name) AS column_name,
                 CASE WHEN b.index_relid IS NULL THEN named.index_name ELSE i.relname::text END AS index_name,
                 coalesce(archive.name, named.archive_to) AS archive_to, coalesce(hook.name, named.on_expire) AS on_expire
          FROM @extschema@.ttl_binding b
          JOIN @extschema@.ttl_index_table named ON named.id = b.rule_id
          JOIN pg_class c ON c.oid = b.relid
          JOIN pg_namespace n ON n.oid = c.relnamespace
          LEFT JOIN pg_attribute a ON a.attrelid = b.relid AND a.attnum = b.attnum
          LEFT JOIN pg_class i ON i.oid = @extschema@.ttl_index_oid(b.relid, b.index_relid, named.index_name)
          LEFT JOIN LATERAL (SELECT format('%I.%I', s.nspname, k.relname) AS name
                             FROM pg_class k JOIN pg_namespace s ON s.oid = k.relnamespace
                             WHERE k.oid = b.archive_relid) AS archive ON true
          LEFT JOIN LATERAL (SELECT format('%I.%I', s.nspname, p.proname) AS name
                             FROM pg_proc p JOIN pg_namespace s ON s.oid = p.pronamespace
                             WHERE p.oid = b.hook) AS hook ON true) AS now
    WHERE t.id = now.rule_id
      AND (t.schema_name, t.table_name, t.column_name, t.index_name, t.archive_to, t.on_expire)
          IS DISTINCT FROM (now.schema_name, now.table_name, now.column_name, now.index_name, now.archive_to, now.on_expire);

    FOR rule IN
        SELECT t.id, t.filter, t.filter_columns, t.soft_delete_column, t.column_name, t.expression_columns,
               b.relid, b.filter_attnums, b.expression_attnums, b.faulty_columns, c.relowner,
               mark.attname AS mark_now, @extschema@.ttl_attnames(b.relid, b.filter_attnums) AS filter_columns_now,
               @extschema@.ttl_attnames(b.relid, b.expression_attnums) AS expression_columns_now
        FROM @extschema@.ttl_index_table t
        JOIN @extschema@.ttl_binding b ON b.rule_id = t.id
        JOIN pg_class c ON c.oid = b.relid
        LEFT JOIN pg_attribute mark
               ON mark.attrelid = b.relid AND mark.attnum = b.soft_delete_attnum AND NOT mark.attisdropped
    LOOP
        names_now := rule.filter_columns_now || rule.expression_columns_now || rule.mark_now::text;
        CONTINUE WHEN (rule.soft_delete_column, rule.filter_columns, rule.expression_columns)
                      IS NOT DISTINCT FROM (rule.mark_now, rule.filter_columns_now, rule.expression_columns_now)
                   OR rule.faulty_columns IS NOT DISTINCT FROM names_now;
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
                expression_columns = rule.expression_columns_now,
                filter = @extschema@.ttl_rename_columns(
                    rule.relid, rule.relowner, rule.filter, rule.filter_attnums, rule.filter_columns),
                column_name = coalesce(@extschema@.ttl_rename_columns(
                    rule.relid, rule.relowner, rule.column_name, rule.expression_attnums, rule.expression_columns),
                    rule.column_name)
            WHERE t.id = rule.id;
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            UPDATE @extschema@.ttl_binding b SET faulty_columns = names_now
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
    -- ALTER VIEW and its kind rename tables, too.
    WHEN TAG IN ('ALTER TABLE', 'ALTER VIEW', 'ALTER MATERIALIZED VIEW', 'ALTER FOREIGN TABLE', 'ALTER INDEX',
                 'CREATE INDEX', 'ALTER SCHEMA', 'ALTER TYPE', 'ALTER FUNCTION', 'ALTER ROUTINE')
    EXECUTE FUNCTION ttl_follow_ddl();
CREATE EVENT TRIGGER ttl_follow_drop ON sql_drop EXECUTE FUNCTION ttl_follow_ddl();
ALTER EVENT TRIGGER ttl_follow_alter ENABLE ALWAYS;
ALTER EVENT TRIGGER ttl_follow_drop ENABLE ALWAYS;
