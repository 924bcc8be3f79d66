//! Tables with rules, sessions that write to them, and a ledger of the fate of every row.
//!
//! A transaction that changes a row writes the row's expiry into the ledger, too, while it holds the row's lock. So the
//! ledger knows at any moment which rows must be there.

use harness::{Random, Session};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The tables, and the rule on each. All have the columns `id`, `at`, `n` and `other`, by name and not always in this order.
pub const TABLES: [(&str, &str, &str); 5] = [
    ("plain", "CREATE TABLE plain ($columns)", ", batch_size => 50"),
    ("blocks", "CREATE TABLE blocks ($columns)", ", index_method => 'brin', run_every => '1 second'"),
    (
        "moved",
        "CREATE TABLE moved ($columns); CREATE TABLE archive (LIKE moved);
         CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $f$ BEGIN RETURN OLD; END $f$;
         CREATE TRIGGER watch BEFORE DELETE ON moved FOR EACH ROW EXECUTE FUNCTION watch()",
        ", archive_to => 'archive', batch_size => 20",
    ),
    ("hidden", "CREATE TABLE hidden ($columns)", ", hide_expired => true"),
    (
        "parts",
        "CREATE TABLE parts ($columns) PARTITION BY HASH (id);
         CREATE TABLE parts_0 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE parts_1 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "",
    ),
];

/// By `other`, every row has expired: whoever takes it for `at` loses live rows.
const COLUMNS: &str = "id bigint PRIMARY KEY, at timestamptz, n int, other timestamptz DEFAULT '2020-01-01'";

/// How long the sweepers have to remove everything that has expired, once all is quiet.
pub const SOON: Duration = Duration::from_secs(60);

/// Makes the tables, and what the checks need.
pub fn set_up(session: &mut Session) {
    session.run(
        "CREATE EXTENSION pg_ttl_index; CREATE EXTENSION amcheck; CREATE SCHEMA elsewhere; CREATE SEQUENCE ids START 1000;
         CREATE TABLE ledger (kind text, id bigint, at timestamptz, PRIMARY KEY (kind, id));
         CREATE TABLE counted (kind text, rows bigint)",
    );
    for (_, table, _) in TABLES {
        session.run(&table.replace("$columns", COLUMNS));
    }
    registrations().iter().for_each(|sql| session.run(sql));
}

/// Makes all rules, as they should be.
pub fn registrations() -> Vec<String> {
    let register = |(table, _, options)| format!("SELECT ttl_create_index('{table}', 'at', 0{options})");
    TABLES.into_iter().map(register).collect()
}

/// A statement that drops the rule of a table on this column, and keeps what the rule has counted.
pub fn forget(table: &str, column: &str) -> String {
    format!(
        "INSERT INTO counted SELECT table_name, total_rows_deleted FROM ttl_index_table WHERE table_name = '{table}' FOR UPDATE;
         PERFORM ttl_drop_index('{table}', '{column}')"
    )
}

/// Rows of a table that are in the ledger and gone.
pub fn gone(table: &str) -> String {
    format!(
        "(SELECT count(*) FROM ledger l WHERE kind = '{table}' AND NOT EXISTS (SELECT FROM {table} t WHERE t.id = l.id))"
    )
}

