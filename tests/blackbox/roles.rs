//! Who may do what: every object of the extension, as the catalog lists them, by every kind of role. An object that is new has to
//! be put into the table below.

use harness::{Database, Session, SqlError};

/// Who asks: `superuser`, the `owner` of the table, a `member` of the owner, a `grantee` of SELECT, INSERT, UPDATE and DELETE on the
/// table, a `reader` who may SELECT, a `stranger` and a `monitor` of pg_monitor, in this order.
const ROLES: [&str; 7] = ["superuser", "owner", "member", "grantee", "reader", "stranger", "monitor"];

/// A function by its name and the types of its first arguments, or a relation; what is tried; and what comes of it by role: `+` is
/// a result, `.` none (nothing, zero, false), `-` is permission denied, `T` is for triggers alone, `U` a unique violation.
#[rustfmt::skip]
const MATRIX: &[(&str, &str, &str)] = &[
    // Rules are for owners.
    ("ttl_create_index(regclass,text,integer)", "SELECT ttl_create_index('t', 'at', 3600)", "+++----"),
    ("ttl_create_index(regclass,text,text)", "SELECT ttl_create_index('t', 'at', '1 hour')", "+++----"),
    ("ttl_create_index(regclass,text,interval)", "SELECT ttl_create_index('t', 'at', interval '1 hour')", "+++----"),
    ("ttl_alter_index(regclass,text,interval)", "SELECT ttl_alter_index('t', 'at', batch_size => 5)", "+++----"),
    ("ttl_drop_index(regclass,text,text)", "SELECT ttl_drop_index('t', 'at')", "+++----"),
    ("ttl_pause(regclass,text,text)", "SELECT ttl_pause('t')", "+++----"),
    ("ttl_resume(regclass,text,text)", "SELECT ttl_resume('t')", "...----"),
    ("ttl_enable_touch(regclass,text,text)", "SELECT ttl_enable_touch('t')", "+++----"),
    ("ttl_disable_touch(regclass,text,text)", "SELECT ttl_disable_touch('t')", "...----"),
    ("ttl_preview(regclass,text,text)", "SELECT relation FROM ttl_preview('t')", "+++----"),
    ("ttl_runner(regclass)", "SELECT ttl_runner('t')", "+++----"),
    ("ttl_runner(regclass)", "SELECT ttl_runner()", "+++...."),
    ("ttl_sweep(regclass,bigint,interval)", "CALL ttl_sweep('swept')", "...----"),
    // Rows are for those who may read and write them.
    ("ttl_get(regclass,text,text)", "SELECT ttl_get('t', '1')", "+++++--"),
    ("ttl_get(regclass,anyelement,text)", "SELECT ttl_get('t', jsonb '{\"id\": 1}')", "+++++--"),
    ("ttl_set(regclass,text,interval)", "SELECT ttl_set('t', '1', interval '1 day')", "++++---"),
    ("ttl_set(regclass,text,text)", "SELECT ttl_set('t', '1', '1 day')", "++++---"),
    ("ttl_set(regclass,text,double precision)", "SELECT ttl_set('t', '1', 3600)", "++++---"),
    ("ttl_set(regclass,anyelement,text)", "SELECT ttl_set('t', 1, '1 day')", "++++---"),
    ("ttl_set(regclass,anyelement,double precision)", "SELECT ttl_set('t', 1, 3600)", "++++---"),
    ("ttl_set(regclass,anyelement,interval)", "SELECT ttl_set('t', jsonb '{\"id\": 1}', interval '1 day')", "++++---"),
    ("ttl_expire_at(regclass,text,timestamp with time zone)", "SELECT ttl_expire_at('t', '1', now() + interval '1 day')", "++++---"),
    ("ttl_expire_at(regclass,anyelement,timestamp with time zone)", "SELECT ttl_expire_at('t', jsonb '{\"id\": 1}', now() + interval '1 day')", "++++---"),
    ("ttl_touch(regclass,text,text)", "SELECT ttl_touch('t', '1')", "++++---"),
    ("ttl_touch(regclass,anyelement,text)", "SELECT ttl_touch('t', jsonb '{\"id\": 1}')", "++++---"),
    ("ttl_persist(regclass,text,text)", "SELECT ttl_persist('t', '1')", "++++---"),
    ("ttl_persist(regclass,anyelement,text)", "SELECT ttl_persist('t', jsonb '{\"id\": 1}')", "++++---"),
    // What is known of a rule is for those who may read its table, and for monitors.
    ("ttl_summary()", "SELECT table_name FROM ttl_summary() WHERE table_name = 't'", "+++++.+"),
    ("ttl_summary", "SELECT table_name FROM ttl_summary WHERE table_name = 't'", "+++++.+"),
    ("ttl_overview", "SELECT table_name FROM ttl_overview WHERE table_name = 't'", "+++++.+"),
    ("ttl_doctor()", "SELECT subject FROM ttl_doctor() WHERE subject LIKE '%public.t (%'", "+++++.+"),
    ("ttl_metrics", "SELECT table_name FROM ttl_metrics WHERE table_name = 't'", "+-----+"),
    ("ttl_history()", "SELECT table_name FROM ttl_history() WHERE table_name = 't'", "+++++.+"),
    ("ttl_history", "SELECT table_name FROM ttl_history WHERE table_name = 't'", "+++++.+"),
    ("ttl_history_log", "SELECT table_name FROM ttl_history_log WHERE table_name = 't'", "+++++.+"),
    ("ttl_progress()", "SELECT table_name FROM ttl_progress()", "......."),
    ("ttl_progress", "SELECT table_name FROM ttl_progress", "......."),
    ("ttl_progress_slots()", "SELECT relid FROM ttl_progress_slots()", "......."),
    ("ttl_states()", "SELECT rule_id FROM ttl_states() WHERE rule_id = 1", "+++++.+"),
    ("ttl_history_errors()", "SELECT * FROM ttl_history_errors()", "......."),
    // What was asked for can be dumped by everybody. What it means here, and what errors say, is not for reading.
    ("ttl_index_table", "SELECT table_name FROM ttl_index_table WHERE table_name = 't'", "+++++++"),
    // And restored by the owner of the table; what others write does not stay.
    ("ttl_index_table", "DELETE FROM ttl_index_table WHERE false RETURNING id", ".------"),
    ("ttl_index_table", "UPDATE ttl_index_table SET active = false WHERE false RETURNING id", ".------"),
    ("ttl_binding", "SELECT relid FROM ttl_binding WHERE relid = 't'::regclass", "+------"),
    ("ttl_state", "SELECT * FROM ttl_state", ".------"),
    ("ttl_history_log", "SELECT count(error) FROM ttl_history_log", ".------"),
    ("ttl_lags()", "SELECT rule_id FROM ttl_lags() WHERE rule_id = 1", "+++++.+"),
    ("ttl_holds()", "SELECT * FROM ttl_holds()", "......."),
    ("ttl_waits_for_process(bigint)", "SELECT ttl_waits_for_process(1)", "......."),
    ("ttl_next_due(bigint)", "SELECT ttl_next_due(1)", "+++++.+"),
    ("ttl_due_at(ttl_index_table)", "SELECT 1 FROM ttl_index_table t WHERE ttl_due_at(t) IS NULL LIMIT 1", "+++++++"),
    // Of the workers everybody may know that they are there, and of their settings.
    ("ttl_worker_status()", "SELECT count(*) >= 0 FROM ttl_worker_status()", "+++++++"),
    ("ttl_next_pass()", "SELECT 1 FROM ttl_next_pass()", "+++++++"),
    ("ttl_default_batch_size()", "SELECT ttl_default_batch_size()", "+++++++"),
    ("ttl_worker_off", "SELECT since FROM ttl_worker_off", "+++++++"),
    ("ttl_start_worker()", "SELECT ttl_start_worker()", "+------"),
    ("ttl_stop_worker()", "SELECT ttl_stop_worker()", ".------"),
    ("ttl_wake()", "SELECT ttl_wake()", ".------"),
    ("ttl_adopt()", "SELECT ttl_adopt()", ".------"),
    ("ttl_clock", "SELECT count(*) >= 0 FROM ttl_clock", "+------"),
    ("ttl_recovery", "SELECT count(*) >= 0 FROM ttl_recovery", "+------"),
    ("ttl_last_recovery()", "SELECT ttl_last_recovery()", "......."),
    ("ttl_database_hold()", "SELECT ttl_database_hold()", "......."),
    ("ttl_forget(oid)", "SELECT ttl_forget('t'::regclass)", ".------"),
    // What tells nothing but what its arguments, or the system catalogs, tell everybody.
    ("ttl_instant(text)", "SELECT ttl_instant('2020-01-01T00:00:00Z')", "+++++++"),
    ("ttl_instant(text,text)", "SELECT ttl_instant('1600000000', 's')", "+++++++"),
    ("ttl_instant(numeric,text)", "SELECT ttl_instant(1600000000, 's')", "+++++++"),
    ("ttl_instant(uuid)", "SELECT ttl_instant(uuid '01890000-0000-7000-8000-000000000000')", "+++++++"),
    ("ttl_instant(uuid,text)", "SELECT ttl_instant(uuid '01890000-0000-7000-8000-000000000000', 'ulid')", "+++++++"),
    ("ttl_rfc3339(timestamp with time zone)", "SELECT ttl_rfc3339(now())", "+++++++"),
    ("ttl_run_window(text,text,timestamp with time zone)", "SELECT until FROM ttl_run_window('22:00-06:00', 'UTC', now())", "+++++++"),
    // Statements call it that met a hidden row, as whoever sent them: it fails.
    ("ttl_refuse(oid)", "SELECT ttl_refuse('t'::regclass)", "UUUUUUU"),
    // The summary calls it as whoever reads that.
    ("ttl_index_oid(oid,oid,text)", "SELECT ttl_index_oid('t'::regclass, NULL, 't_pkey')", "+++++++"),
    ("ttl_index_table_id_seq", "SELECT last_value FROM ttl_index_table_id_seq", "+------"),
    ("ttl_history_log_id_seq", "SELECT last_value FROM ttl_history_log_id_seq", "+------"),
    // Parts of the catalog.
    ("ttl_attnums(oid,text[])", "SELECT ttl_attnums('t'::regclass, '{at}')", "+------"),
    ("ttl_ready_index(oid,text,boolean)", "SELECT ttl_ready_index('t'::regclass, 't_pkey', false)", "+------"),
    ("ttl_on_expire_oid(text)", "SELECT ttl_on_expire_oid('pg_catalog.nothing')", ".------"),
    ("ttl_default_marks(oid,smallint[])", "SELECT ttl_default_marks('t'::regclass, '{1}')", "+------"),
    ("ttl_defaults(oid,smallint[])", "SELECT ttl_defaults('t'::regclass, '{1}')", "+------"),
    ("ttl_bind()", "SELECT ttl_bind()", "T------"),
    ("ttl_take_in()", "SELECT ttl_take_in()", "T------"),
    ("ttl_count_version()", "SELECT ttl_count_version()", "T------"),
    ("ttl_tell_of_drop()", "SELECT ttl_tell_of_drop()", "T------"),
    ("ttl_follow_ddl()", "SELECT ttl_follow_ddl()", "T------"),
    // An owner's triggers call them, and an owner makes those.
    ("ttl_touch_row()", "SELECT ttl_touch_row()", "TTTTTTT"),
    ("ttl_free_key()", "SELECT ttl_free_key()", "TTTTTTT"),
    // What is not in these is not to be had by their owners either.
    ("ttl_states()", "SELECT rule_id FROM ttl_states() WHERE rule_id = 2", "+.....+"),
    ("ttl_lags()", "SELECT rule_id FROM ttl_lags() WHERE rule_id = 2", "+.....+"),
    ("ttl_is_large(oid)", "SELECT ttl_is_large('t'::regclass)", "......."),
    ("ttl_next_due(bigint)", "SELECT ttl_next_due(2)", "+.....+"),
];

