CREATE FUNCTION ttl_touch_row() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_touch_row';
CREATE FUNCTION ttl_free_key() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_free_key';