/// Waits until a query has this result, or notes that it has not.
pub fn expect(session: &mut Session, faults: &mut Vec<String>, what: &str, sql: &str, expected: &str) {
    let deadline = Instant::now() + SOON;
    loop {
        let result = session.try_get(sql);
        if result.as_deref() == Ok(expected) {
            return;
        }
        if Instant::now() > deadline {
            faults.push(format!("{what}: {result:?}, not {expected}"));
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Compares the tables with the ledger, once all that has expired is gone. Nobody writes meanwhile.
pub fn check(session: &mut Session, faults: &mut Vec<String>) {
    session.run("SET pg_ttl_index.hide_expired = off");
    // These must hold at any moment. What expires just now may go.
    let later = "now() + interval '1 second'";
    let mut at_once = |what: String, sql: String| match session.try_get(&sql).as_deref() {
        Ok("0") => {}
        other => faults.push(format!("{what}: {other:?}")),
    };
    for (table, ..) in TABLES {
        let live = format!("t.id = l.id AND t.at = l.at AND l.kind = '{table}'");
        at_once(
            format!("{table}: live rows that are lost"),
            format!(
                "SELECT count(*) FROM ledger l WHERE l.kind = '{table}' AND l.at > {later} AND NOT EXISTS (SELECT FROM {table} t WHERE {live})"
            ),
        );
        at_once(
            format!("{table}: rows that nobody has written"),
            format!(
                "SELECT count(*) FROM {table} t WHERE t.at > {later} AND NOT EXISTS (SELECT FROM ledger l WHERE {live})"
            ),
        );
    }
    at_once(
        "live rows in the archive".into(),
        "SELECT count(*) FROM archive a JOIN ledger l ON l.kind = 'moved' AND l.id = a.id WHERE l.at > now()".into(),
    );
    let mut expect = |what: &str, sql: &str, expected: &str| expect(session, faults, what, sql, expected);
    for (table, ..) in TABLES {
        expect(
            &format!("{table}: expired rows that are left"),
            &format!("SELECT count(*) FROM {table} WHERE at <= now()"),
            "0",
        );
        // Writers free keys of hidden rows, too.
        if table != "hidden" {
            let counters = format!(
                "SELECT (SELECT total_rows_deleted FROM ttl_index_table WHERE table_name = '{table}')
                      + (SELECT coalesce(sum(rows), 0) FROM counted WHERE kind = '{table}') - {}",
                gone(table)
            );
            expect(&format!("{table}: rows counted beside those that are gone"), &counters, "0");
        }
    }
    let missing = "SELECT count(*) FROM ledger l WHERE kind = 'moved' AND at <= now() - interval '1 second' AND NOT EXISTS (SELECT FROM archive a WHERE a.id = l.id)";
    expect("rows that are neither in the table nor in the archive", missing, "0");
    expect("rows that are in the archive twice", "SELECT count(*) - count(DISTINCT id) FROM archive", "0");
    expect(
        "broken relations",
        "SELECT count(*) FROM pg_class c CROSS JOIN LATERAL verify_heapam(c.oid) WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace",
        "0",
    );
    expect(
        "broken indexes",
        "SELECT count(*) FILTER (WHERE bt_index_check(i.indexrelid, true) IS NULL) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
         WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'i' AND i.indisvalid AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')",
        "0",
    );
    expect("rules that do not sweep", "SELECT count(*) FROM ttl_summary WHERE state <> 'active'", "0");
    expect("rules", "SELECT count(*) FROM ttl_summary", &TABLES.len().to_string());
    expect("locks that are left", "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", "0");
    let workers =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres' AND backend_type LIKE 'pg_ttl_index%'
                   AND application_name = 'pg_ttl_index worker'";
    expect("workers of the database", workers, "1");
    session.run("RESET pg_ttl_index.hide_expired");
}

/// Notes what a log should not have.
pub fn check_log(log: &str, faults: &mut Vec<String>) {
    for sign in ["TRAP:", "XX000", "panicked at", "PANIC:"] {
        if let Some(line) = log.lines().find(|line| line.contains(sign)) {
            faults.push(format!("in the log: {line}"));
        }
    }
}

/// Sessions that write.
pub struct Load {
    shared: Arc<Shared>,
    writers: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    pause: Duration,
    is_over: AtomicBool,
    written: AtomicU64,
    faults: Mutex<Vec<String>>,
}

impl Load {
    /// So many writers to the server whose socket is here.
    pub fn start(writers: u64, random: &mut Random, host: &Path) -> Self {
        Self::start_slow(writers, Duration::ZERO, random, host)
    }

    /// The same, with a pause after each transaction.
    pub fn start_slow(writers: u64, pause: Duration, random: &mut Random, host: &Path) -> Self {
        let shared = Arc::new(Shared { pause, ..Shared::default() });
        let writers = (0..writers)
            .map(|_| {
                let (shared, seed, host) = (Arc::clone(&shared), random.below(u64::MAX), host.to_owned());
                std::thread::spawn(move || write(&shared, &mut Random(seed), &host))
            })
            .collect();
        Self { shared, writers }
    }

    /// Ends the load, and returns how many transactions it has done.
    pub fn stop(self, faults: &mut Vec<String>) -> u64 {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
        faults.append(&mut self.shared.faults.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.written.load(Ordering::Relaxed)
    }
}

/// Writes until the load is over, in new sessions as long as the server ends them.
fn write(shared: &Shared, random: &mut Random, host: &Path) {
    let mut session = None;
    while !shared.is_over.load(Ordering::Relaxed) {
        let Some(open) = session.as_mut() else {
            session = Session::connect_to(host, "postgres", "postgres").ok();
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        match Session::ask(open, &statement(random)) {
            Some(Ok(_)) => {
                shared.written.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(shared.pause);
            }
            // DDL comes in between.
            Some(Err(error)) if error.code.starts_with("XX") => {
                shared.faults.lock().unwrap_or_else(PoisonError::into_inner).push(format!("a writer: {error:?}"));
            }
            Some(Err(_)) => {}
            None => session = None,
        }
    }
}

/// One transaction that changes rows and the ledger.
fn statement(random: &mut Random) -> String {
    let (table, ..) = random.pick(&TABLES);
    let at = random.pick(&[
        "'infinity'",
        "now() + interval '1 hour'",
        "now() + random() * interval '2 seconds'",
        "now() + interval '20 ms'",
    ]);
    // Rows of late, which may be about to expire, or any.
    let id = match random.below(3) {
        0 => "(SELECT 1000 + floor(random() * (last_value - 999))::bigint FROM ids)",
        _ => "(SELECT greatest(1000, last_value - floor(random() * 200)::bigint) FROM ids)",
    };
    let noted = |changed: &str| {
        format!(
            "{changed} UPDATE ledger l SET at = changed.at FROM changed WHERE l.kind = '{table}' AND l.id = changed.id"
        )
    };
    let call = |call: &str| {
        format!(
            "CREATE TEMP TABLE IF NOT EXISTS chosen (id bigint); TRUNCATE chosen; INSERT INTO chosen SELECT {id};
             SELECT {call} FROM chosen;
             WITH changed AS MATERIALIZED (SELECT id, at FROM {table} WHERE id = (SELECT id FROM chosen) FOR UPDATE)
             UPDATE ledger l SET at = changed.at FROM changed WHERE l.kind = '{table}' AND l.id = changed.id"
        )
    };
    match random.below(8) {
        0..=2 => format!(
            "WITH new AS (INSERT INTO {table} (id, at, n) SELECT nextval('ids'), {at}, 0 FROM generate_series(1, 5) RETURNING id, at)
             INSERT INTO ledger SELECT '{table}', id, at FROM new"
        ),
        3 => noted(&format!("WITH changed AS (UPDATE {table} SET at = {at}, n = n + 1 WHERE id = {id} RETURNING id, at)")),
        4 => format!(
            "WITH gone AS (DELETE FROM {table} WHERE id = {id} RETURNING id)
             DELETE FROM ledger l USING gone WHERE l.kind = '{table}' AND l.id = gone.id"
        ),
        5 => call(&format!("ttl_set('{table}', id, interval '1 second')")),
        6 => call(&format!("ttl_persist('{table}', id)")),
        _ => format!(
            "WITH new AS (INSERT INTO hidden (id, at, n) SELECT {}, {at}, 0 ON CONFLICT (id) DO UPDATE SET at = excluded.at RETURNING id, at)
             INSERT INTO ledger SELECT 'hidden', id, at FROM new ON CONFLICT (kind, id) DO UPDATE SET at = excluded.at",
            random.below(50)
        ),
    }
}
