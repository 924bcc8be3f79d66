//! Keeps rules in line with DDL: updates their names, and removes rules whose table or column was dropped.
//!
//! A command looks only at the rules it concerns, through an index on the objects each rule uses: DDL costs the same
//! however many rules there are.

use super::Catalog;
use super::binding::{FINGERPRINT, oids};
use crate::error::{Purpose, TtlError};
use crate::pg::event::Event;
use crate::pg::plan::Plan;
use crate::pg::transaction::{Failure, subtransaction};
use crate::pg::{access, identity, meaning, spi};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CString;
use std::time::{Duration, Instant};

/// The relations a command affected, `found`, with all their ancestors and descendants: a column is renamed in
/// children too, and a trigger on a partition guards its parent's rows.
const KIN: &str = "below (oid) AS (SELECT oid FROM found UNION SELECT i.inhrelid FROM below JOIN pg_inherits i ON i.inhparent = below.oid),
     above (oid) AS (SELECT oid FROM found UNION SELECT i.inhparent FROM above JOIN pg_inherits i ON i.inhrelid = above.oid)";

/// The objects a command has changed, and related tables: that of an index, trigger or rewrite rule, those that a
/// foreign key references, and those that depend on a type.
const TOUCHED: &str =
    "touched (oids) AS (SELECT ARRAY(SELECT objid FROM pg_event_trigger_ddl_commands() WHERE objid >= 16384)),
     found (oid) AS (
         SELECT unnest(oids) FROM touched
         UNION SELECT indrelid FROM pg_index WHERE indexrelid = ANY (ARRAY(SELECT unnest(oids) FROM touched))
         UNION SELECT confrelid FROM pg_constraint
         WHERE conrelid = ANY (ARRAY(SELECT unnest(oids) FROM touched)) AND contype = 'f'
         UNION SELECT tgrelid FROM pg_trigger WHERE oid = ANY (ARRAY(SELECT unnest(oids) FROM touched))
         UNION SELECT ev_class FROM pg_rewrite WHERE oid = ANY (ARRAY(SELECT unnest(oids) FROM touched))
         UNION SELECT objid FROM pg_depend
         WHERE refclassid = 'pg_type'::regclass AND classid = 'pg_class'::regclass
           AND refobjid = ANY (ARRAY(SELECT unnest(oids) FROM touched
                                     UNION ALL SELECT reltype FROM pg_class
                                     WHERE oid = ANY (ARRAY(SELECT unnest(oids) FROM touched)) AND reltype <> 0)))";

/// The dropped objects, and the tables of dropped triggers and rules. Foreign keys have triggers on both tables.
const DROPPED: &str = "dropped AS (SELECT objid, object_type, address_names FROM pg_event_trigger_dropped_objects()),
     found (oid) AS (
         SELECT objid FROM dropped
         UNION SELECT to_regclass(format('%I.%I', address_names[1], address_names[2]))::oid FROM dropped
         WHERE object_type IN ('trigger', 'rule'))";

/// Rules whose index was dropped; also rules on tables with children, if a trigger was dropped together with its table:
/// whose child that table was is no longer known.
const ORPHANED: &str =
    "UNION SELECT b.rule_id FROM $schema$.ttl_binding b WHERE b.index_relid = ANY (ARRAY(SELECT objid FROM dropped))
     UNION SELECT b.rule_id FROM $schema$.ttl_binding b JOIN pg_class c ON c.oid = b.relid
     WHERE c.relhassubclass AND b.guards_found > 0
       AND (SELECT EXISTS (SELECT FROM dropped WHERE object_type IN ('trigger', 'rule')
                             AND to_regclass(format('%I.%I', address_names[1], address_names[2])) IS NULL))";

/// How long a command waits in total for locked rules on other owners' tables.
const PATIENCE: Duration = Duration::from_millis(200);

