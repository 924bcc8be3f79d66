//! Rules as a sweep needs them: names looked up in the system catalogs, by the binding.

use super::binding::{Binding, Columns, Meanings};
use super::outcome::Blocked;
use super::{Catalog, rules};
use crate::error::TtlError;
use crate::pg::transaction::Failure;
use crate::pg::{access, meaning, spi};
use crate::rule::{Mark, Options, Predicate, Source};
use pgrx::PgSqlErrorCode;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys::Oid;
use pgrx::spi::{quote_identifier, quote_qualified_identifier};
use std::fmt;
use std::time::Duration;

/// First key of the advisory lock that a sweeper of a rule holds; the second is the rule's id.
const ADVISORY_LOCK_CLASS: u32 = 0x7474_6c00;

/// Whether a sweep may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    Held,
    /// Another session is sweeping the rule.
    Busy,
    /// The rule was changed, paused or dropped.
    Changed,
}

/// A rule, ready to be swept.
pub struct Rule {
    pub id: i64,
    /// Counts the changes of its definition.
    pub version: i64,
    pub relid: Oid,
    pub owner: Oid,
    /// For people: `schema.table`, quoted where needed.
    pub table: String,
    /// The TTL column, or the expression.
    pub name: String,
    /// The same as SQL: quoted, or in parentheses.
    pub column: String,
    /// The column's number, if it is one.
    pub attnum: Option<i16>,
    pub type_oid: Oid,
    /// Qualified and quoted, with its modifier.
    pub type_name: String,
    pub typmod: i32,
    pub not_null: bool,
    /// Whether a statement may set the column.
    pub is_writable: bool,
    /// Which rows it takes.
    pub predicate: Predicate,
    pub options: Options,
    /// Whether rows may be in other relations below this one.
    pub has_children: bool,
    pub is_partitioned: bool,
    /// The name of the index that a worker is to make, or is making.
    pub pending_index: Option<String>,
    /// What it cannot be swept without, and which is not there any more.
    pub lacks: Option<Failure>,
    /// The table that rows move to.
    pub archive: Option<Oid>,
    /// Whether it has not run or failed so lately that it should rest, and how long it still should.
    pub is_due: bool,
    pub rests_for: Duration,
    /// Whether the making of its index has not failed so lately that it should rest, and how it failed.
    pub may_build: bool,
    pub index_error: Option<String>,
    /// What the last sweep left behind.
    pub blocked_rows: i64,
    /// Where the blocked ones are, if that is known.
    pub blocked: Option<Blocked>,
    pub locked_rows: i64,
    pub skipped_parts: Option<String>,
    /// SQLSTATE and message.
    pub last_error: Option<String>,
    /// What filter and expression meant when it was registered.
    pub meanings: Meanings,
    /// Why it rests although it is active: what it needs has not been restored or copied yet.
    pub hold: Option<String>,
    /// Whether it was written other than by registering it, and has not been swept since.
    pub was_restored: bool,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {} of table {}", self.column, self.table)
    }
}

impl Rule {
    /// Whether it marks rows instead of removing them.
    pub fn marks(&self) -> bool {
        self.predicate.mark.is_some()
    }

    /// Whether filter and expression call nothing of users. Nothing runs to find out.
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
    /// Whether this was its last error already.
    pub is_known: bool,
    /// Whether it rests anyway.
    pub is_held: bool,
}

impl Catalog {
    /// The active rules on one table, or on all tables that the current role may rule. A rule that cannot be swept comes
    /// with the reason.
    pub fn active_rules(&self, relid: Option<Oid>) -> Result<Vec<Result<Rule, Broken>>, TtlError> {
        let condition = "t.active AND b.relid = coalesce($1, b.relid) AND pg_has_role($2, c.relowner, 'USAGE')";
        self.rules_where(condition, &[relid.into(), access::current_role().into()])
    }

