//! Every option: where it is seen, how it is changed and put back.

use crate::sweep::with;
use crate::worker::{database, server};

const SETUP: &str = "CREATE TABLE p (id int, at timestamptz, gone timestamptz, n bigint) PARTITION BY RANGE (at);
    CREATE TABLE p1 PARTITION OF p DEFAULT; CREATE TABLE archive (LIKE p);
    CREATE FUNCTION hook(regclass, jsonb) RETURNS void LANGUAGE sql AS ''";

/// The option, a value for it, and how the summary shows that, and its default.
const OPTIONS: [(&str, &str, &str, &str); 18] = [
    ("batch_size", "77", "77", "10000"),
    ("soft_delete_column", "'gone'", "gone", ""),
    ("clear_columns", "'{gone,n}'", "{gone,n}", ""),
    ("filter", "'id > 0'", "(id > 0)", ""),
    ("index_method", "'brin'", "brin", "btree"),
    ("concurrently", "true", "t", "f"),
    ("hide_expired", "true", "t", "f"),
    ("archive_to", "'archive'", "public.archive", ""),
    ("on_expire", "'hook(regclass, jsonb)'", "public.hook", ""),
    ("notify_channel", "'Gone'", "Gone", ""),
    ("emit_message", "true", "t", "f"),
    ("partition_action", "'detach'", "detach", "delete"),
    ("run_every", "interval '1 day 3 hours'", "1 day 03:00:00", ""),
    ("run_window", "'sat-sun 23:00-24:00 UTC'", "Sat,Sun 23:00-24:00 UTC", ""),
    ("max_rows_per_second", "5", "5", ""),
    ("max_rows_per_run", "5000000000", "5000000000", ""),
    ("purge_after", "interval '1 mon'", "1 mon", ""),
    ("unit", "'ms'", "ms", ""),
];

#[test]
fn every_option_can_be_given_altered_shown_and_reset() {
    for (option, value, shown, default) in OPTIONS {
        let mut db = with(SETUP);
        let column = match option {
            "concurrently" => "index_concurrently",
            option => option,
        };
        let (subject, others, needed) = match option {
            "unit" => ("n", ", unit => 's'", ""),
            "purge_after" => ("at", ", soft_delete_column => 'gone'", ""),
            _ => ("at", "", ""),
        };
        let see = format!("SELECT {column} FROM ttl_summary WHERE column_name = '{subject}'");
        db.run(&format!("SELECT ttl_create_index('p', '{subject}', 60{others}{needed})"));
        db.notices();
        db.run(&format!("SELECT ttl_alter_index('p', '{subject}', {option} => {value})"));
        assert_eq!(db.get(&see), shown, "{option}");
        db.run(&format!("SELECT ttl_alter_index('p', '{subject}', expire_after_seconds => 90)"));
        assert_eq!(db.get(&see), shown, "{option} stays when something else is altered");
        let both = format!("SELECT ttl_alter_index('p', '{subject}', {option} => {value}, reset => '{{{option}}}')");
        assert_eq!(db.error(&both).code, "22023", "{option}");
        if option == "unit" {
            continue;
        }
        db.run(&format!("SELECT ttl_alter_index('p', '{subject}', reset => '{{{option}}}')"));
        assert_eq!(db.get(&see), default, "{option}");
        db.run(&format!("SELECT ttl_create_index('p', '{subject}', 90{others}, {option} => {value})"));
        assert!(db.notices().concat().contains(&format!("{option} ")), "{option}");
        db.run(&format!("SELECT ttl_create_index('p', '{subject}', 90{others})"));
        let notices = db.notices();
        assert!(notices.iter().any(|notice| notice.contains(&format!("{option} c"))), "{option}: {notices:?}");
        assert_eq!(db.get(&see), default, "{option}");
    }
}

#[test]
fn only_what_has_a_default_can_be_reset_and_the_hint_names_it() {
    let mut db = with(SETUP);
    db.run("SELECT ttl_create_index('p', 'at', 60)");
    assert_eq!(db.error("SELECT ttl_alter_index('p', 'at', reset => '{NULL}')").code, "22004");
    for option in ["expire_after", "time_zone", "colour", "active"] {
        let error = db.error(&format!("SELECT ttl_alter_index('p', 'at', reset => '{{{option}}}')"));
        assert_eq!(error.code, "22023");
        for (option, ..) in OPTIONS {
            assert!(error.hint.contains(option), "{}", error.hint);
        }
    }
}

#[test]
fn the_catalog_refuses_what_the_functions_refuse() {
    let mut db = with(SETUP);
    db.run("SELECT ttl_create_index('p', 'at', 60)");
    for change in [
        "partition_action = 'burn'",
        "run_every = '0'",
        "max_rows_per_second = 0",
        "max_rows_per_run = -1",
        "purge_after = '-1 day'",
        "notify_channel = ''",
    ] {
        assert_eq!(db.error(&format!("UPDATE ttl_index_table SET {change}")).code, "23514", "{change}");
    }
    db.run("UPDATE ttl_index_table SET run_window = 'whenever'");
    db.run("SELECT ttl_runner()");
    assert_eq!(db.get("SELECT state, left(last_error, 5) FROM ttl_summary"), "error|22023");
}

#[test]
fn a_window_in_a_zone_that_is_gone_stops_its_rule_and_no_other() {
    let server = server(&[]);
    let mut db = database(&server);
    db.run("CREATE TABLE t (at timestamptz); CREATE TABLE u (at timestamptz); INSERT INTO u VALUES ('2020-01-01')");
    db.run(
        "SELECT ttl_create_index('t', 'at', 60); UPDATE ttl_index_table SET run_window = '00:00-24:00 Nowhere/Land'",
    );
    db.wait_for("SELECT state, left(last_error, 5) FROM ttl_summary", "error|22023");
    db.run("SELECT ttl_create_index('u', 'at', 60)");
    db.wait_for("SELECT count(*) FROM u", "0");
}

#[test]
fn an_option_is_in_the_catalog_the_trigger_the_summary_the_arguments_and_the_docs() {
    let mut db = with("CREATE TABLE t (at timestamptz); SELECT ttl_create_index('t', 'at', 60)");
    let hint = db.error("SELECT ttl_alter_index('t', 'at', reset => '{nothing}')").hint;
    let list =
        hint.strip_prefix("Options with a default are ").and_then(|list| list.strip_suffix('.')).expect("a list");
    let reference =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference.md")).expect("a page");
    let trigger = db.get("SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = 'ttl_count_version'");
    let options: Vec<_> = list.split(", ").chain(["expire_after", "time_zone"]).collect();
    assert_eq!(options.len(), OPTIONS.len() + 2);
    for option in options {
        let quoted = db.get(&format!("SELECT quote_ident('{option}')"));
        assert!(trigger.contains(&format!(" {quoted},")), "{option} in {trigger}");
        assert!(reference.contains(&format!("`{option}`")), "{option} in the reference");
        let columns = format!(
            "SELECT string_agg(c.relname, ' ' ORDER BY c.relname) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
             WHERE c.relname IN ('ttl_index_table', 'ttl_summary') AND a.attname IN ('{option}', 'index_{option}')"
        );
        assert_eq!(db.get(&columns), "ttl_index_table ttl_summary", "{option}");
        let functions = format!(
            "SELECT string_agg(DISTINCT proname, ' ') FROM pg_proc
             WHERE '{option}' = ANY (proargnames) AND proname IN ('ttl_create_index', 'ttl_alter_index')"
        );
        assert_eq!(db.get(&functions), "ttl_alter_index ttl_create_index", "{option}");
    }
}
