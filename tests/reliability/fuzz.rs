//! Every function of the extension with arguments that nobody should give it.

use super::{Trial, server};
use harness::{Database, Random};

/// How many calls go to the server at once.
const AT_ONCE: usize = 200;

const TEXTS: [&str; 34] = [
    "NULL",
    "''",
    "'t'",
    "'at'",
    "'AT'",
    "'no such column'",
    "'\"\"'",
    "'a\"b'",
    "'a''b'",
    "'; DROP TABLE t; --'",
    "repeat('x', 64)",
    "repeat('\u{e9}', 40)",
    "repeat('a', 100000)",
    "'1'",
    "'-1'",
    "'1e400'",
    "'0x7fffffff'",
    "'99999999999999999999999999'",
    "'NaN'",
    "'infinity'",
    "'1 month -30 days'",
    "'P1Y2M3DT4H5M6S'",
    "'2026-02-30T25:61:61Z'",
    "'Mon-Fri 22:00-06:00 Europe/Paris'",
    "'25:00-24:01'",
    "'{\"id\": 1}'",
    "'[1, 2]'",
    "repeat('[', 5000)",
    "repeat('{\"a\":', 3000)",
    "'id % 2 = 0 AND (SELECT true)'",
    "'1/0 = 1'",
    "repeat('NOT ', 2000) || 'true'",
    "'ms'",
    "'{filter,batch_size,nothing}'",
];

const TABLES: [&str; 9] =
    ["'t'", "'parts'", "'\"Na\"\"me '';--\"'", "'pg_class'", "'ttl_index_table'", "0", "4294967295", "'v'", "'t_pkey'"];

const NUMBERS: [&str; 10] = [
    "NULL",
    "0",
    "1",
    "-1",
    "2147483647",
    "(-2147483648)",
    "9223372036854775807",
    "(-9223372036854775808)",
    "60",
    "86400",
];

const INTERVALS: [&str; 8] = [
    "NULL",
    "interval '0'",
    "interval '1 second'",
    "interval '-1 day'",
    "interval '178000000 years'",
    "interval '1 month -30 days'",
    "interval '2147483647 days'",
    "interval '0.000001 seconds'",
];

const TIMES: [&str; 6] = [
    "NULL",
    "now()",
    "timestamptz 'infinity'",
    "timestamptz '-infinity'",
    "timestamptz '4714-11-24 00:00:00+00 BC'",
    "timestamptz '294276-12-31 23:59:59+00'",
];

/// A value for an argument of this type, most of the time of that type.
fn value(random: &mut Random, type_name: &str) -> String {
    if random.below(20) == 0 {
        return random.pick(&TEXTS).to_owned();
    }
    match type_name {
        "regclass" | "oid" => random.pick(&TABLES).to_owned(),
        "boolean" => random.pick(&["true", "false", "NULL"]).to_owned(),
        "integer" | "bigint" | "smallint" | "double precision" | "numeric" => random.pick(&NUMBERS).to_owned(),
        "interval" => random.pick(&INTERVALS).to_owned(),
        "timestamp with time zone" => random.pick(&TIMES).to_owned(),
        "text[]" => {
            let parts: Vec<_> = (0..random.below(4)).map(|_| random.pick(&TEXTS)).collect();
            format!("ARRAY[{}]::text[]", parts.join(", "))
        }
        "regprocedure" => random.pick(&["'now()'", "'tell(regclass, jsonb)'", "0", "NULL"]).to_owned(),
        "anyelement" | "anynonarray" | "\"any\"" => {
            let typed =
                random.pick(&["1", "'x'::text", "now()", "'{}'::jsonb", "1.5", "NULL::int", "gen_random_uuid()"]);
            typed.to_owned()
        }
        _ => random.pick(&TEXTS).to_owned(),
    }
}

