\echo
\echo '--- The extension, and a table of 200,000 sessions, half of them long gone -------'
CREATE EXTENSION pg_ttl_index;
CREATE TABLE sessions (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    username  text NOT NULL,
    last_seen timestamptz NOT NULL DEFAULT now()
);
INSERT INTO sessions (username, last_seen)
SELECT 'user ' || i, now() - interval '1 day' * (i % 2) FROM generate_series(1, 200000) AS i;

\echo
\echo '--- Errors say what is wrong, and change nothing ---------------------------------'
SELECT ttl_create_index('sessions', 'id', 60);
SELECT ttl_create_index('sessions', 'last_seen', -1);
SELECT ttl_create_index('sessions', 'last_seen', 60, filter => 'random() < 0.5');

\echo
\echo '--- One call says how long rows live, and makes the index: paused, to look first --'
SELECT ttl_create_index('sessions', 'last_seen', '30 minutes', batch_size => 4000, active => false);
SELECT relation, expired_rows, plan FROM ttl_preview('sessions');

\echo
\echo '--- It looks right: from now on the worker sweeps --------------------------------'
SELECT ttl_resume('sessions');
