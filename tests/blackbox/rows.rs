//! One row's time to live.

use crate::sweep::with;
use harness::{Database, Session};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::cell::RefCell;

/// A kind of column that can be written: its type, and the options of a rule on it.
pub const KINDS: &[(&str, &str)] = &[
    ("timestamptz", ""),
    ("timestamp", ", time_zone => 'America/St_Johns'"),
    ("bigint", ", unit => 'us'"),
    ("bigint", ", unit => 's'"),
    ("integer", ", unit => 's'"),
    ("numeric", ", unit => 'ms'"),
    ("text", ""),
    ("varchar(30)", ", unit => 'ms'"),
    ("date", ", time_zone => 'Pacific/Auckland'"),
];

/// How much later than asked a row of that kind may expire, because its type has no other values, in seconds.
fn grain(kind: &str, options: &str) -> f64 {
    match kind {
        "date" => 90_000.0,
        _ if options.contains("'s'") => 1.0,
        _ => 0.001,
    }
}

pub fn table(kind: &str, options: &str, ttl: &str) -> Database {
    let mut db = with(&format!("CREATE TABLE t (id int PRIMARY KEY, v {kind}); INSERT INTO t VALUES (1), (2), (3)"));
    db.run(&format!("SELECT ttl_create_index('t', 'v', interval '{ttl}' {options})"));
    db
}

pub fn seconds(session: &mut Session, key: u32) -> f64 {
    session.get(&format!("SELECT ttl_get('t', '{key}')")).parse().expect("a number")
}

/// Whether so many seconds are left as were asked for, or a little more than the type can help.
fn is_about(left: f64, asked: f64, grain: f64) -> bool {
    left > asked - 20.0 && left <= asked + grain
}

#[test]
fn every_kind_of_column_can_be_set_touched_and_persisted() {
    for (kind, options) in KINDS {
        for ttl in ["0", "3 days", "1 day 2:00"] {
            let mut db = table(kind, options, ttl);
            let grain = grain(kind, options);
            let name = format!("{kind}{options} {ttl}");
            assert_eq!(db.get("SELECT ttl_get('t', '1'), ttl_get('t', '4')"), "-1|-2", "{name}");
            assert_eq!(db.get("SELECT ttl_set('t', '1', '30 days'), ttl_set('t', '4', '30 days')"), "t|f", "{name}");
            let left = seconds(&mut db, 1);
            assert!(is_about(left, 30.0 * 86_400.0, grain + 3600.0), "{name}: {left}");
            assert_eq!(db.get("SELECT ttl_expire_at('t', '1', now() + interval '100 hours')"), "t", "{name}");
            let left = seconds(&mut db, 1);
            assert!(is_about(left, 360_000.0, grain), "{name}: {left}");
            if ttl == "0" {
                assert_eq!(db.error("SELECT ttl_touch('t', '1')").code, "55000", "{name}");
            } else {
                assert_eq!(db.get("SELECT ttl_touch('t', '1')"), "t", "{name}");
                let asked = if ttl == "3 days" { 3.0 * 86_400.0 } else { 26.0 * 3600.0 };
                let left = seconds(&mut db, 1);
                assert!(is_about(left, asked, grain + 3600.0), "{name}: {left}");
            }
            assert_eq!(db.get("SELECT ttl_persist('t', '1'), ttl_get('t', '1')"), "t|-1", "{name}");
            assert_eq!(db.get("SELECT v FROM t WHERE id = 1"), "", "{name}");
            db.run("UPDATE t SET v = NULL; DELETE FROM t WHERE id > 1");
            db.run("SELECT ttl_set('t', '1', '1 hour'); ALTER TABLE t ALTER v SET NOT NULL");
            assert_eq!(db.get("SELECT ttl_persist('t', '1'), ttl_get('t', '1')"), "t|-1", "{name}");
            assert_eq!(db.get("SELECT ttl_runner('t')"), "0", "{name}");
        }
    }
}

