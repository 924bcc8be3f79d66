//! Every error that the extension itself raises: one variant, one SQLSTATE, a hint where a user can act.

use crate::rule::{Invalid, Mark, Options, Source};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::spi::quote_literal;
use pgrx::{PgSqlErrorCode as Code, function_name};
use std::fmt;

/// Defines [`TtlError`] by a list: variant, SQLSTATE, message and, where a user can act, a hint.
macro_rules! errors {
    ($($variant:ident $(($of:ty))? $({ $($field:ident: $type:ty),* })?: $code:ident, $message:literal $(, $hint:expr)?;)*) => {
        #[derive(Debug, thiserror::Error)]
        pub enum TtlError {
            #[error(transparent)]
            Invalid(#[from] Invalid),
            #[error("invalid {purpose}: {message}")]
            Expression { purpose: Purpose, code: Code, message: String },
            #[error("{0}")]
            Unserved(Unserved),
            #[error(transparent)]
            Spi(#[from] pgrx::spi::Error),
            $(#[error($message)] $variant $(($of))? $({ $($field: $type),* })?,)*
        }

        impl TtlError {
            pub fn code(&self) -> Code {
                match self {
                    Self::Invalid(invalid) => code_of_invalid(invalid),
                    Self::Expression { code, .. } => *code,
                    Self::Unserved(_) => Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                    Self::Spi(_) => Code::ERRCODE_INTERNAL_ERROR,
                    $(Self::$variant { .. } => Code::$code,)*
                }
            }

            #[allow(unused_variables, reason = "few hints use what their variant holds")]
            pub fn hint(&self) -> Option<String> {
                match self {
                    Self::Invalid(invalid) => hint_of_invalid(invalid),
                    Self::Unserved(reason) => Some(reason.hint().into()),
                    Self::Expression { .. } | Self::Spi(_) => None,
                    $(Self::$variant { $($($field,)*)? .. } => [$(String::from($hint))?].into_iter().next(),)*
                }
            }
        }
    };
}

errors! {
    UnknownTable(u32): ERRCODE_UNDEFINED_TABLE, "relation with OID {0} does not exist";
    UnknownFunction(u32): ERRCODE_UNDEFINED_FUNCTION, "function with OID {0} does not exist";
    NotATable { name: String, kind: &'static str }: ERRCODE_WRONG_OBJECT_TYPE,
        "\"{name}\" is not a table",
        "TTL rules can be registered on tables and partitioned tables.";
    SystemTable(String): ERRCODE_INSUFFICIENT_PRIVILEGE,
        "permission denied: \"{0}\" is a system table";
    NotOwner(String): ERRCODE_INSUFFICIENT_PRIVILEGE, "must be owner of table {0}";
    TemporaryTable: ERRCODE_FEATURE_NOT_SUPPORTED,
        "TTL rules on temporary tables are not supported",
        "A temporary table is invisible to the background worker.";
    NotAHeap { name: String, reason: String }: ERRCODE_FEATURE_NOT_SUPPORTED,
        "rows of {name} are not in a heap of its own: it {reason}",
        "Foreign tables, other table access methods, distributed tables and compressed chunks cannot be swept row by row.";
    ConcurrentHypertable(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "the index of hypertable \"{0}\" cannot be made concurrently",
        "TimescaleDB builds the indexes of its chunks itself; leave out concurrently.";
    UnknownColumn { table: String, column: String }: ERRCODE_UNDEFINED_COLUMN,
        "column \"{column}\" of relation \"{table}\" does not exist";
    CannotExpire { column: String, data_type: String }: ERRCODE_DATATYPE_MISMATCH,
        "column \"{column}\" of type {data_type} cannot expire",
        format!("Use a column of type {}.", Source::ACCEPTED);
    CannotExpireNow(String): ERRCODE_DATATYPE_MISMATCH,
        "column \"{0}\" has a type that cannot expire";
    TypeChanged(String): ERRCODE_DATATYPE_MISMATCH,
        "the type of column \"{0}\" has changed since the TTL rule was registered",
        "Confirm the rule with ttl_create_index or ttl_alter_index; the latter keeps unit and time_zone unless they are given.";
    ColumnMissing(String): ERRCODE_UNDEFINED_COLUMN,
        "column \"{0}\" used by the TTL rule no longer exists",
        "Register the rule again with ttl_create_index.";
    MarkDropped(String): ERRCODE_UNDEFINED_COLUMN,
        "soft delete column \"{0}\" was dropped",
        "Register the rule again with ttl_create_index.";
    FilterColumnDropped(String): ERRCODE_UNDEFINED_COLUMN,
        "column \"{0}\" of the filter was dropped",
        "Register the rule again with ttl_create_index.";
    MeaningChanged(Purpose): ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "the meaning of the {0} of the TTL rule has changed since it was registered",
        "A function or type was replaced. If the rule is still right, confirm it with ttl_alter_index without options.";
    RuleMoved: ERRCODE_FEATURE_NOT_SUPPORTED,
        "cannot move a TTL rule to another table or column",
        "Names follow a rename by themselves; use ttl_drop_index and ttl_create_index to move a rule.";
    NotConfirmed: ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "the owner of the table has not confirmed the TTL rule",
        "The table has a new owner, or the rule had stopped before it was restored. If the rule is still right, confirm it with ttl_alter_index without options.";
    CannotMarkNow(String): ERRCODE_DATATYPE_MISMATCH,
        "column \"{0}\" can no longer mark a row as deleted";
    MarkIsSource(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "soft delete column \"{0}\" must not be the TTL column itself";
    CatalogMark(String): ERRCODE_CHECK_VIOLATION,
        "column \"{0}\" cannot be both the TTL column and one that the rule updates";
    CannotMark { column: String, data_type: String }: ERRCODE_DATATYPE_MISMATCH,
        "column \"{column}\" of type {data_type} cannot mark a row as deleted",
        format!("Use a column of type {}.", Mark::ACCEPTED);
    MarkIsGenerated(String): ERRCODE_GENERATED_ALWAYS,
        "soft delete column \"{0}\" is a generated column";
    MarkIsNotNull(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "soft delete column \"{0}\" must accept null",
        "A row is live while the column is null.";
    ClearsSource(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "column \"{0}\" cannot be cleared because rows expire by it";
    ClearsGenerated(String): ERRCODE_GENERATED_ALWAYS,
        "column \"{0}\" cannot be cleared because it is a generated or identity column";
    ClearsNotNull(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "column \"{0}\" cannot be cleared because it must not be null and has no default",
        "Give it a default.";
    ClearsKey { column: String, table: String }: ERRCODE_FEATURE_NOT_SUPPORTED,
        "column \"{column}\" cannot be cleared because it, or a column generated from it, is part of a key of table {table}",
        "Columns of primary keys, partition keys and keys that are referenced stay; those of other unique keys can be cleared to null.";
    ClearsUnequal(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "column \"{0}\" cannot be cleared because its values cannot all be told from its default",
        "A default needs a type with an order and a deterministic collation; without one, columns of any type are cleared to null.";
    UpdatedTwice: ERRCODE_INVALID_PARAMETER_VALUE,
        "a column cannot be marked by one TTL rule and cleared by another";
    DefaultVaries(String): ERRCODE_INVALID_OBJECT_DEFINITION,
        "a column with the default {0} cannot be cleared",
        "The default must be a constant of one of PostgreSQL's own types, or null.";
    DefaultChanged(String): ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "a default of column \"{0}\" has changed since the TTL rule was registered",
        "Rows that were cleared already would be cleared to the new one. If that is right, confirm the rule with ttl_alter_index without options.";
    ClearedDropped(String): ERRCODE_UNDEFINED_COLUMN,
        "column \"{0}\", which the TTL rule clears, was dropped",
        "Register the rule again with ttl_create_index.";
    NoRule { place: String }: ERRCODE_UNDEFINED_OBJECT,
        "there is no TTL rule on {place}",
        "Register one with ttl_create_index.";
    NoRules(String): ERRCODE_UNDEFINED_OBJECT,
        "there is no TTL rule on table \"{0}\"",
        "Register one with ttl_create_index.";
    AmbiguousRule { table: String, columns: String }: ERRCODE_AMBIGUOUS_COLUMN,
        "there are several TTL rules on table \"{table}\"",
        format!("Give column_name as one of: {columns}.");
    ClassBySource { column: String, table: String }: ERRCODE_FEATURE_NOT_SUPPORTED,
        "cannot set the expiry of a row of table {table} because a filter of its TTL rules uses column \"{column}\"",
        "The row could fall under another rule and be gone at once. Give rule_name, or update the column itself.";
    AmbiguousName { table: String, column: String, names: String }: ERRCODE_AMBIGUOUS_FUNCTION,
        "there are several TTL rules on column \"{column}\" of table \"{table}\"",
        format!("Give rule_name as one of: {names}; an empty one is that of the rule without a name.");
    NoPrimaryKey(String): ERRCODE_UNDEFINED_OBJECT,
        "there is no primary key for table {0}",
        "A row is named by its primary key.";
    KeyShape { table: String, columns: String }: ERRCODE_INVALID_PARAMETER_VALUE,
        "the key does not have the columns of the primary key of table {table}",
        format!("Give text for a key of one column, or a JSON object with exactly these: {columns}. Numbers that are not integers of 64 bits come as strings.");
    NotWritable(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "cannot write the expiry of a row to column \"{0}\"",
        "Generated columns, expressions, JSON and uuid columns cannot be written; change the columns they are computed from.";
    NoClock(String): ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "column \"{0}\" does not start a time to live that could be restarted",
        "The column holds the instant of expiry itself; use ttl_set or ttl_expire_at.";
    TouchOfChildren(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "rows of table \"{0}\" are in child tables, which do not have its triggers",
        "Use partitions instead of inheritance.";
    Mode(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "unrecognized mode \"{0}\"",
        "Use always, nx, xx, gt or lt.";
    InfiniteInstant: ERRCODE_INVALID_PARAMETER_VALUE,
        "expires_at must be finite",
        "Use ttl_persist for a row that never expires.";
    NotOurTrigger: ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
        "function can only be called by triggers of pg_ttl_index";
    Mismatch: ERRCODE_INTERNAL_ERROR, "value has an unexpected type";
    HiddenPart(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "rows of table \"{0}\" are also visible through its parent",
        "Register the rule on the parent.";
    HiddenKey(String): ERRCODE_UNIQUE_VIOLATION,
        "duplicate key value violates unique constraint \"{0}\"";
    HiddenExclusion(String): ERRCODE_EXCLUSION_VIOLATION,
        "conflicting key value violates exclusion constraint \"{0}\"";
    OwnersCode(String): ERRCODE_INSUFFICIENT_PRIVILEGE,
        "permission denied: the TTL rule on table {0} runs code of the table's owner",
        "Only the owner and superusers can use this function if the rule calls user-defined functions.";
    ExpiredMeanwhile: ERRCODE_T_R_SERIALIZATION_FAILURE,
        "could not serialize access due to a row that expired concurrently",
        "The transaction might succeed if retried.";
    HiddenConflict: ERRCODE_UNIQUE_VIOLATION, "an expired row conflicts with the new row";
    NotLoaded: ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "hide_expired requires pg_ttl_index to be loaded in every session",
        "Add pg_ttl_index to shared_preload_libraries, or to session_preload_libraries.";
    HiddenByCode: ERRCODE_FEATURE_NOT_SUPPORTED,
        "hide_expired requires a filter and an expression that use only built-in immutable functions and types",
        "They run in every query on the table, with the caller's privileges and settings.";
    HiddenByZone(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "hide_expired cannot use time zone \"{0}\", which depends on timezone_abbreviations",
        "Use the name of a place, as in America/New_York.";
    TwoExpiries: ERRCODE_INVALID_PARAMETER_VALUE,
        "expire_after and expire_after_seconds must not be given together";
    NotAnExpression(Purpose): ERRCODE_SYNTAX_ERROR, "a TTL {0} must be a single expression";
    Subquery(Purpose): ERRCODE_FEATURE_NOT_SUPPORTED,
        "cannot use a subquery in a TTL {0}",
        "It can only use columns of the row.";
    Volatile(Purpose): ERRCODE_INVALID_OBJECT_DEFINITION,
        "functions in a TTL {0} must not be volatile";
    WholeRow(Purpose): ERRCODE_FEATURE_NOT_SUPPORTED,
        "cannot use a system column or the whole row in a TTL {0}",
        "Name the columns that are needed.";
    Constant: ERRCODE_INVALID_PARAMETER_VALUE, "a TTL expression must use at least one column";
    NotImmutable: ERRCODE_INVALID_OBJECT_DEFINITION,
        "functions in an indexed TTL expression must be immutable",
        "Use index_method => 'none', or immutable functions: AT TIME ZONE instead of the session's time zone, say.";
    CascadeTriggers(String): ERRCODE_INSUFFICIENT_PRIVILEGE,
        "triggers of table {0}, reached through a foreign key, would run with the privileges of another role";
    PartInUse(String): ERRCODE_LOCK_NOT_AVAILABLE, "could not obtain lock on partition {0}";
    AnotherPart(String): ERRCODE_OBJECT_IN_USE, "partition {0} has been replaced";
    SchemaPermission(String): ERRCODE_INSUFFICIENT_PRIVILEGE, "permission denied for schema {0}";
    ArchiveOwner(String): ERRCODE_INSUFFICIENT_PRIVILEGE,
        "archive table {0} must have the same owner as the table",
        "Its triggers run with the privileges of the table's owner.";
    ArchiveIsSource(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "rows of table \"{0}\" cannot be archived in itself";
    ArchiveCircle(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "rows archived in table \"{0}\" would come back",
        "Another rule moves them on from there.";
    MarkIsKey(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "soft delete column \"{0}\" must not be part of the partition key",
        "A row that is marked would have to move to another partition.";
    ArchiveKind { name: String, kind: &'static str }: ERRCODE_WRONG_OBJECT_TYPE,
        "archive \"{name}\" is not a table";
    ArchiveTemporary: ERRCODE_FEATURE_NOT_SUPPORTED, "archive table must not be temporary";
    ArchiveUnlogged(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "archive table \"{0}\" is unlogged",
        "A crash would empty it after the rows have left their table.";
    ArchiveMissing { archive: String, column: String }: ERRCODE_UNDEFINED_COLUMN,
        "archive table {archive} lacks column \"{column}\"",
        "An archive made with CREATE TABLE … (LIKE …) has the columns it needs.";
    ArchiveType { archive: String, column: String }: ERRCODE_DATATYPE_MISMATCH,
        "column \"{column}\" of archive table {archive} has a type that cannot hold every value",
        "An archive made with CREATE TABLE … (LIKE …) has the columns it needs.";
    ArchiveNeeds { archive: String, column: String }: ERRCODE_NOT_NULL_VIOLATION,
        "column \"{column}\" of archive table {archive} would have no value",
        "Give it a default, or let it be null.";
    ArchiveRefused: ERRCODE_TRIGGERED_ACTION_EXCEPTION,
        "the archive table did not accept every row",
        "A trigger or rule keeps rows out.";
    FunctionArguments(String): ERRCODE_INVALID_FUNCTION_DEFINITION,
        "function {0} cannot be called with expired rows",
        "Its arguments are the table and a JSON array of rows: (regclass, jsonb).";
    FunctionPermission(String): ERRCODE_INSUFFICIENT_PRIVILEGE,
        "the table's owner must be allowed to call function {0}";
    NotPartitioned(String): ERRCODE_FEATURE_NOT_SUPPORTED,
        "table \"{0}\" is not partitioned",
        "There is nothing to drop or detach.";
    PurgeOfFlag(String): ERRCODE_DATATYPE_MISMATCH,
        "soft delete column \"{0}\" does not record when a row was deleted",
        "Use a column of type timestamp with time zone.";
    PurgeFilter(String): ERRCODE_INVALID_PARAMETER_VALUE,
        "rows cannot be purged by a filter that uses soft delete column \"{0}\"",
        "The purge has the same filter, and its rows are marked.";
    PurgeTaken(String): ERRCODE_DUPLICATE_OBJECT,
        "there is already a TTL rule on column \"{0}\"",
        "Drop that rule: purge_after makes one of its own.";
    RestoredTableMissing: ERRCODE_UNDEFINED_TABLE, "the table does not exist";
    RestoredTwice(String): ERRCODE_DUPLICATE_OBJECT, "there is a TTL rule on column \"{0}\"";
    RestoredNumber(i64): ERRCODE_DUPLICATE_OBJECT,
        "number {0}, which its triggers use, is taken or too high";
    RestoredTypes: ERRCODE_INVALID_PARAMETER_VALUE,
        "its column types are not named as PostgreSQL names them";
    RestoredPurge(i64): ERRCODE_INVALID_PARAMETER_VALUE,
        "rule {0}, for which it purges, does not mark rows in this column of the same table";
    IsPurge { column: String }: ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "the TTL rule on column \"{column}\" belongs to purge_after of another rule",
        "Change purge_after of the other rule.";
    ClockJumped: ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "the clock has jumped ahead",
        "Nothing is removed until the clock is back, or ttl_start_worker() says that it is right.";
    CannotCommit: ERRCODE_INVALID_TRANSACTION_TERMINATION,
        "ttl_sweep cannot run inside a transaction block",
        "Turn autocommit on if your driver begins transactions by itself, or use ttl_runner to sweep within one.";
    NotInstalled: ERRCODE_UNDEFINED_OBJECT,
        "extension pg_ttl_index is not installed in this database",
        "Use CREATE EXTENSION pg_ttl_index.";
}

fn code_of_invalid(invalid: &Invalid) -> Code {
    match invalid {
        Invalid::Missing(_) => Code::ERRCODE_NULL_VALUE_NOT_ALLOWED,
        Invalid::UnitMissing => Code::ERRCODE_DATATYPE_MISMATCH,
        Invalid::Year => Code::ERRCODE_DATETIME_FIELD_OVERFLOW,
        _ => Code::ERRCODE_INVALID_PARAMETER_VALUE,
    }
}

fn hint_of_invalid(invalid: &Invalid) -> Option<String> {
    let hint = match invalid {
        Invalid::NegativeTtl(_) => "Use 0 if the column itself holds the instant of expiry.",
        Invalid::IndexMethod(_) => "Use btree, brin or none.",
        Invalid::PartitionAction(_) => "Use delete, drop or detach.",
        Invalid::Window(_) => {
            "Give days if not all, local start and end, and a time zone if not the rule's: 'Mon-Fri 22:00-06:00 Europe/Paris'."
        }
        Invalid::Alone(_, needs) => needs.hint(),
        Invalid::Reset(_) => return Some(format!("Options with a default are {}.", Options::resettable().join(", "))),
        Invalid::UnitMissing | Invalid::Unit(_) => {
            "Use s, ms, us or ns for Unix time, or ulid for ULIDs in a uuid column."
        }
        Invalid::UnitUnused(_) => "Numbers and text have a unit, and uuid columns that hold ULIDs have the unit ulid.",
        Invalid::UnitRange(_) => "Use a wider column, or another unit or time to live.",
        _ => return None,
    };
    Some(hint.into())
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
            Self::HiddenKey(_) | Self::HiddenExclusion(_) | Self::HiddenConflict => {
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
