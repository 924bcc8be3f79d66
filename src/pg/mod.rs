//! The only home of `unsafe`: what the rest of the code needs from the server, behind safe functions.

pub mod access;
pub mod expression;
pub mod identity;
pub mod index;
pub mod regclass;
pub mod spi;
