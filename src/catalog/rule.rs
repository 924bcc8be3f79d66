//! A rule, ready to be swept: its options, what they are bound to in this database, and its state.

use super::binding::{Columns, Meanings};
use super::outcome::Blocked;
use super::{Catalog, rules};
use crate::error::TtlError;
use crate::pg::transaction::Failure;
use crate::pg::{access, meaning, spi};
use crate::rule::{Cleared, Mark, Options, Predicate, Source, Update};
use pgrx::pg_sys::Oid;
use pgrx::spi::{quote_identifier, quote_qualified_identifier};
use pgrx::{JsonB, PgSqlErrorCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::time::Duration;

/// A rule and what it is bound to.
pub struct Rule {
    pub id: i64,
    /// Counts the changes of the definition.
    pub version: i64,
    pub relid: Oid,
    pub owner: Oid,
    /// `schema.table`, quoted where needed.
    pub table: String,
    /// The TTL column, or the expression.
    pub name: String,
    /// Tells the rules on one column apart.
    pub rule_name: Option<String>,
    /// The column or expression as SQL: quoted, or in parentheses.
    pub column: String,
    /// The column's number; `None` for an expression.
    pub attnum: Option<i16>,
    pub type_oid: Oid,
    /// The column's type, qualified and quoted, with its modifier.
    pub type_name: String,
    pub typmod: i32,
    pub not_null: bool,
    /// Whether a statement may set the column.
    pub is_writable: bool,
    /// Whether rows may be in child relations.
    pub has_children: bool,
    pub is_partitioned: bool,
    /// The table that expired rows are moved to.
    pub archive: Option<Oid>,
    /// Whether the table's owner is not the one the rule was registered for.
    has_changed_hands: bool,
    /// Why the rule cannot be swept: an object it needs, or its new owner's confirmation, is missing.
    pub missing: Option<Failure>,
    /// The meaning of filter and expression when the rule was registered.
    pub meanings: Meanings,
    /// The options that the user chose.
    pub options: Options,
    /// Which rows the rule applies to.
    pub predicate: Predicate,
    pub state: State,
}

/// The state of a rule.
#[derive(Deserialize)]
pub struct State {
    /// Whether the rule may run now, and for how many more seconds it must wait because it ran or failed recently.
    pub is_due: bool,
    rests_for: Option<f64>,
    /// The name of the index that a worker has to build, or is building.
    pub pending_index: Option<String>,
    /// Whether a build of the index may be tried now, and the error of the last one.
    pub may_build: bool,
    pub index_error: Option<String>,
    /// The rows and parts that the last sweep left behind.
    pub blocked_rows: i64,
    pub locked_rows: i64,
    pub skipped_parts: Option<String>,
    /// Where the blocked rows are, if known.
    pub blocked: Option<Blocked>,
    /// SQLSTATE and message.
    pub last_error: Option<String>,
    /// The largest share of its table that the rule may take at once by somebody's word.
    pub largest_share: f64,
    /// Whether the rule was held because it would take more.
    pub was_held: bool,
    /// Why the rule is on hold although active: something it needs has not been restored or copied yet.
    pub hold: Option<String>,
    /// Whether the rule was written other than by registering it, and has not been released since.
    pub was_restored: bool,
}

impl State {
    /// Returns how much longer the rule must wait.
    pub fn rests_for(&self) -> Duration {
        Duration::try_from_secs_f64(self.rests_for.unwrap_or_default()).unwrap_or_default()
    }
}

/// A column that a rule clears, and its default as a constant in SQL.
#[derive(Deserialize)]
struct Clears {
    column: String,
    default: Option<String>,
}

/// The objects of a rule as the system catalogs have them.
#[derive(Deserialize)]
struct Bound {
    relid: u32,
    owner: u32,
    registered_for: u32,
    schema_name: String,
    table_name: String,
    name: String,
    rule_name: Option<String>,
    attnum: Option<i16>,
    type_oid: Option<u32>,
    type_name: Option<String>,
    typmod: Option<i32>,
    not_null: bool,
    is_writable: bool,
    mark: Option<String>,
    mark_type: Option<u32>,
    clears: Option<Vec<Clears>>,
    has_same_defaults: bool,
    has_children: bool,
    is_partitioned: bool,
    archive: Option<u32>,
    missing_archive: Option<String>,
    missing_function: Option<String>,
    filter_tree: Option<String>,
    expression_tree: Option<String>,
    called: Vec<u32>,
    functions: Option<String>,
    is_comparable: bool,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {} of table {}", self.column, self.table)?;
        self.rule_name.as_ref().map_or(Ok(()), |name| write!(f, ", named \"{name}\""))
    }
}

