//! The options of a rule: one structure, one place that validates it, and one that lists changes.

use super::{Invalid, Ttl, Window};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;
use std::time::Duration;

/// The settings of a rule beyond its table and column. Field names are the argument names users know, and the catalog's
/// columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    pub expire_after: Ttl,
    /// `None` follows `pg_ttl_index.batch_size`.
    pub batch_size: Option<i32>,
    pub soft_delete_column: Option<String>,
    /// The columns of an expired row that go back to their defaults; the row stays.
    pub clear_columns: Option<Vec<String>>,
    /// How long a soft-deleted row stays before it is removed.
    pub purge_after: Option<Ttl>,
    /// In the canonical form PostgreSQL prints, with every function and operator qualified.
    pub filter: Option<String>,
    pub time_zone: String,
    /// The unit of a number; see [`super::Source`].
    pub unit: Option<String>,
    pub index_method: IndexMethod,
    /// Whether a worker builds the index, without locking out writers.
    pub concurrently: bool,
    /// Whether expired rows are hidden from queries.
    pub hide_expired: bool,
    /// The table that rows move to, qualified and quoted.
    pub archive_to: Option<String>,
    /// The function that is called with expired rows, qualified and quoted.
    pub on_expire: Option<String>,
    pub notify_channel: Option<String>,
    /// Whether batches write messages to the log.
    pub emit_message: bool,
    pub partition_action: PartitionAction,
    /// `None` follows `pg_ttl_index.naptime`.
    pub run_every: Option<Ttl>,
    pub run_window: Option<Window>,
    pub max_rows_per_second: Option<i32>,
    pub max_rows_per_run: Option<i64>,
}

/// The options that a caller gave; `None` means not given.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Given {
    pub expire_after: Option<Ttl>,
    pub batch_size: Option<i32>,
    pub soft_delete_column: Option<String>,
    pub clear_columns: Option<Vec<String>>,
    pub purge_after: Option<Ttl>,
    pub filter: Option<String>,
    pub time_zone: Option<String>,
    pub unit: Option<String>,
    pub index_method: Option<IndexMethod>,
    pub concurrently: Option<bool>,
    pub hide_expired: Option<bool>,
    pub archive_to: Option<String>,
    pub on_expire: Option<String>,
    pub notify_channel: Option<String>,
    pub emit_message: Option<bool>,
    pub partition_action: Option<PartitionAction>,
    pub run_every: Option<Ttl>,
    pub run_window: Option<Window>,
    pub max_rows_per_second: Option<i32>,
    pub max_rows_per_run: Option<i64>,
}

/// How a rule finds its expired rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IndexMethod {
    #[default]
    Btree,
    Brin,
    None,
}

/// What happens to a partition whose rows have all expired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartitionAction {
    /// Its rows are deleted, and the partition stays.
    #[default]
    Delete,
    Drop,
    Detach,
}

impl IndexMethod {
    pub fn parse(name: &str) -> Result<Self, Invalid> {
        by_name(name).ok_or_else(|| Invalid::IndexMethod(name.into()))
    }
}

impl PartitionAction {
    pub fn parse(name: &str) -> Result<Self, Invalid> {
        by_name(name).ok_or_else(|| Invalid::PartitionAction(name.into()))
    }
}

fn by_name<T: DeserializeOwned>(name: &str) -> Option<T> {
    serde_json::from_value(Value::from(name)).ok()
}

impl fmt::Display for IndexMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Btree => "btree",
            Self::Brin => "brin",
            Self::None => "none",
        })
    }
}

/// Options without a default.
const REQUIRED: [&str; 2] = ["expire_after", "time_zone"];

impl Options {
    /// Returns the options of a new registration, with defaults for options that are not given.
    pub fn create(given: &Given, time_zone: String) -> Result<Self, Invalid> {
        let expire_after = given.expire_after.ok_or(Invalid::Missing("expire_after"))?;
        Self { expire_after, time_zone, ..Self::default() }.alter(given, &[])
    }

