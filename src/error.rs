//! Every error that the extension itself raises: one variant, one SQLSTATE, a hint where a user can act.

use crate::rule::{Invalid, Mark, Options, Source};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::spi::quote_literal;
use pgrx::{PgSqlErrorCode as Code, function_name};
use std::fmt;

#[derive(Debug, thiserror::Error)]
pub enum TtlError {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("relation with OID {0} does not exist")]
    UnknownTable(u32),
    #[error("function with OID {0} does not exist")]
    UnknownFunction(u32),
    #[error("\"{name}\" is not a table")]
    NotATable { name: String, kind: &'static str },
    #[error("permission denied: \"{0}\" is a system table")]
    SystemTable(String),
    #[error("must be owner of table {0}")]
    NotOwner(String),
    #[error("TTL rules on temporary tables are not supported")]
    TemporaryTable,
    #[error("rows of {name} are not in a heap of its own: it {reason}")]
    NotAHeap { name: String, reason: String },
    #[error("the index of hypertable \"{0}\" cannot be made concurrently")]
    ConcurrentHypertable(String),
    #[error("column \"{column}\" of relation \"{table}\" does not exist")]
    UnknownColumn { table: String, column: String },
    #[error("column \"{column}\" of type {data_type} cannot expire")]
    CannotExpire { column: String, data_type: String },
    #[error("column \"{0}\" has a type that cannot expire")]
    CannotExpireNow(String),
    #[error("the type of column \"{0}\" has changed since the TTL rule was registered")]
    TypeChanged(String),
    #[error("column \"{0}\" used by the TTL rule no longer exists")]
    ColumnMissing(String),
    #[error("soft delete column \"{0}\" was dropped")]
    MarkDropped(String),
    #[error("column \"{0}\" of the filter was dropped")]
    FilterColumnDropped(String),
    #[error("the meaning of the {0} of the TTL rule has changed since it was registered")]
    MeaningChanged(Purpose),
    #[error("cannot move a TTL rule to another table or column")]
    RuleMoved,
    #[error("the owner of the table has not confirmed the TTL rule")]
    NotConfirmed,
    #[error("column \"{0}\" can no longer mark a row as deleted")]
    CannotMarkNow(String),
    #[error("soft delete column \"{0}\" must not be the TTL column itself")]
    MarkIsSource(String),
    #[error("column \"{0}\" cannot be both the TTL column and one that the rule updates")]
    CatalogMark(String),
    #[error("column \"{column}\" of type {data_type} cannot mark a row as deleted")]
    CannotMark { column: String, data_type: String },
    #[error("soft delete column \"{0}\" is a generated column")]
    MarkIsGenerated(String),
    #[error("soft delete column \"{0}\" must accept null")]
    MarkIsNotNull(String),
    #[error("column \"{0}\" cannot be cleared because rows expire by it")]
    ClearsSource(String),
    #[error("column \"{0}\" cannot be cleared because it is a generated or identity column")]
    ClearsGenerated(String),
    #[error("column \"{0}\" cannot be cleared because it must not be null and has no default")]
    ClearsNotNull(String),
    #[error("column \"{0}\" cannot be cleared because it is part of a key")]
    ClearsKey(String),
    #[error("column \"{0}\" cannot be cleared because its values cannot all be told from its default")]
    ClearsUnequal(String),
    #[error("a column cannot be marked by one TTL rule and cleared by another")]
    UpdatedTwice,
    #[error("a column with the default {0} cannot be cleared")]
    DefaultVaries(String),
    #[error("a default of column \"{0}\" has changed since the TTL rule was registered")]
    DefaultChanged(String),
    #[error("column \"{0}\", which the TTL rule clears, was dropped")]
    ClearedDropped(String),
    #[error("there is no TTL rule on {place}")]
    NoRule { place: String },
    #[error("there is no TTL rule on table \"{0}\"")]
    NoRules(String),
    #[error("there are several TTL rules on table \"{table}\"")]
    AmbiguousRule { table: String, columns: String },
    #[error("there are several TTL rules on column \"{column}\" of table \"{table}\"")]
    AmbiguousName { table: String, column: String, names: String },
    #[error("there is no primary key for table {0}")]
    NoPrimaryKey(String),
    #[error("the key does not have the columns of the primary key of table {table}")]
    KeyShape { table: String, columns: String },
    #[error("cannot write the expiry of a row to column \"{0}\"")]
    NotWritable(String),
    #[error("column \"{0}\" does not start a time to live that could be restarted")]
    NoClock(String),
    #[error("rows of table \"{0}\" are in child tables, which do not have its triggers")]
    TouchOfChildren(String),
    #[error("unrecognized mode \"{0}\"")]
    Mode(String),
    #[error("expires_at must be finite")]
    InfiniteInstant,
    #[error("function can only be called by triggers of pg_ttl_index")]
    NotOurTrigger,
    #[error("value has an unexpected type")]
    Mismatch,
    #[error("rows of table \"{0}\" are also visible through its parent")]
    HiddenPart(String),
    #[error("{} key value violates {} constraint \"{constraint}\"", if *is_exclusion { "conflicting" } else { "duplicate" }, if *is_exclusion { "exclusion" } else { "unique" })]
    HiddenKey { constraint: String, is_exclusion: bool },
    #[error("permission denied: the TTL rule on table {0} runs code of the table's owner")]
    OwnersCode(String),
    #[error("could not serialize access due to a row that expired concurrently")]
    ExpiredMeanwhile,
    #[error("an expired row conflicts with the new row")]
    HiddenConflict,
    #[error("hide_expired requires pg_ttl_index to be loaded in every session")]
    NotLoaded,
    #[error("hide_expired requires a filter and an expression that use only built-in immutable functions and types")]
    HiddenByCode,
    #[error("hide_expired cannot use time zone \"{0}\", which depends on timezone_abbreviations")]
    HiddenByZone(String),
    #[error("expire_after and expire_after_seconds must not be given together")]
    TwoExpiries,
    #[error("invalid {purpose}: {message}")]
    Expression { purpose: Purpose, code: Code, message: String },
    #[error("a TTL {0} must be a single expression")]
    NotAnExpression(Purpose),
    #[error("cannot use a subquery in a TTL {0}")]
    Subquery(Purpose),
    #[error("functions in a TTL {0} must not be volatile")]
    Volatile(Purpose),
    #[error("cannot use a system column or the whole row in a TTL {0}")]
    WholeRow(Purpose),
    #[error("a TTL expression must use at least one column")]
    Constant,
    #[error("functions in an indexed TTL expression must be immutable")]
    NotImmutable,
    #[error("triggers of table {0}, reached through a foreign key, would run with the privileges of another role")]
    CascadeTriggers(String),
    #[error("could not obtain lock on partition {0}")]
    PartInUse(String),
    #[error("partition {0} has been replaced")]
    AnotherPart(String),
    #[error("permission denied for schema {0}")]
    SchemaPermission(String),
    #[error("archive table {0} must have the same owner as the table")]
    ArchiveOwner(String),
    #[error("rows of table \"{0}\" cannot be archived in itself")]
    ArchiveIsSource(String),
    #[error("rows archived in table \"{0}\" would come back")]
    ArchiveCircle(String),
    #[error("soft delete column \"{0}\" must not be part of the partition key")]
    MarkIsKey(String),
    #[error("archive \"{name}\" is not a table")]
    ArchiveKind { name: String, kind: &'static str },
    #[error("archive table must not be temporary")]
    ArchiveTemporary,
    #[error("archive table \"{0}\" is unlogged")]
    ArchiveUnlogged(String),
    #[error("archive table {archive} lacks column \"{column}\"")]
    ArchiveMissing { archive: String, column: String },
    #[error("column \"{column}\" of archive table {archive} has a type that cannot hold every value")]
    ArchiveType { archive: String, column: String },
    #[error("column \"{column}\" of archive table {archive} would have no value")]
    ArchiveNeeds { archive: String, column: String },
    #[error("the archive table did not accept every row")]
    ArchiveRefused,
    #[error("function {0} cannot be called with expired rows")]
    FunctionArguments(String),
    #[error("the table's owner must be allowed to call function {0}")]
    FunctionPermission(String),
    #[error("table \"{0}\" is not partitioned")]
    NotPartitioned(String),
    #[error("soft delete column \"{0}\" does not record when a row was deleted")]
    PurgeOfFlag(String),
    #[error("rows cannot be purged by a filter that uses soft delete column \"{0}\"")]
    PurgeFilter(String),
    #[error("there is already a TTL rule on column \"{0}\"")]
    PurgeTaken(String),
    #[error("the table does not exist")]
    RestoredTableMissing,
    #[error("there is a TTL rule on column \"{0}\"")]
    RestoredTwice(String),
    #[error("number {0}, which its triggers use, is taken or too high")]
    RestoredNumber(i64),
    #[error("its column types are not named as PostgreSQL names them")]
    RestoredTypes,
    #[error("rule {0}, for which it purges, does not mark rows in this column of the same table")]
    RestoredPurge(i64),
    #[error("the TTL rule on column \"{column}\" belongs to purge_after of another rule")]
    IsPurge { column: String },
    #[error("the clock has jumped ahead")]
    ClockJumped,
    #[error("ttl_sweep cannot run inside a transaction block")]
    CannotCommit,
    #[error("extension pg_ttl_index is not installed in this database")]
    NotInstalled,
    #[error("{0}")]
    Unserved(Unserved),
    #[error(transparent)]
    Spi(#[from] pgrx::spi::Error),
}

/// What an expression is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Decides about a row.
    Filter,
    /// Says when a row expires, or what an index is sorted by.
    Value,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Filter => "filter",
            Self::Value => "expression",
        })
    }
}

