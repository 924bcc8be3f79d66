\set ECHO queries
\set VERBOSITY default
\echo
\echo '--- The extension, and a table of sessions --------------------------------------'
CREATE EXTENSION pg_ttl_index;
CREATE TABLE sessions (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    username  text NOT NULL,
    last_seen timestamptz NOT NULL DEFAULT now()
);

\echo
\echo '--- One call says how long its rows live, and makes the index that finds them ---'
SELECT ttl_create_index('sessions', 'last_seen', interval '30 minutes');
\d sessions
\x on
SELECT * FROM ttl_summary;
\x off

\echo
\echo '--- Registering again keeps statistics, and says what changed -------------------'
SELECT ttl_create_index('sessions', 'last_seen', interval '1 month', filter => $$username <> 'admin'$$);
SELECT expire_after, filter, index_name FROM ttl_summary;

\echo
\echo '--- A rule follows its table, and a filter its columns --------------------------'
ALTER TABLE sessions RENAME TO web_sessions;
ALTER TABLE web_sessions RENAME COLUMN username TO login;
SELECT table_name, column_name, filter FROM ttl_summary;

\echo
\echo '--- Pausing and resuming --------------------------------------------------------'
SELECT ttl_pause('web_sessions');
SELECT table_name, active, state FROM ttl_summary;
SELECT ttl_resume('web_sessions');

\echo
\echo '--- Errors say what is wrong, and change nothing --------------------------------'
SELECT ttl_create_index('web_sessions', 'login', 60);
SELECT ttl_create_index('web_sessions', 'last_seen', -1);
SELECT ttl_create_index('web_sessions', 'last_seen', 60, filter => 'random() < 0.5');
SELECT ttl_create_index('pg_class', 'relname', 60);

\echo
\echo '--- Dropping the rule drops the index it made, and nothing else -----------------'
SELECT ttl_drop_index('web_sessions', 'last_seen');
\d web_sessions