/// Members of the extension: functions with the types of up to three arguments, and relations.
const OBJECTS: &str =
    "SELECT CASE d.classid WHEN 'pg_class'::regclass THEN (SELECT relname::text FROM pg_class WHERE oid = d.objid)
        ELSE (SELECT format('%s(%s)', p.proname, (SELECT string_agg(format_type(type, NULL), ',' ORDER BY position)
                            FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, position) WHERE position <= 3))
              FROM pg_proc p WHERE p.oid = d.objid) END
    FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
    WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'pg_ttl_index'
      AND d.classid IN ('pg_class'::regclass, 'pg_proc'::regclass)
    ORDER BY 1";

/// A database with a rule on table `t`, number 1, one on `secret`, a table of somebody else, number 2, and one on `swept`; and a
/// session for each kind of role.
fn cast() -> (Database, Vec<Session>) {
    let mut db = Database::new();
    let [owner, member, grantee, reader, stranger, monitor] =
        ["owner", "member", "grantee", "reader", "stranger", "monitor"].map(|name| db.role(name));
    db.run(&format!("GRANT {owner} TO {member}; GRANT pg_monitor TO {monitor}"));
    db.session(&owner).run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz); CREATE TABLE swept (at timestamptz);
         GRANT SELECT, INSERT, UPDATE, DELETE ON t TO {grantee}; GRANT SELECT ON t TO {reader};
         INSERT INTO t VALUES (1, now()), (2, '2020-01-01'), (3, '2020-01-01');
         SELECT ttl_create_index('t', 'at', 3600, run_every => interval '1 hour', max_rows_per_run => 1)"
    ));
    db.run(
        "CREATE TABLE secret (at timestamptz); INSERT INTO secret VALUES ('2020-01-01'), ('2020-01-01');
            SELECT ttl_create_index('secret', 'at', 3600, run_every => interval '1 hour', max_rows_per_run => 1)",
    );
    db.session(&owner).run("SELECT ttl_create_index('swept', 'at', 3600)");
    // The worker has swept one row of each, so that there is a history, and knows when they are due again.
    db.wait_for("SELECT count(*) FROM ttl_history WHERE rows_removed = 1", "2");
    db.wait_for("SELECT count(*) FROM ttl_index_table WHERE ttl_next_due(id) IS NOT NULL", "2");
    db.run("SELECT ttl_stop_worker()");
    db.wait_for("SELECT count(*) FROM ttl_worker_status() WHERE database_name = current_database()", "0");
    let roles = ["postgres", &owner, &member, &grantee, &reader, &stranger, &monitor];
    let sessions = roles.into_iter().map(|role| db.session(role)).collect();
    (db, sessions)
}

