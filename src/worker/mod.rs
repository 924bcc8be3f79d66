//! When to sweep, never how: the launcher, and the workers of each database.

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

/// `bgw_type` of every worker, which sessions cannot take on. The same word stands in `sql/workers.sql`.
const TYPE: &str = "pg_ttl_index worker";
const LIBRARY: &str = "pg_ttl_index";

/// How long a process keeps its slot with work to do while another database waits for one.
const TURN: Duration = Duration::from_secs(5);