/// Keeps only rules on tables whose owner's rights the role `$1` has.
const RULED: &str = "WHERE EXISTS (SELECT FROM $schema$.ttl_binding b JOIN pg_class c ON c.oid = b.relid
     WHERE b.rule_id = concerned.rule_id AND pg_has_role($1, c.relowner, 'USAGE'))";

thread_local! {
    /// The prepared queries for the rules that a command concerns, by their text.
    static CONCERNED: RefCell<HashMap<String, std::rc::Rc<Plan>>> = RefCell::new(HashMap::new());
}

/// The time left for a command to wait for other owners' locked rules. Skipped rules are checked when they are swept.
/// A command that has locked the table itself, to drop or rename it, has already waited for those sessions.
struct Patience(Duration);

impl Patience {
    fn on(&mut self, work: impl FnOnce() -> Result<(), TtlError>) -> Result<(), Failure> {
        let timeout = CString::new(format!("{}ms", self.0.as_millis().clamp(1, 50))).unwrap_or_default();
        let settings = [(c"lock_timeout", timeout.as_c_str())];
        let started = Instant::now();
        let done = subtransaction(|| identity::with_settings(&settings, work));
        self.0 = self.0.saturating_sub(started.elapsed());
        done
    }
}

/// The names of a rule as stored in the catalog, and what they are bound to.
struct Bound {
    relid: Option<Oid>,
    attnum: Option<i16>,
    expression_attnums: Option<Vec<i16>>,
    mark_attnum: Option<i16>,
    clear_attnums: Option<Vec<i16>>,
    filter_attnums: Vec<i16>,
    mark: Option<String>,
    clear_columns: Option<Vec<String>>,
    has_same_defaults: bool,
    filter_columns: Vec<String>,
    expression_columns: Option<Vec<String>>,
    types: Vec<Oid>,
    filter_tree: Option<String>,
    expression_tree: Option<String>,
    is_comparable: bool,
    column: String,
    filter: Option<String>,
    called: Vec<Oid>,
    functions: Option<String>,
    has_changed_hands: bool,
}

impl Catalog {
    /// Brings rules up to date after a command. A rule's error does not fail the command: it is stored with the rule.
    pub fn follow(&self, event: &Event<'_>) -> Result<(), TtlError> {
        let concerned = self.concerned(event);
        if concerned.is_empty() {
            return Ok(());
        }
        let recomputed = if event.is_drop() { Vec::new() } else { event.recomputed_columns() };
        let mut patience = Patience(PATIENCE);
        for id in concerned {
            let (is_ruled, is_own) = self.rights_on(id, access::current_role())?;
            if is_ruled && is_own {
                self.follow_rule(id, &recomputed)?;
            } else {
                match patience.on(|| self.follow_rule(id, &recomputed)) {
                    Err(failure) if failure.code != PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE => failure.raise(),
                    Err(_) => continue,
                    Ok(()) => {}
                }
            }
            if is_ruled {
                // A failure only leaves the rule's lag unknown. The probe reads the filter as the owner, whose
                // functions may have been compiled for another search path in the session of an unrelated role.
                let _ = subtransaction(|| self.know_probe(id));
            }
        }
        Ok(())
    }

    /// Follows `REASSIGN OWNED`: rules on tables that have a new owner stop until that owner confirms them. An error
    /// does not fail the command, because a sweep checks the owner anyway.
    pub fn follow_reassigned() {
        let mut patience = Patience(PATIENCE);
        let _ = subtransaction(|| {
            let Some(catalog) = Self::open_if_served()? else { return Ok(()) };
            let sql = format!(
                "SELECT b.rule_id FROM {}.ttl_binding b JOIN pg_class c ON c.oid = b.relid WHERE c.relowner <> b.owner ORDER BY 1",
                catalog.schema
            );
            let given_away: Vec<i64> =
                catalog.with_rights(|| spi::read(&sql, &[], |row| Ok(row.get(1)?.unwrap_or_default())))?;
            for id in given_away {
                let _ = patience.on(|| catalog.record_fault(id, &Failure::from(TtlError::NotConfirmed)));
            }
            Ok(())
        });
    }