    /// Replaces the given options, and resets those named in `reset` to their defaults.
    pub fn alter(self, given: &Given, reset: &[String]) -> Result<Self, Invalid> {
        let given: Map<_, _> = fields(given).into_iter().filter(|(_, value)| !value.is_null()).collect();
        let mut fields = fields(&self);
        for option in reset {
            if given.contains_key(option) {
                return Err(Invalid::GivenAndReset(option.clone()));
            }
            if REQUIRED.contains(&option.as_str()) || fields.remove(option).is_none() {
                return Err(Invalid::Reset(option.clone()));
            }
        }
        fields.extend(given);
        let options =
            serde_json::from_value::<Self>(fields.into()).map_err(|error| Invalid::Other(error.to_string()))?;
        options.check()?;
        Ok(options)
    }

    /// Checks which options make sense, alone and together. No other code decides this.
    fn check(&self) -> Result<(), Invalid> {
        let positive = [
            ("batch_size", self.batch_size.map(i64::from)),
            ("max_rows_per_second", self.max_rows_per_second.map(i64::from)),
            ("max_rows_per_run", self.max_rows_per_run),
        ];
        if let Some((option, number)) = positive.into_iter().find_map(|(name, n)| Some((name, n.filter(|n| *n < 1)?))) {
            return Err(Invalid::TooSmall(option, number));
        }
        if self.filter.as_ref().is_some_and(|filter| filter.len() > LONGEST_FILTER) {
            return Err(Invalid::FilterTooLong);
        }
        if self.run_every.is_some_and(|every| every.estimate() < MOST_OFTEN) {
            return Err(Invalid::TooOften);
        }
        if self.notify_channel.as_ref().is_some_and(|channel| channel.is_empty() || channel.len() >= LONGEST_NAME) {
            return Err(Invalid::Channel);
        }
        let has_each_once = |columns: &Vec<String>| {
            !columns.is_empty() && columns.iter().enumerate().all(|(place, column)| !columns[..place].contains(column))
        };
        if !self.clear_columns.as_ref().is_none_or(has_each_once) {
            return Err(Invalid::ClearColumns);
        }
        let clears = self.clear_columns.is_some();
        let takes_parts = self.partition_action != PartitionAction::Delete;
        let together = [
            ("soft_delete_column", self.soft_delete_column.is_some(), clears, Needs::NoClearing),
            ("hide_expired", self.hide_expired, clears, Needs::NoClearing),
            ("partition_action", takes_parts, clears, Needs::NoClearing),
            ("purge_after", self.purge_after.is_some(), self.soft_delete_column.is_none(), Needs::SoftDelete),
            (
                "archive_to",
                self.archive_to.is_some(),
                self.soft_delete_column.is_some() && self.purge_after.is_none(),
                Needs::Removal,
            ),
            ("concurrently", self.concurrently, self.index_method == IndexMethod::None, Needs::Index),
        ];
        match together.into_iter().find(|(_, is_given, is_useless, _)| *is_given && *is_useless) {
            Some((option, _, _, needs)) => Err(Invalid::Alone(option, needs)),
            None => Ok(()),
        }
    }

    /// Returns the options of the rule that removes the rows this rule soft-deletes.
    pub fn of_purge(&self) -> Option<Self> {
        Some(Self {
            expire_after: self.purge_after?,
            soft_delete_column: None,
            purge_after: None,
            unit: None,
            hide_expired: false,
            // The function was called when the rows expired.
            on_expire: None,
            // The table is not partitioned by the column that marks rows.
            partition_action: PartitionAction::default(),
            ..self.clone()
        })
    }

    /// Returns the table that rows move to when this rule removes them.
    pub fn archive(&self) -> Option<&str> {
        self.archive_to.as_deref().filter(|_| self.soft_delete_column.is_none())
    }

    /// Returns the columns that the rule changes in rows that stay.
    pub fn updated_columns(&self) -> Vec<String> {
        self.soft_delete_column.iter().chain(self.clear_columns.iter().flatten()).cloned().collect()
    }

