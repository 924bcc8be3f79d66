//! Puts rules onto tables: checks table, columns and filter, ensures the index, and writes the catalog.

mod restored;
mod update;

pub use restored::restore;

use crate::catalog::{Catalog, Definition, Rule, RuleIndex, StoredRule};
use crate::delivery;
use crate::error::{Purpose, TtlError};
use crate::index;
use crate::pg::expression::{self, Checked};
use crate::pg::names::{Regclass, Regprocedure};
use crate::pg::{access, harmless, identity, relation, shmem, spi};
use crate::row;
use crate::rule::{Given, Invalid, LONGEST_NAME, Mark, Options, PartitionAction, Predicate, Source, Window};
use crate::table::{Subject, Table};
use pgrx::pg_sys::Oid;
use pgrx::prelude::*;

/// The trigger functions of the extension.
const TOUCH: &str = "ttl_touch_row";
const FREE_KEY: &str = "ttl_free_key";

/// Registers a rule, or registers it again: statistics and a pause stay, options that are not given again do not.
pub fn create(relid: Oid, column: &str, rule_name: Option<&str>, given: Given) -> Result<(), TtlError> {
    let rule_name = rule_name.filter(|name| !name.is_empty());
    check_name(rule_name)?;
    let table = Table::lock(relid)?;
    table.check_storage()?;
    let subject = table.subject(column)?;
    let stored = find(&table, &subject, Some(rule_name.unwrap_or_default()))?;
    let given = check_given_filter(relid, given)?;
    let options = Options::create(&given, access::session_time_zone())?;
    let author = access::current_role();
    refuse_purge(stored.as_ref(), &subject)?;
    save(&table, &subject, rule_name, &options, stored.as_ref(), author, None)?;
    if let Some(stored) = stored {
        for change in options.changes_since(&stored.options) {
            notice!("TTL rule on column \"{}\" of table \"{}\": {change}", subject.name, table.name);
        }
    }
    Ok(())
}

/// Changes the given options, and resets those named in `reset` to their defaults.
pub fn alter(
    relid: Oid,
    column: &str,
    rule_name: Option<&str>,
    given: Given,
    reset: &[String],
) -> Result<(), TtlError> {
    let table = Table::lock(relid)?;
    let subject = table.subject(column)?;
    let stored = find(&table, &subject, rule_name)?
        .ok_or_else(|| TtlError::no_rule(&table.name, Some(&subject.name), rule_name))?;
    // A stored filter is the owner's text, whichever role alters the rule.
    let author = if given.filter.is_some() { access::current_role() } else { table.owner };
    let given = check_given_filter(relid, given)?;
    let options = stored.options.clone().alter(&given, reset)?;
    refuse_purge(Some(&stored), &subject)?;
    let was_in_doubt = Catalog::open()?.is_in_doubt(stored.id)?;
    save(&table, &subject, stored.rule_name.as_deref(), &options, Some(&stored), author, None)?;
    if was_in_doubt {
        let unit = options.unit.map_or_else(String::new, |unit| format!(", in unit {unit}"));
        let (column, zone) = (&subject.name, &options.time_zone);
        notice!("TTL rule on column \"{column}\": values are read as {}, in time zone {zone}{unit}", subject.data_type);
    }
    Ok(())
}

/// Removes the rule, and its index if the extension made it.
pub fn drop(relid: Oid, column: &str, rule_name: Option<&str>) -> Result<bool, TtlError> {
    let table = Table::lock(relid)?;
    let subject = table.subject(column)?;
    let Some(stored) = find(&table, &subject, rule_name)? else { return Ok(false) };
    refuse_purge(Some(&stored), &subject)?;
    remove(&table, &stored)?;
    Ok(true)
}

fn remove(table: &Table, rule: &StoredRule) -> Result<(), TtlError> {
    remove_purge(table, rule.id, None)?;
    Catalog::open()?.remove(rule.id)?;
    table.drop_triggers(TOUCH, Some(rule.id))?;
    table.drop_triggers(FREE_KEY, Some(rule.id))?;
    rule.index.as_ref().map_or(Ok(()), |index| give_up_index(table, index, rule))
}

/// Returns the rule that is meant, if there is one. Without a name, it must be the only one on its column.
fn find(table: &Table, subject: &Subject, rule_name: Option<&str>) -> Result<Option<StoredRule>, TtlError> {
    let mut found = Catalog::open()?.find(table.relid, subject.attnum, &subject.name, rule_name)?;
    if found.len() > 1 {
        let names = found.into_iter().map(|rule| rule.rule_name);
        return Err(TtlError::ambiguous_name(&table.name, &subject.name, names));
    }
    Ok(found.pop())
}