impl Rule {
    /// Fails if the table has a new owner: triggers, functions and the archive's code would run as that owner, who has
    /// not agreed to it.
    pub fn check_owner(&self) -> Result<(), TtlError> {
        if self.has_changed_hands { Err(TtlError::NotConfirmed) } else { Ok(()) }
    }

    /// Whether the rule marks or clears rows instead of removing them.
    pub fn updates(&self) -> bool {
        self.predicate.update.is_some()
    }

    /// Whether the rule clears columns of rows that stay.
    pub fn clears(&self) -> bool {
        matches!(self.predicate.update, Some(Update::Clear(_)))
    }

    /// Whether filter and expression call no user code. Decided without running anything.
    pub fn calls_nothing_of_users(&self) -> bool {
        self.meanings.are_harmless(self.options.filter.is_some(), self.attnum.is_none())
    }
}

/// A rule that cannot be swept, and why.
pub struct Broken {
    pub rule_id: i64,
    pub version: i64,
    pub failure: Failure,
    pub is_due: bool,
    /// Whether this was already its last error.
    pub is_known: bool,
    /// Whether the rule is on hold anyway.
    pub is_held: bool,
}

/// Reads the JSON at this ordinal of a row, by the names of its fields.
fn part<T: DeserializeOwned>(row: &spi::Row<'_>, ordinal: usize) -> Result<T, TtlError> {
    let values = row.get::<JsonB>(ordinal)?.map(|json| json.0).unwrap_or_default();
    serde_json::from_value(values).map_err(|_| TtlError::Mismatch)
}