    /// Brings one rule up to date after a command. Rows that have not changed are neither written nor locked.
    fn follow_rule(&self, id: i64, recomputed: &[String]) -> Result<(), TtlError> {
        let followed = subtransaction(|| self.follow_names(id))
            .and_then(|()| subtransaction(|| self.follow_columns(id, recomputed)));
        match followed {
            Err(failure) if failure.code == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE => failure.raise(),
            Err(failure) => self.record_fault(id, &failure),
            Ok(()) => Ok(()),
        }
    }

    /// Returns the rules that a command concerns. Any user may use another's function in many rules: a change of a
    /// function follows only rules on the caller's own tables, and sweeps check the meaning of the others.
    fn concerned(&self, event: &Event<'_>) -> Vec<i64> {
        let (found, others) = if event.is_drop() { (DROPPED, ORPHANED) } else { (TOUCHED, "") };
        let ruled = if event.is_about_functions() { RULED } else { "" };
        let sql = format!(
            "WITH RECURSIVE {found}, {KIN}
             SELECT array_agg(rule_id ORDER BY rule_id)
             FROM (SELECT b.rule_id FROM {schema}.ttl_binding b
                   WHERE b.uses && ARRAY(SELECT oid FROM below WHERE oid IS NOT NULL UNION SELECT oid FROM above WHERE oid IS NOT NULL)
                   {others}) AS concerned {ruled}",
            others = others.replace("$schema$", &self.schema),
            ruled = ruled.replace("$schema$", &self.schema),
            schema = self.schema
        );
        let role = access::current_role();
        let known = CONCERNED.with_borrow(|plans| plans.get(&sql).cloned());
        // The plan is kept, and a table that was small when it was planned may grow.
        let by_index = [(c"enable_seqscan", c"off"), (c"enable_hashjoin", c"off"), (c"enable_mergejoin", c"off")];
        self.with_rights(|| {
            identity::with_pinned_names(|| {
                identity::with_settings(&by_index, || {
                    let plan = known.unwrap_or_else(|| {
                        let plan = std::rc::Rc::new(Plan::new(&sql, &mut [pg_sys::OIDOID]));
                        CONCERNED.with_borrow_mut(|plans| {
                            // Renaming the extension's schema makes new texts.
                            if plans.len() > 8 {
                                plans.clear();
                            }
                            plans.insert(sql.clone(), plan.clone());
                        });
                        plan
                    });
                    plan.call::<Vec<i64>>(&[role.into()]).1.unwrap_or_default()
                })
            })
        })
    }

