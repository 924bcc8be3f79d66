//! Every SQL statement that looks for or removes rows, for one rule and one leaf.

use crate::catalog::Rule;
use crate::pg::estimate;
use crate::pg::planner::ENGINE_TAG;
use crate::rule::Source;
use pgrx::spi::{quote_identifier, quote_literal};

/// How a statement is told which rows it is about.
#[derive(Clone, Copy)]
pub enum Which {
    /// By an array of places.
    Listed,
    /// By the first and last place of a range.
    Ranged,
}

impl Which {
    fn condition(self) -> &'static str {
        match self {
            Self::Listed => "ctid = ANY ($1)",
            Self::Ranged => "ctid >= $1 AND ctid <= $2",
        }
    }
}

/// Which rows are looked at to tell how many are to go.
#[derive(Clone, Copy)]
pub enum Look {
    /// At most so many, in the order of an index, which may be partial on the filter.
    InOrder { most: i64, is_partial: bool },
    /// All of them, until so many are found.
    Whole { most: i64 },
    /// Those in some of the blocks.
    Sample { percent: f64 },
}

fn sample(percent: f64) -> String {
    format!("TABLESAMPLE SYSTEM ({percent}) REPEATABLE (1)")
}

/// Who is to have the rows that go, or to hear of them.
#[derive(Clone, Default)]
pub struct Delivery {
    /// The archive, and the columns that are copied.
    pub archive: Option<(String, Vec<String>)>,
    /// Whether the rows themselves are asked for.
    pub wants_rows: bool,
    /// The columns of the primary key, if the range of keys is asked for.
    pub keys: Option<Vec<String>>,
}

#[derive(Clone)]
pub struct Statements {
    leaf: String,
    value: String,
    /// What is compared with the cutoff.
    compared: String,
    source: Source,
    /// What holds for a row that has expired and is not marked yet, its parts in parentheses.
    expired: Vec<String>,
    /// What else holds for one that is to go: code of users, which may fail.
    filter: Option<String>,
    /// The last value that is left out of a search, if there is one.
    after: Option<String>,
    /// What is done to it, up to WHERE.
    action: String,
    delivery: Option<Delivery>,
}

impl Statements {
    pub fn new(rule: &Rule, cutoff: &str, leaf: &str) -> Self {
        let expired = rule.predicate.expired(cutoff);
        let action = match &rule.predicate.mark {
            None => format!("DELETE FROM ONLY {leaf}"),
            Some((column, mark)) => format!("UPDATE ONLY {leaf} SET {column} = {}", mark.value()),
        };
        Self {
            leaf: leaf.to_owned(),
            value: rule.column.clone(),
            compared: rule.predicate.expiry.compared(),
            source: rule.predicate.expiry.source(),
            expired,
            filter: rule.predicate.filter(),
            after: None,
            action,
            delivery: None,
        }
    }

    /// The same, but searches leave out values up to this one.
    pub fn searching_after(self, value: Option<String>) -> Self {
        Self { after: value, ..self }
    }

    /// What holds for a row that is to go, in a form that indexes serve.
    fn conditions(&self) -> String {
        self.expired.iter().chain(&self.filter).cloned().collect::<Vec<_>>().join(" AND ")
    }

    /// The same, `also` included, in a form that asks the filter about expired rows alone: it may fail on others.
    fn judgement(&self, also: Option<String>) -> String {
        let expired = self.expired.iter().cloned().chain(also).collect::<Vec<_>>().join(" AND ");
        match &self.filter {
            Some(filter) => format!("CASE WHEN {expired} THEN {filter} ELSE false END"),
            None => expired,
        }
    }

    /// The condition that a value lies behind another.
    fn beyond(&self, value: &str) -> String {
        format!("{} > {}", self.compared, self.literal(value))
    }

    fn literal(&self, value: &str) -> String {
        format!("{}::{}", quote_literal(value), self.source.type_name())
    }

    pub fn delivers(&self) -> bool {
        self.delivery.is_some()
    }

