//! The options of a rule: one structure, one place that validates them, one that tells what changed.

use super::{Invalid, Ttl};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

/// What a rule says beyond its table and column. Field names are the argument names users know.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Options {
    pub expire_after: Ttl,
    /// `None` follows `pg_ttl_index.batch_size`.
    pub batch_size: Option<i32>,
    pub soft_delete_column: Option<String>,
    /// In the canonical form PostgreSQL prints, every function and operator qualified.
    pub filter: Option<String>,
    pub time_zone: String,
    /// What a number counts; see [`super::Source`].
    pub unit: Option<String>,
    pub index_method: IndexMethod,
    /// Whether queries do not see rows that have expired.
    pub hide_expired: bool,
}

/// What a caller gave, before validation. `None` is "not given".
#[derive(Clone, Debug, Default)]
pub struct Given {
    pub expire_after: Option<Ttl>,
    pub batch_size: Option<i32>,
    pub soft_delete_column: Option<String>,
    pub filter: Option<String>,
    pub time_zone: Option<String>,
    pub unit: Option<String>,
    pub index_method: Option<String>,
    pub hide_expired: Option<bool>,
}

impl Given {
    /// Whether an option that has a default was given.
    pub fn has(&self, option: &str) -> bool {
        match option {
            "batch_size" => self.batch_size.is_some(),
            "soft_delete_column" => self.soft_delete_column.is_some(),
            "filter" => self.filter.is_some(),
            "unit" => self.unit.is_some(),
            "index_method" => self.index_method.is_some(),
            "hide_expired" => self.hide_expired.is_some(),
            _ => false,
        }
    }
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

impl IndexMethod {
    pub fn parse(name: &str) -> Result<Self, Invalid> {
        serde_json::from_value(Value::from(name)).map_err(|_| Invalid::IndexMethod(name.into()))
    }
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

impl Options {
    /// The options of a new registration: what is not given has its default.
    pub fn create(given: Given, time_zone: String) -> Result<Self, Invalid> {
        let expire_after = given.expire_after.ok_or(Invalid::Missing("expire_after"))?;
        let defaults = Self {
            expire_after,
            batch_size: None,
            soft_delete_column: None,
            filter: None,
            time_zone,
            unit: None,
            index_method: IndexMethod::default(),
            hide_expired: false,
        };
        defaults.alter(given)
    }

    /// These options with what is given put in place of what was there.
    pub fn alter(self, given: Given) -> Result<Self, Invalid> {
        if let Some(size) = given.batch_size.filter(|size| *size <= 0) {
            return Err(Invalid::BatchSize(size));
        }
        Ok(Self {
            expire_after: given.expire_after.unwrap_or(self.expire_after),
            batch_size: given.batch_size.or(self.batch_size),
            soft_delete_column: given.soft_delete_column.or(self.soft_delete_column),
            filter: given.filter.or(self.filter),
            time_zone: given.time_zone.unwrap_or(self.time_zone),
            unit: given.unit.or(self.unit),
            index_method: given.index_method.map_or(Ok(self.index_method), |name| IndexMethod::parse(&name))?,
            hide_expired: given.hide_expired.unwrap_or(self.hide_expired),
        })
    }

    /// Puts one option back to its default.
    pub fn reset(&mut self, option: &str) -> Result<(), Invalid> {
        match option {
            "batch_size" => self.batch_size = None,
            "soft_delete_column" => self.soft_delete_column = None,
            "filter" => self.filter = None,
            "unit" => self.unit = None,
            "index_method" => self.index_method = IndexMethod::default(),
            "hide_expired" => self.hide_expired = false,
            _ => return Err(Invalid::Reset(option.into())),
        }
        Ok(())
    }

    /// One line for each option that differs from `before`, for the user to read.
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let (Ok(Value::Object(old)), Ok(Value::Object(new))) =
            (serde_json::to_value(before), serde_json::to_value(self))
        else {
            return Vec::new();
        };
        new.iter()
            .filter_map(|(name, value)| match (&old[name], value) {
                (was, is) if was == is => None,
                (Value::Null, is) => Some(format!("{name} set to {is}")),
                (was, Value::Null) => Some(format!("{name} cleared, was {was}")),
                (was, is) => Some(format!("{name} changed from {was} to {is}")),
            })
            .collect()
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
        Options::create(given, "UTC".into()).expect("valid options")
    }

    #[test]
    fn defaults_are_a_btree_and_the_servers_batch_size() {
        assert_eq!((options().index_method, options().batch_size), (IndexMethod::Btree, None));
    }

    #[test]
    fn an_expiry_is_required() {
        assert_eq!(Options::create(Given::default(), "UTC".into()), Err(Invalid::Missing("expire_after")));
    }

    #[test]
    fn alter_changes_only_what_is_given() {
        let before = Options { filter: Some("done".into()), ..options() };
        let after = before.clone().alter(Given { batch_size: Some(5), ..Given::default() });
        assert_eq!(after, Ok(Options { batch_size: Some(5), ..before }));
    }

    #[test]
    fn a_batch_has_at_least_one_row() {
        for size in [0, -1, i32::MIN] {
            let given = Given { batch_size: Some(size), ..Given::default() };
            assert_eq!(options().alter(given), Err(Invalid::BatchSize(size)));
        }
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
        let mut options = Options { batch_size: Some(5), ..options() };
        assert_eq!(options.reset("batch_size"), Ok(()));
        assert_eq!(options.batch_size, None);
        assert_eq!(options.reset("expire_after"), Err(Invalid::Reset("expire_after".into())));
    }
}