    /// Updates the names of the objects a rule is bound to, or removes the rule if its table or TTL column is gone.
    fn follow_names(&self, id: i64) -> Result<(), TtlError> {
        let Some(bound) = self.bound(id)? else { return Ok(()) };
        let subject = bound.expression_attnums.clone().unwrap_or_else(|| bound.attnum.into_iter().collect());
        let is_there = |relid| subject.iter().all(|attnum| access::column(relid, *attnum).is_some());
        if !bound.relid.is_some_and(is_there) {
            return self.remove(id);
        }
        // Forget dropped objects: their OIDs may be reused. A restored rule is bound to its index once that is created.
        let objects = format!(
            "UPDATE {schema}.ttl_binding b
             SET archive_relid = (SELECT oid FROM pg_class WHERE oid = b.archive_relid), on_expire_oid = (SELECT oid FROM pg_proc WHERE oid = b.on_expire_oid),
                 index_relid = coalesce(b.index_relid, {schema}.ttl_ready_index(b.relid, t.index_name, t.concurrently))
             FROM {schema}.ttl_index_table t
             WHERE t.id = b.rule_id AND t.id = $1
               AND (b.archive_relid IS NOT NULL AND NOT EXISTS (SELECT FROM pg_class WHERE oid = b.archive_relid)
                    OR b.on_expire_oid IS NOT NULL AND NOT EXISTS (SELECT FROM pg_proc WHERE oid = b.on_expire_oid)
                    OR b.index_relid IS NULL AND {schema}.ttl_ready_index(b.relid, t.index_name, t.concurrently) IS NOT NULL)",
            schema = self.schema
        );
        let names = format!(
            "UPDATE {schema}.ttl_index_table t
             SET schema_name = now.schema_name, table_name = now.table_name, column_name = now.column_name,
                 soft_delete_column = now.mark, index_name = now.index_name, archive_to = now.archive_to, on_expire = now.on_expire,
                 index_created_by_extension = t.index_created_by_extension AND now.index_name IS NOT NULL,
                 column_types = now.column_types
             FROM (SELECT n.nspname::text AS schema_name, c.relname::text AS table_name,
                          coalesce(a.attname::text, named.column_name) AS column_name,
                          coalesce(mark.attname::text, named.soft_delete_column) AS mark,
                          CASE WHEN b.index_relid IS NULL THEN named.index_name ELSE i.relname::text END AS index_name,
                          coalesce(archive.name, named.archive_to) AS archive_to, coalesce(hook.name, named.on_expire) AS on_expire,
                          CASE WHEN b.types = '{{}}' THEN named.column_types ELSE types.names END AS column_types
                   FROM {schema}.ttl_binding b
                   JOIN {schema}.ttl_index_table named ON named.id = b.rule_id
                   JOIN pg_class c ON c.oid = b.relid
                   JOIN pg_namespace n ON n.oid = c.relnamespace
                   LEFT JOIN pg_attribute a ON a.attrelid = b.relid AND a.attnum = b.attnum
                   LEFT JOIN pg_attribute mark
                          ON mark.attrelid = b.relid AND mark.attnum = b.soft_delete_attnum AND NOT mark.attisdropped
                   LEFT JOIN pg_class i ON i.oid = {schema}.ttl_index_oid(b.relid, b.index_relid, named.index_name)
                   LEFT JOIN LATERAL (SELECT array_agg(CASE WHEN y.oid IS NULL THEN named.column_types[place]
                                                            ELSE format_type(y.oid, NULL) END ORDER BY place) AS names
                                      FROM unnest(b.types) WITH ORDINALITY AS type (oid, place)
                                      LEFT JOIN pg_type y ON y.oid = type.oid) AS types ON true
                   LEFT JOIN LATERAL (SELECT format('%I.%I', s.nspname, k.relname) AS name
                                      FROM pg_class k JOIN pg_namespace s ON s.oid = k.relnamespace
                                      WHERE k.oid = b.archive_relid) AS archive ON true
                   LEFT JOIN LATERAL (SELECT format('%I.%I', s.nspname, p.proname) AS name
                                      FROM pg_proc p JOIN pg_namespace s ON s.oid = p.pronamespace
                                      WHERE p.oid = b.on_expire_oid) AS hook ON true
                   WHERE b.rule_id = $1) AS now
             WHERE t.id = $1
               AND (t.schema_name, t.table_name, t.column_name, t.soft_delete_column, t.index_name, t.archive_to, t.on_expire, t.column_types)
                   IS DISTINCT FROM (now.schema_name, now.table_name, now.column_name, now.mark, now.index_name, now.archive_to,
                                     now.on_expire, now.column_types)",
            schema = self.schema
        );
        self.with_rights(|| {
            spi::execute(&objects, &[id.into()])?;
            spi::execute(&names, &[id.into()])
        })?;
        self.know_uses(id)?;
        bound.relid.map_or(Ok(()), |relid| self.count_guards(id, relid))
    }