fn check_name(rule_name: Option<&str>) -> Result<(), TtlError> {
    match rule_name {
        Some(name) if name.len() >= LONGEST_NAME => Err(Invalid::RuleName.into()),
        _ => Ok(()),
    }
}

/// Drops an index that the extension made for a rule, unless another rule uses it.
fn give_up_index(table: &Table, index: &RuleIndex, rule: &StoredRule) -> Result<(), TtlError> {
    let is_handed_on = match index.oid.filter(|_| index.made_by_us) {
        Some(oid) => Catalog::open()?.hand_on_index(oid, rule.id)?,
        None => false,
    };
    if is_handed_on { Ok(()) } else { index::drop(table, index, rule.attnum) }
}

/// Refuses to change a purge rule directly: it is created, altered and dropped with the rule it purges for.
fn refuse_purge(stored: Option<&StoredRule>, subject: &Subject) -> Result<(), TtlError> {
    match stored {
        Some(StoredRule { purges: Some(_), .. }) => Err(TtlError::IsPurge { column: subject.name.clone() }),
        _ => Ok(()),
    }
}

/// Saves or removes the rule that purges the rows this rule soft-deletes, by the column that marks them. It has the same
/// name.
fn save_purge(table: &Table, id: i64, rule_name: Option<&str>, options: &Options, author: Oid) -> Result<(), TtlError> {
    let (Some(purge), Some(mark)) = (options.of_purge(), &options.soft_delete_column) else {
        return remove_purge(table, id, None);
    };
    let subject = table.subject(mark)?;
    let filter = options.filter.as_deref().map(|filter| check_filter(table, filter, author)).transpose()?;
    if filter.is_some_and(|filter| subject.attnum.is_some_and(|mark| filter.attnums.contains(&mark))) {
        return Err(TtlError::PurgeFilter(subject.name));
    }
    if Mark::of_type(subject.base_type) != Some(Mark::Instant) {
        return Err(TtlError::PurgeOfFlag(subject.name));
    }
    remove_purge(table, id, Some(mark))?;
    let stored = find(table, &subject, Some(rule_name.unwrap_or_default()))?;
    if stored.as_ref().is_some_and(|stored| stored.purges != Some(id)) {
        return Err(TtlError::PurgeTaken(subject.name));
    }
    save(table, &subject, rule_name, &purge, stored.as_ref(), author, Some(id))?;
    Catalog::open()?.pause_with(id)
}

/// Removes the purge rule of a rule, unless it is on the column `but`.
fn remove_purge(table: &Table, id: i64, but: Option<&str>) -> Result<(), TtlError> {
    let catalog = Catalog::open()?;
    let Some(column) = catalog.purge_of(id)?.filter(|column| Some(column.as_str()) != but) else { return Ok(()) };
    let found = catalog.find(table.relid, Some(table.column(&column)?.attnum), &column, None)?;
    found.iter().filter(|rule| rule.purges == Some(id)).try_for_each(|purge| remove(table, purge))
}

/// Returns the name of a table that was given as an option.
pub fn table_name(table: Regclass) -> Result<String, TtlError> {
    table.qualified_name().ok_or(TtlError::UnknownTable(table.0.to_u32()))
}

/// Returns the name of a function that was given as an option, if it can be called with rows.
pub fn function_name(function: Regprocedure) -> Result<String, TtlError> {
    let name = function.qualified_name().ok_or(TtlError::UnknownFunction(function.0.to_u32()))?;
    let fits = spi::query(
        "SELECT FROM pg_proc WHERE oid = $1 AND prokind = 'f' AND proargtypes = '2205 3802'::oidvector",
        &[function.0.into()],
        |_| Ok(()),
    )?;
    if fits.is_empty() { Err(TtlError::FunctionArguments(name)) } else { Ok(name) }
}

/// Pauses or resumes the rules of a table, or those on a column or of a name. Returns how many changed state.
pub fn set_active(relid: Oid, column: Option<&str>, rule_name: Option<&str>, active: bool) -> Result<i32, TtlError> {
    let table = Table::lock(relid)?;
    let subject = column.map(|column| table.subject(column)).transpose()?;
    let subject = subject.as_ref().map(|subject| (subject.attnum, subject.name.as_str()));
    Catalog::open()?.set_active(relid, subject, rule_name, active)
}