fn outcome(session: &mut Session, statement: &str) -> Result<char, SqlError> {
    let is_procedure = statement.starts_with("CALL");
    if !is_procedure {
        session.run("BEGIN");
    }
    let result = session.try_get(statement);
    if !is_procedure {
        session.run("ROLLBACK");
    }
    match result {
        Ok(rows) if ["", "0", "f"].contains(&rows.as_str()) => Ok('.'),
        Ok(_) => Ok('+'),
        Err(error) if error.code == "42501" => Ok('-'),
        Err(error) if ["0A000", "39P01"].contains(&error.code.as_str()) => Ok('T'),
        Err(error) if error.message.ends_with("NotTrigger") => Ok('T'),
        Err(error) if error.code == "23505" => Ok('U'),
        Err(error) => Err(error),
    }
}

#[test]
fn every_object_is_in_the_matrix_and_every_role_gets_what_it_says() {
    let (mut db, mut sessions) = cast();
    let mut listed: Vec<_> = MATRIX.iter().map(|(object, _, _)| *object).collect();
    listed.sort_unstable();
    listed.dedup();
    let mut objects: Vec<_> = db.get(OBJECTS).lines().map(str::to_owned).collect();
    objects.sort_unstable();
    assert_eq!(objects, listed, "what is new belongs into the matrix");

    let mut surprises = Vec::new();
    for (object, statement, expected) in MATRIX {
        let outcomes: String = sessions
            .iter_mut()
            .map(|session| outcome(session, statement).unwrap_or_else(|error| panic!("{error:?} in: {statement}")))
            .collect();
        if outcomes != *expected {
            surprises.push(format!("{object}: {statement}: {outcomes} instead of {expected}"));
        }
    }
    assert!(surprises.is_empty(), "by {}:\n{}", ROLES.join(", "), surprises.join("\n"));
}

