//! When to sweep, never how: the launcher and the workers of each database.

mod builder;
mod database;
mod helper;
mod helpers;
mod launcher;
pub mod schedule;
mod start;
mod turn;

use std::time::Duration;

pub use database::start as start_database_worker;
pub use launcher::register as register_launcher;

/// `bgw_type` of every worker, which sessions cannot assume. `sql/workers.sql` uses the same string.
const TYPE: &str = "pg_ttl_index worker";
const LIBRARY: &str = "pg_ttl_index";

/// How long a process with work to do keeps its slot while another database waits for one.
const TURN: Duration = Duration::from_secs(5);
