//! Hiding expired rows from queries from the instant they expire: which tables are affected, and who may see the rows.

mod unique_conflict;

pub use unique_conflict::made_room;

use crate::catalog::Catalog;
use crate::error::TtlError;
use crate::guc;
use crate::pg::condition::Condition;
use crate::pg::existing::{self, Existing};
use crate::pg::memo::Memo;
use crate::pg::plan::Tid;
use crate::pg::planner::{self, Decision, Occasion};
use crate::pg::transaction::reading;
use crate::pg::utility::Dropped;
use crate::pg::{access, citus, executor, identity, spi, utility};
use pgrx::pg_sys::Oid;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The instant by which a query decides: that of the client's statement, the same for all scans of all queries in it.
const PRESENT: &str = "pg_catalog.statement_timestamp()";

/// The hidden rows of this database.
#[derive(Default)]
struct Hidden {
    tables: HashMap<Oid, Table>,
    /// The extension's schema, which the conditions name.
    schema: String,
    /// The function that refuses to pass over a hidden row.
    refusal: Oid,
}

/// A table, partition or child with hidden rows.
struct Table {
    owner: Oid,
    /// The condition for its visible rows, as SQL.
    visible: String,
    /// The same condition, parsed on first use.
    condition: OnceCell<Rc<Condition>>,
}

thread_local! {
    static HIDDEN: Memo<(), Hidden> = Memo::new();
}

/// Makes queries of this process skip hidden rows.
pub fn install() {
    planner::install(decide, is_concerned, is_exempt);
    utility::install(is_restricted, lock_triggered_tables, Catalog::follow_reassigned);
    executor::install(recheck, unique_conflict::recheck_pending, passes_over_rows);
}

/// Whether this database has any hidden rows.
fn is_concerned() -> bool {
    !hidden().tables.is_empty()
}

/// Whether a query sees hidden rows. Foreign keys and the engine need physical rows; a walsender feeds a replica.
fn is_exempt(occasion: &Occasion<'_>) -> bool {
    occasion.is_of_engine || occasion.is_of_walsender() || occasion.is_foreign_key_check()
}

fn decide(relid: Oid) -> Option<Decision> {
    let hidden = hidden();
    let (table, refusal) = (hidden.tables.get(&relid)?, hidden.refusal);
    let wants_to_look = guc::shows_expired();
    if wants_to_look {
        // PostgreSQL's plan cache would not know to whom the rows are shown.
        executor::use_plan_once();
        if looks(table) {
            return Some(Decision { depends_on_role: true, condition: None, refusal });
        }
    }
    Some(Decision { depends_on_role: wants_to_look, condition: condition(relid), refusal })
}

/// Whether a table's hidden rows are shown now: to the session's role, in its own statements.
fn looks(table: &Table) -> bool {
    guc::shows_expired() && may_look(table) && access::is_sessions_own_role()
}

/// Whether queries of these relations skip hidden rows.
fn passes_over_rows(relids: &[Oid]) -> bool {
    let hidden = hidden();
    relids.iter().filter_map(|relid| hidden.tables.get(relid)).any(|table| !looks(table))
}

/// Whether a row of a relation is visible under all its rules.
fn is_visible(relid: Oid, existing: &Existing) -> bool {
    let hidden = hidden();
    let Some((table, condition)) = hidden.tables.get(&relid).zip(condition(relid)) else { return true };
    identity::sandboxed_as(table.owner, || existing.meets(&condition))
}

/// Rechecks live rows that made a statement do nothing: if one had expired by then, a write would be lost.
fn recheck(conflicts: &[(Oid, Tid)]) {
    let hidden = hidden();
    for (relid, tid) in conflicts {
        let Some((table, condition)) = hidden.tables.get(relid).zip(condition(*relid)) else { continue };
        let is_visible = |existing: &Existing| existing.meets(&condition);
        // A row that was deleted while it was live was in the way until then.
        if identity::sandboxed_as(table.owner, || existing::newest(*relid, *tid, is_visible)) != Some(true) {
            TtlError::ExpiredMeanwhile.raise();
        }
    }
}

/// Fails a statement that would do nothing because of a hidden row in its way. Where room is made for keys, that row
/// has become hidden only now.
pub fn refuse(relid: Oid) -> Result<bool, TtlError> {
    let triggers = spi::read(
        "SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE t.tgrelid = $1 AND p.proname = 'ttl_free_key'",
        &[relid.into()],
        |_| Ok(()),
    )?;
    Err(if triggers.is_empty() { TtlError::HiddenConflict } else { TtlError::ExpiredMeanwhile })
}