/// Makes every UPDATE of a row restart its clock, by a trigger. Returns `false` if the trigger already existed.
pub fn enable_touch(relid: Oid, column: Option<&str>, rule_name: Option<&str>) -> Result<bool, TtlError> {
    let table = Table::lock(relid)?;
    let catalog = Catalog::open()?;
    let rule = row::rule_of(&catalog, relid, column, rule_name)?;
    row::check_touch(&rule)?;
    if rule.has_children && !rule.is_partitioned {
        return Err(TtlError::TouchOfChildren(table.name));
    }
    table.create_trigger("ttl_touch", "UPDATE", TOUCH, rule.id)
}

/// Drops the touch trigger of one rule, or of all. Returns `false` if there was none.
pub fn disable_touch(relid: Oid, column: Option<&str>, rule_name: Option<&str>) -> Result<bool, TtlError> {
    let table = Table::lock(relid)?;
    let catalog = Catalog::open()?;
    let rule = column.or(rule_name).map(|_| row::rule_of(&catalog, relid, column, rule_name)).transpose()?;
    table.drop_triggers(TOUCH, rule.map(|rule| rule.id))
}

/// Returns the rules of a table that the caller may manage, or those on a column or of a name, with the table's schema
/// and name.
pub fn rules_to_preview(
    relid: Oid,
    column: Option<&str>,
    rule_name: Option<&str>,
) -> Result<Vec<(String, String, Rule)>, TtlError> {
    let table = Table::describe(relid)?;
    let catalog = Catalog::open()?;
    let rules = match column.or(rule_name) {
        Some(_) => row::rules_of(&catalog, relid, column, rule_name)?,
        None => catalog.rules_on(relid)?,
    };
    Ok(rules.into_iter().map(|rule| (table.schema.clone(), table.name.clone(), rule)).collect())
}

/// Returns the table, if the caller may manage it.
pub fn owned_table(relid: Oid) -> Result<Oid, TtlError> {
    Ok(Table::describe(relid)?.relid)
}

/// Checks a filter as its author wrote it, under the author's search path, and puts it into canonical form.
fn check_given_filter(relid: Oid, mut given: Given) -> Result<Given, TtlError> {
    if let Some(filter) = &mut given.filter {
        *filter = expression::check_given(relid, filter, Purpose::Filter)?.sql;
    }
    Ok(given)
}

/// A rule that has passed every check except for its index.
struct Accepted {
    predicate: Predicate,
    filter: Option<Checked>,
}

/// Checks a rule. `author` is the role that wrote the filter; `id` is the rule's ID, if it has one.
fn check(
    table: &Table,
    subject: &Subject,
    options: &Options,
    id: Option<i64>,
    author: Oid,
) -> Result<Accepted, TtlError> {
    let source = Source::of_type(subject.base_type, options.unit.as_deref())?
        .ok_or_else(|| TtlError::CannotExpire { column: subject.name.clone(), data_type: subject.data_type.clone() })?;
    source.check_range(access::unix_micros(), options.expire_after)?;
    check_time_zone(&options.time_zone)?;
    options.run_window.as_ref().and_then(Window::zone).map_or(Ok(()), check_time_zone)?;
    check_surroundings(table, options)?;
    let catalog = Catalog::open()?;
    delivery::check_end(&catalog, table.relid, options, id)?;
    let expiry = catalog.expiry(source, subject.sql.clone(), options);
    check_as_owner(table, &format!("{} IS NULL", expiry.compared()))?;
    let filter = options.filter.as_deref().map(|filter| check_filter(table, filter, author)).transpose()?;
    if options.hide_expired {
        check_hiding(table, subject, filter.as_ref(), &options.time_zone)?;
    }
    let update = update::check(table, subject, options, id)?;
    let predicate = Predicate::new(expiry, filter.as_ref().map(|filter| filter.sql.clone()), update);
    Ok(Accepted { predicate, filter })
}

/// Returns what the catalog stores of a rule, except for its index.
fn definition<'a>(
    table: &Table,
    subject: &Subject,
    rule_name: Option<&'a str>,
    options: &'a Options,
    filter: Option<Checked>,
    purges: Option<i64>,
) -> Result<Definition<'a>, TtlError> {
    Ok(Definition {
        options,
        rule_name,
        filter_columns: filter.map_or(Ok(Vec::new()), |filter| table.column_names(&filter.attnums))?,
        expression_columns: match subject.attnum {
            Some(_) => None,
            None => Some(table.column_names(&subject.uses)?),
        },
        expression_type: subject.attnum.is_none().then(|| subject.data_type.clone()),
        index_name: None,
        index_created_by_extension: false,
        purges,
    })
}