    /// The same for rows that somebody wants to have, or to hear of.
    pub fn with_delivery(self, delivery: Option<Delivery>) -> Self {
        Self { delivery, ..self }
    }

    /// The next places in the order of expiry, with all that share the last value, so that the next harvest can start
    /// strictly behind it. Those of all expired rows, unless the filter is asked.
    pub fn in_order(&self, watermark: Option<&str>, wanted: usize, is_filtered: bool) -> String {
        let Self { leaf, compared, .. } = self;
        let beyond = watermark.or(self.after.as_deref()).map(|value| self.beyond(value));
        let filter = self.filter.iter().filter(|_| is_filtered).cloned();
        let conditions = self.expired.iter().cloned().chain(filter).chain(beyond).collect::<Vec<_>>().join(" AND ");
        format!(
            "{ENGINE_TAG}SELECT ctid, {compared} FROM ONLY {leaf} WHERE {conditions}
             ORDER BY {compared} FETCH FIRST {wanted} ROWS WITH TIES"
        )
    }

    /// The places in a range of blocks, the last one exclusive.
    pub fn in_blocks(&self, from: u32, to: u32) -> String {
        let judgement = self.judgement(self.after.as_deref().map(|value| self.beyond(value)));
        format!("{} AND {judgement}", self.all_in_blocks(from, to))
    }

    /// The places of all rows there.
    pub fn all_in_blocks(&self, from: u32, to: u32) -> String {
        format!("{ENGINE_TAG}SELECT ctid FROM ONLY {} WHERE ctid >= '({from},0)' AND ctid < '({to},0)'", self.leaf)
    }

