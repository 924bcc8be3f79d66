\echo
\echo '--- What was done, and what the rule says now ------------------------------------'
\x on
SELECT table_name, column_name, expire_after, state, next_run, rows_deleted_last_run, total_rows_deleted, index_name
FROM ttl_summary;
SELECT initiator, rows_removed, batches, duration, pg_size_pretty(wal_bytes) AS wal, status FROM ttl_history;
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

\echo
\echo '--- One row: its seconds, another time to live, and back to never ----------------'
SELECT ttl_get('tokens', 'short-lived') AS short_lived, ttl_get('tokens', 'for ever') AS for_ever, ttl_get('tokens', 'none') AS none;
SELECT ttl_set('tokens', 'for ever', interval '1 hour') AS set, round(ttl_get('tokens', 'for ever')) AS seconds,
       ttl_set('tokens', 'for ever', interval '2 hours', mode => 'nx') AS only_if_never, ttl_persist('tokens', 'for ever') AS never;

\echo
\echo '--- Unix time, RFC 3339 text, a path into jsonb, the time inside a UUID ----------'
CREATE TABLE events (id uuid PRIMARY KEY, body jsonb, expires text, seconds bigint);
SELECT ttl_create_index('events', 'id', interval '90 days'), ttl_create_index('events', 'body->>''until''', 0),
       ttl_create_index('events', 'expires', 0), ttl_create_index('events', 'seconds', 0, unit => 's');
INSERT INTO events SELECT gen_random_uuid(), '{"until": "2100-01-01T00:00:00Z"}', 'whenever', 0 FROM generate_series(1, 3);
SELECT column_name, plan, expired_rows, unreadable_values FROM ttl_preview('events');

\echo
\echo '--- With hide_expired an expired row is invisible at once, and its key is free ---'
CREATE TABLE leases (job text PRIMARY KEY, worker text, until timestamptz NOT NULL);
SELECT ttl_pause('leases') FROM ttl_create_index('leases', 'until', 0, hide_expired => true);
INSERT INTO leases VALUES ('nightly', 'worker 1', now() - interval '1 second');
SELECT count(*) AS visible FROM leases;
SET pg_ttl_index.hide_expired = off;
SELECT count(*) AS behind_the_curtain FROM leases;
RESET pg_ttl_index.hide_expired;
INSERT INTO leases VALUES ('nightly', 'worker 2', now() + interval '1 minute')
    ON CONFLICT (job) DO UPDATE SET worker = leases.worker || ' and ' || excluded.worker;
SELECT job, worker FROM leases;

\echo
\echo '--- Several rules on one column: each class of rows has its own time --------------'
CREATE TABLE logs (id int PRIMARY KEY, at timestamptz, level text);
INSERT INTO logs SELECT i, now() - i * interval '1 day', (ARRAY['debug', 'error'])[1 + i % 2] FROM generate_series(1, 200) AS i;
SELECT ttl_create_index('logs', 'at', '7 days', filter => $$level = 'debug'$$, rule_name => 'debug', active => false),
       ttl_create_index('logs', 'at', '90 days', filter => $$level = 'error'$$, rule_name => 'errors', active => false);
SELECT rule_name, expired_rows FROM ttl_preview('logs');
SELECT ttl_resume('logs') AS rules_resumed, ttl_runner('logs') AS removed;
SELECT level, count(*), max(now() - at)::text AS oldest FROM logs GROUP BY level ORDER BY level;

\echo
\echo '--- Columns expire, and the row stays: personal data is forgotten -----------------'
CREATE TABLE customers (id int PRIMARY KEY, left_at timestamptz, spent numeric, email text, city text DEFAULT 'unknown');
INSERT INTO customers VALUES (1, now() - interval '1 year', 99.5, 'ada@example.com', 'London'), (2, now(), 12, 'bob@example.com', 'Paris');
SELECT ttl_create_index('customers', 'left_at', '30 days', clear_columns => '{email,city}', rule_name => 'forget', active => false);
SELECT ttl_resume('customers') AS rules_resumed, ttl_runner('customers') AS cleared;
SELECT id, spent, email, city FROM customers ORDER BY id;

