//! cargo-pgrx reads the SQL entities out of the built library, so the linker must keep what nothing calls.
fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-gc-sections");
    println!("cargo::rerun-if-changed=build.rs");
}