    /// The last of the values at some places and of one that is known, of those that have expired, as text.
    pub fn last_value(&self, known: Option<&str>) -> String {
        let Self { leaf, compared, expired, .. } = self;
        let known = known.map_or_else(String::new, |known| format!(" UNION ALL SELECT {}", self.literal(known)));
        format!(
            "{ENGINE_TAG}SELECT value::text FROM (
                 SELECT {compared} FROM ONLY {leaf} WHERE {} AND ({}) IS TRUE{known}) AS places (value)
             ORDER BY value DESC LIMIT 1",
            Which::Listed.condition(),
            expired[0]
        )
    }

    /// How many rows the planner expects to go.
    pub fn estimate(&self) -> i64 {
        self.expected(&self.conditions())
    }

    /// How many it expects to have expired, whatever the filter says of them.
    pub fn estimate_expired(&self) -> i64 {
        self.expected(&self.expired[0])
    }

    fn expected(&self, condition: &str) -> i64 {
        estimate::rows(&format!("{ENGINE_TAG}SELECT FROM ONLY {} WHERE {condition}", self.leaf))
    }

    /// A look at some rows: how many there were, how many of them are to go, the first value and the bytes of those.
    pub fn count(&self, look: Look) -> String {
        let Self { leaf, compared, .. } = self;
        let (all, judgement) = (self.conditions(), self.judgement(None));
        let (sample, condition, rest) = match look {
            // The rest of the conditions is looked at afterwards: a filter that lets nothing go must not have all of the index
            // read.
            Look::InOrder { most, is_partial: false } => {
                let condition = format!("WHERE {} ORDER BY {compared} LIMIT {most}", self.expired[0]);
                (String::new(), condition, format!("({judgement}) IS TRUE"))
            }
            Look::InOrder { most, is_partial: true } => {
                (String::new(), format!("WHERE {all} ORDER BY {compared} LIMIT {most}"), "true".into())
            }
            Look::Whole { most } => (String::new(), format!("WHERE {judgement} LIMIT {most}"), "true".into()),
            Look::Sample { percent } => (sample(percent), String::new(), format!("({judgement}) IS TRUE")),
        };
        format!(
            "{ENGINE_TAG}SELECT count(*), count(*) FILTER (WHERE goes),
                          (array_agg(compared::text ORDER BY compared) FILTER (WHERE goes))[1], sum(bytes) FILTER (WHERE goes)
             FROM (SELECT {compared} AS compared, pg_column_size(leaf.*) AS bytes, {rest} AS goes
                   FROM ONLY {leaf} AS leaf {sample} {condition}) AS seen"
        )
    }

    /// How many rows there are, all or a sample of them, and how many values that cannot be read, if there can be any.
    pub fn count_all(&self, percent: Option<f64>) -> String {
        let Self { leaf, compared, value, .. } = self;
        let sample = percent.map_or_else(String::new, sample);
        let unreadable = if self.source.compares_value() {
            "NULL::bigint".into()
        } else {
            format!("count(*) FILTER (WHERE {value} IS NOT NULL AND {compared} IS NULL)")
        };
        format!("{ENGINE_TAG}SELECT count(*), {unreadable} FROM ONLY {leaf} AS leaf {sample}")
    }

    /// Removes what is at places whose rows are locked already, if it has expired still. Where there is an delivery it is one query that also moves the rows into the
    /// archive, and whose one row has the number of rows removed and archived, the rows, and their range.
    pub fn remove(&self) -> String {
        let removal = format!("{} WHERE {} AND {}", self.action, Which::Listed.condition(), self.has_expired());
        let Some(delivery) = &self.delivery else { return format!("{ENGINE_TAG}{removal}") };
        let archived = delivery.archive.as_ref().map_or_else(String::new, |(archive, columns)| {
            let columns = columns.join(", ");
            format!(
                ", archived AS (INSERT INTO {archive} ({columns}) OVERRIDING SYSTEM VALUE
                               SELECT {columns} FROM gone RETURNING 1)"
            )
        });
        let count = if archived.is_empty() { "NULL::bigint" } else { "(SELECT count(*) FROM archived)" };
        let rows = if delivery.wants_rows { "jsonb_agg(to_jsonb(gone.*))" } else { "NULL::jsonb" };
        let range = delivery.keys.as_ref().map_or_else(|| "NULL::jsonb".into(), |keys| self.range(keys));
        format!(
            "{ENGINE_TAG}WITH gone AS ({removal} RETURNING *){archived} SELECT count(*), {count}, {rows}, {range} FROM gone"
        )
    }

    /// The first and the last of some rows, by value and by key.
    fn range(&self, keys: &[String]) -> String {
        let ends = |[first, last]: [&str; 2], value: &str, order: &str| {
            let sorted = format!("array_agg({value} ORDER BY {order})");
            format!("'{first}', ({sorted})[1], '{last}', ({sorted})[count(*)]")
        };
        let values = ends(["oldest", "newest"], &self.compared, &self.compared);
        if keys.is_empty() {
            return format!("jsonb_build_object({values})");
        }
        let pairs: Vec<_> =
            keys.iter().map(|key| format!("{}, {}", quote_literal(key), quote_identifier(key))).collect();
        let order: Vec<_> = keys.iter().map(quote_identifier).collect();
        let key = format!("jsonb_build_object({})", pairs.join(", "));
        format!("jsonb_build_object({values}, {})", ends(["first_key", "last_key"], &key, &order.join(", ")))
    }

    /// Finds the places that still hold an expired row.
    pub fn look(&self, which: Which) -> String {
        format!(
            "{ENGINE_TAG}SELECT ctid FROM ONLY {} WHERE {} AND {}",
            self.leaf,
            which.condition(),
            self.has_expired()
        )
    }

    /// Locks those that nobody else has locked.
    pub fn lock(&self) -> String {
        format!("{} FOR UPDATE SKIP LOCKED", self.look(Which::Listed))
    }

    /// `IS TRUE` changes nothing about the answer, but no index matches it: the rows are to be found by their places.
    fn has_expired(&self) -> String {
        if self.filter.is_some() {
            return format!("({}) IS TRUE", self.judgement(None));
        }
        let tests: Vec<_> = self.expired.iter().map(|condition| format!("({condition}) IS TRUE")).collect();
        tests.join(" AND ")
    }
}
