//! What two or three sessions can do around a sweep, in every order of their steps.

use super::{Trial, server};
use harness::{Database, Session, SqlError};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Sessions, each with its steps, and what must be true afterwards of the table and of what the steps said.
struct Spec {
    name: &'static str,
    table: &'static str,
    options: &'static str,
    sessions: &'static [&'static [&'static str]],
    /// SQL for whether the end is right; `$n` is the result of the n-th step over all sessions, or NULL if it failed.
    holds: &'static str,
}

const TABLE: &str =
    "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text, other timestamptz DEFAULT '2020-01-01')";
const PARTITIONS: &str = "CREATE TABLE t (id int, at timestamptz, v text, other timestamptz) PARTITION BY RANGE (at);
     CREATE TABLE old PARTITION OF t FOR VALUES FROM (MINVALUE) TO ('2021-01-01'); CREATE TABLE new PARTITION OF t DEFAULT";
const SWEEP: &[&str] = &["BEGIN", "SELECT ttl_runner('t')", "COMMIT"];
const TOUCH: &str = "WITH u AS (UPDATE t SET at = now() + interval '1 hour', v = 'touched' WHERE id = 1 RETURNING 1) SELECT count(*) FROM u";
const UPSERT: &str = "WITH u AS (INSERT INTO t VALUES (1, now() + interval '1 hour', 'touched') ON CONFLICT (id) DO UPDATE SET at = excluded.at, v = excluded.v RETURNING 1) SELECT count(*) FROM u";
const LIVES: &str = "SELECT count(*) = 1 FROM t WHERE id = 1 AND v = 'touched'";

const SPECS: [Spec; 9] = [
    Spec {
        name: "a touch around a sweep",
        table: TABLE,
        options: "",
        sessions: &[SWEEP, &["BEGIN", TOUCH, "COMMIT"]],
        holds: "CASE WHEN $4 = '1' THEN ($lives) ELSE NOT ($lives) END",
    },
    Spec {
        name: "a touch that is rolled back",
        table: TABLE,
        options: "",
        sessions: &[SWEEP, &["BEGIN", TOUCH, "ROLLBACK"]],
        holds: "(SELECT count(*) = 0 FROM t WHERE v = 'touched')",
    },
    Spec {
        name: "an upsert on a hidden key",
        table: TABLE,
        options: ", hide_expired => true",
        sessions: &[SWEEP, &["BEGIN", UPSERT, "COMMIT"]],
        holds: "$4 = '1' AND ($lives)",
    },
    Spec {
        name: "two upserts on a hidden key",
        table: TABLE,
        options: ", hide_expired => true",
        sessions: &[&["BEGIN", UPSERT, "COMMIT"], &["BEGIN", UPSERT, "COMMIT"], &["SELECT ttl_runner('t')"]],
        holds: "$1 = '1' AND $4 = '1' AND ($lives)",
    },
    Spec {
        name: "a touch, a sweep and a pause",
        table: TABLE,
        options: "",
        sessions: &[SWEEP, &[TOUCH], &["SELECT ttl_pause('t')"]],
        holds: "CASE WHEN $3 = '1' THEN ($lives) ELSE NOT ($lives) END AND (SELECT NOT active FROM ttl_summary)",
    },
    Spec {
        name: "a rule dropped around a sweep",
        table: TABLE,
        options: "",
        sessions: &[SWEEP, &["BEGIN", "SELECT ttl_drop_index('t', 'at')", "COMMIT"], &[TOUCH]],
        holds: "CASE WHEN $6 = '1' THEN ($lives) ELSE NOT ($lives) END",
    },
    Spec {
        name: "a row that leaves a partition as it is dropped",
        table: PARTITIONS,
        options: ", partition_action => 'drop'",
        sessions: &[SWEEP, &["BEGIN", TOUCH, "COMMIT"]],
        holds: "CASE WHEN $4 = '1' THEN ($lives) ELSE NOT ($lives) END AND (SELECT count(*) = 1 FROM t WHERE id = 2)",
    },
    Spec {
        name: "a row that comes into a partition as it is dropped",
        table: PARTITIONS,
        options: ", partition_action => 'drop'",
        sessions: &[
            &["SELECT ttl_runner('t')"],
            &["BEGIN", "UPDATE t SET at = '2020-06-01' WHERE id = 2", "ROLLBACK"],
            &["BEGIN", "SELECT count(*) FROM t WHERE id = 2 FOR UPDATE", "COMMIT"],
        ],
        holds: "(SELECT count(*) = 1 FROM t WHERE id = 2)",
    },
    Spec {
        name: "columns swapped around a sweep",
        table: TABLE,
        options: "",
        sessions: &[
            SWEEP,
            &[
                "BEGIN",
                "ALTER TABLE t RENAME at TO x; ALTER TABLE t RENAME other TO at; ALTER TABLE t RENAME x TO other",
                "COMMIT",
            ],
        ],
        holds: "(SELECT count(*) = 1 FROM t WHERE id = 2)",
    },
];

/// Plays what so many sessions can do, or fewer.
pub fn run(sessions: usize) -> Vec<Trial> {
    let server = server(&[]);
    let mut trials = Vec::new();
    for spec in SPECS.iter().filter(|spec| spec.sessions.len() <= sessions) {
        let (mut tried, mut faults) = (0, Vec::new());
        let mut db = Database::on(&server);
        db.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
        for order in orders(&spec.sessions.iter().map(|steps| steps.len()).collect::<Vec<_>>()) {
            tried += 1;
            if let Some(fault) = play(&mut db, spec, &order) {
                faults.push(format!("{order:?}: {fault}"));
            }
        }
        trials.push(Trial { name: spec.name.into(), tried, what: "orders of steps", faults });
    }
    trials
}

/// Every order of the steps of sessions that have so many.
fn orders(steps: &[usize]) -> Vec<Vec<usize>> {
    if steps.iter().all(|left| *left == 0) {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for session in (0..steps.len()).filter(|session| steps[*session] > 0) {
        let mut left = steps.to_vec();
        left[session] -= 1;
        all.extend(orders(&left).into_iter().map(|rest| [vec![session], rest].concat()));
    }
    all
}

/// A session in a thread, which runs the steps that it is sent.
struct Actor {
    pid: String,
    steps: Sender<String>,
    results: Receiver<Result<String, SqlError>>,
    /// Steps sent, and results that have come.
    sent: usize,
    done: Vec<Option<String>>,
}

impl Actor {
    fn new(mut session: Session) -> Self {
        let pid = session.get("SELECT pg_backend_pid()");
        let ((steps, to_do), (done, results)) = (channel::<String>(), channel());
        std::thread::spawn(move || {
            for step in to_do {
                if done.send(session.try_get(&step)).is_err() {
                    return;
                }
            }
        });
        Self { pid, steps, results, sent: 0, done: Vec::new() }
    }

    fn send(&mut self, step: &str) {
        self.steps.send(step.to_owned()).expect("a session");
        self.sent += 1;
    }

    /// Takes results until all steps are done, or the session waits for a lock.
    fn settle(&mut self, observer: &mut Session) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.done.len() < self.sent {
            if let Ok(result) = self.results.recv_timeout(Duration::from_millis(2)) {
                self.done.push(result.ok());
                continue;
            }
            let waits = format!("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = {}", self.pid);
            if observer.get(&waits) == "t" || Instant::now() > deadline {
                return;
            }
        }
    }
}

/// Plays the steps in an order, and returns what is wrong in the end.
fn play(db: &mut Database, spec: &Spec, order: &[usize]) -> Option<String> {
    db.run("DROP TABLE IF EXISTS t");
    db.run(&format!(
        "{};
         SELECT ttl_create_index('t', 'at', 60, batch_size => 10{});
         INSERT INTO t VALUES (1, '2020-01-01', 'old', now()), (2, now() + interval '1 hour', 'live', '2020-01-01')",
        spec.table, spec.options
    ));
    let mut actors: Vec<_> = spec.sessions.iter().map(|_| Actor::new(db.session("postgres"))).collect();
    for session in order {
        let actor = &mut actors[*session];
        let step = spec.sessions[*session][actor.sent];
        actor.send(step);
        actors.iter_mut().for_each(|actor| actor.settle(db));
    }
    // All have been sent, so nobody waits for anything but what is about to end.
    let deadline = Instant::now() + Duration::from_secs(30);
    while actors.iter().any(|actor| actor.done.len() < actor.sent) {
        actors.iter_mut().for_each(|actor| actor.settle(db));
        if Instant::now() > deadline {
            return Some("somebody waits for ever".into());
        }
    }
    let results: Vec<_> = actors.into_iter().flat_map(|actor| actor.done).collect();
    let mut holds = spec.holds.replace("$lives", LIVES);
    for (place, result) in results.iter().enumerate() {
        let text = result.as_ref().map_or("NULL".into(), |text| format!("'{text}'"));
        holds = holds.replace(&format!("${place}"), &text);
    }
    (db.get(&format!("SELECT {holds}")) != "t")
        .then(|| format!("{results:?}, and {}", db.get("SELECT string_agg(t::text, ' ') FROM t")))
}