\echo
\echo '--- A row that cannot go is counted, named, and keeps no other -------------------'
CREATE TABLE accounts (id int PRIMARY KEY, closed_at timestamptz);
CREATE TABLE invoices (account int REFERENCES accounts);
INSERT INTO accounts SELECT i, now() - interval '1 year' FROM generate_series(1, 1000) AS i;
INSERT INTO invoices VALUES (7), (77);
SELECT ttl_pause('accounts') FROM ttl_create_index('accounts', 'closed_at', interval '30 days');
SELECT blockers FROM ttl_preview('accounts');
SELECT ttl_resume('accounts'), ttl_runner('accounts') AS removed;
SELECT table_name, state, blocked_rows, last_error FROM ttl_summary WHERE table_name = 'accounts';

\echo
\echo '--- Whole partitions are dropped, the rest goes by rows, and a preview says so ---'
CREATE TABLE metrics (at timestamptz NOT NULL, value float) PARTITION BY RANGE (at);
CREATE TABLE metrics_2020 PARTITION OF metrics FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');
CREATE TABLE metrics_2021 PARTITION OF metrics FOR VALUES FROM ('2021-01-01') TO ('2022-01-01');
CREATE TABLE metrics_now PARTITION OF metrics FOR VALUES FROM ('2022-01-01') TO ('2100-01-01');
INSERT INTO metrics SELECT '2020-01-01'::timestamptz + i * interval '2 hours', i FROM generate_series(1, 10000) AS i;
SELECT ttl_pause('metrics') FROM ttl_create_index('metrics', 'at', interval '30 days', partition_action => 'drop');
SELECT relation, plan, expired_rows, share, blockers FROM ttl_preview('metrics');
SELECT ttl_resume('metrics');

\echo
\echo '--- Rows can move to an archive, by night, at a pace that you allow --------------'
CREATE TABLE orders (id int PRIMARY KEY, placed_at timestamptz, amount numeric);
CREATE TABLE old_orders (LIKE orders, archived_at timestamptz DEFAULT now());
INSERT INTO orders SELECT i, now() - i * interval '1 month', i * 9.9 FROM generate_series(1, 36) AS i;
SELECT ttl_create_index('orders', 'placed_at', interval '2 years', archive_to => 'old_orders',
                        run_window => '22:00-06:00 Europe/Paris', max_rows_per_second => 1000);
SELECT ttl_runner('orders') AS moved_on_request;
SELECT count(*), min(placed_at)::date AS oldest, sum(amount) FROM old_orders;
SELECT table_name, cleanup_mode, archive_to, run_window, hold FROM ttl_summary WHERE table_name = 'orders';

\echo
\echo '--- A brake: a rule that would take half of its table waits for a word -------------'
ALTER SYSTEM SET pg_ttl_index.max_share_per_run = 0.5;
SELECT pg_reload_conf();
CREATE TABLE carts (id int, at bigint);
INSERT INTO carts SELECT i, extract(epoch FROM now() - i * interval '1 second') * 1000 FROM generate_series(1, 1000) AS i;
\echo 'The unit is wrong: these are milliseconds.'
SELECT ttl_create_index('carts', 'at', '30 days', unit => 'us');
DO $$ BEGIN FOR i IN 1..50 LOOP EXIT WHEN (SELECT state = 'held' FROM ttl_summary WHERE table_name = 'carts'); PERFORM pg_sleep(0.1); END LOOP; END $$;
SELECT finding, statement FROM ttl_doctor() WHERE subject = 'public.carts (at)' \gx
SELECT ttl_alter_index('carts', 'at', unit => 'ms');
SELECT state, (SELECT count(*) FROM carts) AS carts FROM ttl_summary WHERE table_name = 'carts';
ALTER SYSTEM RESET pg_ttl_index.max_share_per_run;
SELECT pg_reload_conf();

\echo
\echo '--- Meanwhile the worker has dropped the partitions ------------------------------'
DO $$ BEGIN FOR i IN 1..50 LOOP EXIT WHEN to_regclass('metrics_2021') IS NULL; PERFORM pg_sleep(0.1); END LOOP; END $$;
SELECT inhrelid::regclass AS partition FROM pg_inherits WHERE inhparent = 'metrics'::regclass;

\echo
\echo '--- All rules, a line each --------------------------------------------------------'
SELECT table_name, rule_name, ttl, action, state, removed FROM ttl_overview;
