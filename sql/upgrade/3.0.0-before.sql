-- Upgrades from the C extension 3.0.0: sets its rules aside, drops its objects, and creates those of this version.
-- `make schema` writes this script.
CREATE TEMPORARY TABLE ttl_rules_of_3 AS SELECT * FROM @extschema@.ttl_index_table;
DROP FUNCTION @extschema@.ttl_create_index(text, text, integer, integer, text);
DROP FUNCTION @extschema@.ttl_drop_index(text, text);
DROP FUNCTION @extschema@.ttl_runner();
DROP FUNCTION @extschema@.ttl_start_worker();
DROP FUNCTION @extschema@.ttl_stop_worker();
DROP FUNCTION @extschema@.ttl_worker_status();
DROP FUNCTION @extschema@.ttl_summary();
DROP TABLE @extschema@.ttl_index_table;

