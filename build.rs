use std::env;

const MAJORS: std::ops::RangeInclusive<u32> = 15..=19;

/// cargo-pgrx reads the SQL entities out of the built library, so the linker must keep what nothing calls. And code for
/// PostgreSQL 18 and later is marked `#[cfg(since = "18")]`.
fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-gc-sections");
    println!("cargo::rerun-if-changed=build.rs");
    let values: Vec<_> = MAJORS.map(|major| format!("\"{major}\"")).collect();
    println!("cargo::rustc-check-cfg=cfg(since, values({}))", values.join(", "));
    let chosen = MAJORS.filter(|major| env::var_os(format!("CARGO_FEATURE_PG{major}")).is_some()).max();
    for major in MAJORS.filter(|major| chosen.is_some_and(|chosen| *major <= chosen)) {
        println!("cargo::rustc-cfg=since=\"{major}\"");
    }
}