    /// Whether rows are archived, passed to a function or announced when they go.
    pub fn delivers(&self) -> bool {
        self.archive().is_some() || self.on_expire.is_some() || self.notify_channel.is_some()
    }

    /// Whether an expired row may be removed as soon as a new row needs its key, without a sweep.
    pub fn frees_keys(&self) -> bool {
        self.hide_expired && self.soft_delete_column.is_none() && !self.delivers()
    }

    /// Whether a rule with these options does the same to the same rows as one with others.
    pub fn takes_as(&self, other: &Self) -> bool {
        let rows = |it: &Self| (it.expire_after, it.filter.clone(), it.unit.clone(), it.time_zone.clone());
        rows(self) == rows(other) && self.updated_columns() == other.updated_columns()
    }

    /// Returns one line for each option that differs from `before`, for the user to read.
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let (old, new) = (fields(before), fields(self));
        new.iter()
            .filter_map(|(name, value)| match (&old[name], value) {
                (was, is) if was == is => None,
                (Value::Null, is) => Some(format!("{name} set to {is}")),
                (was, Value::Null) => Some(format!("{name} cleared, was {was}")),
                (was, is) => Some(format!("{name} changed from {was} to {is}")),
            })
            .collect()
    }

    /// Returns the names of all options.
    pub fn names() -> Vec<String> {
        fields(&Self::default()).into_iter().map(|(name, _)| name).collect()
    }

    /// Returns the names of the options that can be reset.
    pub fn resettable() -> Vec<String> {
        Self::names().into_iter().filter(|name| !REQUIRED.contains(&name.as_str())).collect()
    }
}

/// Limits the filter's length, because every session that plans a query may have to read it.
const LONGEST_FILTER: usize = 100_000;

/// The shortest interval between sweeps, as for `naptime`.
const MOST_OFTEN: Duration = Duration::from_secs(1);

/// PostgreSQL's NAMEDATALEN.
pub const LONGEST_NAME: usize = 64;

/// What an option needs to make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    SoftDelete,
    Removal,
    Index,
    NoClearing,
}

impl Needs {
    pub fn hint(self) -> &'static str {
        match self {
            Self::SoftDelete => "Rows are purged that were softly deleted before: give soft_delete_column.",
            Self::Removal => {
                "Softly deleted rows stay where they are: give purge_after too, and they are archived then."
            }
            Self::NoClearing => "With clear_columns, rows stay: use another rule to remove them.",
            Self::Index => "There is no index to make with index_method => 'none'.",
        }
    }
}

