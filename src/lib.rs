//! pg_ttl_index: row expiry as a feature of PostgreSQL.
//!
//! Registering a rule goes `api → registry → rule, catalog`; `pg` is the only module that touches the server's C API.
//! `docs/architecture.md` describes the rest.

#![deny(unsafe_code)]

mod api;
mod cascade;
mod catalog;
mod delivery;
mod error;
mod guc;
mod index;
#[allow(unsafe_code)]
mod pg;
mod registry;
mod row;
mod rule;
mod sandbox;
mod sweep;
mod table;
mod visibility;
mod worker;

use pgrx::prelude::*;

::pgrx::pg_module_magic!(name, version);

extension_sql_file!("../sql/catalog.sql", name = "catalog", bootstrap);
extension_sql_file!(
    "../sql/follow.sql",
    name = "follow",
    requires = [
        "catalog",
        api::follow::ttl_bind,
        api::follow::ttl_take_in,
        api::follow::ttl_count_version,
        api::follow::ttl_tell_of_drop
    ]
);
extension_sql_file!(
    "../sql/summary.sql",
    name = "summary",
    requires = [
        "catalog",
        api::rules::ttl_default_batch_size,
        api::rules::ttl_holds,
        api::workers::ttl_database_hold,
        api::workers::ttl_history_errors,
        api::workers::ttl_is_large,
        api::workers::ttl_lags,
        api::workers::ttl_next_due,
        api::workers::ttl_next_pass,
        api::workers::ttl_progress_slots,
        api::workers::ttl_run_window,
        api::workers::ttl_states,
        api::workers::ttl_waits_for_process
    ]
);
extension_sql_file!(
    "../sql/workers.sql",
    name = "workers",
    requires =
        ["catalog", api::workers::ttl_database_hold, api::workers::ttl_last_recovery, api::workers::ttl_progress_slots]
);
extension_sql_file!("../sql/watch.sql", name = "watch", requires = ["summary", "workers"]);
extension_sql_file!("../sql/rows.sql", name = "rows");
extension_sql_file!("../sql/sweeps.sql", name = "sweeps");
extension_sql_file!("../sql/grants.sql", name = "grants", finalize);

#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    if pg::access::in_binary_upgrade() {
        return;
    }
    guc::init();
    visibility::install();
    if pg::access::is_preloading() {
        pg::shmem::init();
        pg::recovery::init();
        worker::register_launcher();
    }
}

/// The functions that `cargo pgrx test` requires of the crate.
#[cfg(test)]
pub mod pg_test {
    pub fn setup(_options: Vec<&str>) {}

    pub fn postgresql_conf_options() -> Vec<&'static str> {
        vec!["shared_preload_libraries = 'pg_ttl_index'"]
    }
}
