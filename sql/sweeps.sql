-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE PROCEDURE @extschema@.ttl_sweep(table_name regclass DEFAULT NULL, max_rows bigint DEFAULT NULL, max_time interval DEFAULT NULL)
    LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_sweep_wrapper';

SET LOCAL search_path = @extschema@, pg_temp;
