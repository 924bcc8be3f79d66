//! `make regress`: PostgreSQL's own regression tests, on a server without the library and on one with it. Both must say the
//! same, test by test; what fails on both is the environment's doing.

use harness::{Server, program, run};
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let source = PathBuf::from(std::env::args().nth(1).expect("the directory of the regression tests"));
    let library = source.join("regress.so");
    if !library.exists() {
        let headers = run(Command::new(program("pg_config")).arg("--includedir-server"));
        run(Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-I", headers.trim(), "-o"])
            .args([&library, &source.join("regress.c")]));
    }
    let without = outcomes(&source, "without the library", &[], "");
    let preload = ["shared_preload_libraries=pg_ttl_index"];
    let with = outcomes(&source, "with the library", &preload, "");
    compare(&without, &with, &[]);
    let hiding = outcomes(&source, "with the library, and a table that hides rows", &preload, HIDING);
    compare(&without, &hiding, SHOW_THE_EXTENSION);
}

/// In the database of the tests, so that every query of theirs is looked at.
const HIDING: &str = "CREATE SCHEMA ttl; CREATE EXTENSION pg_ttl_index SCHEMA ttl; CREATE TABLE ttl.t (at timestamptz);
                      SELECT ttl.ttl_create_index('ttl.t', 'at', 60, hide_expired => true)";

/// Tests that list what is in the database, or show plans into which SQL functions are inlined.
const SHOW_THE_EXTENSION: &[&str] =
    &["alter_table", "create_function_sql", "event_trigger", "generated", "opr_sanity", "rangefuncs", "window"];

fn compare(without: &BTreeMap<String, String>, with: &BTreeMap<String, String>, explained: &[&str]) {
    let differing: Vec<_> = with.keys().filter(|name| with.get(*name) != without.get(*name)).collect();
    println!("{} tests, {} of them with the same output", with.len(), with.len() - differing.len());
    assert!(with.len() == without.len() && with.len() > 150, "the tests did not run");
    let unexplained: Vec<_> = differing.into_iter().filter(|name| !explained.contains(&name.as_str())).collect();
    assert!(unexplained.is_empty(), "other output with the library: {unexplained:?}");
}

/// The output of every test.
fn outcomes(source: &Path, name: &str, settings: &[&str], setup: &str) -> BTreeMap<String, String> {
    let server = Server::start(&[settings, &["fsync=off", "max_prepared_transactions=2"]].concat());
    let output = std::env::temp_dir().join(format!(
        "pg_ttl_index_regress_{}_{}",
        std::process::id(),
        settings.len() + setup.len().min(1)
    ));
    // The server writes here, too, as a user of its own.
    for directory in [output.clone(), output.join("results"), output.join("testtablespace")] {
        std::fs::create_dir_all(&directory).expect("a directory");
        std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).expect("its permissions");
    }
    println!("==> {name}");
    run(server.client_program("createdb").args(["--template=template0", "regression"]));
    run(server.client_program("psql").args(["-d", "regression", "-q", "-v", "ON_ERROR_STOP=1", "-c", setup]));
    // As pg_regress would have it.
    let settings = "ALTER DATABASE regression SET lc_messages TO 'C'; ALTER DATABASE regression SET lc_monetary TO 'C';
                    ALTER DATABASE regression SET lc_numeric TO 'C'; ALTER DATABASE regression SET lc_time TO 'C';
                    ALTER DATABASE regression SET bytea_output TO 'hex'; ALTER DATABASE regression SET timezone_abbreviations TO 'Default'";
    run(server.client_program("psql").args(["-q", "-c", settings]));
    let libraries = run(Command::new(program("pg_config")).arg("--pkglibdir"));
    let status = Command::new(Path::new(libraries.trim()).join("pgxs/src/test/regress/pg_regress"))
        .args(["--use-existing", "--user=postgres", "--max-concurrent-tests=20", "--host"])
        .arg(server.host())
        .args([
            format!("--bindir={}", program("psql").parent().expect("a directory").display()),
            format!("--inputdir={}", source.display()),
            format!("--dlpath={}", source.display()),
            format!("--outputdir={}", output.display()),
            format!("--schedule={}", source.join("parallel_schedule").display()),
        ])
        .current_dir(&output)
        .stdout(std::fs::File::create(output.join("log")).expect("a log"))
        .status()
        .expect("running pg_regress");
    let log = std::fs::read_to_string(output.join("log")).expect("the log");
    println!("    {status}: {}", log.lines().filter(|line| line.contains("tests")).collect::<Vec<_>>().join(" "));
    for line in log.lines().filter(|line| line.contains("FAILED") || line.starts_with("not ok")) {
        println!("    {}", line.trim());
    }
    let results = std::fs::read_dir(output.join("results")).expect("results");
    let outcomes = results
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "out"))
        .map(|path| {
            let text = String::from_utf8_lossy(&std::fs::read(&path).expect("an output")).into_owned();
            (path.file_stem().expect("a name").to_string_lossy().into_owned(), text)
        })
        .collect();
    if std::env::var_os("PG_TTL_KEEP").is_none() {
        std::fs::remove_dir_all(output).expect("removing what the tests left");
    }
    outcomes
}