fn save(
    table: &Table,
    subject: &Subject,
    rule_name: Option<&str>,
    options: &Options,
    stored: Option<&StoredRule>,
    author: Oid,
    purges: Option<i64>,
) -> Result<(), TtlError> {
    let catalog = Catalog::open()?;
    let Accepted { predicate, filter } = check(table, subject, options, stored.map(|stored| stored.id), author)?;
    let is_immutable = filter.as_ref().is_some_and(|filter| filter.immutable);
    let current = stored.and_then(|stored| Some((stored, stored.index.as_ref()?)));
    let index = current.map(|(_, index)| index);
    let index = index::ensure(table, subject, options, &predicate, is_immutable, index, author)?;
    if let Some((stored, outdated)) = current.filter(|(_, current)| !is_same(current, index.as_ref())) {
        give_up_index(table, outdated, stored)?;
    }
    let definition = Definition {
        index_name: index.as_ref().map(|index| index.name.as_str()),
        index_created_by_extension: index.as_ref().is_some_and(|index| index.made_by_us),
        ..definition(table, subject, rule_name, options, filter, purges)?
    };
    // Before a new rule gets its ID: an orphaned trigger may already have that ID.
    for function in [FREE_KEY, TOUCH] {
        table.drop_orphaned_triggers(function)?;
    }
    let id = match stored {
        Some(stored) => {
            if !options.takes_as(&stored.options) {
                catalog.forget_shares(stored.id)?;
            }
            catalog.update(stored.id, &definition).map(|()| stored.id)
        }
        None => catalog.insert(&table.schema, &table.name, &subject.name, &definition),
    }?;
    if options.hide_expired {
        // Triggers fire in name order: this one must see the row as the others have left it.
        table.create_trigger("~ttl_free_key", "INSERT OR UPDATE", FREE_KEY, id)?;
    } else {
        table.drop_triggers(FREE_KEY, Some(id))?;
    }
    if index.is_some_and(|index| !index.is_valid) && !shmem::is_preloaded() && !catalog.has_worker()? {
        notice!("no worker is running to build the index; start one with ttl_start_worker()");
    }
    if purges.is_none() { save_purge(table, id, rule_name, options, author) } else { Ok(()) }
}

/// Checks what a rule needs besides its table: partitions, an archive, a function to call.
fn check_surroundings(table: &Table, options: &Options) -> Result<(), TtlError> {
    if options.partition_action != PartitionAction::default() && !table.is_partitioned {
        return Err(TtlError::NotPartitioned(table.name.clone()));
    }
    delivery::check(table, options)
}

/// Checks that a rule can hide rows: its condition runs in every session, as the querying role.
fn check_hiding(table: &Table, subject: &Subject, filter: Option<&Checked>, time_zone: &str) -> Result<(), TtlError> {
    if !access::is_in_every_session() {
        return Err(TtlError::NotLoaded);
    }
    if !subject.is_harmless || filter.is_some_and(|filter| !filter.is_harmless) {
        return Err(TtlError::HiddenByCode);
    }
    if !harmless::is_lasting_zone(time_zone) {
        return Err(TtlError::HiddenByZone(time_zone.to_owned()));
    }
    // Queries of the parent are planned for the parent, not for its partitions and children.
    if relation::has_parent(table.relid) {
        return Err(TtlError::HiddenPart(table.name.clone()));
    }
    Ok(())
}

fn is_same(current: &RuleIndex, chosen: Option<&RuleIndex>) -> bool {
    chosen.is_some_and(|chosen| chosen.oid.is_some() && chosen.oid == current.oid)
}

/// Checks a time zone. PostgreSQL's own error names a zone it does not know.
fn check_time_zone(time_zone: &str) -> Result<(), TtlError> {
    spi::execute("SELECT timezone($1, now())", &[time_zone.into()])?;
    Ok(())
}

/// Checks a canonical filter, and that the table's owner may call all its functions, as the sweep will.
fn check_filter(table: &Table, filter: &str, author: Oid) -> Result<Checked, TtlError> {
    let checked = identity::sandboxed_as(author, || expression::check_stored(table.relid, filter, Purpose::Filter))?;
    check_as_owner(table, &checked.sql)?;
    Ok(checked)
}

/// Checks that the table's owner may call all functions of a condition, as the sweep will.
fn check_as_owner(table: &Table, condition: &str) -> Result<(), TtlError> {
    let probe = format!("SELECT FROM ONLY {} WHERE {condition} LIMIT 0", table.qualified_name());
    identity::sandboxed_as(table.owner, || spi::execute(&probe, &[]))?;
    Ok(())
}
