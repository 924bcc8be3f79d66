CREATE FUNCTION ttl_touch_row() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_touch_row';
CREATE FUNCTION ttl_make_room() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_make_room';
