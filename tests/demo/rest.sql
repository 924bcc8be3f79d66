\echo
\echo '--- What was done, and what the rule says now ------------------------------------'
\x on
SELECT table_name, column_name, expire_after, state, next_run, rows_deleted_last_run, total_rows_deleted, index_name
FROM ttl_summary;
SELECT trigger, rows_removed, batches, duration, pg_size_pretty(wal_bytes) AS wal, status FROM ttl_history;
\x off

\echo
\echo '--- A rule follows its table, and a filter its columns ---------------------------'
SELECT ttl_alter_index('sessions', 'last_seen', filter => $$username <> 'admin'$$);
ALTER TABLE sessions RENAME TO web_sessions;
ALTER TABLE web_sessions RENAME COLUMN username TO login;
SELECT table_name, column_name, filter, state FROM ttl_summary;

\echo
\echo '--- A column can hold the instant of expiry itself: this one is 5 seconds away ---'
CREATE TABLE tokens (token text PRIMARY KEY, expires_at timestamptz);
SELECT ttl_create_index('tokens', 'expires_at', 0);
INSERT INTO tokens VALUES ('short-lived', now() + interval '5 seconds'), ('for ever', 'infinity');
TABLE tokens;
