//! Failovers in the middle of sweeps, standbys that lag, and a subscriber.

use super::ledger::{Load, SOON, check, check_log, expect, set_up};
use super::{Trial, server};
use harness::{Random, Server, Session};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SETTINGS: [&str; 3] = ["synchronous_commit=on", "wal_log_hints=on", "wal_level=logical"];

/// A backlog that takes a while to sweep.
const BACKLOG: &str = "WITH new AS (INSERT INTO plain (id, at, n) SELECT nextval('ids'), now() - interval '1 hour', 0 FROM generate_series(1, 60000) RETURNING id, at)
     INSERT INTO ledger SELECT 'plain', id, at FROM new";

const HIDDEN_AND_SHOWN: &str = "SELECT count(*) FROM hidden WHERE at <= statement_timestamp()";
const WORKERS: &str = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_ttl_index%'";

pub fn run(random: &mut Random, failovers: u64) -> Vec<Trial> {
    vec![fail_over(random, failovers), subscribe(random)]
}

/// Primary and standby change places again and again, in the middle of sweeps under load.
fn fail_over(random: &mut Random, failovers: u64) -> Trial {
    let mut faults = Vec::new();
    let mut primary = Arc::into_inner(server(&SETTINGS)).expect("nobody else's");
    let mut session = Session::connect(&primary, "postgres", "postgres");
    set_up(&mut session);
    // pg_rewind looks for these in the files.
    primary.configure("wal_log_hints", "on");
    primary.configure("wal_keep_size", "'2GB'");
    let mut standby = primary.start_standby();
    for _ in 0..failovers {
        let load = Load::start(3, random, primary.host());
        let mut replica = Session::connect(&standby, "postgres", "postgres");
        expect(&mut replica, &mut faults, "sweepers on a standby", WORKERS, "0");
        look_at_a_standby_that_lags(&mut session, &mut replica, &mut faults);
        session.run(BACKLOG);
        session.wait_for_often("SELECT count(*) > 0 FROM ttl_progress WHERE rows_removed > 0", "t");
        primary.crash();
        replica.run("SELECT pg_promote()");
        let after = Load::start(2, random, standby.host());
        expect(
            &mut replica,
            &mut faults,
            "a worker after promotion",
            &format!("{WORKERS} AND datname = 'postgres' AND application_name = 'pg_ttl_index worker'"),
            "1",
        );
        std::thread::sleep(Duration::from_millis(500));
        load.stop(&mut faults);
        after.stop(&mut faults);
        check(&mut replica, &mut faults);
        for server in [&primary, &standby] {
            check_log(&server.log(), &mut faults);
        }
        // pg_rewind learns of the new timeline from the control file.
        replica.run("CHECKPOINT");
        primary.rejoin(&standby);
        std::mem::swap(&mut primary, &mut standby);
        session = replica;
        let mut old = Session::connect(&standby, "postgres", "postgres");
        catch_up(&mut session, &mut old, &mut faults);
        expect(&mut old, &mut faults, "sweepers on the old primary", WORKERS, "0");
    }
    Trial { name: "failovers in the middle of a sweep".into(), tried: failovers, what: "times", faults }
}

/// What has expired is hidden on a standby whose replay stands still, and goes when it goes on.
fn look_at_a_standby_that_lags(session: &mut Session, replica: &mut Session, faults: &mut Vec<String>) {
    session.run("INSERT INTO hidden (id, at) VALUES (-1, now() + interval '2 seconds') ON CONFLICT (id) DO UPDATE SET at = excluded.at; INSERT INTO ledger VALUES ('hidden', -1, now()) ON CONFLICT (kind, id) DO UPDATE SET at = excluded.at");
    catch_up(session, replica, faults);
    replica.run("SELECT pg_wal_replay_pause()");
    replica.wait_for("SELECT pg_get_wal_replay_pause_state()", "paused");
    session.wait_for("SELECT count(*) FROM hidden WHERE id = -1", "0");
    session.run("SET pg_ttl_index.hide_expired = off");
    session.wait_for("SELECT count(*) FROM hidden WHERE id = -1", "0");
    session.run("RESET pg_ttl_index.hide_expired");
    expect(replica, faults, "hidden rows that a standby shows", HIDDEN_AND_SHOWN, "0");
    replica.run("SET pg_ttl_index.hide_expired = off");
    expect(replica, faults, "the row where replay is paused", "SELECT count(*) FROM hidden WHERE id = -1", "1");
    replica.run("SELECT pg_wal_replay_resume()");
    expect(replica, faults, "the row after replay", "SELECT count(*) FROM hidden WHERE id = -1", "0");
    replica.run("RESET pg_ttl_index.hide_expired");
}

/// Waits until a standby has replayed what is written now.
fn catch_up(session: &mut Session, replica: &mut Session, faults: &mut Vec<String>) {
    let written = session.get("SELECT pg_current_wal_flush_lsn()");
    let replayed = format!("SELECT pg_last_wal_replay_lsn() >= '{written}'");
    expect(replica, faults, "a standby that catches up", &replayed, "t");
}

/// A subscriber ends up with what the publisher has, hidden rows included.
fn subscribe(random: &mut Random) -> Trial {
    let mut faults = Vec::new();
    let publisher = server(&SETTINGS);
    let mut session = Session::connect(&publisher, "postgres", "postgres");
    set_up(&mut session);
    let tables = ["ledger", "plain", "blocks", "moved", "hidden", "parts"];
    session.run(&format!(
        "CREATE PUBLICATION all_of_it FOR TABLE {} WITH (publish_via_partition_root = true)",
        tables.join(", ")
    ));
    let load = Load::start(3, random, publisher.host());
    let subscriber = Server::start(&[]);
    let mut copy = Session::connect(&subscriber, "postgres", "postgres");
    copy.run("CREATE TABLE ledger (kind text, id bigint, at timestamptz, PRIMARY KEY (kind, id))");
    for table in &tables[1..] {
        copy.run(&format!("CREATE TABLE {table} (id bigint PRIMARY KEY, at timestamptz, n int, other timestamptz)"));
    }
    // The first copy is taken under load, too.
    copy.run(&format!(
        "CREATE SUBSCRIPTION all_of_it CONNECTION 'host={} user=postgres dbname=postgres' PUBLICATION all_of_it",
        publisher.host().display()
    ));
    std::thread::sleep(Duration::from_secs(5));
    let written = load.stop(&mut faults);
    check(&mut session, &mut faults);
    session.run("SET pg_ttl_index.hide_expired = off");
    for table in tables {
        let order = if table == "ledger" { "kind, id" } else { "id" };
        let contents =
            format!("SELECT count(*), md5(string_agg(concat_ws(' ', id, at), ',' ORDER BY {order})) FROM {table}");
        // Rows still expire and go.
        let deadline = Instant::now() + SOON;
        loop {
            let (here, there) = (session.get(&contents), copy.get(&contents));
            if here == there {
                break;
            }
            if Instant::now() > deadline {
                faults.push(format!("{table}: {here} on the publisher, {there} on the subscriber"));
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    copy.run("DROP SUBSCRIPTION all_of_it");
    check_log(&publisher.log(), &mut faults);
    Trial { name: "a subscriber".into(), tried: written, what: "transactions beside it", faults }
}