/// Returns the fields by name, in name order.
fn fields(of: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(of) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ttl(seconds: i32) -> Ttl {
        Ttl::from_seconds(seconds).expect("a valid TTL")
    }

    fn options() -> Options {
        let given = Given { expire_after: Some(ttl(60)), ..Given::default() };
        Options::create(&given, "UTC".into()).expect("valid options")
    }

    #[test]
    fn defaults_are_a_btree_and_the_servers_batch_size() {
        assert_eq!((options().index_method, options().batch_size), (IndexMethod::Btree, None));
    }

    #[test]
    fn an_expiry_is_required() {
        assert_eq!(Options::create(&Given::default(), "UTC".into()), Err(Invalid::Missing("expire_after")));
    }

    #[test]
    fn alter_changes_only_what_is_given() {
        let before = Options { filter: Some("done".into()), ..options() };
        let after = before.clone().alter(&Given { batch_size: Some(5), ..Given::default() }, &[]);
        assert_eq!(after, Ok(Options { batch_size: Some(5), ..before }));
    }

    #[test]
    fn numbers_are_positive() {
        for number in [0, -1, i32::MIN] {
            let given = Given { batch_size: Some(number), ..Given::default() };
            assert_eq!(options().alter(&given, &[]), Err(Invalid::TooSmall("batch_size", number.into())));
            let given = Given { max_rows_per_second: Some(number), ..Given::default() };
            assert_eq!(options().alter(&given, &[]), Err(Invalid::TooSmall("max_rows_per_second", number.into())));
        }
        for every in [Ttl::default(), Ttl::new(0, 0, 999_999).expect("a span")] {
            let given = Given { run_every: Some(every), ..Given::default() };
            assert_eq!(options().alter(&given, &[]), Err(Invalid::TooOften));
        }
    }

    #[test]
    fn what_makes_no_sense_together_is_refused() {
        let purge = Given { purge_after: Some(ttl(1)), ..Given::default() };
        assert_eq!(options().alter(&purge, &[]), Err(Invalid::Alone("purge_after", Needs::SoftDelete)));
        let archive = Given { archive_to: Some("a".into()), ..Given::default() };
        let soft = Options { soft_delete_column: Some("gone".into()), ..options() };
        assert_eq!(soft.clone().alter(&archive, &[]), Err(Invalid::Alone("archive_to", Needs::Removal)));
        let both = Options { purge_after: Some(ttl(1)), ..soft };
        assert_eq!(both.alter(&archive, &[]).map(|options| options.archive().is_some()), Ok(false));
    }

    #[test]
    fn clearing_leaves_the_row_alone() {
        let clear = |columns: &[&str]| Given {
            clear_columns: Some(columns.iter().map(|column| (*column).into()).collect()),
            ..Given::default()
        };
        for columns in [&[][..], &["a", "b", "a"]] {
            assert_eq!(options().alter(&clear(columns), &[]), Err(Invalid::ClearColumns));
        }
        let hidden = Options { hide_expired: true, ..options() };
        assert_eq!(hidden.alter(&clear(&["a"]), &[]), Err(Invalid::Alone("hide_expired", Needs::NoClearing)));
        let archived = Options { archive_to: Some("x".into()), ..options() }.alter(&clear(&["a"]), &[]);
        assert_eq!(archived.map(|options| options.archive().is_some()), Ok(true));
    }

    #[test]
    fn a_purge_goes_by_the_mark_and_archives() {
        let soft = Options {
            soft_delete_column: Some("gone".into()),
            purge_after: Some(ttl(90)),
            archive_to: Some("a".into()),
            filter: Some("done".into()),
            ..options()
        };
        let purge = soft.of_purge().expect("a purge");
        assert_eq!((purge.expire_after, purge.archive(), purge.filter.as_deref()), (ttl(90), Some("a"), Some("done")));
        assert_eq!(options().of_purge(), None);
    }

    #[test]
    fn index_methods_are_three() {
        for name in ["btree", "brin", "none"] {
            assert_eq!(IndexMethod::parse(name).map(|method| method.to_string()), Ok(name.into()));
        }
        assert_eq!(IndexMethod::parse("hash"), Err(Invalid::IndexMethod("hash".into())));
    }

    #[test]
    fn changes_name_what_was_set_changed_and_cleared() {
        let before = Options { filter: Some("done".into()), ..options() };
        let after = Options { expire_after: ttl(90), batch_size: Some(7), filter: None, ..before.clone() };
        assert_eq!(
            after.changes_since(&before),
            [
                "batch_size set to 7",
                "expire_after changed from \"1 minute\" to \"1 minute 30 seconds\"",
                "filter cleared, was \"done\"",
            ]
        );
        assert!(before.changes_since(&before).is_empty());
    }

    #[test]
    fn reset_takes_only_what_has_a_default() {
        let before = Options { batch_size: Some(5), index_method: IndexMethod::Brin, ..options() };
        let reset = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            before.clone().alter(&Given { filter: Some("done".into()), ..Given::default() }, &names)
        };
        let after = Options { filter: Some("done".into()), ..options() };
        assert_eq!(reset(&["batch_size", "index_method"]), Ok(after));
        assert_eq!(reset(&["expire_after"]), Err(Invalid::Reset("expire_after".into())));
        assert_eq!(reset(&["colour"]), Err(Invalid::Reset("colour".into())));
        assert_eq!(reset(&["filter"]), Err(Invalid::GivenAndReset("filter".into())));
    }
}
