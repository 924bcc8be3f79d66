//! What happens to a database under load. Whatever an event breaks for the writers, it mends itself.

use super::super::ledger::{SOON, TABLES, forget, gone};
use super::Chaos;
use harness::{Session, is_alive};
use std::process::Command;
use std::time::{Duration, Instant};

type Event = (&'static str, fn(&mut Chaos));

pub const EVENTS: &[Event] = &[
    ("kill -9 of a worker or helper", |it| {
        it.kill_one("backend_type LIKE 'pg_ttl_index%' AND backend_type NOT LIKE '%launcher'")
    }),
    ("kill -9 of the launcher", |it| it.kill_one("backend_type LIKE 'pg_ttl_index%launcher'")),
    ("kill -9 of a builder", |it| {
        it.rebuild();
        it.kill_one("application_name = 'pg_ttl_index builder'");
    }),
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
        let table = it.table();
        it.run(&format!("DO $$ BEGIN {}; END $$", forget(table, "at")));
        it.register();
    }),
    ("a column added and dropped", |it| {
        it.run_on("ALTER TABLE $t ADD extra text DEFAULT 'x'; ALTER TABLE $t DROP extra")
    }),
    ("a column renamed and back", |it| {
        it.run_on("ALTER TABLE $t RENAME at TO until; SELECT pg_sleep(0.02); ALTER TABLE $t RENAME until TO at")
    }),
    ("a column retyped and back", |it| {
        it.run_on(
            "ALTER TABLE $t ALTER at TYPE timestamp; SELECT pg_sleep(0.1); ALTER TABLE $t ALTER at TYPE timestamptz",
        );
        it.register();
    }),
    ("columns swapped, with a new rule", |it| {
        let table = it.table();
        it.run(&format!(
            "DO $$ BEGIN
                 LOCK TABLE {table};
                 ALTER TABLE {table} RENAME at TO x; ALTER TABLE {table} RENAME other TO at; ALTER TABLE {table} RENAME x TO other;
                 SET LOCAL pg_ttl_index.hide_expired = off;
                 UPDATE {table} SET at = other, other = '2020-01-01';
                 ALTER TABLE {table} ALTER at SET DEFAULT NULL, ALTER other SET DEFAULT '2020-01-01';
                 {};
             END $$",
            forget(table, "other")
        ));
        it.register();
    }),
    ("a table renamed and back", |it| {
        it.run_on("ALTER TABLE $t RENAME TO other; SELECT pg_sleep(0.02); ALTER TABLE other RENAME TO $t")
    }),
    ("a table swapped for its copy", |it| {
        let table = it.random.pick(&["plain", "blocks", "hidden"]);
        it.run(&format!(
            "DO $$ BEGIN
                 LOCK TABLE {table};
                 SET LOCAL pg_ttl_index.hide_expired = off;
                 CREATE TABLE copy (LIKE {table} INCLUDING ALL); INSERT INTO copy SELECT * FROM {table};
                 {};
                 DROP TABLE {table}; ALTER TABLE copy RENAME TO {table};
                 ALTER TABLE {table} RENAME CONSTRAINT copy_pkey TO {table}_pkey;
             END $$",
            forget(table, "at")
        ));
        it.register();
    }),
    ("a table truncated", |it| {
        let table = it.table();
        it.run(&format!(
            "DO $$ BEGIN
                 LOCK TABLE {table};
                 SET LOCAL pg_ttl_index.hide_expired = off;
                 INSERT INTO counted SELECT '{table}', -{};
                 TRUNCATE {table}; DELETE FROM ledger WHERE kind = '{table}';
             END $$",
            gone(table)
        ));
    }),
    ("a schema moved and back", |it| {
        it.run_on("ALTER TABLE $t SET SCHEMA elsewhere; ALTER TABLE elsewhere.$t SET SCHEMA public")
    }),
    ("an owner changed and back", |it| {
        it.run_on("ALTER TABLE $t OWNER TO other; SELECT pg_sleep(0.1); ALTER TABLE $t OWNER TO postgres");
        it.register();
    }),
    ("VACUUM FULL", |it| it.run_on("VACUUM FULL $t")),
    ("CLUSTER", |it| it.run("CLUSTER plain USING plain_pkey")),
    ("REINDEX CONCURRENTLY", |it| it.run_on("REINDEX TABLE CONCURRENTLY $t")),
    ("an index dropped", |it| {
        it.drop_index();
        it.register();
    }),
    ("an index built concurrently", Chaos::rebuild),
    ("a table locked", |it| it.run_on("BEGIN; LOCK TABLE $t; SELECT pg_sleep(0.2); COMMIT")),
    ("a storm of locks", |it| {
        let host = it.server.host().to_owned();
        let sessions = (0..8).filter_map(|_| Session::connect_to(&host, "postgres", "postgres").ok());
        let storm: Vec<_> = sessions
            .map(|mut session| {
                let (table, ..) = it.random.pick(&TABLES);
                std::thread::spawn(move || {
                    for _ in 0..20 {
                        let _ = session.ask(&format!("SELECT FROM {table} ORDER BY random() LIMIT 50 FOR UPDATE SKIP LOCKED"));
                        let _ = session.ask(&format!("DO $$ BEGIN PERFORM FROM ttl_index_table WHERE table_name = '{table}' FOR UPDATE; PERFORM pg_sleep(0.005); END $$"));
                    }
                })
            })
            .collect();
        storm.into_iter().for_each(|session| session.join().expect("a session"));
    }),
    ("connections exhausted", |it| {
        let host = it.server.host().to_owned();
        let mut sessions = Vec::new();
        while let Ok(session) = Session::connect_to(&host, "postgres", "postgres") {
            sessions.push(session);
        }
        std::thread::sleep(Duration::from_millis(200));
    }),
    ("worker slots exhausted", |it| {
        // Each takes a slot if there is one.
        let host = it.server.host().to_owned();
        let takers: Vec<_> = (0..8)
            .filter_map(|_| Session::connect_to(&host, "postgres", "postgres").ok())
            .map(|mut session| {
                std::thread::spawn(move || {
                    let _ = session.ask(IN_A_WORKER);
                })
            })
            .collect();
        takers.into_iter().for_each(|taker| taker.join().expect("a session"));
    }),
    ("a partition detached and attached", |it| {
        it.run("ALTER TABLE parts DETACH PARTITION parts_1");
        it.run("ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES WITH (MODULUS 2, REMAINDER 1)");
    }),
    ("a database renamed and dropped while it is swept", Chaos::drop_database),
];

