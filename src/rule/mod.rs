//! What a rule is: pure types and their validation, free of PostgreSQL.

mod expiry;
pub mod instant;
mod options;
mod pg_type;
mod predicate;
mod source;
pub mod sql;
mod ttl;
mod update;
mod window;

pub use expiry::Expiry;
pub use options::{Given, IndexMethod, LONGEST_NAME, Needs, Options, PartitionAction};
pub use predicate::Predicate;
pub use source::{Source, Unit};
pub use ttl::Ttl;
pub use update::{Cleared, Mark, Update};
pub use window::Window;

/// Why a value cannot be part of a rule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Invalid {
    #[error("{0} must not be null")]
    Missing(&'static str),
    #[error("time to live \"{0}\" must not be negative")]
    NegativeTtl(Ttl),
    #[error("time to live \"{0}\" is too long")]
    TtlTooLong(Ttl),
    #[error("{0} must be at least 1, not {1}")]
    TooSmall(&'static str, i64),
    #[error("partition action \"{0}\" is not known")]
    PartitionAction(String),
    #[error("invalid run window: \"{0}\"")]
    Window(String),
    #[error("filter is too long")]
    FilterTooLong,
    #[error("{0} must be a span of time, and not negative")]
    Span(&'static str),
    #[error("notify_channel must have 1 to 63 bytes")]
    Channel,
    #[error("rule_name must have at most 63 bytes")]
    RuleName,
    #[error("option \"{0}\" makes no sense here")]
    Alone(&'static str, Needs),
    #[error("option \"{0}\" must not be both given and reset")]
    GivenAndReset(String),
    #[error("{0}")]
    Other(String),
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
    #[error("run_every must be at least one second")]
    TooOften,
    #[error("clear_columns must name columns, each once")]
    ClearColumns,
    #[error("option \"{0}\" cannot be reset")]
    Reset(String),
}
