//! The only home of `unsafe`: what the rest of the code needs from the server, behind safe functions.

pub mod access;
pub mod board;
pub mod bound;
pub mod chain;
pub mod estimate;
pub mod expression;
pub mod identity;
pub mod index;
pub mod memo;
pub mod names;
pub mod plan;
pub mod planner;
pub mod procedure;
pub mod process;
pub mod relation;
pub mod setting;
pub mod spi;
pub mod statement;
pub mod transaction;
pub mod trigger;
mod trust;
pub mod utility;
