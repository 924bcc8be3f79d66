//! A ledger of rows with known fates, kept under load, while processes die and everything around the rows changes.

mod events;

use super::ledger::{Load, SOON, check, check_log, registrations, set_up};
use super::{Trial, server};
use events::EVENTS;
use harness::{Random, Server, Session};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many sessions write.
const WRITERS: u64 = 4;

struct Chaos {
    server: Server,
    random: Random,
    admin: Session,
    faults: Vec<String>,
}

/// Goes on until so much time has passed, and at least for one round.
pub fn run(random: &mut Random, time: Duration, events_in_a_round: u64) -> Vec<Trial> {
    let begun = Instant::now();
    let server = server(&["synchronous_commit=on", "max_connections=60", "restart_after_crash=on"]);
    let server = Arc::into_inner(server).expect("nobody else's");
    let admin = Session::connect(&server, "postgres", "postgres");
    let mut chaos = Chaos { server, random: Random(random.below(u64::MAX)), admin, faults: Vec::new() };
    set_up(&mut chaos.admin);
    chaos.admin.run("CREATE ROLE other");
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
        let load = Load::start(WRITERS, &mut self.random, self.server.host());
        for _ in 0..events {
            std::thread::sleep(Duration::from_millis(50 + self.random.below(300)));
            let (name, event) = self.random.pick(EVENTS);
            *happened.entry(name).or_default() += 1;
            event(self);
        }
        let written = load.stop(&mut self.faults);
        self.admin = Session::reconnect(&self.server, "postgres");
        self.register();
        self.run("SELECT ttl_resume(table_name::regclass) FROM ttl_summary; SELECT ttl_start_worker()");
        check(&mut self.admin, &mut self.faults);
        check_log(&self.server.log(), &mut self.faults);
        written
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

    /// Makes all rules, as they should be.
    fn register(&mut self) {
        registrations().iter().for_each(|sql| self.run(sql));
    }
}

/// Splits statements, but not blocks of code, which are transactions.
fn split(sql: &str) -> Vec<String> {
    if sql.contains("$$") {
        return vec![sql.to_owned()];
    }
    sql.split(';').map(|statement| statement.trim().to_owned()).filter(|statement| !statement.is_empty()).collect()
}
