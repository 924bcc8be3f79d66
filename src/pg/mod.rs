//! The only home of `unsafe`: what the rest of the code needs from the server, behind safe functions.

pub mod access;
pub mod board;
pub mod citus;
pub mod conflict;
pub mod event;
pub mod executor;
pub mod expression;
pub mod identity;
pub mod index;
pub mod meaning;
pub mod memo;
pub mod names;
pub mod plan;
pub mod planner;
pub mod procedure;
pub mod process;
mod reference;
pub mod relation;
pub mod setting;
pub mod simple;
pub mod spi;
pub mod statement;
pub mod storage;
pub mod transaction;
pub mod trigger;
pub mod trust;
pub mod utility;