#[test]
fn nobody_but_a_superuser_may_write_any_of_it_but_for_a_restore() {
    let (_db, mut sessions) = cast();
    for session in &mut sessions[1..] {
        let writable = session.get(
            "SELECT c.relname FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.classid = 'pg_class'::regclass
             JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_ttl_index'
             WHERE d.deptype = 'e' AND CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, 'USAGE, UPDATE')
                       ELSE has_table_privilege(c.oid, 'UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
                            OR has_any_column_privilege(c.oid, 'UPDATE, REFERENCES')
                            OR has_any_column_privilege(c.oid, 'INSERT') AND NOT EXISTS (
                                SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
                                WHERE t.tgrelid = c.oid AND t.tgenabled = 'A' AND p.proname = 'ttl_take_in') END",
        );
        assert_eq!(writable, "");
    }
}

#[test]
fn what_workers_are_at_is_for_monitors() {
    let (mut db, mut sessions) = cast();
    db.run("SELECT ttl_start_worker()");
    db.wait_for("SELECT count(*) FROM ttl_worker_status() WHERE database_name = current_database()", "1");
    let seen: Vec<_> = sessions
        .iter_mut()
        .map(|session| {
            session.get("SELECT activity IS NOT NULL FROM ttl_worker_status() WHERE database_name = current_database()")
        })
        .collect();
    assert_eq!(seen, ["t", "f", "f", "f", "f", "f", "t"]);
}

#[test]
fn a_trigger_with_the_number_of_somebody_elses_rule_does_and_tells_nothing() {
    let (_db, mut sessions) = cast();
    let stranger = &mut sessions[5];
    stranger.run(
        "CREATE TABLE mine (id int PRIMARY KEY, at timestamptz, n int); INSERT INTO mine VALUES (1, '2020-01-01', 0)",
    );
    for function in ["ttl_touch_row", "ttl_free_key"] {
        stranger.run(&format!(
            "CREATE TRIGGER {function} BEFORE UPDATE ON mine FOR EACH ROW EXECUTE FUNCTION {function}('1')"
        ));
        stranger.run("UPDATE mine SET n = n + 1");
        assert_eq!(stranger.get("SELECT at = '2020-01-01' FROM mine"), "t", "{function}");
        stranger.run(&format!("DROP TRIGGER {function} ON mine"));
    }
}
