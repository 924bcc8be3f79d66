//! A ledger of rows with known fates, kept under load, while processes die and everything around the rows changes.
//!
//! A transaction that changes a row writes the row's expiry into the ledger, too, while it holds the row's lock. So the
//! ledger knows at any moment which rows must be there.

use super::{Trial, server};
use harness::{Random, Server, Session};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The tables, and the rule on each. All have the columns `id`, `at` and `n`.
const TABLES: [(&str, &str, &str); 5] = [
    ("plain", "CREATE TABLE plain (id bigint PRIMARY KEY, at timestamptz, n int)", ", batch_size => 50"),
    (
        "blocks",
        "CREATE TABLE blocks (id bigint PRIMARY KEY, at timestamptz, n int)",
        ", index_method => 'brin', run_every => '1 second'",
    ),
    (
        "moved",
        "CREATE TABLE moved (id bigint PRIMARY KEY, at timestamptz, n int); CREATE TABLE archive (LIKE moved);
         CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
         CREATE TRIGGER watch BEFORE DELETE ON moved FOR EACH ROW EXECUTE FUNCTION watch()",
        ", archive_to => 'archive', batch_size => 20",
    ),
    ("hidden", "CREATE TABLE hidden (id bigint PRIMARY KEY, at timestamptz, n int)", ", hide_expired => true"),
    (
        "parts",
        "CREATE TABLE parts (id bigint PRIMARY KEY, at timestamptz, n int) PARTITION BY HASH (id);
         CREATE TABLE parts_0 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE parts_1 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "",
    ),
];

/// How many sessions write.
const WRITERS: u64 = 4;

/// How long the sweepers have to remove everything that has expired, once all is quiet.
const SOON: Duration = Duration::from_secs(60);

