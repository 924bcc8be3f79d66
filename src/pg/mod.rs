//! The only home of `unsafe`: what the rest of the code needs from the server, behind safe functions.

pub mod access;
pub mod board;
pub mod event;
pub mod expression;
pub mod identity;
pub mod index;
pub mod meaning;
pub mod memo;
pub mod names;
pub mod plan;
pub mod planner;
pub mod probe;
pub mod procedure;
pub mod process;
pub mod relation;
pub mod setting;
pub mod spi;
pub mod statement;
pub mod transaction;
pub mod trigger;
pub mod trust;
pub mod utility;
