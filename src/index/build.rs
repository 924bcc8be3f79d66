//! Building a rule's index without blocking writers: in the transactions of `CREATE INDEX CONCURRENTLY`, and in a
//! worker of its own, because it waits for other transactions.

use super::{PREFIX, command, free_name};
use crate::catalog::{Catalog, Rule};
use crate::error::{Purpose, TtlError};
use crate::pg::expression;
use crate::pg::index::{self, Wanted};
use crate::pg::names::Regclass;
use crate::pg::relation::{self, Lock};
use crate::pg::shmem::{self, Progress};
use crate::pg::transaction::{Failure, Scope};
use crate::pg::{access, spi, statement, storage};
use crate::sandbox::in_sandbox;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::pg_sys::Oid;
use std::time::Duration;

const SCOPE: Scope = Scope::Transaction;

/// Builds the rule's index, unless an equivalent one exists, and binds it. Returns whether one was bound. For a
/// partitioned table, every partition's index is built first, so that the parent's takes no time. Ends early if the
/// rule changes.
pub fn run(catalog: &Catalog, rule: &Rule) -> Result<bool, Failure> {
    let Some(wished) = &rule.state.pending_index else { return Ok(false) };
    rule.check_owner()?;
    // A restarted worker may not know that another builder is at work.
    let progress = Progress {
        rule_id: rule.id,
        relid: rule.relid.to_u32(),
        started_at: clock_timestamp().into(),
        is_building: true,
        ..Progress::default()
    };
    if !shmem::claim_building(progress) {
        return Ok(false);
    }
    // Another extension may have taken over the table since the rule was registered.
    SCOPE.attempt(|| storage::check(rule.relid).and_then(|()| storage::check_concurrent_index(rule.relid)))?;
    let predicate = SCOPE.attempt(|| in_sandbox(rule, || predicate(rule)))?;
    let build = Build { catalog, rule, predicate };
    let relids = SCOPE.attempt(|| if rule.is_partitioned { partitions(rule) } else { Ok(vec![rule.relid]) })?;
    let mut made = None;
    for relid in relids {
        if SCOPE.attempt(|| catalog.has_changed(rule))? {
            return Ok(false);
        }
        made = build.make(relid, (!rule.is_partitioned).then_some(wished))?;
    }
    if rule.is_partitioned {
        made = SCOPE.attempt(|| {
            access::lock_against_ddl(rule.relid);
            if !build.is_wanted()? {
                return Ok(None);
            }
            let (_, name) = build.name(rule.relid, Some(wished))?;
            in_sandbox(rule, || spi::execute(&build.command("", &name, &rule.table), &[]))?;
            Ok(Some((name, true)))
        })?;
    }
    if let Some((name, is_ours)) = &made {
        SCOPE.attempt(|| catalog.bind_index(rule, name, *is_ours))?;
    }
    Ok(made.is_some())
}

struct Build<'a> {
    catalog: &'a Catalog,
    rule: &'a Rule,
    /// The predicate of the index.
    predicate: Option<String>,
}

