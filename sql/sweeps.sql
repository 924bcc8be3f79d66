CREATE PROCEDURE ttl_sweep(table_name regclass DEFAULT NULL, max_rows bigint DEFAULT NULL, max_time interval DEFAULT NULL)
    LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_sweep_wrapper';
