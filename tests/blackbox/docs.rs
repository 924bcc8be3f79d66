//! The SQL in README and docs runs, and its results are those that are shown.

use harness::Database;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A fenced block: `sql` must succeed, `sql error CODE` must fail with that SQLSTATE. A block `text` after it is what psql prints.
#[derive(Default)]
struct Example {
    sql: String,
    error: Option<String>,
    result: Option<String>,
}

fn examples(text: &str) -> Vec<Example> {
    let mut found: Vec<Example> = Vec::new();
    let mut open: Option<&str> = None;
    for line in text.lines() {
        match (open, line.strip_prefix("```")) {
            (Some(_), Some(_)) => open = None,
            (None, Some(info)) => {
                open = Some(info);
                match info {
                    "sql" => found.push(Example::default()),
                    "text" => found.last_mut().expect("an example before its result").result = Some(String::new()),
                    info => {
                        let error = info.strip_prefix("sql error ").map(str::to_owned);
                        found.extend(error.map(|code| Example { error: Some(code), ..Example::default() }));
                    }
                }
            }
            (Some(info), None) => {
                let Some(example) = found.last_mut() else { continue };
                let part = match info {
                    "text" => example.result.get_or_insert_default(),
                    info if info.starts_with("sql") => &mut example.sql,
                    _ => continue,
                };
                part.push_str(line.trim_end());
                part.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}

/// Runs an example as a reader would, statement by statement; returns the SQLSTATE of the error that ended it, and what was printed.
fn run_in_psql(db: &Database, sql: &str) -> (Option<String>, String) {
    let mut psql = db.server.client_program("psql");
    psql.args(["-X", "-q", "-P", "footer=off", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=sqlstate", "-d", &db.name]);
    let mut child = psql.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("psql");
    child.stdin.take().expect("a pipe").write_all(sql.as_bytes()).expect("writing to psql");
    let output = child.wait_with_output().expect("psql");
    let complaint = String::from_utf8(output.stderr).expect("UTF-8");
    let code = complaint.split("ERROR:  ").nth(1).map(|code| code.trim_end().to_owned());
    assert_eq!(output.status.success(), code.is_none(), "{complaint}");
    let printed = String::from_utf8(output.stdout).expect("UTF-8");
    (code, printed.lines().map(|line| format!("{}\n", line.trim_end())).collect())
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
    let (mut ran, mut compared) = (0, 0);
    for document in documents() {
        let text = std::fs::read_to_string(&document).expect("a document");
        let db = Database::empty();
        for Example { sql, error, result } in examples(&text) {
            let (code, printed) = run_in_psql(&db, &sql);
            assert_eq!(code, error, "{}:\n{sql}", document.display());
            if let Some(result) = result {
                assert_eq!(printed.trim_end(), result.trim_end(), "{}:\n{sql}", document.display());
                compared += 1;
            }
            ran += 1;
        }
    }
    assert!(ran >= 10 && compared >= 3, "{ran} examples were found, and {compared} results");
}
