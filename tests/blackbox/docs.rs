//! The SQL in README and docs runs.

use harness::Database;
use std::path::{Path, PathBuf};

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

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
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
        let mut db = Database::empty();
        for (expected, sql) in blocks(&text) {
            let outcome = db.try_get(&sql).err().map(|error| error.code);
            assert_eq!(outcome, expected, "{}:\n{sql}", document.display());
            ran += 1;
        }
    }
    assert!(ran >= 10, "only {ran} examples were found");
}