#[test]
fn what_is_set_is_what_is_got_in_every_time_zone() {
    let zones = ["UTC", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"];
    for (kind, options) in KINDS.iter().filter(|(kind, _)| *kind != "date") {
        let db = RefCell::new(table(kind, options, "0"));
        let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
        let cases = (0..zones.len(), 0..zones.len(), 0..18_i64, 0..400_i64, 30..90_000_000_i64);
        let outcome = runner.run(&cases, |(session_zone, zone, months, days, millis)| {
            let mut db = db.borrow_mut();
            let (session_zone, zone) = (zones[session_zone], zones[zone]);
            db.run(&format!(
                "SET TimeZone = '{session_zone}'; UPDATE t SET v = NULL;
                 SELECT ttl_alter_index('t', 'v', interval '{months} months {days} days {millis} milliseconds', time_zone => '{zone}')"
            ));
            let target = "now() + interval '2 years 5 hours'";
            let left: f64 = db
                .get(&format!(
                    "BEGIN; SELECT ttl_expire_at('t', '1', {target}); SELECT ttl_get('t', '1') - extract(epoch FROM {target} - clock_timestamp())"
                ))
                .lines()
                .last()
                .and_then(|line| line.parse().ok())
                .expect("a number");
            db.run("COMMIT");
            // Never earlier than asked. Later by no more than the type's grain, or, where the calendar has no such day or
            // hour, by the days that months differ.
            let calendar = if months > 0 || days > 0 { 4.0 * 86_400.0 } else { 0.0 };
            let is_right = left > -1.0 && left < 0.001 + grain(kind, options) + calendar;
            prop_assert!(is_right, "{kind}{options} {session_zone} {zone} {months} {days} {millis}: {left}");
            let again = db.get("SELECT ttl_set('t', '1', '100 days'), ttl_get('t', '1') BETWEEN 8636000 AND 8990000");
            prop_assert_eq!(again, "t|t", "{}{} {} {} {} {} {}", kind, options, session_zone, zone, months, days, millis);
            Ok(())
        });
        outcome.expect("a round trip");
    }
}

#[test]
fn a_row_never_expires_before_the_instant_that_was_set() {
    // A month before 31 March is 28 February, and a month after that is 28 March.
    let mut db = table("timestamptz", ", time_zone => 'Europe/Berlin'", "1 month");
    for at in ["2031-03-31 12:00+02", "2031-03-30 02:30+02", "2032-10-31 02:30+02", "2031-05-31 23:59:59.5+02"] {
        db.run(&format!("SELECT ttl_expire_at('t', '1', '{at}')"));
        // As the sweep will compare, just before the instant and some days after it.
        let expired = |at: &str| {
            format!("v <= ((({at}) AT TIME ZONE 'Europe/Berlin') - interval '1 month') AT TIME ZONE 'Europe/Berlin'")
        };
        let before = expired(&format!("timestamptz '{at}' - interval '1 second'"));
        let after = expired(&format!("timestamptz '{at}' + interval '4 days'"));
        assert_eq!(db.get(&format!("SELECT {before}, {after} FROM t WHERE id = 1")), "f|t", "{at}");
    }
}

#[test]
fn modes_are_those_of_redis() {
    let mut db = table("timestamptz", "", "0");
    let mut set = |row: u32, mode: &str, hours: u32| {
        let sql = format!(
            "SELECT ttl_set('t', '{row}', make_interval(hours => {hours}), mode => '{mode}'), round(ttl_get('t', '{row}') / 3600)"
        );
        db.get(&sql)
    };
    assert_eq!(set(1, "xx", 5), "f|-0", "it never expires");
    assert_eq!(set(1, "gt", 5), "f|-0", "never is later than anything");
    assert_eq!(set(1, "lt", 5), "t|5");
    assert_eq!(set(1, "nx", 6), "f|5");
    assert_eq!(set(1, "gt", 4), "f|5");
    assert_eq!(set(1, "gt", 6), "t|6");
    assert_eq!(set(1, "lt", 7), "f|6");
    assert_eq!(set(1, "xx", 7), "t|7");
    assert_eq!(set(1, "always", 3), "t|3");
    assert_eq!(set(2, "nx", 2), "t|2");
    let at = "SELECT ttl_expire_at('t', '3', now() + interval '1 hour', mode => 'xx'), ttl_expire_at('t', '3', now() + interval '1 hour', mode => 'nx')";
    assert_eq!(db.get(at), "f|t");
}

#[test]
fn a_row_that_has_expired_is_not_there_swept_or_not() {
    let mut db = table("timestamptz", "", "1 hour");
    db.run("UPDATE t SET v = now() - interval '61 minutes' WHERE id = 1; UPDATE t SET v = now() - interval '59 minutes' WHERE id = 2");
    assert_eq!(db.get("SELECT ttl_get('t', '1'), ttl_get('t', '2') BETWEEN 55 AND 60"), "-2|t");
    let calls = "SELECT ttl_set('t', '1', '1 day'), ttl_touch('t', '1'), ttl_persist('t', '1'), ttl_expire_at('t', '1', now() + interval '1 day')";
    assert_eq!(db.get(calls), "f|f|f|f");
    assert_eq!(db.get("SELECT ttl_set('t', '2', '0'), ttl_get('t', '2')"), "t|-2");
    assert_eq!(db.get("SELECT ttl_runner('t')"), "2");
    assert_eq!(db.get("SELECT ttl_expire_at('t', '3', '2020-01-01'), ttl_get('t', '3')"), "t|-2");
}

#[test]
fn filters_and_marks_count() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, v timestamptz DEFAULT '2020-01-01', kept boolean, gone timestamptz);
         INSERT INTO t (id, kept) VALUES (1, true), (2, false); INSERT INTO t (id, v, kept) VALUES (3, 'infinity', false)",
    );
    db.run("SELECT ttl_create_index('t', 'v', 60, soft_delete_column => 'gone', filter => 'NOT kept')");
    assert_eq!(db.get("SELECT ttl_get('t', '1'), ttl_get('t', '2'), ttl_get('t', '3')"), "-1|-2|-1");
    db.run("SELECT ttl_runner('t'); UPDATE t SET v = now()");
    assert_eq!(db.get("SELECT ttl_get('t', '2'), ttl_touch('t', '2')"), "-2|f", "it is marked");
    assert_eq!(db.get("SELECT ttl_get('t', '3') > 0"), "t");
}