    /// Updates the names in filter and expression, and checks that the rule still means what it meant.
    fn follow_columns(&self, id: i64, recomputed: &[String]) -> Result<(), TtlError> {
        let Some(bound) = self.bound(id)? else { return Ok(()) };
        let Some(relid) = bound.relid else { return Ok(()) };
        let names_now = |attnums: &[i16], known: &[String], dropped: fn(String) -> TtlError| {
            let name_now = |(attnum, known): (&i16, &String)| {
                access::column(relid, *attnum).map(|(name, _)| name).ok_or_else(|| dropped(known.clone()))
            };
            attnums.iter().zip(known).map(name_now).collect::<Result<Vec<_>, TtlError>>()
        };
        names_now(bound.mark_attnum.as_slice(), bound.mark.as_slice(), TtlError::MarkDropped)?;
        let clear_columns = match (&bound.clear_attnums, &bound.clear_columns) {
            (Some(attnums), Some(known)) => Some(names_now(attnums, known, TtlError::ClearedDropped)?),
            _ => None,
        };
        let filter_columns = names_now(&bound.filter_attnums, &bound.filter_columns, TtlError::FilterColumnDropped)?;
        let expression_columns = match (&bound.expression_attnums, &bound.expression_columns) {
            (Some(attnums), Some(known)) => Some(names_now(attnums, known, TtlError::ColumnMissing)?),
            _ => None,
        };
        if bound.is_comparable && bound.functions != self.fingerprint(&bound.called)? {
            let has_filter = bound.filter_tree.is_some();
            return Err(TtlError::MeaningChanged(if has_filter { Purpose::Filter } else { Purpose::Value }));
        }
        let text_now = |tree: &Option<String>, purpose| match tree {
            Some(tree) if bound.is_comparable => {
                let text = subtransaction(|| Ok(meaning::text_of(relid, tree)));
                text.map(Some).map_err(|_| TtlError::MeaningChanged(purpose))
            }
            _ => Ok(None),
        };
        let filter = text_now(&bound.filter_tree, Purpose::Filter)?.or_else(|| bound.filter.clone());
        let column = text_now(&bound.expression_tree, Purpose::Value)?.unwrap_or_else(|| bound.column.clone());
        let sql = format!(
            "UPDATE {}.ttl_index_table SET filter = $2, column_name = $3, filter_columns = $4, expression_columns = $5,
                 clear_columns = $6
             WHERE id = $1
               AND (filter, column_name, filter_columns, expression_columns, clear_columns) IS DISTINCT FROM ($2, $3, $4, $5, $6)",
            self.schema
        );
        let args = [
            id.into(),
            filter.into(),
            column.into(),
            filter_columns.clone().into(),
            expression_columns.clone().into(),
            clear_columns.clone().into(),
        ];
        self.with_rights(|| spi::execute(&sql, &args))?;

        let attnums = bound.all_attnums();
        for (place, attnum) in attnums.iter().enumerate() {
            let Some((name, type_oid)) = access::column(relid, *attnum) else { continue };
            if bound.types.get(place) != Some(&type_oid) || recomputed.contains(&name) {
                return Err(TtlError::TypeChanged(name));
            }
        }
        if let (false, Some(columns)) = (bound.has_same_defaults, clear_columns) {
            return Err(TtlError::DefaultChanged(columns.join("\", \"")));
        }
        // Record a new owner at once, so that a dump says so even if no sweep has noticed.
        if bound.has_changed_hands { Err(TtlError::NotConfirmed) } else { Ok(()) }
    }