impl Catalog {
    /// Returns the query whose rows [`Self::rule`] reads: id, version, options, bound objects, state and columns of
    /// each rule.
    pub(super) fn rules_sql(&self, condition: &str) -> String {
        format!(
            "SELECT t.id, t.version, {options},
                    jsonb_build_object(
                        'relid', b.relid::bigint, 'owner', c.relowner::bigint, 'registered_for', b.owner::bigint,
                        'schema_name', n.nspname, 'table_name', c.relname,
                        'name', coalesce(a.attname::text, t.column_name), 'rule_name', t.rule_name, 'attnum', b.attnum, 'type_oid', type.oid::bigint,
                        'type_name', format_type(a.atttypid, a.atttypmod), 'typmod', a.atttypmod,
                        'not_null', coalesce(a.attnotnull OR type.typnotnull, false),
                        'is_writable', coalesce(a.attgenerated = '' AND a.attidentity <> 'a', false),
                        'mark', mark.attname, 'mark_type', mark.atttypid::bigint,
                        'clears', CASE WHEN b.clear_attnums IS NOT NULL THEN (
                                 SELECT jsonb_agg(jsonb_build_object('column', k.attname, 'default', b.clear_values[c.place]) ORDER BY c.place)
                                 FROM unnest(b.clear_attnums) WITH ORDINALITY AS c (attnum, place)
                                 JOIN pg_attribute k ON k.attrelid = b.relid AND k.attnum = c.attnum) END,
                        'has_same_defaults', b.clear_attnums IS NULL OR b.tree_version <> {version}
                             OR coalesce({schema}.ttl_default_marks(b.relid, b.clear_attnums) = b.clear_defaults, false),
                        'has_children', c.relkind = 'p' OR c.relhassubclass, 'is_partitioned', c.relkind = 'p',
                        'archive', b.archive_relid::bigint,
                        'missing_archive', CASE WHEN t.archive_to IS NOT NULL AND b.archive_relid IS NULL
                                           THEN format('archive table %s does not exist', t.archive_to) END,
                        'missing_function', CASE WHEN t.on_expire IS NOT NULL AND b.on_expire_oid IS NULL
                                            THEN format('function %s(regclass, jsonb) does not exist', t.on_expire) END,
                        'filter_tree', b.filter_tree, 'expression_tree', b.expression_tree, 'called', b.called::bigint[],
                        'functions', b.functions, 'is_comparable', coalesce(b.tree_version = {version}, false)),
                    jsonb_build_object(
                        'is_due', coalesce({schema}.ttl_due_at(t) <= now(), true),
                        'rests_for', extract(epoch FROM {schema}.ttl_due_at(t) - now())::double precision,
                        'pending_index', CASE WHEN t.concurrently AND t.index_created_by_extension AND NOT EXISTS (
                                 SELECT FROM pg_index i WHERE i.indisvalid
                                   AND i.indexrelid = {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name))
                             THEN t.index_name END,
                        'may_build', coalesce(t.index_retry_at <= now(), true), 'index_error', s.index_error,
                        'blocked_rows', t.blocked_rows, 'locked_rows', t.locked_rows, 'skipped_parts', t.skipped_parts,
                        'blocked', CASE WHEN t.blocked_retry_at IS NOT NULL THEN jsonb_build_object(
                                 'rests', t.blocked_retry_at > now() AND t.consecutive_failures = 0,
                                 'up_to', s.blocked_up_to, 'under', s.blocked_under) END,
                        'last_error', t.last_error_code || ': ' || s.last_error,
                        'largest_share', t.largest_share, 'was_held', t.held_share IS NOT NULL,
                        'hold', {hold}, 'was_restored', b.held_by IS NOT NULL),
                    {columns}
             FROM {schema}.ttl_index_table t
             JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             LEFT JOIN {schema}.ttl_state s ON s.rule_id = t.id
             JOIN pg_class c ON c.oid = b.relid
             JOIN pg_namespace n ON n.oid = c.relnamespace
             LEFT JOIN pg_attribute a ON a.attrelid = b.relid AND a.attnum = b.attnum AND NOT a.attisdropped
             LEFT JOIN pg_type type ON type.oid = coalesce(a.atttypid, to_regtype(t.expression_type))
             LEFT JOIN pg_attribute mark
                    ON mark.attrelid = b.relid AND mark.attnum = b.soft_delete_attnum AND NOT mark.attisdropped
             WHERE (a.attname IS NOT NULL OR b.attnum IS NULL) AND {condition}
             ORDER BY t.id",
            options = rules::options_of("t"),
            version = meaning::version(),
            hold = self.hold(),
            columns = Columns::SQL,
            schema = self.schema
        )
    }

    /// Reads a rule from a row, or returns why it cannot be swept.
    pub(super) fn rule(&self, row: &spi::Row<'_>) -> Result<Rule, Broken> {
        let number = |ordinal| row.get::<i64>(ordinal).ok().flatten().unwrap_or_default();
        let (id, version) = (number(1), number(2));
        let broken = |failure: Failure, state: Option<&State>| Broken {
            rule_id: id,
            version,
            is_due: state.is_some_and(|state| state.is_due),
            is_known: state.is_some_and(|state| state.last_error == Some(failure.to_string())),
            is_held: state.is_some_and(|state| state.hold.is_some()),
            failure,
        };
        let state: State = part(row, 5).map_err(|error| broken(error.into(), None))?;
        if let Err(failure) = check_columns(row, &state) {
            return Err(broken(failure, Some(&state)));
        }
        match self.read_rule(id, version, row) {
            Ok(read) => Ok(read(state)),
            Err(error) => Err(broken(error.into(), Some(&state))),
        }
    }

