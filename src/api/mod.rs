//! The functions users call: they read arguments and call inward.

pub mod follow;
pub mod instants;
pub mod rows;
pub mod rules;
pub mod sweeps;
pub mod workers;
