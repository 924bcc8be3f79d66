//! Sweeping that happens by itself: workers from server start to shutdown.

use harness::{Database, Server, Session, run};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const EXPIRED: &str =
    "CREATE TABLE t (id int, at timestamptz); INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 1000) i";
/// Beside a worker there may be helpers.
pub const WORKERS: &str = "SELECT count(*) FROM ttl_worker_status()
     WHERE database_name = current_database() AND application_name = 'pg_ttl_index worker'";
pub const ROWS: &str = "SELECT count(*) FROM t";

/// A server of the test's own, whose workers look every second.
pub fn server(settings: &[&str]) -> Arc<Server> {
    let mut all = vec!["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1"];
    all.extend(settings);
    Arc::new(Server::start(&all))
}

pub fn database(server: &Arc<Server>) -> Database {
    let mut db = Database::on(server);
    db.run("CREATE EXTENSION pg_ttl_index");
    db
}

pub fn worker_pid(session: &mut Session) -> String {
    session.wait_for(WORKERS, "1");
    session.get(&WORKERS.replace("count(*)", "worker_pid"))
}

#[test]
fn registering_a_rule_wakes_the_worker_at_commit() {
    // The shared server's naptime is a minute: only a wake-up can be this fast.
    let mut db = Database::new();
    db.run(EXPIRED);
    db.wait_for(WORKERS, "1");
    db.run("BEGIN; SELECT ttl_create_index('t', 'at', 60, 100)");
    db.run("COMMIT");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT state, total_rows_deleted FROM ttl_summary", "active|1000");
    db.wait_for(
        "SELECT initiator, rows_removed, batches, status, wal_bytes > 0 FROM ttl_history",
        "worker|1000|10|done|t",
    );
    db.run("SELECT ttl_pause('t'); INSERT INTO t VALUES (1, '2020-01-01'); SELECT ttl_resume('t')");
    db.wait_for(ROWS, "0");
    db.run("UPDATE ttl_index_table SET active = false; INSERT INTO t VALUES (1, now() - interval '50 seconds')");
    db.run("UPDATE ttl_index_table SET active = true; SELECT ttl_alter_index('t', 'at', expire_after_seconds => 10)");
    db.wait_for(ROWS, "0");
}

#[test]
fn sweeping_starts_with_the_server_and_after_crashes_of_worker_and_backend() {
    let mut server = Server::start(&["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1"]);
    let sql = |server: &Server, sql: &str| Session::connect(server, "postgres", "postgres").run(sql);
    sql(&server, "CREATE EXTENSION pg_ttl_index");
    sql(&server, EXPIRED);
    sql(&server, "SELECT ttl_create_index('t', 'at', 60)");
    let gone = |server: &Server| Session::connect(server, "postgres", "postgres").wait_for(ROWS, "0");
    let refill = "INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 1000) i";
    gone(&server);

    let stopping = server.stop();
    assert!(stopping < Duration::from_secs(10), "{stopping:?}");
    server.start_again();
    sql(&server, refill);
    gone(&server);

    let mut session = Session::connect(&server, "postgres", "postgres");
    let pid = worker_pid(&mut session);
    session.run(&format!("SELECT pg_terminate_backend({pid})"));
    session.wait_for(&format!("{WORKERS} AND worker_pid <> {pid}"), "1");
    sql(&server, refill);
    gone(&server);

    for (restarts, victim) in
        [(1, "SELECT worker_pid FROM ttl_worker_status() LIMIT 1"), (2, "SELECT pg_backend_pid()")]
    {
        let mut session = Session::connect(&server, "postgres", "postgres");
        session.wait_for(WORKERS, "1");
        let pid = session.get(victim);
        run(std::process::Command::new("kill").args(["-9", &pid]));
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_back = |server: &Server| {
            server.log().matches("reinitializing").count() == restarts
                && Session::try_connect(server, "postgres", "postgres").is_ok()
        };
        while !is_back(&server) {
            assert!(Instant::now() < deadline, "the server did not come back");
            std::thread::sleep(Duration::from_millis(50));
        }
        sql(&server, refill);
        gone(&server);
    }
}

