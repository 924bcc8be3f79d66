//! The SQL in README and docs runs.

use harness::Database;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Fenced blocks: `sql` must succeed, `sql error CODE` must fail with that SQLSTATE.
fn blocks(text: &str) -> Vec<(Option<String>, String)> {
    let mut found = Vec::new();
    let mut open: Option<(Option<String>, String)> = None;
    for line in text.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (Some(_), Some(_)) => found.extend(open.take()),
            (Some((_, sql)), None) => {
                sql.push_str(line);
                sql.push('\n');
            }
            (None, Some("sql")) => open = Some((None, String::new())),
            (None, Some(info)) => {
                open = info.strip_prefix("sql error ").map(|code| (Some(code.to_owned()), String::new()));
            }
            (None, None) => {}
        }
    }
    found
}

/// Runs a block as a reader would, statement by statement; returns the SQLSTATE of the error that ended it.
fn run_in_psql(db: &Database, sql: &str) -> Option<String> {
    let mut psql = db.server.client_program("psql");
    psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=sqlstate", "-d", &db.name]);
    let mut child = psql.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("psql");
    child.stdin.take().expect("a pipe").write_all(sql.as_bytes()).expect("writing to psql");
    let output = child.wait_with_output().expect("psql");
    let complaint = String::from_utf8(output.stderr).expect("UTF-8");
    let code = complaint.split("ERROR:  ").nth(1).map(|code| code.trim_end().to_owned());
    assert_eq!(output.status.success(), code.is_none(), "{complaint}");
    code
}

fn documents() -> Vec<PathBuf> {
    // As cargo says when the tests run: one build may serve several checkouts.
    let root = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo")).join("..");
    let mut documents: Vec<_> = std::fs::read_dir(root.join("docs"))
        .expect("docs")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.push(root.join("README.md"));
    documents
}

#[test]
fn every_sql_example_does_what_the_page_says() {
    let mut ran = 0;
    for document in documents() {
        let text = std::fs::read_to_string(&document).expect("a document");
        let db = Database::empty();
        for (expected, sql) in blocks(&text) {
            assert_eq!(run_in_psql(&db, &sql), expected, "{}:\n{sql}", document.display());
            ran += 1;
        }
    }
    assert!(ran >= 10, "only {ran} examples were found");
}
