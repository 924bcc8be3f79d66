//! Every error the extension raises of its own: one variant, one SQLSTATE, a hint where a user can act.

use crate::rule::{Invalid, Mark, Source};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgSqlErrorCode as Code, function_name};

#[derive(Debug, thiserror::Error)]
pub enum TtlError {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("relation with OID {0} does not exist")]
    UnknownTable(u32),
    #[error("\"{name}\" is not a table")]
    NotATable { name: String, kind: &'static str },
    #[error("permission denied: \"{0}\" is a system table")]
    SystemTable(String),
    #[error("must be owner of table {0}")]
    NotOwner(String),
    #[error("TTL rules on temporary tables are not supported")]
    TemporaryTable,
    #[error("rows of {0} are not in a heap of its own")]
    NotAHeap(String),
    #[error("column \"{column}\" of relation \"{table}\" does not exist")]
    UnknownColumn { table: String, column: String },
    #[error("column \"{column}\" of type {data_type} cannot expire")]
    CannotExpire { column: String, data_type: String },
    #[error("soft delete column \"{0}\" must not be the TTL column itself")]
    MarkIsSource(String),
    #[error("column \"{column}\" of type {data_type} cannot mark a row as deleted")]
    CannotMark { column: String, data_type: String },
    #[error("soft delete column \"{0}\" is a generated column")]
    MarkIsGenerated(String),
    #[error("soft delete column \"{0}\" must accept null")]
    MarkIsNotNull(String),
    #[error("there is no TTL rule on column \"{column}\" of table \"{table}\"")]
    NoRule { table: String, column: String },
    #[error("expire_after and expire_after_seconds must not be given together")]
    TwoExpiries,
    #[error("option \"{0}\" must not be both given and reset")]
    GivenAndReset(String),
    #[error("invalid filter: {message}")]
    Filter { code: Code, message: String },
    #[error("filter must be a single boolean expression")]
    FilterNotAnExpression,
    #[error("cannot use a subquery in a TTL filter")]
    FilterSubquery,
    #[error("functions in a TTL filter must not be volatile")]
    FilterVolatile,
    #[error("cannot use a system column or the whole row in a TTL filter")]
    FilterWholeRow,
    #[error("triggers of table {0}, behind a foreign key, would run with the rights of another role")]
    CascadeTriggers(String),
    #[error("ttl_sweep cannot run inside a transaction block")]
    CannotCommit,
    #[error("extension pg_ttl_index is not installed in this database")]
    NotInstalled,
    #[error(transparent)]
    Spi(#[from] pgrx::spi::Error),
}

impl TtlError {
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(Invalid::Missing(_)) => Code::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            Self::Invalid(_)
            | Self::MarkIsSource(_)
            | Self::MarkIsNotNull(_)
            | Self::TwoExpiries
            | Self::GivenAndReset(_) => Code::ERRCODE_INVALID_PARAMETER_VALUE,
            Self::UnknownTable(_) => Code::ERRCODE_UNDEFINED_TABLE,
            Self::NotATable { .. } => Code::ERRCODE_WRONG_OBJECT_TYPE,
            Self::SystemTable(_) | Self::NotOwner(_) | Self::CascadeTriggers(_) => Code::ERRCODE_INSUFFICIENT_PRIVILEGE,
            Self::TemporaryTable | Self::NotAHeap(_) | Self::FilterSubquery | Self::FilterWholeRow => {
                Code::ERRCODE_FEATURE_NOT_SUPPORTED
            }
            Self::UnknownColumn { .. } => Code::ERRCODE_UNDEFINED_COLUMN,
            Self::CannotExpire { .. } | Self::CannotMark { .. } => Code::ERRCODE_DATATYPE_MISMATCH,
            Self::MarkIsGenerated(_) => Code::ERRCODE_GENERATED_ALWAYS,
            Self::NoRule { .. } | Self::NotInstalled => Code::ERRCODE_UNDEFINED_OBJECT,
            Self::Filter { code, .. } => *code,
            Self::FilterNotAnExpression => Code::ERRCODE_SYNTAX_ERROR,
            Self::CannotCommit => Code::ERRCODE_INVALID_TRANSACTION_TERMINATION,
            Self::FilterVolatile => Code::ERRCODE_INVALID_OBJECT_DEFINITION,
            Self::Spi(_) => Code::ERRCODE_INTERNAL_ERROR,
        }
    }

    fn detail(&self) -> Option<String> {
        match self {
            Self::NotATable { kind, .. } => Some(format!("This is {kind}.")),
            Self::Invalid(Invalid::TtlTooLong(_)) => {
                Some("The cutoff would lie before the first instant PostgreSQL can represent.".into())
            }
            Self::FilterVolatile => {
                Some("A volatile function may decide differently when the row is checked again before deletion.".into())
            }
            _ => None,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Invalid(Invalid::NegativeTtl(_)) => {
                Some("Use 0 if the column itself holds the instant of expiry.".into())
            }
            Self::Invalid(Invalid::IndexMethod(_)) => Some("Use btree, brin or none.".into()),
            Self::Invalid(Invalid::Reset(_)) => {
                Some("Options with a default are batch_size, soft_delete_column, filter and index_method.".into())
            }
            Self::NotATable { .. } => Some("TTL rules stand on tables and partitioned tables.".into()),
            Self::TemporaryTable => Some("A temporary table is invisible to the background worker.".into()),
            Self::NotAHeap(_) => Some(
                "Foreign tables, other table access methods, distributed tables and compressed chunks cannot be swept row by row."
                    .into(),
            ),
            Self::CannotExpire { .. } => Some(format!("Use a column of type {}.", Source::ACCEPTED)),
            Self::CannotMark { .. } => Some(format!("Use a column of type {}.", Mark::ACCEPTED)),
            Self::MarkIsNotNull(_) => Some("A row is live while the column is null.".into()),
            Self::NoRule { .. } => Some("Register one with ttl_create_index.".into()),
            Self::FilterSubquery => Some("A filter decides by the columns of the row alone.".into()),
            Self::FilterWholeRow => Some("Name the columns the filter needs.".into()),
            Self::CannotCommit => Some("Use ttl_runner to sweep within a transaction.".into()),
            Self::NotInstalled => Some("Use CREATE EXTENSION pg_ttl_index.".into()),
            _ => None,
        }
    }
}

impl From<TtlError> for ErrorReport {
    fn from(error: TtlError) -> Self {
        let mut report = ErrorReport::new(error.code(), error.to_string(), function_name!());
        if let Some(detail) = error.detail() {
            report = report.set_detail(detail);
        }
        if let Some(hint) = error.hint() {
            report = report.set_hint(hint);
        }
        report
    }
}