#[test]
fn a_fast_shutdown_does_not_wait_for_a_sweep() {
    let mut server = Server::start(&["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1"]);
    let mut session = Session::connect(&server, "postgres", "postgres");
    session.run("CREATE EXTENSION pg_ttl_index");
    session.run(EXPIRED);
    // Each row takes a tenth of a second to remove: a batch alone takes 100 seconds.
    session.run(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.1); RETURN OLD; END';
                 CREATE TRIGGER slow BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION slow()",
    );
    session.run("SELECT ttl_create_index('t', 'at', 60)");
    session.wait_for("SELECT count(*) FROM ttl_progress", "1");
    drop(session);
    let stopping = server.stop();
    assert!(stopping < Duration::from_secs(10), "{stopping:?}");
    server.start_again();
    assert_eq!(
        Session::connect(&server, "postgres", "postgres").get("SELECT total_rows_deleted FROM ttl_summary"),
        "0"
    );
}

#[test]
fn a_cancel_ends_the_sweep_and_not_the_worker() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(10); RETURN OLD; END';
            CREATE TRIGGER slow BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION slow()",
    );
    let pid = worker_pid(&mut db);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    let helper = "SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'pg_ttl_index%' AND wait_event = 'PgSleep'";
    db.wait_for(&helper.replace("pid", "count(*)"), "1");
    let helper = db.get(helper);
    db.run(&format!("SELECT pg_cancel_backend({helper})"));
    db.wait_for("SELECT state, left(last_error, 5) FROM ttl_summary", "error|57014");
    assert_eq!(worker_pid(&mut db), pid);
    assert_eq!(db.get(&format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {helper}")), "1");
    db.run("DROP TRIGGER slow ON t");
    db.wait_for(ROWS, "0");
    db.wait_for("SELECT state, consecutive_failures FROM ttl_summary", "active|0");
}

#[test]
fn enabled_off_stops_all_sweeping_within_a_batch_and_on_resumes_it() {
    let server = server(&["pg_ttl_index.batch_delay=100ms"]);
    let mut db = database(&server);
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60, 10)");
    db.wait_for("SELECT count(*) < 1000 FROM t", "t");
    server.configure("pg_ttl_index.enabled", "off");
    db.wait_for("SELECT count(*) FROM ttl_progress", "0");
    let left = db.get(ROWS);
    assert_ne!(left, "0");
    db.run("SELECT ttl_pause('t'), ttl_resume('t')");
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(db.get(ROWS), left);
    server.configure("pg_ttl_index.batch_delay", "0");
    server.configure("pg_ttl_index.enabled", "on");
    db.wait_for(ROWS, "0");
}

#[test]
fn a_standby_does_not_sweep_until_it_is_promoted() {
    let primary = server(&[]);
    let mut session = Session::connect(&primary, "postgres", "postgres");
    session.run("CREATE EXTENSION pg_ttl_index");
    session.run(EXPIRED);
    session.run("SELECT ttl_stop_worker(); SELECT ttl_create_index('t', 'at', 60)");
    let standby = primary.start_standby();
    let mut replica = Session::connect(&standby, "postgres", "postgres");
    assert_eq!(replica.get(ROWS), "1000");
    assert_eq!(replica.get("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_ttl_index%'"), "0");
    assert_eq!(replica.get("SELECT table_name, lag > interval '1 year' FROM ttl_summary"), "t|t");
    assert_eq!(replica.error("SELECT ttl_runner()").code, "25006");
    session.run("SELECT ttl_start_worker()");
    session.wait_for(ROWS, "0");
    replica.wait_for(ROWS, "0");
    session.run("SELECT ttl_stop_worker()");
    session.run("INSERT INTO t VALUES (1, '2020-01-01')");
    session.run("SELECT ttl_start_worker()");
    replica.wait_for("SELECT count(*) FROM ttl_worker_off", "0");
    replica.run("SELECT pg_promote()");
    replica.wait_for(WORKERS, "1");
    replica.run("INSERT INTO t SELECT i, '2020-01-01' FROM generate_series(1, 10) i");
    replica.wait_for(ROWS, "0");
}

#[test]
fn every_database_is_swept_and_can_be_dropped_renamed_and_copied() {
    let server = server(&[]);
    let mut one = database(&server);
    let mut two = database(&server);
    for db in [&mut one, &mut two] {
        db.run(EXPIRED);
        db.run("SELECT ttl_create_index('t', 'at', 60)");
        db.wait_for(ROWS, "0");
        db.wait_for(WORKERS, "1");
    }
    let mut admin = Session::connect(&server, "postgres", "postgres");
    let name = two.name.clone();
    two.release();
    admin.run(&format!("CREATE DATABASE copied TEMPLATE {name}"));
    admin.run(&format!("ALTER DATABASE {name} RENAME TO renamed"));
    let mut copied = Session::connect(&server, "copied", "postgres");
    copied.run("INSERT INTO t VALUES (1, '2020-01-01')");
    copied.wait_for(ROWS, "0");
    drop(copied);
    admin.run("DROP DATABASE copied");
    admin.run("DROP DATABASE renamed");
}

