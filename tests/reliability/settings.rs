//! What matters most, under each setting that changes what statements mean, or how they are planned.

use super::{Trial, server};
use harness::{Database, Session};

/// Settings, each with values other than the default.
const SETTINGS: [(&str, &str); 34] = [
    ("default_transaction_isolation", "'repeatable read'"),
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_deferrable", "on"),
    ("standard_conforming_strings", "off"),
    ("backslash_quote", "off"),
    ("transform_null_equals", "on"),
    ("quote_all_identifiers", "on"),
    ("DateStyle", "'German, DMY'"),
    ("DateStyle", "'SQL, MDY'"),
    ("IntervalStyle", "iso_8601"),
    ("IntervalStyle", "sql_standard"),
    ("TimeZone", "'Pacific/Apia'"),
    ("TimeZone", "'America/St_Johns'"),
    ("extra_float_digits", "-15"),
    ("bytea_output", "escape"),
    ("array_nulls", "off"),
    ("search_path", "''"),
    ("search_path", "pg_temp, public, pg_catalog"),
    ("row_security", "off"),
    ("check_function_bodies", "off"),
    ("jit", "on"),
    ("jit_above_cost", "0"),
    ("work_mem", "64"),
    ("enable_indexscan", "off"),
    ("enable_indexonlyscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_seqscan", "off"),
    ("enable_tidscan", "off"),
    ("enable_sort", "off"),
    ("enable_nestloop", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("plan_cache_mode", "force_custom_plan"),
    ("constraint_exclusion", "on"),
    ("session_replication_role", "replica"),
];

/// Runs the core under every so many of the settings, set in each of these scopes.
pub fn run(scopes: &[&str], every: usize) -> Vec<Trial> {
    let server = server(&[]);
    let (mut tried, mut faults) = (0, Vec::new());
    let version: u32 = Database::on(&server).get("SHOW server_version_num").parse().expect("a number");
    for (name, value) in SETTINGS.into_iter().step_by(every) {
        // Since 19, this cannot be changed.
        if name == "standard_conforming_strings" && version >= 190_000 {
            continue;
        }
        for scope in scopes {
            let mut db = Database::on(&server);
            db.run("CREATE EXTENSION pg_ttl_index; SELECT ttl_stop_worker()");
            let owner = db.role("owner");
            db.run(&format!("GRANT ALL ON SCHEMA public TO {owner}; ALTER ROLE {owner} SUPERUSER"));
            let set = format!("{name} = {value}");
            match *scope {
                "DATABASE" => {
                    let name = db.name.clone();
                    db.run(&format!("ALTER DATABASE {name} SET {set}"));
                }
                "ROLE" => db.run(&format!("ALTER ROLE {owner} SET {set}")),
                _ => {}
            }
            let mut session = db.session(&owner);
            if *scope == "session" {
                session.run(&format!("SET {set}"));
            }
            for fault in core(&mut session, name == "session_replication_role") {
                faults.push(format!("{set} for the {scope}: {fault}"));
            }
            tried += 1;
        }
    }
    vec![Trial { name: format!("for {}", scopes.join(", ")), tried, what: "settings around the core", faults }]
}

/// Registers rules of all kinds, sweeps, and returns what is not as it should be. Triggers do not fire for replicas.
pub fn core(session: &mut Session, is_replica: bool) -> Vec<String> {
    let mut faults = Vec::new();
    let mut check = |sql: &str, expected: &str| {
        let found = session.try_get(sql);
        if found.as_deref() != Ok(expected) {
            faults.push(format!("{found:?}, not {expected}: {sql}"));
        }
    };
    let made = "CREATE TABLE public.$t (id int PRIMARY KEY, at timestamptz, n int, v text, gone timestamptz);
        INSERT INTO public.$t SELECT i, pg_catalog.now() - i * interval '1 hour', i, 'keep' || i FROM pg_catalog.generate_series(1, 60) i";
    // The same filter in every syntax of strings: it keeps rows whose text ends in 7.
    let filter = "filter => $f$v !~ '7$'$f$";
    for (table, options, left) in [
        ("plain", filter, "27"),
        ("blocks", "index_method => 'none', filter => $f$n % 10 <> 7$f$", "27"),
        ("soft", "soft_delete_column => 'gone', filter => $f$v !~ '7$'$f$", "27"),
        ("clears", "clear_columns => $f${v}$f$, filter => $f$n % 10 <> 7$f$", "27"),
        (
            "zoned",
            "time_zone => 'Asia/Kolkata', filter => $f$extract(hour FROM timestamptz '2026-01-01 00:00+00') = 5 AND n % 10 <> 7$f$",
            "27",
        ),
    ] {
        check(&made.replace("$t", table), "");
        check(&format!("SELECT public.ttl_create_index('public.{table}', 'at', interval '1 day', {options})"), "t");
        check(&format!("SELECT public.ttl_runner('public.{table}') > 0"), "t");
        let live = "gone IS NULL AND v IS NOT NULL";
        check(&format!("SELECT pg_catalog.count(*) FROM public.{table} WHERE {live}"), left);
        check(&format!("CALL public.ttl_sweep('public.{table}')"), "");
        check(&format!("SELECT pg_catalog.count(*) FROM public.{table} WHERE {live}"), left);
        check(
            &format!(
                "SELECT public.ttl_set('public.{table}', 1, interval '2 hours'), public.ttl_get('public.{table}', 1) BETWEEN 7100 AND 7200"
            ),
            "t|t",
        );
        check(&format!("SELECT state, last_error FROM public.ttl_summary WHERE table_name = '{table}'"), "active|");
    }
    if !is_replica {
        check(&made.replace("$t", "hidden"), "");
        check("SELECT public.ttl_create_index('public.hidden', 'at', interval '1 day', hide_expired => true)", "t");
        check("SELECT pg_catalog.count(*) FROM public.hidden", "23");
        check(
            "INSERT INTO public.hidden (id, at) VALUES (50, pg_catalog.now()) ON CONFLICT (id) DO UPDATE SET at = excluded.at",
            "",
        );
        check("SELECT pg_catalog.count(*) FROM public.hidden", "24");
    }
    faults
}