/// Why the library does not serve a schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unserved {
    Older(String),
    Newer(String),
    /// The tables or functions are not those of the schema's version; holds their digest.
    Damaged(String),
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let library = env!("CARGO_PKG_VERSION");
        match self {
            Self::Older(version) | Self::Newer(version) => {
                write!(
                    f,
                    "version {library} of the pg_ttl_index library does not serve version {version} of its schema"
                )
            }
            Self::Damaged(digest) => {
                write!(f, "the schema of extension pg_ttl_index is not that of its version (digest {digest})")
            }
        }
    }
}

impl Unserved {
    /// Returns what an administrator can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Older(_) => "Use ALTER EXTENSION pg_ttl_index UPDATE.",
            Self::Newer(_) => "Restart the server with the library of that version.",
            Self::Damaged(_) => {
                "Undo changes of the extension's tables and functions, or drop the extension and create it again."
            }
        }
    }
}

impl TtlError {
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(Invalid::Missing(_)) => Code::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            Self::Invalid(Invalid::UnitMissing) => Code::ERRCODE_DATATYPE_MISMATCH,
            Self::Invalid(Invalid::Year) => Code::ERRCODE_DATETIME_FIELD_OVERFLOW,
            Self::Invalid(_)
            | Self::MarkIsSource(_)
            | Self::MarkIsNotNull(_)
            | Self::ClearsSource(_)
            | Self::ClearsNotNull(_)
            | Self::UpdatedTwice
            | Self::TwoExpiries
            | Self::Constant
            | Self::KeyShape { .. }
            | Self::Mode(_)
            | Self::InfiniteInstant => Code::ERRCODE_INVALID_PARAMETER_VALUE,
            Self::HiddenKey { is_exclusion: true, .. } => Code::ERRCODE_EXCLUSION_VIOLATION,
            Self::HiddenKey { .. } | Self::HiddenConflict => Code::ERRCODE_UNIQUE_VIOLATION,
            Self::ExpiredMeanwhile => Code::ERRCODE_T_R_SERIALIZATION_FAILURE,
            Self::UnknownTable(_) | Self::RestoredTableMissing => Code::ERRCODE_UNDEFINED_TABLE,
            Self::UnknownFunction(_) => Code::ERRCODE_UNDEFINED_FUNCTION,
            Self::NotATable { .. } | Self::ArchiveKind { .. } => Code::ERRCODE_WRONG_OBJECT_TYPE,
            Self::SystemTable(_)
            | Self::NotOwner(_)
            | Self::CascadeTriggers(_)
            | Self::OwnersCode(_)
            | Self::SchemaPermission(_)
            | Self::ArchiveOwner(_)
            | Self::FunctionPermission(_) => Code::ERRCODE_INSUFFICIENT_PRIVILEGE,
            Self::TemporaryTable
            | Self::NotAHeap { .. }
            | Self::ConcurrentHypertable(_)
            | Self::Subquery(_)
            | Self::WholeRow(_)
            | Self::NotWritable(_)
            | Self::TouchOfChildren(_)
            | Self::HiddenByCode
            | Self::HiddenByZone(_)
            | Self::NotPartitioned(_)
            | Self::ArchiveTemporary
            | Self::ArchiveUnlogged(_)
            | Self::MarkIsKey(_)
            | Self::ClearsKey(_)
            | Self::ClearsUnequal(_)
            | Self::HiddenPart(_) => Code::ERRCODE_FEATURE_NOT_SUPPORTED,
            Self::RuleMoved => Code::ERRCODE_FEATURE_NOT_SUPPORTED,
            Self::CatalogMark(_) => Code::ERRCODE_CHECK_VIOLATION,
            Self::MeaningChanged(_) | Self::NotConfirmed | Self::DefaultChanged(_) => {
                Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE
            }
            Self::UnknownColumn { .. }
            | Self::ColumnMissing(_)
            | Self::MarkDropped(_)
            | Self::ClearedDropped(_)
            | Self::FilterColumnDropped(_)
            | Self::ArchiveMissing { .. } => Code::ERRCODE_UNDEFINED_COLUMN,
            Self::CannotExpire { .. }
            | Self::CannotMark { .. }
            | Self::CannotExpireNow(_)
            | Self::TypeChanged(_)
            | Self::CannotMarkNow(_)
            | Self::PurgeOfFlag(_)
            | Self::ArchiveType { .. } => Code::ERRCODE_DATATYPE_MISMATCH,
            Self::PartInUse(_) => Code::ERRCODE_LOCK_NOT_AVAILABLE,
            Self::AnotherPart(_) => Code::ERRCODE_OBJECT_IN_USE,
            Self::ArchiveNeeds { .. } => Code::ERRCODE_NOT_NULL_VIOLATION,
            Self::ArchiveIsSource(_)
            | Self::ArchiveCircle(_)
            | Self::PurgeFilter(_)
            | Self::RestoredPurge(_)
            | Self::RestoredTypes => Code::ERRCODE_INVALID_PARAMETER_VALUE,
            Self::ArchiveRefused => Code::ERRCODE_TRIGGERED_ACTION_EXCEPTION,
            Self::FunctionArguments(_) => Code::ERRCODE_INVALID_FUNCTION_DEFINITION,
            Self::PurgeTaken(_) | Self::RestoredTwice(_) | Self::RestoredNumber(_) => Code::ERRCODE_DUPLICATE_OBJECT,
            Self::MarkIsGenerated(_) | Self::ClearsGenerated(_) => Code::ERRCODE_GENERATED_ALWAYS,
            Self::AmbiguousRule { .. } => Code::ERRCODE_AMBIGUOUS_COLUMN,
            Self::AmbiguousName { .. } => Code::ERRCODE_AMBIGUOUS_FUNCTION,
            Self::ClockJumped | Self::NoClock(_) | Self::NotLoaded | Self::IsPurge { .. } | Self::Unserved(_) => {
                Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE
            }
            Self::NotOurTrigger => Code::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
            Self::NoRule { .. } | Self::NoRules(_) | Self::NoPrimaryKey(_) | Self::NotInstalled => {
                Code::ERRCODE_UNDEFINED_OBJECT
            }
            Self::Expression { code, .. } => *code,
            Self::NotAnExpression(_) => Code::ERRCODE_SYNTAX_ERROR,
            Self::CannotCommit => Code::ERRCODE_INVALID_TRANSACTION_TERMINATION,
            Self::Volatile(_) | Self::NotImmutable | Self::DefaultVaries(_) => Code::ERRCODE_INVALID_OBJECT_DEFINITION,
            Self::Mismatch | Self::Spi(_) => Code::ERRCODE_INTERNAL_ERROR,
        }
    }

    pub fn no_rule(table: &str, column: Option<&str>, rule_name: Option<&str>) -> Self {
        let column = column.map_or_else(String::new, |column| format!("column \"{column}\" of "));
        let name = rule_name.map_or_else(String::new, |name| format!(" with the name \"{name}\""));
        Self::NoRule { place: format!("{column}table \"{table}\"{name}") }
    }

    pub fn ambiguous_name(table: &str, column: &str, names: impl Iterator<Item = Option<String>>) -> Self {
        let names: Vec<_> = names.map(|name| quote_literal(name.unwrap_or_default())).collect();
        Self::AmbiguousName { table: table.into(), column: column.into(), names: names.join(", ") }
    }

    /// Raises the error in the current (sub)transaction.
    pub fn raise(self) -> ! {
        ErrorReport::from(self).report(pgrx::PgLogLevel::ERROR);
        unreachable!("an error does not return")
    }

    fn detail(&self) -> Option<String> {
        match self {
            Self::HiddenKey { .. } | Self::HiddenConflict => {
                Some("An expired row that the new row cannot replace has the key.".into())
            }
            Self::NotATable { kind, .. } | Self::ArchiveKind { kind, .. } => Some(format!("This is {kind}.")),
            Self::Invalid(Invalid::TtlTooLong(_)) => {
                Some("The cutoff would lie before the first instant PostgreSQL can represent.".into())
            }
            Self::Volatile(_) => {
                Some("A volatile function may decide differently when the row is checked again before deletion.".into())
            }
            _ => None,
        }
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Invalid(Invalid::NegativeTtl(_)) => {
                Some("Use 0 if the column itself holds the instant of expiry.".into())
            }
            Self::Invalid(Invalid::IndexMethod(_)) => Some("Use btree, brin or none.".into()),
            Self::Invalid(Invalid::PartitionAction(_)) => Some("Use delete, drop or detach.".into()),
            Self::Invalid(Invalid::Window(_)) => {
                Some("Give days if not all, local start and end, and a time zone if not the rule's: 'Mon-Fri 22:00-06:00 Europe/Paris'.".into())
            }
            Self::Invalid(Invalid::Alone(_, needs)) => Some(needs.hint().into()),
            Self::Invalid(Invalid::Reset(_)) => {
                Some(format!("Options with a default are {}.", Options::resettable().join(", ")))
            }
            Self::ArchiveOwner(_) => Some("Its triggers run with the privileges of the table's owner.".into()),
            Self::ArchiveMissing { .. } | Self::ArchiveType { .. } => {
                Some("An archive made with CREATE TABLE … (LIKE …) has the columns it needs.".into())
            }
            Self::ArchiveUnlogged(_) => Some("A crash would empty it after the rows have left their table.".into()),
            Self::ArchiveCircle(_) => Some("Another rule moves them on from there.".into()),
            Self::MarkIsKey(_) => Some("A row that is marked would have to move to another partition.".into()),
            Self::ArchiveNeeds { .. } => Some("Give it a default, or let it be null.".into()),
            Self::ArchiveRefused => Some("A trigger or rule keeps rows out.".into()),
            Self::FunctionArguments(_) => {
                Some("Its arguments are the table and a JSON array of rows: (regclass, jsonb).".into())
            }
            Self::NotPartitioned(_) => Some("There is nothing to drop or detach.".into()),
            Self::PurgeOfFlag(_) => Some("Use a column of type timestamp with time zone.".into()),
            Self::PurgeFilter(_) => Some("The purge has the same filter, and its rows are marked.".into()),
            Self::PurgeTaken(_) => Some("Drop that rule: purge_after makes one of its own.".into()),
            Self::IsPurge { .. } => Some("Change purge_after of the other rule.".into()),
            Self::NotATable { .. } => Some("TTL rules can be registered on tables and partitioned tables.".into()),
            Self::TemporaryTable => Some("A temporary table is invisible to the background worker.".into()),
            Self::ConcurrentHypertable(_) => Some("TimescaleDB builds the indexes of its chunks itself; leave out concurrently.".into()),
            Self::NotAHeap { .. } => Some(
                "Foreign tables, other table access methods, distributed tables and compressed chunks cannot be swept row by row."
                    .into(),
            ),
            Self::CannotExpire { .. } => Some(format!("Use a column of type {}.", Source::ACCEPTED)),
            Self::TypeChanged(_) => Some(
                "Confirm the rule with ttl_create_index or ttl_alter_index; the latter keeps unit and time_zone unless they are given."
                    .into(),
            ),
            Self::ClearsNotNull(_) => Some("Give it a default.".into()),
            Self::ClearsUnequal(_) => Some(
                "A default needs a type with an order and a deterministic collation; without one, columns of any type are cleared to null."
                    .into(),
            ),
            Self::ClearsKey(_) => Some(
                "Columns of primary keys, partition keys and keys that are referenced stay; those of other unique keys can be cleared to null."
                    .into(),
            ),
            Self::DefaultVaries(_) => {
                Some("The default must be a constant of one of PostgreSQL's own types, or null.".into())
            }
            Self::DefaultChanged(_) => Some(
                "Rows that were cleared already would be cleared to the new one. If that is right, confirm the rule with ttl_alter_index without options."
                    .into(),
            ),
            Self::ColumnMissing(_) | Self::MarkDropped(_) | Self::ClearedDropped(_) | Self::FilterColumnDropped(_) => {
                Some("Register the rule again with ttl_create_index.".into())
            }
            Self::MeaningChanged(_) => {
                Some("A function or type was replaced. If the rule is still right, confirm it with ttl_alter_index without options.".into())
            }
            Self::NotConfirmed => Some(
                "The table has a new owner, or the rule had stopped before it was restored. If the rule is still right, confirm it with ttl_alter_index without options."
                    .into(),
            ),
            Self::RuleMoved => Some(
                "Names follow a rename by themselves; use ttl_drop_index and ttl_create_index to move a rule.".into(),
            ),
            Self::CannotMark { .. } => Some(format!("Use a column of type {}.", Mark::ACCEPTED)),
            Self::MarkIsNotNull(_) => Some("A row is live while the column is null.".into()),
            Self::AmbiguousRule { columns, .. } => Some(format!("Give column_name as one of: {columns}.")),
            Self::AmbiguousName { names, .. } => {
                Some(format!("Give rule_name as one of: {names}; an empty one is that of the rule without a name."))
            }
            Self::NoPrimaryKey(_) => Some("A row is named by its primary key.".into()),
            Self::KeyShape { columns, .. } => Some(format!(
                "Give text for a key of one column, or a JSON object with exactly these: {columns}. Numbers that are not integers of 64 bits come as strings."
            )),
            Self::NotWritable(_) => Some(
                "Generated columns, expressions, JSON and uuid columns cannot be written; change the columns they are computed from.".into(),
            ),
            Self::NoClock(_) => Some("The column holds the instant of expiry itself; use ttl_set or ttl_expire_at.".into()),
            Self::TouchOfChildren(_) => Some("Use partitions instead of inheritance.".into()),
            Self::NotLoaded => {
                Some("Add pg_ttl_index to shared_preload_libraries, or to session_preload_libraries.".into())
            }
            Self::HiddenByCode => {
                Some("They run in every query on the table, with the caller's privileges and settings.".into())
            }
            Self::OwnersCode(_) => Some(
                "Only the owner and superusers can use this function if the rule calls user-defined functions.".into(),
            ),
            Self::ExpiredMeanwhile => Some("The transaction might succeed if retried.".into()),
            Self::HiddenByZone(_) => Some("Use the name of a place, as in America/New_York.".into()),
            Self::HiddenPart(_) => Some("Register the rule on the parent.".into()),
            Self::Mode(_) => Some("Use always, nx, xx, gt or lt.".into()),
            Self::InfiniteInstant => Some("Use ttl_persist for a row that never expires.".into()),
            Self::NoRule { .. } | Self::NoRules(_) => Some("Register one with ttl_create_index.".into()),
            Self::Subquery(_) => Some("It can only use columns of the row.".into()),
            Self::WholeRow(_) => Some("Name the columns that are needed.".into()),
            Self::NotImmutable => Some(
                "Use index_method => 'none', or immutable functions: AT TIME ZONE instead of the session's time zone, say."
                    .into(),
            ),
            Self::Invalid(Invalid::UnitMissing | Invalid::Unit(_)) => {
                Some("Use s, ms, us or ns for Unix time, or ulid for ULIDs in a uuid column.".into())
            }
            Self::Invalid(Invalid::UnitUnused(_)) => {
                Some("Numbers and text have a unit, and uuid columns that hold ULIDs have the unit ulid.".into())
            }
            Self::Invalid(Invalid::UnitRange(_)) => Some("Use a wider column, or another unit or time to live.".into()),
            Self::CannotCommit => Some(
                "Turn autocommit on if your driver begins transactions by itself, or use ttl_runner to sweep within one."
                    .into(),
            ),
            Self::ClockJumped => Some(
                "Nothing is removed until the clock is back, or ttl_start_worker() says that it is right.".into(),
            ),
            Self::NotInstalled => Some("Use CREATE EXTENSION pg_ttl_index.".into()),
            Self::Unserved(reason) => Some(reason.hint().into()),
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
