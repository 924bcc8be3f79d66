//! What a rule is: pure types and their validation, free of PostgreSQL.

mod expiry;
pub mod instant;
mod mark;
mod options;
mod pg_type;
mod source;
pub mod sql;
mod ttl;

pub use expiry::Expiry;
pub use mark::Mark;
pub use options::{Given, IndexMethod, Options};
pub use source::{Source, Unit};
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
    #[error("a number needs a unit to be an instant")]
    UnitMissing,
    #[error("unit \"{0}\" is not one that instants are counted in")]
    Unit(String),
    #[error("unit \"{0}\" means nothing for this column")]
    UnitUnused(String),
    #[error("the column has no room for instants counted in \"{}\"", .0.name())]
    UnitRange(Unit),
    #[error("timestamp out of range: RFC 3339 has four digits for a year")]
    Year,
    #[error("{0} must be positive")]
    Limit(&'static str),
    #[error("option \"{0}\" cannot be reset")]
    Reset(String),
}
