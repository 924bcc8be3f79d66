//! A database of its own for each test, and sessions in it.

use crate::Server;
use once_cell::sync::Lazy;
use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, Config, NoTls, SimpleQueryMessage};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The server that tests share unless they need one of their own.
static SHARED: Lazy<Arc<Server>> = Lazy::new(|| Arc::new(Server::start(&["shared_preload_libraries=pg_ttl_index"])));
/// How long a test waits for what should happen soon.
const PATIENCE: Duration = Duration::from_secs(90);

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A database that goes away with its roles at the end of the test. It is its owner's session, a superuser's, too.
pub struct Database {
    pub name: String,
    pub server: Arc<Server>,
    session: Option<Session>,
    roles: Vec<String>,
}

pub struct Session {
    client: Client,
    notices: Arc<Mutex<Vec<String>>>,
}

/// What the server says when a statement fails.
#[derive(Debug, PartialEq)]
pub struct SqlError {
    pub code: String,
    pub message: String,
    pub detail: String,
    pub hint: String,
}

impl Database {
    /// A new database with the extension in schema `public`.
    pub fn new() -> Self {
        let mut database = Self::empty();
        database.run("CREATE EXTENSION pg_ttl_index");
        database
    }

    /// A new database without the extension.
    pub fn empty() -> Self {
        Self::on(&SHARED)
    }

    /// A new database without the extension, on a server of the test's own.
    pub fn on(server: &Arc<Server>) -> Self {
        let name = format!("test_{}", COUNTER.fetch_add(1, Ordering::Relaxed));
        Session::connect(server, "postgres", "postgres").run(&format!("CREATE DATABASE {name}"));
        let session = Session::connect(server, &name, "postgres");
        Self { name, server: Arc::clone(server), session: Some(session), roles: Vec::new() }
    }

    /// A new role, and its full name.
    pub fn role(&mut self, name: &str) -> String {
        let role = format!("{}_{name}", self.name);
        self.run(&format!("CREATE ROLE {role} LOGIN; GRANT CREATE, USAGE ON SCHEMA public TO {role}"));
        self.roles.push(role.clone());
        role
    }

    /// Closes the database's own session, and leaves dropping the database to the test.
    pub fn release(mut self) {
        self.session = None;
    }

    /// A session as that role.
    pub fn session(&self, role: &str) -> Session {
        Session::connect(&self.server, &self.name, role)
    }
}

impl Default for Database {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // After a failure the server may be gone, and it goes away soon anyway.
        if std::thread::panicking() || self.session.is_none() {
            return;
        }
        let mut admin = Session::connect(&self.server, "postgres", "postgres");
        admin.run(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
        for role in &self.roles {
            admin.run(&format!("DROP ROLE {role}"));
        }
    }
}

impl Deref for Database {
    type Target = Session;

    fn deref(&self) -> &Session {
        self.session.as_ref().expect("an open session")
    }
}

impl DerefMut for Database {
    fn deref_mut(&mut self) -> &mut Session {
        self.session.as_mut().expect("an open session")
    }
}

impl Session {
    pub fn connect(server: &Server, database: &str, role: &str) -> Self {
        Self::try_connect(server, database, role).expect("connecting")
    }

    /// A session in a server that is recovering from a crash.
    pub fn reconnect(server: &Server, database: &str) -> Self {
        let deadline = Instant::now() + PATIENCE;
        loop {
            std::thread::sleep(Duration::from_millis(50));
            match Self::try_connect(server, database, "postgres") {
                Ok(session) => return session,
                Err(error) => assert!(Instant::now() < deadline, "the server did not recover: {error}"),
            }
        }
    }

    pub fn try_connect(server: &Server, database: &str, role: &str) -> Result<Self, postgres::Error> {
        Self::connect_to(server.host(), database, role)
    }

    /// A session in the server whose socket is in a directory.
    pub fn connect_to(host: &Path, database: &str, role: &str) -> Result<Self, postgres::Error> {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&notices);
        let client = Config::new()
            .host_path(host)
            .dbname(database)
            .user(role)
            .notice_callback(move |notice| {
                sink.lock().expect("notices").push(format!("{}: {}", notice.severity(), notice.message()));
            })
            .connect(NoTls)?;
        Ok(Self { client, notices })
    }

    /// Runs statements that must succeed.
    pub fn run(&mut self, sql: &str) {
        if let Err(error) = self.try_get(sql) {
            panic!("{error:?} in: {sql}");
        }
    }

    /// The rows of a statement as psql prints them unaligned: `a|b`, one row a line, NULL as nothing.
    pub fn get(&mut self, sql: &str) -> String {
        self.try_get(sql).unwrap_or_else(|error| panic!("{error:?} in: {sql}"))
    }

    /// Waits until a query has this result.
    pub fn wait_for(&mut self, sql: &str, expected: &str) {
        self.wait(sql, expected, Duration::from_millis(20));
    }

    /// The same for what should happen within a few milliseconds.
    pub fn wait_for_often(&mut self, sql: &str, expected: &str) {
        self.wait(sql, expected, Duration::from_millis(1));
    }

    fn wait(&mut self, sql: &str, expected: &str, pause: Duration) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let result = self.get(sql);
            if result == expected {
                return;
            }
            assert!(Instant::now() < deadline, "waited for {expected:?}, but it stays {result:?}: {sql}");
            std::thread::sleep(pause);
        }
    }

    /// The error of a statement that must fail.
    pub fn error(&mut self, sql: &str) -> SqlError {
        match self.try_get(sql) {
            Err(error) => error,
            Ok(rows) => panic!("succeeded with {rows:?}: {sql}"),
        }
    }

    /// The payload of the next notification, which must come soon.
    pub fn notification(&mut self) -> String {
        let mut notifications = self.client.notifications();
        let next = notifications.timeout_iter(PATIENCE).next();
        next.expect("a connection").expect("a notification").payload().to_owned()
    }

    /// The notices and warnings since the last call.
    pub fn notices(&mut self) -> Vec<String> {
        std::mem::take(&mut *self.notices.lock().expect("notices"))
    }

    pub fn try_get(&mut self, sql: &str) -> Result<String, SqlError> {
        self.ask(sql).unwrap_or_else(|| panic!("the connection is lost in: {sql}"))
    }

    /// The same; `None` if the connection is lost.
    pub fn ask(&mut self, sql: &str) -> Option<Result<String, SqlError>> {
        let messages = match self.client.simple_query(sql) {
            Ok(messages) => messages,
            Err(error) => {
                let error = error.as_db_error()?;
                // The server tells why it ends the session.
                return (!self.client.is_closed()).then(|| {
                    Err(SqlError {
                        code: error.code().code().into(),
                        message: error.message().into(),
                        detail: error.detail().unwrap_or_default().into(),
                        hint: error.hint().unwrap_or_default().into(),
                    })
                });
            }
        };
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|column| row.get(column).unwrap_or_default()).collect::<Vec<_>>().join("|"))
            }
            _ => None,
        });
        Some(Ok(rows.collect::<Vec<_>>().join("\n")))
    }
}