    /// Records why a rule no longer works; a running sweep notices. A rule whose column had another type once stays in
    /// doubt, even if the column gets its old type back.
    fn record_fault(&self, id: i64, failure: &Failure) -> Result<(), TtlError> {
        let fault = format!(
            "WITH rule AS (
                 UPDATE {schema}.ttl_index_table t SET last_error_code = $3, last_error_at = now(), version = version + 1
                 WHERE id = $1 AND (last_error_code IS DISTINCT FROM $3 OR NOT EXISTS (
                     SELECT FROM {schema}.ttl_state s WHERE s.rule_id = $1 AND s.last_error = $2)) RETURNING id)
             INSERT INTO {schema}.ttl_state (rule_id, last_error) SELECT id, $2 FROM rule
             ON CONFLICT (rule_id) DO UPDATE SET last_error = excluded.last_error",
            schema = self.schema
        );
        let doubt = format!("UPDATE {}.ttl_binding SET types = '{{}}' WHERE rule_id = $1", self.schema);
        let (message, code) = (failure.message.clone(), failure.sqlstate());
        self.with_rights(|| {
            spi::execute(&fault, &[id.into(), message.into(), code.into()])?;
            if failure.code == PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH {
                spi::execute(&doubt, &[id.into()])?;
            }
            Ok::<_, TtlError>(())
        })?;
        self.forget_rule(id)
    }

    /// Returns a fingerprint of what functions do, as far as their definitions tell.
    pub(super) fn fingerprint(&self, functions: &[Oid]) -> Result<Option<String>, TtlError> {
        let found = self.with_rights(|| spi::read(FINGERPRINT, &[functions.to_vec().into()], |row| row.get(1)))?;
        Ok(found.into_iter().flatten().next())
    }

    fn bound(&self, id: i64) -> Result<Option<Bound>, TtlError> {
        let sql = format!(
            "SELECT c.oid, b.attnum, b.expression_attnums, b.soft_delete_attnum, b.filter_attnums, t.soft_delete_column,
                    t.filter_columns, t.expression_columns, b.types, b.filter_tree, b.expression_tree,
                    coalesce(b.tree_version = $2, false), t.column_name, t.filter, b.called, b.functions,
                    c.relowner IS DISTINCT FROM b.owner, b.clear_attnums, t.clear_columns,
                    b.clear_attnums IS NULL OR b.tree_version <> $2
                        OR coalesce({schema}.ttl_default_marks(b.relid, b.clear_attnums) = b.clear_defaults, false)
             FROM {schema}.ttl_index_table t JOIN {schema}.ttl_binding b ON b.rule_id = t.id
             LEFT JOIN pg_class c ON c.oid = b.relid WHERE t.id = $1",
            schema = self.schema
        );
        let found = self.with_rights(|| {
            spi::query(&sql, &[id.into(), meaning::version().into()], |row| {
                Ok(Bound {
                    relid: row.get(1)?,
                    attnum: row.get(2)?,
                    expression_attnums: row.get(3)?,
                    mark_attnum: row.get(4)?,
                    filter_attnums: row.get(5)?.unwrap_or_default(),
                    mark: row.get(6)?,
                    filter_columns: row.get(7)?.unwrap_or_default(),
                    expression_columns: row.get(8)?,
                    types: oids(&row, 9)?,
                    filter_tree: row.get(10)?,
                    expression_tree: row.get(11)?,
                    is_comparable: row.get(12)?.unwrap_or_default(),
                    column: row.get(13)?.unwrap_or_default(),
                    filter: row.get(14)?,
                    called: row.get(15)?.unwrap_or_default(),
                    functions: row.get(16)?,
                    has_changed_hands: row.get(17)?.unwrap_or_default(),
                    clear_attnums: row.get(18)?,
                    clear_columns: row.get(19)?,
                    has_same_defaults: row.get(20)?.unwrap_or_default(),
                })
            })
        })?;
        Ok(found.into_iter().next())
    }
}

impl Bound {
    /// Returns the numbers of all columns the rule uses, in the order of `types`.
    fn all_attnums(&self) -> Vec<i16> {
        let subject = self.expression_attnums.clone().unwrap_or_else(|| self.attnum.into_iter().collect());
        let updated = self.mark_attnum.into_iter().chain(self.clear_attnums.iter().flatten().copied());
        subject.into_iter().chain(updated).chain(self.filter_attnums.iter().copied()).collect()
    }
}