    /// The active rules that workers may sweep: all but those that rest during a restore or a copy, and none while sweeping
    /// is off. One snapshot decides about all, so that a rule which comes in the transaction that switches it off is not
    /// swept. A rule whose restore is over is told so for good: what is dropped from now on is not still to come. All of
    /// them, or the one with this number.
    pub fn rules_for_workers(&self, id: Option<i64>) -> Result<Vec<Result<Rule, Broken>>, TtlError> {
        let condition = format!(
            "t.active AND t.id = coalesce($1, t.id) AND NOT EXISTS (SELECT FROM {}.ttl_worker_off)",
            self.schema
        );
        self.remove_forsaken()?;
        let mut rules = self.rules_where(&condition, &[id.into()])?;
        // Where a restore has several sessions, one may have made a trigger while another brought the rule, and neither saw the other.
        for rule in rules.iter().flatten().filter(|rule| rule.was_restored && rule.hold.is_some()) {
            if self.is_free(rule.id)? {
                self.count_guards(rule.id, rule.relid)?;
            }
        }
        rules.retain(|rule| rule.as_ref().map_or_else(|broken| !broken.is_held, |rule| rule.hold.is_none()));
        for rule in rules.iter().flatten().filter(|rule| rule.was_restored) {
            // Somebody who is just changing the rule tells it himself, or the next pass does.
            if self.is_free(rule.id)? {
                self.release(Some(rule.id))?;
            }
        }
        Ok(rules)
    }

    /// Removes rules whose table is gone. They go with it; should one be left, it must not wait for another table of that name.
    fn remove_forsaken(&self) -> Result<(), TtlError> {
        let find = format!(
            "SELECT b.rule_id FROM {}.ttl_binding b LEFT JOIN pg_class c ON c.oid = b.relid WHERE c.oid IS NULL",
            self.schema
        );
        let found = self.with_rights(|| spi::read(&find, &[], |row| Ok(row.get::<i64>(1)?.unwrap_or_default())))?;
        for id in found {
            if self.is_free(id)? {
                self.remove(id)?;
            }
        }
        Ok(())
    }

