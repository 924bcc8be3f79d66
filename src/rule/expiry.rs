//! When the rows of a rule expire, as SQL.

use super::sql::operation;
use super::{Source, Ttl};

/// A rule's expiry: the value in each row, its kind, and how long a row lives from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Expiry {
    source: Source,
    /// SQL over the row: a quoted column, or an expression in parentheses.
    value: String,
    ttl: Ttl,
    /// An SQL literal.
    zone: String,
    /// The quoted schema of the extension's functions.
    functions: String,
    /// Fractional digits that the column keeps, if limited.
    precision: Option<u32>,
}

impl Expiry {
    pub fn new(source: Source, value: String, ttl: Ttl, time_zone: &str, functions: &str) -> Self {
        let zone = format!("'{}'", time_zone.replace('\'', "''"));
        Self { source, value, ttl, zone, functions: functions.to_owned(), precision: None }
    }

    /// Returns the same expiry for a column that keeps this many fractional digits.
    pub fn with_precision(self, precision: Option<u32>) -> Self {
        Self { precision, ..self }
    }

    pub fn source(&self) -> Source {
        self.source
    }

    /// Returns the same expiry for another value.
    pub fn of_value(&self, value: &str) -> Self {
        Self { value: value.to_owned(), ..self.clone() }
    }

    /// Returns a later instant: months and days by the calendar of the rule's time zone, the rest by the clock.
    pub fn later(&self, instant: &str, calendar: &str, clock: &str) -> String {
        let zone = &self.zone;
        let local = operation(&format!("({instant} AT TIME ZONE {zone})"), "+", calendar);
        operation(&format!("({local} AT TIME ZONE {zone})"), "+", clock)
    }

    /// Returns the SQL that is compared with the cutoff, sorted by and indexed.
    pub fn compared(&self) -> String {
        self.source.compared(&self.value, &self.functions)
    }

    /// Returns the conditions for an expired row, each in parentheses. `cutoff` is a constant of the compared type.
    pub fn has_expired(&self, cutoff: &str) -> Vec<String> {
        let mut conditions = vec![operation(&self.compared(), "<=", cutoff)];
        conditions.extend(self.source.guard(&self.value, &self.functions));
        conditions
    }

    /// Returns the condition for a row that has not expired, in a form that indexes and partition bounds can serve.
    pub fn is_visible(&self, present: &str, not_null: bool) -> String {
        let compared = self.compared();
        let mut visible = format!("{compared} > {}", self.cutoff_at(present));
        if !not_null || !self.source.compares_value() {
            visible += &format!(" OR {compared} IS NULL");
        }
        if let Some(guard) = self.source.guard(&self.value, &self.functions) {
            visible += &format!(" OR NOT {guard}");
        }
        visible
    }

    /// Returns the condition for a row that never expires.
    pub fn is_endless(&self) -> String {
        format!("coalesce({}, true)", operation(&self.instant(), ">=", "'infinity'::timestamptz"))
    }

    /// Returns a row's value as an instant.
    fn instant(&self) -> String {
        self.instant_of(&self.compared())
    }

    /// Converts SQL of the compared type to an instant.
    pub fn instant_of(&self, compared: &str) -> String {
        self.source.instant(compared, &self.zone, &self.functions)
    }

    /// Returns the instant at which a row expires.
    pub fn ends(&self) -> String {
        self.ttl.after(&self.instant(), &self.zone)
    }

    /// Returns the instant at which a row expires whose time to live begins at an instant.
    pub fn ends_if_begun(&self, instant: &str) -> String {
        self.ttl.after(instant, &self.zone)
    }

    /// Returns a query with three columns: the cutoff at `present` as an SQL constant, the cutoff as an instant, and
    /// `present`.
    pub fn cutoff(&self, present: &str) -> String {
        let (bound, type_name) = (self.cutoff_at("present"), self.source.type_name());
        let instant = self.ttl.before("present", &self.zone);
        format!(
            "SELECT quote_literal({bound}) || '::{type_name}', {instant}, present
             FROM (SELECT {present} AS present) AS clock"
        )
    }

    /// Returns the cutoff at an instant.
    ///
    /// While clocks are set back, a local time happens twice, and PostgreSQL reads it as the second one. During the
    /// first, the local cutoff would let rows expire that are read as later, so it is moved back by the difference.
    pub fn cutoff_at(&self, present: &str) -> String {
        let zone = &self.zone;
        let instant = self.ttl.before(present, zone);
        let local = format!("({instant} AT TIME ZONE {zone})");
        let early = operation(&format!("({local} AT TIME ZONE {zone})"), "-", &instant);
        let safe = operation(&local, "-", &format!("greatest({early}, interval '0')"));
        self.source.bound(&instant, &safe)
    }

    /// Returns the value of a row that expires at `instant`, or as soon after it as the rule can express. `None` if the
    /// value cannot be written.
    ///
    /// Going back from the instant and forward again need not lead to it where months differ in length or clocks
    /// change. So a few values are tried, covering more than that difference, and the first that does not end too early
    /// is used.
    pub fn value_to_end(&self, instant: &str) -> Option<String> {
        if self.ttl.is_of_fixed_length() {
            return self.value_to_begin(&self.ttl.before(instant, &self.zone));
        }
        let zone = &self.zone;
        let stored = self.value_to_begin("chosen")?;
        let midnight_after = |instant: &str| {
            let midnight = format!("pg_catalog.date_trunc('day'::text, {instant} AT TIME ZONE {zone})");
            format!("({} AT TIME ZONE {zone})", operation(&midnight, "+", "interval '1 day'"))
        };
        let later = operation("begins", "+", "missing");
        Some(format!(
            "(SELECT {stored}
              FROM (SELECT pg_catalog.min(tried) AS chosen
                    FROM (SELECT {instant} AS target) AS asked,
                         LATERAL (SELECT {begins} AS begins) AS back,
                         LATERAL (SELECT {missing} AS missing) AS forth,
                         LATERAL pg_catalog.unnest(ARRAY[begins, {later}, {midnight}, {later_midnight}, {last}]) AS tried
                    WHERE {goes_on} AND {is_enough}) AS first)",
            begins = self.ttl.before("target", zone),
            missing = operation("target", "-", &self.ttl.after("begins", zone)),
            midnight = midnight_after("begins"),
            later_midnight = midnight_after(&later),
            last = operation("begins", "+", "interval '4 days'"),
            goes_on = operation("tried", ">=", "begins"),
            is_enough = operation(&self.ttl.after("tried", zone), ">=", "target"),
        ))
    }

    /// Returns the value of a row whose time to live begins at `instant`.
    pub fn value_to_begin(&self, instant: &str) -> Option<String> {
        self.source.stored(instant, &self.zone, &self.functions, self.precision)
    }

    /// Whether the rule adds a time to live to the value.
    pub fn has_ttl(&self) -> bool {
        !self.ttl.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_compared_bare() {
        let ttl = Ttl::from_seconds(60).expect("a TTL");
        let expiry = Expiry::new(Source::TimestampTz, "at".into(), ttl, "UTC", "public");
        assert_eq!(expiry.has_expired("$cutoff"), ["(at OPERATOR(pg_catalog.<=) $cutoff)"]);
        let begins = "($1 OPERATOR(pg_catalog.-) interval '0:01:00')";
        assert_eq!(expiry.value_to_end("$1").as_deref(), Some(begins));
    }

    #[test]
    fn a_zone_is_quoted() {
        let expiry = Expiry::new(Source::Timestamp, "at".into(), Ttl::default(), "it's", "public");
        assert_eq!(expiry.ends(), "(at AT TIME ZONE 'it''s')");
    }
}
