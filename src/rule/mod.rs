//! What a rule is: pure types and their validation, free of PostgreSQL.

mod options;
mod source;
mod ttl;

pub use options::{Given, IndexMethod, Options};
pub use source::{Mark, Source};
pub use ttl::Ttl;

/// Why a value cannot be part of a rule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Invalid {
    #[error("{0} must not be null")]
    Missing(&'static str),
    #[error("time to live \"{0}\" must not be negative")]
    NegativeTtl(Ttl),
    #[error("time to live \"{0}\" is too long")]
    TtlTooLong(Ttl),
    #[error("batch_size must be at least 1, not {0}")]
    BatchSize(i32),
    #[error("index method \"{0}\" cannot serve a TTL rule")]
    IndexMethod(String),
    #[error("{0} must be positive")]
    Limit(&'static str),
    #[error("option \"{0}\" cannot be reset")]
    Reset(String),
}
