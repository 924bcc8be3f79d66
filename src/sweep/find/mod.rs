//! Finding expired rows: the cutoff, the relations that can hold them, and the way through each.

pub mod cutoff;
pub mod leaf;
pub mod range;
pub mod resummarize;
pub mod scan;
mod statement;
