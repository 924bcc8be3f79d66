//! Looking ahead: what a sweep would remove, and how late a rule is.

pub mod lag;
pub mod preview;
pub mod share;
mod statement;
