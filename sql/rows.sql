-- Users may create operators and functions in the extension's schema. This script must not find them.
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE FUNCTION @extschema@.ttl_touch_row() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_touch_row';
CREATE FUNCTION @extschema@.ttl_free_key() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'ttl_free_key';

SET LOCAL search_path = @extschema@, pg_temp;