/// Makes so many calls; none may fail with an internal error, or end a process.
pub fn run(random: &mut Random, wanted: u64) -> Vec<Trial> {
    let server = server(&["max_stack_depth=2MB"]);
    let mut db = Database::on(&server);
    db.run(
        "CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker();
         CREATE TABLE t (id int PRIMARY KEY, at timestamptz, gone timestamptz, n int, doc jsonb, label text);
         INSERT INTO t SELECT i, now() - i * interval '1 hour', NULL, i, '{}', 'x' FROM generate_series(1, 50) i;
         CREATE TABLE parts (id int, at timestamptz) PARTITION BY RANGE (at); CREATE TABLE part PARTITION OF parts DEFAULT;
         CREATE TABLE \"Na\"\"me '';--\" (\"a\"\"b\" timestamptz, id text PRIMARY KEY); CREATE VIEW v AS TABLE t;
         CREATE FUNCTION tell(regclass, jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
         SELECT ttl_create_index('t', 'at', 60, batch_size => 5, active => false), ttl_create_index('parts', 'at', 60);
         -- What a call has done is undone.
         CREATE FUNCTION outcome(call text) RETURNS text LANGUAGE plpgsql AS $$
         BEGIN
             EXECUTE call;
             RAISE EXCEPTION USING ERRCODE = 'ZZZZZ';
         EXCEPTION
             WHEN query_canceled THEN RETURN SQLSTATE || ' ' || SQLERRM;
             WHEN OTHERS THEN RETURN SQLSTATE || ' ' || SQLERRM;
         END $$",
    );
    let functions: Vec<(String, Vec<(String, String)>)> = db
        .get(
            "SELECT p.proname || E'\\t' || coalesce((
                        SELECT string_agg(coalesce(nullif(p.proargnames[n], ''), '') || ':' || format_type(type, NULL), E'\\t' ORDER BY n)
                        FROM unnest(p.proargtypes) WITH ORDINALITY AS argument (type, n)), '')
             FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
             JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_ttl_index'
             WHERE p.prokind = 'f' AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)",
        )
        .lines()
        .map(|line| {
            let mut parts = line.split('\t');
            let name = parts.next().unwrap_or_default().to_owned();
            let arguments = parts.filter_map(|part| part.rsplit_once(':'));
            (name, arguments.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect())
        })
        .collect();
    assert!(functions.len() > 30, "{functions:?}");
    let (mut tried, mut faults) = (0, Vec::new());
    while tried < wanted && faults.len() < 10 {
        let calls: Vec<String> = (0..AT_ONCE).map(|_| call(random, &functions)).collect();
        let outcomes: Vec<_> = calls.iter().map(|call| format!("outcome($call${call}$call$)")).collect();
        // One row each, so that a line is an outcome; messages may have several.
        let sql = format!("SELECT replace(o, E'\\n', ' ') FROM (VALUES ({})) AS o (o)", outcomes.join("), ("));
        match db.try_get(&sql) {
            Ok(answer) => {
                for (outcome, call) in answer.lines().zip(&calls) {
                    if outcome.starts_with("XX") || outcome.starts_with("57P") {
                        let short: String = call.chars().take(600).collect();
                        faults.push(format!("{outcome}: {short}"));
                    }
                }
            }
            Err(error) => {
                faults.push(format!("{error:?} among: {}", calls.join("; ").chars().take(2_000).collect::<String>()))
            }
        }
        tried += AT_ONCE as u64;
    }
    vec![Trial { name: "every function".into(), tried, what: "calls with odd arguments", faults }]
}

fn call(random: &mut Random, functions: &[(String, Vec<(String, String)>)]) -> String {
    let (name, arguments) = &functions[random.below(functions.len() as u64) as usize];
    // The first by place, as users give them, and some of the others by name.
    let by_place = if arguments.len() > 6 { 3 } else { arguments.len() };
    let mut given = Vec::new();
    for (place, (argument, kind)) in arguments.iter().enumerate() {
        if place < by_place {
            given.push(value(random, kind));
        } else if random.below(5) == 0 && !argument.is_empty() {
            given.push(format!("{argument} => {}", value(random, kind)));
        }
    }
    format!("SELECT * FROM {name}({})", given.join(", "))
}
