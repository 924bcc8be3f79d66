CREATE FUNCTION ttl_touch_row() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_touch_row';