    /// Reads a rule from a row, except for its state.
    fn read_rule(&self, id: i64, version: i64, row: &spi::Row<'_>) -> Result<impl FnOnce(State) -> Rule, TtlError> {
        let options = rules::options(row, 3)?;
        let bound: Bound = part(row, 4)?;
        let name = bound.name;
        let column = if bound.attnum.is_some() { quote_identifier(&name) } else { format!("({name})") };
        let type_oid = bound.type_oid.map(Oid::from).ok_or_else(|| TtlError::CannotExpireNow(name.clone()))?;
        let source = Source::of_type(access::base_type(type_oid).to_u32(), options.unit.as_deref())?
            .ok_or_else(|| TtlError::CannotExpireNow(name.clone()))?;
        let typmod = bound.typmod.unwrap_or(-1);
        let expiry = self.expiry(source, column.clone(), &options).with_precision(source.precision(typmod));
        let cleared = |it: Clears| match it.default {
            Some(default) if bound.has_same_defaults => Ok(Cleared { column: quote_identifier(it.column), default }),
            _ => Err(TtlError::DefaultChanged(it.column)),
        };
        let clear = bound.clears.map(|all| all.into_iter().map(cleared).collect::<Result<_, _>>()).transpose()?;
        let mark = match (bound.mark, bound.mark_type) {
            (Some(name), Some(type_oid)) => {
                let mark = Mark::of_type(access::base_type(Oid::from(type_oid)).to_u32());
                Some(Update::Mark(quote_identifier(&name), mark.ok_or(TtlError::CannotMarkNow(name))?))
            }
            _ => None,
        };
        let meanings = Meanings {
            filter: bound.filter_tree,
            expression: bound.expression_tree,
            called: bound.called.into_iter().map(Oid::from).collect(),
            functions: bound.functions,
            is_comparable: bound.is_comparable,
        };
        let has_changed_hands = bound.registered_for != bound.owner;
        let absent = |message: Option<String>, code| message.map(|message| Failure::new(code, message));
        let missing = has_changed_hands
            .then(|| Failure::from(TtlError::NotConfirmed))
            .or_else(|| absent(bound.missing_archive, PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE))
            .or_else(|| absent(bound.missing_function, PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION));
        Ok(move |state| Rule {
            id,
            version,
            relid: Oid::from(bound.relid),
            owner: Oid::from(bound.owner),
            table: quote_qualified_identifier(bound.schema_name, bound.table_name),
            name,
            rule_name: bound.rule_name,
            column,
            attnum: bound.attnum,
            type_oid,
            type_name: bound.type_name.unwrap_or_default(),
            typmod,
            not_null: bound.not_null,
            is_writable: bound.is_writable,
            has_children: bound.has_children,
            is_partitioned: bound.is_partitioned,
            archive: bound.archive.map(Oid::from).filter(|_| options.archive().is_some()),
            has_changed_hands,
            missing,
            meanings,
            predicate: Predicate::new(expiry, options.filter.clone(), mark.or(clear.map(Update::Clear))),
            options,
            state,
        })
    }
}

/// Fails if a rule's columns are not those it was registered for.
fn check_columns(row: &spi::Row<'_>, state: &State) -> Result<(), Failure> {
    Columns::read(row, 6)?.check().map_err(|error| {
        // The error recorded when the column was dropped says more.
        let known = state.last_error.as_deref().and_then(|known| known.strip_prefix("42703: "));
        let failure = Failure::from(error);
        match known {
            Some(message) if failure.code == PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN => {
                Failure { hint: failure.hint, ..Failure::new(failure.code, message) }
            }
            _ => failure,
        }
    })
}