#[test]
fn a_key_of_several_columns_is_an_object() {
    let mut db = with(
        "CREATE TABLE t (tenant text, n numeric, at timestamptz DEFAULT now(), PRIMARY KEY (n, tenant));
         INSERT INTO t VALUES ('a', 1), ('a', 2.5), ('b', 12345678901234567890123)",
    );
    db.run("SELECT ttl_create_index('t', 'at', interval '1 hour')");
    let get = |key: &str| format!("SELECT round(ttl_get('t', '{key}'::jsonb) / 3600)");
    assert_eq!(db.get(&get(r#"{"tenant": "a", "n": 1}"#)), "1");
    assert_eq!(db.get(&get(r#"{"n": "2.5", "tenant": "a"}"#)), "1");
    assert_eq!(db.get(&get(r#"{"n": "12345678901234567890123", "tenant": "b"}"#)), "1");
    assert_eq!(db.get(&get(r#"{"tenant": "a", "n": 3}"#)), "-0");
    for shape in [
        r#"{"tenant": "a"}"#,
        r#"{"tenant": "a", "n": 1, "x": 1}"#,
        r#"{"tenant": "a", "m": 1}"#,
        r#"{"tenant": null, "n": 1}"#,
        r#"{"tenant": "a", "n": 2.5}"#,
        r#"["a", 1]"#,
        "1",
    ] {
        assert_eq!(db.error(&get(shape)).code, "22023", "{shape}");
    }
    let error = db.error("SELECT ttl_get('t', '1')");
    assert_eq!((error.code.as_str(), error.hint.contains("n, tenant")), ("22023", true));
    assert_eq!(
        db.get(r#"SELECT ttl_set('t', '{"n": 1, "tenant": "a"}'::jsonb, '2 hours'), ttl_touch('t', '{"n": 1, "tenant": "a"}'::jsonb),
                         ttl_expire_at('t', '{"n": 1, "tenant": "a"}'::jsonb, now() + interval '1 day'), ttl_persist('t', '{"n": 1, "tenant": "a"}'::jsonb)"#),
        "t|t|t|t"
    );
    assert_eq!(db.get("SELECT at IS NULL FROM t WHERE n = 1"), "t");
}

#[test]
fn keys_of_every_type_are_read_as_the_type_does() {
    for (kind, value, other) in [
        ("bigint", "9007199254740993", "9007199254740992"),
        ("uuid", "018BCFE5-6800-7000-8000-000000000000", "018bcfe5-6800-7000-8000-000000000001"),
        ("varchar(3)", "abc", "abcd"),
        ("char(5)", "ab", "abcdefgh"),
        ("date", "2026-11-16", "2026-11-17"),
        ("text", "it's \"quoted\"", ""),
        ("inet", "10.0.0.1", "10.0.0.2"),
        ("own_domain", "5", "6"),
    ] {
        let mut db = with(&format!(
            "CREATE DOMAIN own_domain AS int; CREATE TABLE t (\"the key\" {kind} PRIMARY KEY, at timestamptz DEFAULT now());
             INSERT INTO t VALUES ($${value}$$); SELECT ttl_create_index('t', 'at', interval '1 hour')"
        ));
        assert_eq!(
            db.get(&format!("SELECT round(ttl_get('t', $${value}$$) / 3600), ttl_get('t', $${other}$$)")),
            "1|-2",
            "{kind}"
        );
    }
    let mut db = table("timestamptz", "", "1 hour");
    assert_eq!(db.error("SELECT ttl_get('t', 'x')").code, "22P02");
}

#[test]
fn what_cannot_be_done_is_refused_and_changes_nothing() {
    let mut db = with(
        "CREATE TABLE bare (id int PRIMARY KEY, at timestamptz);
         CREATE TABLE several (id int PRIMARY KEY, a timestamptz, b timestamptz);
         CREATE TABLE keyless (at timestamptz);
         CREATE TABLE made (id uuid PRIMARY KEY, at timestamp, j jsonb, ends timestamp GENERATED ALWAYS AS (at + interval '1 day') STORED);
         CREATE TABLE t (id int PRIMARY KEY, at timestamptz, n int); INSERT INTO t VALUES (1, '2100-01-01', 2000000000);
         SELECT ttl_create_index('several', 'a', 60), ttl_create_index('several', 'b', 60), ttl_create_index('keyless', 'at', 60),
                ttl_create_index('made', 'id', 60), ttl_create_index('made', 'at + interval ''1 hour''', 60),
                ttl_create_index('made', 'ends', 60), ttl_create_index('made', 'j->>''at''', 60), ttl_create_index('made', 'j', 60),
                ttl_create_index('t', 'at', 0), ttl_create_index('t', 'n', 0, unit => 's')",
    );
    for (call, code) in [
        ("ttl_get('bare', '1')", "42704"),
        ("ttl_get('t', '1', 'nowhere')", "42704"),
        ("ttl_get('several', '1')", "42702"),
        ("ttl_set('several', '1', '1 hour')", "42702"),
        ("ttl_get('keyless', '1')", "42704"),
        ("ttl_get('nowhere', '1')", "42P01"),
        ("ttl_get(NULL, '1')", "22004"),
        ("ttl_get('t', NULL::text, 'at')", "22004"),
        ("ttl_set('t', '1', NULL, 'at')", "22004"),
        ("ttl_set('t', '1', '1 hour', 'at', NULL)", "22004"),
        ("ttl_expire_at('t', '1', NULL, 'at')", "22004"),
        ("ttl_set('t', '1', '-1 second', 'at')", "22023"),
        ("ttl_set('t', '1', '1 month -31 days', 'at')", "22023"),
        ("ttl_set('t', '1', '100000 years', 'at')", "22023"),
        ("ttl_set('t', '1', '200 years', 'n')", "22003"),
        ("ttl_set('t', '1', '1 hour', 'at', 'sometimes')", "22023"),
        ("ttl_expire_at('t', '1', 'infinity', 'at')", "22023"),
        ("ttl_expire_at('t', '1', '-infinity', 'at')", "22023"),
        ("ttl_touch('t', '1', 'at')", "55000"),
        ("ttl_set('made', gen_random_uuid()::text, '1 hour', 'id')", "0A000"),
        ("ttl_persist('made', gen_random_uuid()::text, 'id')", "0A000"),
        ("ttl_touch('made', gen_random_uuid()::text, 'ends')", "0A000"),
        ("ttl_set('made', gen_random_uuid()::text, '1 hour', '(at + ''01:00:00''::interval)')", "0A000"),
        ("ttl_set('made', gen_random_uuid()::text, '1 hour', '(j ->> ''at''::text)')", "0A000"),
        ("ttl_set('made', gen_random_uuid()::text, '1 hour', 'j')", "0A000"),
        ("ttl_enable_touch('t', 'at')", "55000"),
        ("ttl_enable_touch('made', 'ends')", "0A000"),
        ("ttl_enable_touch('bare')", "42704"),
        ("ttl_enable_touch('several')", "42702"),
        ("ttl_touch_row()", "39P01"),
    ] {
        let error = db.error(&format!("SELECT {call}"));
        assert_eq!(error.code, code, "{call}: {error:?}");
        assert!(
            !error.message.ends_with('.')
                && (!["42704", "42702", "0A000", "55000"].contains(&code) || !error.hint.is_empty()),
            "{call}: {error:?}"
        );
    }
    assert_eq!(db.get("SELECT at AT TIME ZONE 'UTC', n FROM t"), "2100-01-01 00:00:00|2000000000");
    db.run("SET default_transaction_read_only = on");
    assert_eq!(db.error("SELECT ttl_set('t', '1', '1 hour', 'at')").code, "25006");
    assert_eq!(db.get("SELECT ttl_get('t', '1', 'at') > 0"), "t");
}

#[test]
fn the_callers_own_rights_and_policies_decide() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, who name, at timestamptz DEFAULT now());
         SELECT ttl_create_index('t', 'at', interval '1 hour')",
    );
    let (reader, tenant) = (db.role("reader"), db.role("tenant"));
    db.run(&format!(
        "INSERT INTO t (id, who) VALUES (1, '{tenant}'), (2, 'somebody else');
         GRANT SELECT ON t TO {reader}; GRANT SELECT, UPDATE ON t TO {tenant};
         ALTER TABLE t ENABLE ROW LEVEL SECURITY;
         CREATE POLICY own ON t TO {tenant} USING (who = current_user); CREATE POLICY look ON t FOR SELECT TO {reader} USING (true)"
    ));
    let stranger = db.role("stranger");
    assert_eq!(db.session(&stranger).error("SELECT ttl_get('t', '1')").code, "42501");
    let mut reader = db.session(&reader);
    assert_eq!(reader.get("SELECT ttl_get('t', '1') > 0"), "t");
    assert_eq!(reader.error("SELECT ttl_set('t', '1', '1 day')").code, "42501");
    let mut tenant = db.session(&tenant);
    assert_eq!(tenant.get("SELECT ttl_set('t', '1', '1 day'), ttl_set('t', '2', '1 day')"), "t|f");
    assert_eq!(tenant.get("SELECT ttl_get('t', '1') > 80000, ttl_get('t', '2')"), "t|-2");
    assert_eq!(tenant.error("SELECT ttl_enable_touch('t')").code, "42501");
}

#[test]
fn triggers_of_the_table_find_the_callers_search_path() {
    let mut db = with(
        "CREATE SCHEMA app; CREATE TABLE app.log (at timestamptz); CREATE TABLE app.t (id int PRIMARY KEY, at timestamptz);
         INSERT INTO app.t VALUES (1);
         CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO log VALUES (NEW.at); RETURN NEW; END';
         CREATE TRIGGER note AFTER UPDATE ON app.t FOR EACH ROW EXECUTE FUNCTION app.note();
         SELECT ttl_create_index('app.t', 'at', 0); SET search_path = app, public",
    );
    assert_eq!(db.get("SELECT ttl_set('t', '1', '1 hour')"), "t");
    assert_eq!(db.get("SELECT count(*) FROM log"), "1");
}

#[test]
fn other_sessions_hear_of_changes_at_once() {
    let mut db = table("timestamptz", "", "1 hour");
    db.run("UPDATE t SET v = now()");
    let mut other = db.session("postgres");
    let hours = "SELECT round(ttl_get('t', '1') / 3600)";
    assert_eq!(other.get(hours), "1");
    db.run("SELECT ttl_alter_index('t', 'v', interval '5 hours')");
    assert_eq!(other.get(hours), "5");
    db.run("ALTER TABLE t RENAME v TO w");
    assert_eq!(other.get(hours), "5");
    db.run("ALTER TABLE t RENAME id TO key; ALTER TABLE t ALTER key TYPE text");
    assert_eq!(other.get(hours), "5");
    db.run("UPDATE ttl_index_table SET expire_after = '7 hours'");
    assert_eq!(other.get(hours), "7");
    db.run("ALTER TABLE t DROP CONSTRAINT t_pkey");
    assert_eq!(other.error(hours).code, "42704");
    db.run("ALTER TABLE t ADD PRIMARY KEY (key); SELECT ttl_drop_index('t', 'w')");
    assert_eq!(other.error(hours).code, "42704");
    db.run("SELECT ttl_create_index('t', 'w', interval '2 hours')");
    assert_eq!(other.get(hours), "2");
    db.run("DROP EXTENSION pg_ttl_index; CREATE EXTENSION pg_ttl_index");
    assert_eq!(other.error(hours).code, "42704");
    db.run("ALTER TABLE t RENAME TO u; CREATE TABLE t (key text PRIMARY KEY, w timestamptz)");
    assert_eq!(other.error(hours).code, "42704");
}

#[test]
fn a_row_is_found_by_its_key_alone() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz DEFAULT now()); INSERT INTO t SELECT i FROM generate_series(1, 10000) i;
         SELECT ttl_create_index('t', 'at', interval '1 hour'); ANALYZE t",
    );
    let mut other = db.session("postgres");
    other.run("SELECT ttl_get('t', '7'), ttl_set('t', '8', '1 hour')");
    drop(other);
    let used = "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 't'";
    let before = db.get("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 't'");
    db.wait_for(used, &format!("{before}|2"));
}

#[test]
fn a_column_with_fewer_digits_is_rounded_up() {
    for (kind, options) in [
        ("timestamptz(0)", ""),
        ("timestamp(3)", ", time_zone => 'Asia/Tokyo'"),
        ("numeric(12,0)", ", unit => 's'"),
        ("numeric(16,2)", ", unit => 's'"),
    ] {
        let mut db = table(kind, options, "1 minute");
        db.run("ALTER TABLE t ADD note text; SELECT ttl_enable_touch('t')");
        for _ in 0..5 {
            let before: f64 = db.get("SELECT extract(epoch FROM clock_timestamp())").parse().expect("seconds");
            // Seconds from the instant before the calls to the row's expiry, however long the calls take.
            let lifetime = format!("(ttl_get('t', '1') + extract(epoch FROM clock_timestamp())::float8 - {before})");
            let sql = format!(
                "SELECT ttl_expire_at('t', '1', to_timestamp({before}) + interval '1 hour'), {lifetime} >= 3599.999"
            );
            assert_eq!(db.get(&sql), "t|t", "{kind}");
            assert_eq!(db.get(&format!("SELECT ttl_touch('t', '1'), {lifetime} >= 59.999")), "t|t", "{kind}");
            db.run("SELECT ttl_set('t', '1', '30.5 seconds'); UPDATE t SET note = 'used' WHERE id = 1");
            assert_eq!(
                db.get(&format!("SELECT {lifetime} >= 59.999, v::text = (v::{kind})::text FROM t WHERE id = 1")),
                "t|t",
                "{kind}"
            );
        }
    }
    let mut db = table("varchar(20)", "", "1 hour");
    assert_eq!(db.error("SELECT ttl_enable_touch('t')").code, "0A000");
    assert_eq!(db.error("SELECT ttl_set('t', '1', '1 hour')").code, "22001");
}

#[test]
fn what_is_set_stays_also_where_it_was_so_before() {
    let mut db = table("date", "", "30 days");
    db.run("SELECT ttl_enable_touch('t'), ttl_set('t', '1', '9 days 12 hours')");
    db.run("SELECT ttl_set('t', '1', '9 days 12 hours'), ttl_set('t', '1', '9 days 12 hours')");
    assert_eq!(db.get("SELECT ttl_get('t', '1') < 12 * 86400"), "t");
}

#[test]
fn an_expression_is_read_in_the_rules_time_zone() {
    let mut db = with(
        "CREATE TABLE t (id int PRIMARY KEY, l timestamp); SET TimeZone = 'UTC';
         INSERT INTO t VALUES (1, now() + interval '5 hours');
         SELECT ttl_create_index('t', 'l::timestamptz', 0, time_zone => 'UTC', index_method => 'none')",
    );
    db.run("SET TimeZone = 'Asia/Tokyo'");
    assert_eq!(db.get("SELECT round(ttl_get('t', '1') / 3600), ttl_runner('t')"), "5|0");
}

#[test]
fn a_change_is_heard_of_within_a_transaction() {
    let mut db = table("timestamptz", "", "1 hour");
    db.run("UPDATE t SET v = now()");
    let mut other = db.session("postgres");
    let hours = "SELECT round(ttl_get('t', '1') / 3600)";
    other.run("BEGIN");
    assert_eq!(other.get(hours), "1");
    db.run("UPDATE ttl_index_table SET expire_after = '7 hours'");
    assert_eq!(other.get(hours), "7");
}
