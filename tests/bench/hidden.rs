//! Hiding expired rows, beside the same condition written by hand, and queries that have nothing to do with it.

use crate::report::{part, say};
use crate::{cpu_seconds, latency, side_by_side};
use harness::{Server, Session};

const ROWS: u32 = 100_000;

pub fn run(server: &Server) {
    part("Hiding", "```");
    // The same tables with and without the library.
    let without = Server::start(&["shared_buffers=1GB", "autovacuum=off", "synchronous_commit=off"]);
    for server in [server, &without] {
        let mut session = Session::connect(server, "postgres", "postgres");
        session.run(&format!(
            "DROP TABLE IF EXISTS other; CREATE TABLE other (id int PRIMARY KEY, n int); INSERT INTO other SELECT i FROM generate_series(1, {ROWS}) i"
        ));
        session.run("VACUUM ANALYZE other");
    }
    let mut session = Session::connect(server, "postgres", "postgres");
    for table in ["by_hand", "hidden"] {
        session.run(&format!(
            "DROP TABLE IF EXISTS {table}; CREATE TABLE {table} (id int PRIMARY KEY, at timestamptz NOT NULL, n int);
             INSERT INTO {table} SELECT i, now() + (i - {ROWS} / 2) * interval '1 minute', i FROM generate_series(1, {ROWS}) i;
             CREATE INDEX ON {table} (at)"
        ));
    }
    session.run("SELECT ttl_create_index('hidden', 'at', interval '1 hour', hide_expired => true)");
    session.run("VACUUM ANALYZE");
    say("\nQueries of a table without hidden rows: milliseconds a query by pgbench, one client.\n");
    say(format!("{:<34}{:>14}{:>22}", "", "simple protocol", "prepared statement"));
    side_by_side(
        ["without the library", "with it, and a rule that hides"],
        ["simple", "prepared"].map(|protocol| {
            let without = &without;
            move || {
                [without, server].map(|server| latency(server, protocol, "SELECT n FROM other WHERE id = :id", 10_000))
            }
        }),
        "ms",
    );
    let live = "at > statement_timestamp() - interval '1 hour'";
    for (name, by_hand, hidden, count) in [
        (
            "by primary key",
            format!("SELECT n FROM by_hand WHERE id = :id AND {live}"),
            "SELECT n FROM hidden WHERE id = :id",
            20_000,
        ),
        (
            "100 rows by the index on the column",
            format!(
                "SELECT sum(n) FROM by_hand WHERE at < now() - interval '1 hour' + interval '100 minutes' AND {live}"
            ),
            "SELECT sum(n) FROM hidden WHERE at < now() - interval '1 hour' + interval '100 minutes'",
            3_000,
        ),
        ("all rows", format!("SELECT sum(n) FROM by_hand WHERE {live}"), "SELECT sum(n) FROM hidden", 50),
    ] {
        say(format!("\nLive rows {name}, of {ROWS}, half of them expired.\n"));
        say(format!("{:<34}{:>14}{:>22}", "", "simple protocol", "prepared statement"));
        let queries = [by_hand, hidden.to_owned()];
        side_by_side(
            ["condition by hand", "hide_expired"],
            ["simple", "prepared"].map(|protocol| {
                let queries = &queries;
                move || [0, 1].map(|which| latency(server, protocol, &queries[which], count))
            }),
            "ms",
        );
    }
    say("```");
}

/// What it costs to look for hidden rows with the keys of new ones, where there are none.
pub fn writes(server: &Server) {
    part("Freeing keys", "```");
    let tables = ["seen", "unseen"];
    let mut session = Session::connect(server, "postgres", "postgres");
    for (table, hides) in tables.into_iter().zip([false, true]) {
        session.run(&format!(
            "DROP TABLE IF EXISTS {table};
             CREATE TABLE {table} (id int PRIMARY KEY, token text UNIQUE, at timestamptz NOT NULL DEFAULT now(), n int);
             SELECT ttl_create_index('{table}', 'at', interval '1 hour', hide_expired => {hides})"
        ));
    }
    let rows = format!("SELECT i, md5(i::text) FROM generate_series(1, {ROWS}) i");
    session.run(&format!("COPY ({rows}) TO '/tmp/pg_ttl_index_bench.copy'"));
    say(format!("\n{ROWS} new rows in a table with two unique indexes: CPU seconds of the backend.\n"));
    say(format!("{:<34}{:>14}{:>22}", "", "INSERT", "COPY"));
    let statements =
        ["INSERT INTO {table} (id, token) {rows}", "COPY {table} (id, token) FROM '/tmp/pg_ttl_index_bench.copy'"];
    side_by_side(
        ["without hide_expired", "hide_expired"],
        statements.map(|statement| {
            let rows = &rows;
            move || {
                tables.map(|table| {
                    let mut session = Session::connect(server, "postgres", "postgres");
                    let pid = session.get("SELECT pg_backend_pid()");
                    session.run(&format!("TRUNCATE {table}; CHECKPOINT"));
                    let before = cpu_seconds(&pid);
                    session.run(&statement.replace("{table}", table).replace("{rows}", rows));
                    cpu_seconds(&pid) - before
                })
            }
        }),
        "s",
    );
    session.run("DROP TABLE seen, unseen");
    let _ = std::fs::remove_file("/tmp/pg_ttl_index_bench.copy");
    say("```");
}