/// Returns the condition for the visible rows of a table that has hidden ones. A rule whose columns are gone was not
/// loaded: it hides nothing, as it removes nothing, and its sweep reports why.
fn condition(relid: Oid) -> Option<Rc<Condition>> {
    let schema_now = || Ok::<_, TtlError>(Catalog::open_if_served()?.map(|catalog| catalog.schema).unwrap_or_default());
    loop {
        let hidden = hidden();
        let table = hidden.tables.get(&relid)?;
        if let Some(condition) = table.condition.get() {
            return Some(Rc::clone(condition));
        }
        let read = || identity::sandboxed_as(table.owner, || Condition::read(relid, &table.visible));
        let is_named_so = || schema_now().is_ok_and(|schema| schema == hidden.schema);
        // The extension's schema may have been renamed since the rules were read, or may be renamed right now.
        if is_named_so() {
            match reading(read) {
                Ok(condition) => return Some(Rc::clone(table.condition.get_or_init(|| Rc::new(condition)))),
                Err(failure) if is_named_so() => failure.raise(),
                Err(_) => {}
            }
        }
        HIDDEN.with(|memo| memo.remove(&()));
    }
}

/// Locks the tables that have our triggers before a command that drops the extension locks the catalog. A query locks
/// its table before the catalog, so the opposite order would deadlock.
fn lock_triggered_tables(dropped: &Dropped) {
    let (schemas, roles) = match dropped {
        Dropped::Extension => (None, None),
        Dropped::Schemas(names) => (Some(names.clone()), None),
        Dropped::Owned(roles) => (None, Some(roles.clone())),
    };
    let found = spi::read(
        "SELECT DISTINCT t.tgrelid FROM pg_extension e
         JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.deptype = 'e' AND d.refobjid = e.oid
         JOIN pg_trigger t ON t.tgfoid = d.objid
         JOIN pg_namespace n ON n.oid = e.extnamespace
         WHERE e.extname = 'pg_ttl_index' AND pg_has_role(e.extowner, 'USAGE')
           AND ($1 IS NULL OR n.nspname = ANY ($1)) AND ($2 IS NULL OR e.extowner = ANY ($2)) AND NOT EXISTS (
             SELECT FROM pg_depend own WHERE own.classid = 'pg_class'::regclass AND own.objid = t.tgrelid AND own.deptype = 'e')
         ORDER BY t.tgrelid",
        &[schemas.into(), roles.into()],
        |row| Ok(row.get(1)?.unwrap_or_default()),
    );
    access::lock_exclusively(&found.unwrap_or_default());
}

/// Whether a COPY by the current role must leave out hidden rows. A backup by a role that may see them does not.
fn is_restricted(relid: Oid) -> bool {
    hidden().tables.get(&relid).is_some_and(|table| !may_look(table))
}

/// Whether the current role may see hidden rows: the owner and superusers may.
fn may_look(table: &Table) -> bool {
    access::is_member_of(table.owner)
}

/// Returns the hidden rows. Raises an error if they cannot be determined: no session may see them by accident.
fn hidden() -> Rc<Hidden> {
    HIDDEN.with(|memo| match memo.get(&()) {
        Some(hidden) => hidden,
        None => {
            let loaded = memo.remember(&(), || Catalog::read_for_query(|| spi::with_latest_snapshot(load)));
            loaded.unwrap_or_else(|failure| failure.raise())
        }
    })
}

fn load() -> Result<(Vec<Oid>, Hidden), TtlError> {
    let Some(catalog) = Catalog::open_if_served()? else { return Ok((Catalog::watched()?, Hidden::default())) };
    let mut tables: HashMap<Oid, Table> = HashMap::new();
    let mut about = vec![catalog.relid];
    for (rule, relids) in catalog.hidden_rules()? {
        about.extend(&relids);
        // The rows of a Citus distributed table are not stored here, so no condition can apply to them.
        for relid in relids.into_iter().filter(|relid| !citus::is_distributed(*relid)) {
            let visible = rule.predicate.visible(PRESENT, rule.not_null);
            tables
                .entry(relid)
                .and_modify(|table| table.visible = format!("({}) AND ({visible})", table.visible))
                .or_insert_with(|| Table { owner: rule.owner, visible, condition: OnceCell::new() });
        }
    }
    let refusal = catalog.function_oid("ttl_refuse(oid)")?;
    Ok((about, Hidden { tables, schema: catalog.schema, refusal }))
}