impl Build<'_> {
    /// Builds the index of one relation. Returns its name, and whether it is ours. An equivalent index is used if there
    /// is one; what a failed attempt left behind is dropped.
    fn make(&self, relid: Oid, wished: Option<&String>) -> Result<Option<(String, bool)>, Failure> {
        let rule = self.rule;
        let existing = SCOPE.attempt(|| {
            in_sandbox(rule, || {
                relation::lock(relid, Lock::Read);
                let method = rule.options.index_method.to_string();
                index::equivalents(&Wanted {
                    relid,
                    key: &rule.predicate.expiry.compared(),
                    method: &method,
                    condition: self.predicate.as_deref(),
                    at_once: false,
                    guarantee: None,
                })
            })
        })?;
        if let Some(index) = existing.iter().find(|index| index.is_valid) {
            let name = SCOPE.attempt(|| Ok(access::relation_name(index.oid)))?;
            return Ok(name.map(|name| (name.clone(), wished == Some(&name))));
        }
        let of_the_name = SCOPE.attempt(|| self.invalid_of_name(relid, wished))?;
        for leftover in existing.into_iter().map(|index| index.oid).chain(of_the_name) {
            self.drop(leftover)?;
        }
        let (name, table) = SCOPE.attempt(|| {
            let (schema, name) = self.name(relid, wished)?;
            if !access::may_create_in(&schema, rule.owner) {
                return Err(TtlError::SchemaPermission(schema));
            }
            Ok((name, Regclass(relid).qualified_name().unwrap_or_default()))
        })?;
        let command = self.command("CONCURRENTLY ", &name, &table);
        let is_made = statement::create_index_alone(&command, relid, rule.owner, || self.is_wanted())?;
        Ok(is_made.then_some((name, true)))
    }

    /// Whether the rule is still the one that the index is for. Must be called with the table locked. A session that
    /// drops or changes the rule stops the builders it sees, and then waits for that lock: so either it sees us, or we
    /// see its change here. Otherwise an index could be left that no rule knows.
    fn is_wanted(&self) -> Result<bool, TtlError> {
        Ok(!spi::with_latest_snapshot(|| self.catalog.has_changed(self.rule))?)
    }

    /// Returns the invalid index with the rule's index name, built for an earlier definition of the rule.
    fn invalid_of_name(&self, relid: Oid, wished: Option<&String>) -> Result<Option<Oid>, TtlError> {
        let found = spi::read(
            "SELECT i.indexrelid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
             WHERE i.indrelid = $1 AND c.relname = $2 AND NOT i.indisvalid",
            &[relid.into(), wished.map(String::as_str).into()],
            |row| row.get(1),
        )?;
        Ok(found.into_iter().flatten().next())
    }

    /// Drops what an attempt left behind, if it was ours: users may be building an index at this moment, too.
    fn drop(&self, index: Oid) -> Result<(), Failure> {
        let name = SCOPE.attempt(|| {
            let is_ours = access::relation_name(index).is_some_and(|name| name.starts_with(PREFIX));
            Ok(Regclass(index).qualified_name().filter(|_| is_ours))
        })?;
        let Some(name) = name else { return Ok(()) };
        statement::run_alone(&format!("DROP INDEX CONCURRENTLY {name}"), self.rule.owner, Duration::ZERO)
    }

    /// Returns the schema of a relation, and a name for its index: `wished`, if that is free.
    fn name(&self, relid: Oid, wished: Option<&String>) -> Result<(String, String), TtlError> {
        let column = self.rule.attnum.map(|_| self.rule.name.as_str());
        let (schema, table) = Regclass(relid).split_name().ok_or(TtlError::UnknownTable(relid.to_u32()))?;
        let namespace = access::namespace_of(relid);
        let name = wished.filter(|name| access::is_free_name(namespace, name)).cloned();
        let name = name.map_or_else(|| free_name(namespace, &table, column), Ok)?;
        Ok((schema, name))
    }

    fn command(&self, how: &str, name: &str, table: &str) -> String {
        let Rule { options, predicate, .. } = self.rule;
        command(how, name, table, options.index_method, predicate, self.predicate.as_deref())
    }
}

/// Returns every partition of the rule's table that stores rows and has the same owner.
fn partitions(rule: &Rule) -> Result<Vec<Oid>, TtlError> {
    spi::read(
        "SELECT c.oid FROM pg_partition_tree($1) AS tree JOIN pg_class c ON c.oid = tree.relid
         WHERE c.relkind = 'r' AND c.relowner = $2",
        &[rule.relid.into(), rule.owner.into()],
        |row| Ok(row.get(1)?.unwrap_or_default()),
    )
}

/// Returns the index predicate, as at registration: the filter, if it is immutable, and what is still to be updated.
fn predicate(rule: &Rule) -> Result<Option<String>, TtlError> {
    let filter = rule.options.filter.as_deref();
    let filter = filter.map(|filter| expression::check_stored(rule.relid, filter, Purpose::Filter)).transpose()?;
    let is_immutable = filter.is_some_and(|checked| checked.immutable);
    Ok(rule.predicate.indexable(is_immutable))
}