    /// Whether a role may rule the table of a rule, as whoever has just dropped it might.
    pub(super) fn is_ruled_by(&self, id: i64, role: Oid) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT coalesce(pg_has_role($2, c.relowner, 'USAGE'), true)
             FROM {}.ttl_binding b LEFT JOIN pg_class c ON c.oid = b.relid WHERE b.rule_id = $1",
            self.schema
        );
        Ok(self.with_rights(|| spi::read(&sql, &[id.into(), role.into()], |row| row.get(1)))? == [Some(true)])
    }

    /// Locks what the catalog has of a rule, unless somebody else has locked it.
    pub fn is_free(&self, id: i64) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE t.id = $1 FOR UPDATE OF t, b SKIP LOCKED",
            schema = self.schema
        );
        Ok(self.with_rights(|| spi::execute(&sql, &[id.into()]))? > 0)
    }

    /// Whether there is anything for workers to do, now or later.
    pub fn has_active_rules(&self) -> Result<bool, TtlError> {
        let sql = format!("SELECT EXISTS (SELECT FROM {}.ttl_index_table WHERE active)", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))? == [Some(true)])
    }

    /// The rules that hide expired rows, each with every relation that its rows can be in.
    pub fn hidden_rules(&self) -> Result<Vec<(Rule, Vec<Oid>)>, TtlError> {
        let tree = format!(
            "WITH RECURSIVE tree (rule_id, relid) AS (
                 SELECT b.rule_id, b.relid FROM {schema}.ttl_binding b JOIN {schema}.ttl_index_table t ON t.id = b.rule_id
                 WHERE t.hide_expired
                 UNION SELECT tree.rule_id, i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.relid)
             SELECT rule_id, relid FROM tree",
            schema = self.schema
        );
        let relations = self.with_rights(|| {
            spi::peek(&tree, |row| Ok((row.get::<i64>(1)?.unwrap_or_default(), row.get::<Oid>(2)?.unwrap_or_default())))
        })?;
        if relations.is_empty() {
            return Ok(Vec::new());
        }
        let rules = self.with_rights(|| spi::peek(&self.select("t.hide_expired"), |row| self.loaded(&row)))?;
        let relids_of = |id| relations.iter().filter(|relation| relation.0 == id).map(|relation| relation.1).collect();
        Ok(rules
            .into_iter()
            .flatten()
            .map(|rule| (relids_of(rule.id), rule))
            .map(|(relids, rule)| (rule, relids))
            .collect())
    }

    /// The rules on a table, active or not, whoever asks: to tell a row's expiry says no more than the row does.
    pub fn rules_on(&self, relid: Oid) -> Result<Vec<Rule>, TtlError> {
        Ok(self.rules_where("b.relid = $1", &[relid.into()])?.into_iter().flatten().collect())
    }

    /// The numbers of all rules on a table, those that cannot be read included.
    pub fn numbers_on(&self, relid: Oid) -> Result<Vec<i64>, TtlError> {
        let sql = format!("SELECT rule_id FROM {}.ttl_binding WHERE relid = $1", self.schema);
        self.with_rights(|| spi::query(&sql, &[relid.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// Where rows are moved from, and where to, by all rules but one and the one that purges for it.
    pub fn archives(&self, but: Option<i64>) -> Result<Vec<(Oid, Oid)>, TtlError> {
        let sql = format!(
            "SELECT b.relid, b.archive_relid FROM {schema}.ttl_binding b JOIN {schema}.ttl_index_table t ON t.id = b.rule_id
             WHERE b.archive_relid IS NOT NULL AND t.id IS DISTINCT FROM $1 AND ($1 IS NULL OR t.purges IS DISTINCT FROM $1)",
            schema = self.schema
        );
        self.with_rights(|| {
            spi::read(&sql, &[but.into()], |row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default())))
        })
    }

    /// A rule by its number.
    pub fn rule_with_id(&self, id: i64) -> Result<Option<Rule>, TtlError> {
        Ok(self.rules_where("t.id = $1", &[id.into()])?.into_iter().find_map(Result::ok))
    }

    /// The columns that the filter and the expression of a rule read.
    pub fn columns_read(&self, id: i64) -> Result<Vec<String>, TtlError> {
        let sql = format!(
            "SELECT DISTINCT unnest(filter_columns || expression_columns) FROM {}.ttl_index_table WHERE id = $1",
            self.schema
        );
        self.with_rights(|| spi::read(&sql, &[id.into()], |row| Ok(row.get(1)?.unwrap_or_default())))
    }

    /// The same, as this transaction has just written it.
    pub(super) fn rule_now(&self, id: i64) -> Result<Option<Rule>, TtlError> {
        let found =
            self.with_rights(|| spi::query(&self.select("t.id = $1"), &[id.into()], |row| self.loaded(&row)))?;
        Ok(found.into_iter().find_map(Result::ok))
    }

    fn rules_where(&self, condition: &str, args: &[DatumWithOid<'_>]) -> Result<Vec<Result<Rule, Broken>>, TtlError> {
        self.with_rights(|| spi::read(&self.select(condition), args, |row| self.loaded(&row)))
    }

    /// The query that [`Self::loaded`] reads the rows of.
    fn select(&self, condition: &str) -> String {
        format!(
            "SELECT t.id, t.version, b.relid, c.relowner, n.nspname::text, c.relname::text,
                    coalesce(a.attname::text, t.column_name), b.attnum, type.oid,
                    mark.attname::text, mark.atttypid, c.relkind = 'p' OR c.relhassubclass,
                    coalesce(t.retry_at <= now(), true)
                        AND (t.consecutive_failures > 0 OR coalesce(t.swept_at + t.run_every <= now(), true)),
                    t.blocked_rows, t.locked_rows, t.skipped_parts,
                    t.last_error_code || ': ' || s.last_error,
                    NULL,
                    coalesce(a.attnotnull OR type.typnotnull, false),
                    coalesce(a.attgenerated = '' AND a.attidentity <> 'a', false),
                    format_type(a.atttypid, a.atttypmod), a.atttypmod, c.relkind = 'p', {options}, b.archive_relid,
                    CASE WHEN t.concurrently AND t.index_created_by_extension AND NOT EXISTS (
                                 SELECT FROM pg_index i WHERE i.indisvalid
                                   AND i.indexrelid = {schema}.ttl_index_oid(b.relid, b.index_relid, t.index_name))
                         THEN t.index_name
                    END,
                    CASE WHEN t.archive_to IS NOT NULL AND b.archive_relid IS NULL
                         THEN format('archive table %s does not exist', t.archive_to) END,
                    CASE WHEN t.on_expire IS NOT NULL AND b.hook IS NULL
                         THEN format('function %s(regclass, jsonb) does not exist', t.on_expire) END,
                    extract(epoch FROM greatest(t.retry_at, t.swept_at + t.run_every) - now())::double precision,
                    coalesce(t.index_retry_at <= now(), true), s.index_error,
                    coalesce(b.expression_attnums, ARRAY[b.attnum]) || b.soft_delete_attnum || b.filter_attnums,
                    coalesce(t.expression_columns, ARRAY[t.column_name]) || t.soft_delete_column || t.filter_columns, b.types,
                    b.filter_tree, b.expression_tree, b.called, b.functions,
                    coalesce(b.tree_version = {version}, false), {hold}, b.held_by IS NOT NULL,
                    t.blocked_retry_at > now() AND t.consecutive_failures = 0, s.blocked_up_to, s.blocked_under
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
            schema = self.schema
        )
    }

    fn loaded(&self, row: &spi::Row<'_>) -> pgrx::spi::SpiResult<Result<Rule, Broken>> {
        let (id, version) = (row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default());
        let (is_due, last_error) = (row.get(13)?.unwrap_or_default(), row.get::<String>(17)?);
        Ok(self.rule(id, row).map_err(|failure| {
            let is_known = last_error == Some(failure.to_string());
            let is_held = row.get::<String>(40).is_ok_and(|hold| hold.is_some());
            Broken { rule_id: id, version, failure, is_due, is_known, is_held }
        }))
    }

    /// Whether a worker is in this database, as the server sees it.
    pub fn has_worker(&self) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM {}.ttl_worker_status() WHERE database_name = current_database())",
            self.schema
        );
        Ok(spi::read(&sql, &[], |row| row.get(1))? == [Some(true)])
    }

    /// Makes the current transaction the one sweeper of a rule until it ends, if no other is and the rule is still the
    /// one that was loaded. Until then nobody can change the rule: a change that has committed is never followed by
    /// removals under the old definition. Waits for nobody.
    pub fn claim(&self, rule: &Rule) -> Result<Claim, TtlError> {
        if !access::try_advisory_lock(ADVISORY_LOCK_CLASS, rule.id) {
            return Ok(Claim::Busy);
        }
        // What was bound under another major version is bound anew, once.
        if !rule.meanings.is_comparable && self.is_free(rule.id)? {
            self.bind(rule.id, Binding::Upgraded)?;
            return Ok(Claim::Changed);
        }
        if self.has_changed(rule)? {
            return Ok(Claim::Changed);
        }
        let sql = format!(
            "SELECT FROM {}.ttl_index_table WHERE id = $1 AND active AND version = $2 FOR NO KEY UPDATE SKIP LOCKED",
            self.schema
        );
        let locked = self.with_rights(|| spi::execute(&sql, &[rule.id.into(), rule.version.into()]))?;
        if locked != 1 {
            return Ok(Claim::Busy);
        }
        self.check_meaning(rule)?;
        Ok(Claim::Held)
    }

    /// Whether the rule is not the one that was loaded any more.
    pub fn has_changed(&self, rule: &Rule) -> Result<bool, TtlError> {
        // That names still mean the columns they meant is checked for itself: DDL that nobody followed would not show.
        let sql = format!(
            "SELECT to_regclass(t.archive_to) IS NOT DISTINCT FROM b.archive_relid
                    AND {schema}.ttl_hook(t.on_expire) IS NOT DISTINCT FROM b.hook,
                    NULL, b.relid, coalesce(b.expression_attnums, ARRAY[b.attnum]) || b.soft_delete_attnum || b.filter_attnums,
                    coalesce(t.expression_columns, ARRAY[t.column_name]) || t.soft_delete_column || t.filter_columns, b.types
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             WHERE t.id = $1 AND t.active AND t.version = $2",
            schema = self.schema
        );
        let same = self.with_rights(|| {
            spi::read(&sql, &[rule.id.into(), rule.version.into()], |row| {
                Ok(row.get(1)? == Some(true) && columns_at(&row, 4).is_ok_and(|columns| columns.check().is_ok()))
            })
        })?;
        Ok(same != [true])
    }

    fn rule(&self, id: i64, row: &spi::Row<'_>) -> Result<Rule, Failure> {
        let text = |ordinal| Ok::<String, TtlError>(row.get(ordinal)?.unwrap_or_default());
        columns_at(row, 32)?.check().map_err(|error| {
            // What was said when the column went tells more.
            let known = row.get::<String>(17).ok().flatten();
            let known = known.as_deref().and_then(|known| known.strip_prefix("42703: "));
            let failure = Failure::from(error);
            match known {
                Some(message) if failure.code == PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN => {
                    Failure { hint: failure.hint, ..Failure::new(failure.code, message) }
                }
                _ => failure,
            }
        })?;
        let lacks = |ordinal, code| -> Result<_, TtlError> {
            Ok(row.get::<String>(ordinal)?.map(|missing| Failure::new(code, missing)))
        };
        let read = || -> Result<Rule, TtlError> {
            let options = rules::options(row, 24)?;
            let (name, attnum) = (text(7)?, row.get::<i16>(8)?);
            let column = if attnum.is_some() { quote_identifier(&name) } else { format!("({name})") };
            let type_oid = row.get::<Oid>(9)?.ok_or_else(|| TtlError::CannotExpireNow(name.clone()))?;
            let source = Source::of_type(access::base_type(type_oid).to_u32(), options.unit.as_deref())?
                .ok_or_else(|| TtlError::CannotExpireNow(name.clone()))?;
            let typmod = row.get::<i32>(22)?.unwrap_or(-1);
            let expiry = self.expiry(source, column.clone(), &options).with_precision(source.precision(typmod));
            let mark = match (row.get::<String>(10)?, row.get::<Oid>(11)?) {
                (Some(name), Some(type_oid)) => {
                    let mark = Mark::of_type(access::base_type(type_oid).to_u32());
                    Some((quote_identifier(&name), mark.ok_or(TtlError::CannotMarkNow(name))?))
                }
                _ => None,
            };
            Ok(Rule {
                id,
                version: row.get(2)?.unwrap_or_default(),
                relid: row.get(3)?.unwrap_or_default(),
                owner: row.get(4)?.unwrap_or_default(),
                table: quote_qualified_identifier(text(5)?, text(6)?),
                name,
                column,
                attnum,
                type_oid,
                type_name: text(21)?,
                typmod,
                is_partitioned: row.get(23)?.unwrap_or_default(),
                archive: row.get::<Oid>(25)?.filter(|_| options.archive().is_some()),
                pending_index: row.get(26)?,
                lacks: lacks(27, PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE)?
                    .or(lacks(28, PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION)?),
                not_null: row.get(19)?.unwrap_or_default(),
                is_writable: row.get(20)?.unwrap_or_default(),
                predicate: Predicate::new(expiry, options.filter.clone(), mark),
                options,
                has_children: row.get(12)?.unwrap_or_default(),
                is_due: row.get(13)?.unwrap_or_default(),
                rests_for: Duration::try_from_secs_f64(row.get(29)?.unwrap_or_default()).unwrap_or_default(),
                may_build: row.get(30)?.unwrap_or_default(),
                index_error: row.get(31)?,
                blocked_rows: row.get(14)?.unwrap_or_default(),
                blocked: row
                    .get(42)?
                    .map(|rests| Ok::<_, TtlError>(Blocked { rests, up_to: row.get(43)?, under: row.get(44)? }))
                    .transpose()?,
                locked_rows: row.get(15)?.unwrap_or_default(),
                skipped_parts: row.get(16)?,
                last_error: row.get(17)?,
                meanings: Meanings {
                    filter: row.get(35)?,
                    expression: row.get(36)?,
                    called: row.get(37)?.unwrap_or_default(),
                    functions: row.get(38)?,
                    is_comparable: row.get(39)?.unwrap_or_default(),
                },
                hold: row.get(40)?,
                was_restored: row.get(41)?.unwrap_or_default(),
            })
        };
        Ok(read()?)
    }
}

/// The columns of a rule; the relation is third in the row, and from `place` on there are their numbers, names and types.
fn columns_at(row: &spi::Row<'_>, place: usize) -> Result<Columns, TtlError> {
    Ok(Columns {
        relid: row.get(3)?.unwrap_or_default(),
        attnums: row.get::<Vec<Option<i16>>>(place)?.unwrap_or_default().into_iter().flatten().collect(),
        names: row.get::<Vec<Option<String>>>(place + 1)?.unwrap_or_default().into_iter().flatten().collect(),
        types: row.get(place + 2)?.unwrap_or_default(),
    })
}