#[test]
fn switching_sweeping_off_is_durable_and_only_for_this_database() {
    let mut server = Server::start(&["shared_preload_libraries=pg_ttl_index", "pg_ttl_index.naptime=1"]);
    let mut session = Session::connect(&server, "postgres", "postgres");
    session.run("CREATE EXTENSION pg_ttl_index");
    session.wait_for(WORKERS, "1");
    assert_eq!(session.get("SELECT ttl_stop_worker()"), "t");
    assert_eq!(session.get("SELECT ttl_stop_worker()"), "f");
    session.wait_for(WORKERS, "0");
    session.run(EXPIRED);
    session.run("SELECT ttl_create_index('t', 'at', 60)");
    drop(session);
    server.stop();
    server.start_again();
    let mut session = Session::connect(&server, "postgres", "postgres");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(session.get(ROWS), "1000");
    assert_eq!(session.get("SELECT ttl_start_worker()"), "t");
    session.wait_for(ROWS, "0");
}

#[test]
fn without_preload_a_worker_can_be_started_by_hand() {
    let server = Arc::new(Server::start(&[]));
    let mut db = Database::on(&server);
    db.run("CREATE EXTENSION pg_ttl_index");
    db.run(EXPIRED);
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    assert_eq!(db.get("SELECT ttl_start_worker()"), "t");
    assert!(db.notices()[0].contains("until the server restarts"));
    db.wait_for(ROWS, "0");
    assert_eq!(db.get("SELECT ttl_start_worker()"), "t");
    assert_eq!(db.get(WORKERS), "1", "one is enough");
    db.run("SELECT ttl_stop_worker()");
    db.wait_for(WORKERS, "0");
}

#[test]
fn status_is_not_fooled_by_a_name_and_only_the_privileged_control_workers() {
    let mut db = Database::new();
    let user = db.role("user");
    db.wait_for(WORKERS, "1");
    let mut session = db.session(&user);
    session.run("SET application_name = 'pg_ttl_index worker'");
    assert_eq!(session.get(WORKERS), "1");
    db.wait_for(
        "SELECT application_name, state FROM ttl_worker_status() WHERE database_name = current_database()",
        "pg_ttl_index worker|idle",
    );
    for call in ["ttl_start_worker()", "ttl_stop_worker()", "ttl_wake()"] {
        assert_eq!(session.error(&format!("SELECT {call}")).code, "42501", "{call}");
    }
    let pid = worker_pid(&mut session);
    assert_eq!(session.error(&format!("SELECT pg_terminate_backend({pid})")).code, "42501");
    assert_eq!(
        session.get("SELECT count(activity) FROM ttl_worker_status()"),
        "0",
        "whose tables are swept is not for all to know"
    );
}

#[test]
fn nobody_keeps_a_rule_from_being_swept_by_taking_its_lock() {
    let mut db = Database::new();
    db.run(EXPIRED);
    let stranger = db.role("stranger");
    let mut squatter = db.session(&stranger);
    squatter.run("SELECT pg_advisory_lock(1953786880, i), pg_advisory_lock((1953786880::bigint << 32) + i) FROM generate_series(1, 100) i");
    db.run("SELECT ttl_create_index('t', 'at', 60)");
    db.wait_for(ROWS, "0");
}

#[test]
fn a_restored_rule_rests_until_the_restoring_session_has_ended() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run(EXPIRED);
    let mut restore = db.session("postgres");
    restore.run(
        "INSERT INTO ttl_index_table (schema_name, table_name, column_name, expire_after, time_zone)
                 VALUES ('public', 't', 'at', '1 minute', 'UTC')",
    );
    // Foreign keys and triggers come last in a restore: two passes go by without a sweep.
    db.wait_for("SELECT ttl_next_pass() IS NOT NULL", "t");
    for _ in 0..2 {
        let before = db.get("SELECT ttl_next_pass()");
        db.wait_for(&format!("SELECT ttl_next_pass() > '{before}'"), "t");
    }
    assert_eq!(db.get(ROWS), "1000");
    drop(restore);
    db.wait_for(ROWS, "0");
}