/// Sleeps in a parallel worker, if there is a slot for it.
const IN_A_WORKER: &str = "SELECT set_config(CASE WHEN current_setting('server_version_num')::int >= 160000
                                    THEN 'debug_parallel_query' ELSE 'force_parallel_mode' END, 'on', false);
     SELECT pg_sleep(0.5)";

impl Chaos {
    fn table(&mut self) -> &'static str {
        self.random.pick(&TABLES).0
    }

    fn run_on(&mut self, sql: &str) {
        let table = self.table();
        self.run(&sql.replace("$t", table));
    }

    fn drop_index(&mut self) {
        self.run(
            "DO $$ BEGIN EXECUTE (SELECT 'DROP INDEX ' || index_name FROM ttl_summary WHERE table_name = 'plain' AND index_name IS NOT NULL); END $$",
        );
    }

    fn rebuild(&mut self) {
        self.drop_index();
        self.run(
            "SELECT ttl_create_index('plain', 'at', 0, batch_size => 50, concurrently => true); SELECT pg_sleep(0.05)",
        );
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

    /// Nobody's sweep keeps a database from being renamed and dropped.
    fn drop_database(&mut self) {
        self.run("CREATE DATABASE doomed");
        if let Ok(mut doomed) = Session::try_connect(&self.server, "doomed", "postgres") {
            let _ = doomed.ask(
                "CREATE EXTENSION pg_ttl_index; CREATE TABLE t (at timestamptz);
                 INSERT INTO t SELECT '2020-01-01' FROM generate_series(1, 20000); SELECT ttl_create_index('t', 'at', 60, 10)",
            );
        }
        for sql in
            ["ALTER DATABASE doomed RENAME TO lost", "DROP DATABASE IF EXISTS lost", "DROP DATABASE IF EXISTS doomed"]
        {
            self.insist(sql);
        }
    }

    /// Runs a statement until it succeeds, or what it is about is not there.
    fn insist(&mut self, sql: &str) {
        let deadline = Instant::now() + SOON;
        loop {
            match self.admin.ask(sql) {
                Some(Ok(_)) => return,
                Some(Err(error)) if error.code == "3D000" => return,
                Some(Err(error)) if Instant::now() > deadline => {
                    self.faults.push(format!("{sql}: {error:?}"));
                    return;
                }
                Some(Err(_)) => {}
                None => self.admin = Session::reconnect(&self.server, "postgres"),
            }
        }
    }
}

fn kill(signal: &str, pid: &str) {
    let _ = Command::new("kill").args([signal, pid]).output();
}