type Event = (&'static str, fn(&mut Chaos));

/// What happens to the database meanwhile. Whatever it breaks for the writers is mended by the same event.
const EVENTS: [Event; 24] = [
    ("kill -9 of a worker or helper", |it| {
        it.kill_one("backend_type LIKE 'pg_ttl_index%' AND backend_type NOT LIKE '%launcher'")
    }),
    ("kill -9 of the launcher", |it| it.kill_one("backend_type LIKE 'pg_ttl_index%launcher'")),
    ("kill -9 of a backend", |it| it.kill_one("backend_type = 'client backend' AND pid <> pg_backend_pid()")),
    ("kill -9 of the postmaster", |it| it.restart("-KILL")),
    ("immediate shutdown", |it| it.restart("-QUIT")),
    ("fast shutdown", |it| it.restart("-INT")),
    ("termination of workers", |it| it.run("SELECT pg_terminate_backend(worker_pid) FROM ttl_worker_status()")),
    ("cancels of workers", |it| {
        (0..20).for_each(|_| it.run("SELECT pg_cancel_backend(worker_pid) FROM ttl_worker_status()"))
    }),
    ("reloads", |it| (0..30).for_each(|_| it.run("SELECT pg_reload_conf()"))),
    ("stop and start of sweeping", |it| {
        it.run("SELECT ttl_stop_worker(); SELECT pg_sleep(0.1); SELECT ttl_start_worker()")
    }),
    ("pause and resume", |it| it.run_on("SELECT ttl_pause('$t'); SELECT pg_sleep(0.1); SELECT ttl_resume('$t')")),
    ("a rule altered", |it| it.run_on("SELECT ttl_alter_index('$t', 'at', batch_size => 7 + (random() * 100)::int)")),
    ("a rule dropped and made again", |it| {
        it.run_on("SELECT ttl_drop_index('$t', 'at')");
        it.register();
    }),
    ("a column added and dropped", |it| {
        it.run_on("ALTER TABLE $t ADD extra text DEFAULT 'x'; ALTER TABLE $t DROP extra")
    }),
    ("a column renamed and back", |it| {
        it.run_on("ALTER TABLE $t RENAME at TO until; SELECT pg_sleep(0.02); ALTER TABLE $t RENAME until TO at")
    }),
    ("a table renamed and back", |it| {
        it.run_on("ALTER TABLE $t RENAME TO other; SELECT pg_sleep(0.02); ALTER TABLE other RENAME TO $t")
    }),
    ("a schema moved and back", |it| {
        it.run_on("ALTER TABLE $t SET SCHEMA elsewhere; ALTER TABLE elsewhere.$t SET SCHEMA public")
    }),
    ("VACUUM FULL", |it| it.run_on("VACUUM FULL $t")),
    ("CLUSTER", |it| it.run("CLUSTER plain USING plain_pkey")),
    ("REINDEX CONCURRENTLY", |it| it.run_on("REINDEX TABLE CONCURRENTLY $t")),
    ("an index dropped", |it| {
        it.run("DO $$ BEGIN EXECUTE (SELECT 'DROP INDEX ' || index_name FROM ttl_summary WHERE table_name = 'plain' AND index_name IS NOT NULL); END $$");
        it.register();
    }),
    ("a table locked", |it| it.run_on("BEGIN; LOCK TABLE $t; SELECT pg_sleep(0.2); COMMIT")),
    ("a partition detached and attached", |it| {
        it.run("ALTER TABLE parts DETACH PARTITION parts_1");
        it.run("ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES WITH (MODULUS 2, REMAINDER 1)");
    }),
    ("a database dropped while it is swept", |it| it.drop_database()),
];

struct Chaos {
    server: Server,
    random: Random,
    admin: Session,
    faults: Vec<String>,
}

/// What the writers share.
struct Load {
    is_over: AtomicBool,
    written: AtomicU64,
    faults: Mutex<Vec<String>>,
}

/// Goes on until so much time has passed, and at least for one round.
pub fn run(random: &mut Random, time: Duration, events_in_a_round: u64) -> Vec<Trial> {
    let begun = Instant::now();
    let server = server(&["synchronous_commit=on", "max_connections=60", "restart_after_crash=on"]);
    let server = Arc::into_inner(server).expect("nobody else's");
    let admin = Session::connect(&server, "postgres", "postgres");
    let mut chaos = Chaos { server, random: Random(random.below(u64::MAX)), admin, faults: Vec::new() };
    chaos.run("CREATE EXTENSION pg_ttl_index; CREATE EXTENSION amcheck; CREATE SCHEMA elsewhere; CREATE SEQUENCE ids START 1000;
               CREATE TABLE ledger (kind text, id bigint, at timestamptz, PRIMARY KEY (kind, id))");
    for (_, table, _) in TABLES {
        chaos.run(table);
    }
    chaos.register();
    let (mut rounds, mut written, mut happened) = (0, 0, BTreeMap::<&str, u64>::new());
    while rounds == 0 || (begun.elapsed() < time && chaos.faults.is_empty()) {
        rounds += 1;
        written += chaos.round(events_in_a_round, &mut happened);
    }
    let mut trials = vec![Trial {
        name: format!("{rounds} rounds with events"),
        tried: written,
        what: "transactions beside them",
        faults: std::mem::take(&mut chaos.faults),
    }];
    trials.extend(happened.into_iter().map(|(name, tried)| Trial {
        name: name.into(),
        tried,
        what: "times",
        faults: Vec::new(),
    }));
    trials
}

impl Chaos {
    /// Load with events, and then a check of everything.
    fn round(&mut self, events: u64, happened: &mut BTreeMap<&str, u64>) -> u64 {
        let load = Arc::new(Load { is_over: false.into(), written: 0.into(), faults: Mutex::default() });
        let writers: Vec<_> = (0..WRITERS)
            .map(|_| {
                let (load, seed) = (Arc::clone(&load), self.random.below(u64::MAX));
                let host = self.server.host().to_owned();
                std::thread::spawn(move || write(&load, &mut Random(seed), &host))
            })
            .collect();
        for _ in 0..events {
            std::thread::sleep(Duration::from_millis(50 + self.random.below(300)));
            let (name, event) = self.random.pick(&EVENTS);
            *happened.entry(name).or_default() += 1;
            event(self);
        }
        load.is_over.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
        self.faults.append(&mut load.faults.lock().unwrap_or_else(PoisonError::into_inner));
        self.check();
        load.written.load(Ordering::Relaxed)
    }

    /// Runs statements one by one, in new sessions as long as the server ends them. Events run into each other's changes.
    fn run(&mut self, sql: &str) {
        for statement in split(sql) {
            let deadline = Instant::now() + SOON;
            while self.admin.ask(&statement).is_none() {
                if Instant::now() > deadline {
                    self.faults.push(format!("no session for: {statement}"));
                    return;
                }
                self.admin = Session::reconnect(&self.server, "postgres");
            }
        }
    }

    fn run_on(&mut self, sql: &str) {
        let (table, ..) = self.random.pick(&TABLES);
        self.run(&sql.replace("$t", table));
    }

    /// Makes all rules, as they should be.
    fn register(&mut self) {
        for (table, _, options) in TABLES {
            self.run(&format!("SELECT ttl_create_index('{table}', 'at', 0{options})"));
        }
    }

    fn kill_one(&mut self, which: &str) {
        let pid = self.admin.ask(&format!("SELECT pid FROM pg_stat_activity WHERE {which} ORDER BY random() LIMIT 1"));
        if let Some(Ok(pid)) = pid
            && !pid.is_empty()
        {
            kill("-KILL", &pid);
        }
        self.admin = Session::reconnect(&self.server, "postgres");
    }

    /// Ends the postmaster by a signal, and starts the server again when all its processes are gone.
    fn restart(&mut self, signal: &str) {
        let pidfile =
            std::fs::read_to_string(self.server.host().join("data/postmaster.pid")).expect("the postmaster's pid");
        let pid = pidfile.lines().next().expect("a pid");
        let children = Command::new("pgrep").args(["-P", pid]).output().expect("its processes");
        kill(signal, pid);
        let deadline = Instant::now() + SOON;
        for process in String::from_utf8_lossy(&children.stdout).lines().chain([pid]) {
            while is_alive(process) {
                if Instant::now() > deadline {
                    self.faults.push(format!("process {process} is still there after {signal}"));
                    kill("-KILL", process);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        self.server.stop();
        self.server.start_again();
        self.admin = Session::reconnect(&self.server, "postgres");
    }

    /// Nobody's sweep keeps a database from being dropped.
    fn drop_database(&mut self) {
        self.run("CREATE DATABASE doomed");
        if let Ok(mut doomed) = Session::try_connect(&self.server, "doomed", "postgres") {
            let _ = doomed.ask(
                "CREATE EXTENSION pg_ttl_index; CREATE TABLE t (at timestamptz);
                 INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 20000); SELECT ttl_create_index('t', 'at', 60, 10)",
            );
        }
        let deadline = Instant::now() + SOON;
        loop {
            match self.admin.ask("DROP DATABASE IF EXISTS doomed") {
                Some(Ok(_)) => return,
                Some(Err(error)) if Instant::now() > deadline => {
                    self.faults.push(format!("a database could not be dropped: {error:?}"));
                    return;
                }
                Some(Err(_)) => {}
                None => self.admin = Session::reconnect(&self.server, "postgres"),
            }
        }
    }

    /// Waits until a query has this result, or notes that it has not.
    fn expect(&mut self, what: &str, sql: &str, expected: &str) {
        let deadline = Instant::now() + SOON;
        loop {
            let result = self.admin.try_get(sql);
            if result.as_deref() == Ok(expected) {
                return;
            }
            if Instant::now() > deadline {
                self.faults.push(format!("{what}: {result:?}, not {expected}"));
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Compares the tables with the ledger, once all that has expired is gone.
    fn check(&mut self) {
        self.admin = Session::reconnect(&self.server, "postgres");
        self.register();
        self.run("SELECT ttl_resume(table_name::regclass) FROM ttl_summary; SELECT ttl_start_worker()");
        self.admin.run("SET pg_ttl_index.hide_expired = off");
        for (table, ..) in TABLES {
            self.expect(
                &format!("{table}: expired rows that are left"),
                &format!("SELECT count(*) FROM {table} WHERE at <= now()"),
                "0",
            );
            // What expires just now may go at any moment.
            let later = "now() + interval '1 second'";
            let live = format!("t.id = l.id AND t.at = l.at AND l.kind = '{table}'");
            let lost = format!(
                "SELECT count(*) FROM ledger l WHERE l.kind = '{table}' AND l.at > {later} AND NOT EXISTS (SELECT FROM {table} t WHERE {live})"
            );
            let unknown = format!(
                "SELECT count(*) FROM {table} t WHERE t.at > {later} AND NOT EXISTS (SELECT FROM ledger l WHERE {live})"
            );
            self.expect(&format!("{table}: live rows that are lost"), &lost, "0");
            self.expect(&format!("{table}: rows that nobody has written"), &unknown, "0");
        }
        let gone = "SELECT count(*) FROM ledger l WHERE kind = 'moved' AND at <= now() - interval '1 second' AND NOT EXISTS (SELECT FROM archive a WHERE a.id = l.id)";
        self.expect("rows that are neither in the table nor in the archive", gone, "0");
        self.expect("rows that are in the archive twice", "SELECT count(*) - count(DISTINCT id) FROM archive", "0");
        let early =
            "SELECT count(*) FROM archive a JOIN ledger l ON l.kind = 'moved' AND l.id = a.id WHERE l.at > now()";
        self.expect("live rows in the archive", early, "0");
        self.expect(
            "broken relations",
            "SELECT count(*) FROM pg_class c CROSS JOIN LATERAL verify_heapam(c.oid) WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace",
            "0",
        );
        self.run(
            "SELECT bt_index_check(i.indexrelid, true) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
             WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'i' AND i.indisvalid AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')",
        );
        self.expect("rules that do not sweep", "SELECT count(*) FROM ttl_summary WHERE state <> 'active'", "0");
        self.expect("rules", "SELECT count(*) FROM ttl_summary", &TABLES.len().to_string());
        self.expect("locks that are left", "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'", "0");
        let workers =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres' AND backend_type LIKE 'pg_ttl_index%'
                       AND application_name = 'pg_ttl_index worker'";
        self.expect("workers of the database", workers, "1");
        self.run("RESET pg_ttl_index.hide_expired");
        let log = self.server.log();
        for sign in ["TRAP:", "XX000", "panicked at", "PANIC:"] {
            if let Some(line) = log.lines().find(|line| line.contains(sign)) {
                self.faults.push(format!("in the log: {line}"));
            }
        }
    }
}

/// Splits statements; none of ours has a semicolon inside, but those in a DO block.
fn split(sql: &str) -> Vec<String> {
    if sql.contains("$$") || sql.contains("'BEGIN") {
        return vec![sql.to_owned()];
    }
    sql.split(';').map(|statement| statement.trim().to_owned()).filter(|statement| !statement.is_empty()).collect()
}

fn kill(signal: &str, pid: &str) {
    let _ = Command::new("kill").args([signal, pid]).output();
}

/// Whether a process is there and not a zombie.
fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

/// Writes until the load is over, in new sessions as long as the server ends them.
fn write(load: &Load, random: &mut Random, host: &std::path::Path) {
    let mut session = None;
    while !load.is_over.load(Ordering::Relaxed) {
        let Some(open) = session.as_mut() else {
            session = Session::connect_to(host, "postgres", "postgres").ok();
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        match Session::ask(open, &statement(random)) {
            Some(Ok(_)) => {
                load.written.fetch_add(1, Ordering::Relaxed);
            }
            // DDL comes in between.
            Some(Err(error)) if error.code.starts_with("XX") => {
                load.faults.lock().unwrap_or_else(PoisonError::into_inner).push(format!("a writer: {error:?}"));
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
            "WITH new AS (INSERT INTO hidden SELECT {}, {at}, 0 ON CONFLICT (id) DO UPDATE SET at = excluded.at RETURNING id, at)
             INSERT INTO ledger SELECT 'hidden', id, at FROM new ON CONFLICT (kind, id) DO UPDATE SET at = excluded.at",
            random.below(50)
        ),
    }
}
