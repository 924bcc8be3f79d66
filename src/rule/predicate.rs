//! The rows that a rule applies to, as SQL, in every form that the extension needs.

use super::{Expiry, Update};

/// The rows of a rule: expired, matching its filter, and not yet marked or cleared.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicate {
    pub expiry: Expiry,
    /// In the canonical form PostgreSQL prints.
    filter: Option<String>,
    /// What the rule does to rows that stay.
    pub update: Option<Update>,
}

impl Predicate {
    pub fn new(expiry: Expiry, filter: Option<String>, update: Option<Update>) -> Self {
        Self { expiry, filter, update }
    }

    /// Returns the filter, in parentheses. It is user code, and may fail on rows that have not expired.
    pub fn filter(&self) -> Option<String> {
        self.filter.as_ref().map(|filter| format!("({filter})"))
    }

    /// Returns the condition for a row that is still to be marked or cleared, in parentheses, if the rule keeps its rows.
    pub fn outstanding(&self) -> Option<String> {
        self.update.as_ref().map(Update::outstanding)
    }

    /// Returns the conditions for an expired row that is not marked or cleared yet, whatever the filter says, each in parentheses.
    /// The first compares with the cutoff, a constant of the compared type.
    pub fn expired(&self, cutoff: &str) -> Vec<String> {
        self.expiry.has_expired(cutoff).into_iter().chain(self.outstanding()).collect()
    }

    /// Returns the conditions for an expired row that matches the filter, marked or not, each in parentheses.
    fn expired_and_filtered(&self, cutoff: &str) -> Vec<String> {
        self.expiry.has_expired(cutoff).into_iter().chain(self.filter()).collect()
    }

    /// Returns the condition for a row that has expired by `present` and matches the filter.
    pub fn expired_at(&self, present: &str) -> String {
        self.expired_and_filtered(&self.expiry.cutoff_at(present)).join(" AND ")
    }

    /// Returns the condition for a row that users consider gone by `present`: expired, swept or not, or marked.
    pub fn gone(&self, present: &str) -> String {
        let expired = format!("(({}) IS TRUE)", self.expired_at(present));
        match &self.update {
            Some(mark @ Update::Mark(..)) => format!("({expired} OR NOT {})", mark.outstanding()),
            _ => expired,
        }
    }

    /// Returns the condition for a row that never expires as it is.
    pub fn endless(&self) -> String {
        match &self.filter {
            Some(filter) => format!("({} OR ({filter}) IS NOT TRUE)", self.expiry.is_endless()),
            None => self.expiry.is_endless(),
        }
    }

    /// Returns the condition for a row visible at `present`, in a form that indexes and partition bounds can serve.
    pub fn visible(&self, present: &str, not_null: bool) -> String {
        let visible = self.expiry.is_visible(present, not_null);
        match &self.filter {
            Some(filter) => format!("{visible} OR ({filter}) IS NOT TRUE"),
            None => visible,
        }
    }

    /// Returns the part of the condition that does not depend on time: the filter, and what is still to be updated.
    pub fn timeless(&self) -> Option<String> {
        self.indexable(true)
    }

    /// Returns the time-independent part of the condition, as far as an index may be partial on it.
    pub fn indexable(&self, filter_is_immutable: bool) -> Option<String> {
        let filter = self.filter().filter(|_| filter_is_immutable);
        let parts: Vec<_> = filter.into_iter().chain(self.outstanding()).collect();
        (!parts.is_empty()).then(|| parts.join(" AND "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::pg_type::TIMESTAMPTZ;
    use crate::rule::{Cleared, Mark, Source, Ttl};

    fn predicate(filter: Option<&str>, mark: Option<Mark>) -> Predicate {
        let source = Source::of_type(TIMESTAMPTZ, None).expect("no unit").expect("a type that expires");
        let ttl = Ttl::from_seconds(60).expect("a valid TTL");
        let expiry = Expiry::new(source, "at".into(), ttl, "UTC", "ttl");
        Predicate::new(expiry, filter.map(str::to_owned), mark.map(|mark| Update::Mark("gone".to_owned(), mark)))
    }

    #[test]
    fn a_plain_rule_asks_for_expiry_alone() {
        let plain = predicate(None, None);
        assert_eq!(plain.expired("c"), ["(at OPERATOR(pg_catalog.<=) c)"]);
        assert_eq!((plain.timeless(), plain.filter(), plain.outstanding()), (None, None, None));
        assert!(!plain.visible("p", true).contains("IS NOT TRUE"));
    }

    #[test]
    fn what_is_swept_is_hidden_gone_and_indexed_by_the_same_parts() {
        let both = predicate(Some("n > 1"), Some(Mark::Instant));
        assert_eq!(both.expired("c"), ["(at OPERATOR(pg_catalog.<=) c)", "(gone IS NULL)"]);
        assert_eq!(both.filter().as_deref(), Some("(n > 1)"));
        assert_eq!(both.timeless().as_deref(), Some("(n > 1) AND (gone IS NULL)"));
        assert_eq!(both.indexable(false).as_deref(), Some("(gone IS NULL)"));
        assert!(both.gone("p").ends_with(" AND (n > 1)) IS TRUE) OR NOT (gone IS NULL))"), "{}", both.gone("p"));
        assert!(both.visible("p", true).ends_with(" OR (n > 1) IS NOT TRUE"));
        assert!(both.endless().ends_with(" OR (n > 1) IS NOT TRUE)"));
    }

    #[test]
    fn a_cleared_row_is_not_gone() {
        let cleared = Cleared { column: "email".into(), default: "NULL".into() };
        let clears = Predicate { update: Some(Update::Clear(vec![cleared])), ..predicate(None, None) };
        assert_eq!(clears.timeless().as_deref(), Some("(email IS DISTINCT FROM NULL)"));
        assert!(!clears.gone("p").contains("email"));
    }
}
