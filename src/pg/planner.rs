//! Adds conditions to the tables of a query before it is planned, as row-level security does.

use super::citus;
use super::compat;
use super::condition::Condition;
use super::expression::elements;
use super::guard::{add, check_first, check_first_in_rechecks, keep_from_sorting};
use super::identity;
use super::leakproof::query_may_tell;
use super::reference;

use pgrx::pg_sys::{self, Oid};
use pgrx::prelude::*;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::rc::Rc;

/// How to treat a relation of a query.
pub struct Decision {
    /// Whether the decision may differ for another role.
    pub depends_on_role: bool,
    /// The condition that visible rows meet.
    pub condition: Option<Rc<Condition>>,
    /// The function, called with the relation, that raises an error where a statement would silently skip a hidden row.
    pub refusal: Oid,
}

/// Decides about a relation; returns `None` in the usual case that there is nothing to do.
pub type Decide = fn(Oid) -> Option<Decision>;

/// Whether any relation of this database needs a decision.
pub type IsConcerned = fn() -> bool;

/// Whether a query sees every row.
pub type IsExempt = fn(&Occasion<'_>) -> bool;

struct Hooks {
    decide: Decide,
    is_concerned: IsConcerned,
    is_exempt: IsExempt,
    planner: pg_sys::planner_hook_type,
    needs_fmgr: pg_sys::needs_fmgr_hook_type,
    set_rel_pathlist: pg_sys::set_rel_pathlist_hook_type,
    relation_info: compat::RelationInfoHook,
}

impl Hooks {
    /// Returns the condition that visible rows of a relation meet, if it hides others.
    fn condition(&self, relid: Oid) -> Option<Rc<Condition>> {
        if !ask(self.is_concerned).unwrap_or(false) {
            return None;
        }
        asking(|| (self.decide)(relid)).and_then(|decision| decision.condition)
    }
}

static HOOKS: once_cell::sync::OnceCell<Hooks> = once_cell::sync::OnceCell::new();

thread_local! {
    /// Set while a function of ours is called: any query planned in the meantime is our own.
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Installs planner hooks that ask `decide` about every table in the queries of this process.
pub fn install(decide: Decide, is_concerned: IsConcerned, is_exempt: IsExempt) {
    // SAFETY: nothing is planned while the library is being loaded; hooks installed earlier are called in turn.
    unsafe {
        let hooks = Hooks {
            decide,
            is_concerned,
            is_exempt,
            planner: pg_sys::planner_hook,
            needs_fmgr: pg_sys::needs_fmgr_hook,
            set_rel_pathlist: pg_sys::set_rel_pathlist_hook,
            relation_info: compat::on_relation_info,
        };
        if HOOKS.set(hooks).is_ok() {
            pg_sys::planner_hook = Some(planner);
            pg_sys::needs_fmgr_hook = Some(must_not_be_inlined);
            pg_sys::set_rel_pathlist_hook = Some(set_rel_pathlist);
            compat::on_relation_info = Some(relation_info);
        }
    }
}

/// Defines a boolean setting that affects which rows queries see.
pub fn define_setting(
    name: &'static CStr,
    about: &'static CStr,
    more: &'static CStr,
    setting: &'static GucSetting<bool>,
) {
    let (context, flags) = (GucContext::Userset, GucFlags::default());
    // SAFETY: the hook has the type that PostgreSQL expects.
    unsafe {
        GucRegistry::define_bool_guc_with_hooks(
            name,
            about,
            more,
            setting,
            context,
            flags,
            None,
            Some(forget_plans),
            None,
        );
    }
}

/// Discards cached plans: those made under the other value hide too much or too little.
#[pg_guard]
unsafe extern "C-unwind" fn forget_plans(_value: bool, _extra: *mut c_void) {
    // SAFETY: marks the cached plans of this process.
    unsafe { pg_sys::ResetPlanCache() };
}

compat::planner_hook!(
    HOOKS.get().and_then(|hooks| hooks.planner),
    prepare,
    |depends_on_role: bool, plan: *mut pg_sys::PlannedStmt| {
        if depends_on_role {
            (*plan).dependsOnRole = true;
        }
        finish(plan);
    }
);

/// Sees to the rechecks of a finished plan.
#[pg_guard]
unsafe extern "C-unwind" fn finish(plan: *mut pg_sys::PlannedStmt) {
    let Some(hooks) = HOOKS.get() else { return };
    // SAFETY: the plan is whole, and not in use yet.
    unsafe {
        if (*plan).relationOids.is_null() || !ask(hooks.is_concerned).unwrap_or(false) {
            return;
        }
        let decide = hooks.decide;
        let condition_of = |relid| asking(|| decide(relid)).and_then(|decision| decision.condition);
        let trees = elements((*plan).subplans).iter().map(|cell| cell.ptr_value.cast());
        for tree in trees.chain([(*plan).planTree]) {
            check_first_in_rechecks(tree, elements((*plan).rtable), &condition_of);
        }
    }
}

/// Adds conditions to a query and returns whether they may differ for another role.
#[pg_guard]
unsafe extern "C-unwind" fn prepare(query: *mut pg_sys::Query, text: *const c_char) -> bool {
    let Some(hooks) = HOOKS.get() else { return false };
    let mut walk =
        Walk { decide: hooks.decide, depends_on_role: false, may_tell: None, top: query, is_left_to_citus: false };
    // SAFETY: the hook's arguments are valid.
    unsafe {
        if IS_ASKING.get() {
            reference::learn();
        } else if asking(hooks.is_concerned) && !(hooks.is_exempt)(&Occasion::new(query, text)) {
            walk.is_left_to_citus = asking(|| citus::is_concerned(query));
            walk.query(query);
        }
    }
    walk.depends_on_role
}

/// Calls one of our own functions, which may run queries, unless the query at hand is one of those.
pub(super) fn ask<T>(function: impl FnOnce() -> T) -> Option<T> {
    (!IS_ASKING.get()).then(|| asking(function))
}

/// Calls one of our own functions, which may run queries.
fn asking<T>(ask: impl FnOnce() -> T) -> T {
    struct Asking;
    impl Drop for Asking {
        fn drop(&mut self) {
            IS_ASKING.set(false);
        }
    }
    IS_ASKING.set(true);
    let _asking = Asking;
    ask()
}

/// The prefix of the engine's statements.
pub const ENGINE_TAG: &str = "/* pg_ttl_index */ ";

thread_local! {
    /// Set while a statement of the engine is about to be planned; the first statement planned clears it.
    static IS_ENGINE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, which plans `sql`. A statement of the engine sees every row; code that it runs later does not.
pub fn planning<T>(sql: &str, work: impl FnOnce() -> T) -> T {
    struct Planning;
    impl Drop for Planning {
        fn drop(&mut self) {
            IS_ENGINE.set(false);
        }
    }
    IS_ENGINE.set(sql.starts_with(ENGINE_TAG));
    let _planning = Planning;
    work()
}

/// A query that is about to be planned.
pub struct Occasion<'a> {
    query: *mut pg_sys::Query,
    text: &'a CStr,
    /// Whether the engine has announced this query as its own.
    pub is_of_engine: bool,
}

impl Occasion<'_> {
    /// # Safety
    /// `query` is valid, and `text` is null or a C string.
    unsafe fn new(query: *mut pg_sys::Query, text: *const c_char) -> Self {
        // SAFETY: as promised by the caller.
        let text = if text.is_null() { c"" } else { unsafe { CStr::from_ptr(text) } };
        Self { query, text, is_of_engine: IS_ENGINE.take() && text.to_bytes().starts_with(ENGINE_TAG.as_bytes()) }
    }

    fn begins_with(&self, beginning: &str) -> bool {
        self.text.to_bytes().starts_with(beginning.as_bytes())
    }

    /// Whether the rows are read for a replica.
    pub fn is_of_walsender(&self) -> bool {
        // SAFETY: set when the process starts.
        unsafe { pg_sys::am_walsender }
    }

    /// Whether PostgreSQL itself uses this query to check a foreign key.
    pub fn is_foreign_key_check(&self) -> bool {
        // SAFETY: the query is valid while it is planned.
        unsafe {
            reference::is_foreign_key(self.query)
                || (self.begins_with("SELECT fk.")
                    && super::utility::is_altering_a_table()
                    && asking(|| reference::is_initial_check(self.query)))
        }
    }
}

struct Walk {
    decide: Decide,
    depends_on_role: bool,
    /// The whole query, and whether anything in it may leak rows, once that is known.
    top: *mut pg_sys::Query,
    may_tell: Option<bool>,
    /// Whether the query also uses a Citus table. Citus plans the parts that read other tables as separate queries,
    /// which come through this hook again; the ON CONFLICT clause of an INSERT does not.
    is_left_to_citus: bool,
}

impl Walk {
    /// # Safety
    /// `query` is a valid query.
    unsafe fn query(&mut self, query: *mut pg_sys::Query) {
        // SAFETY: the casts follow the kind of the entry, or the node's tag.
        unsafe {
            let target = if (*query).commandType == pg_sys::CmdType::CMD_INSERT { (*query).resultRelation } else { 0 };
            let mut conditions = Vec::new();
            for (cell, index) in elements((*query).rtable).iter().zip(1..) {
                let entry = &*cell.ptr_value.cast::<pg_sys::RangeTblEntry>();
                match entry.rtekind {
                    pg_sys::RTEKind::RTE_RELATION if index != target => {
                        conditions.extend(self.decide(entry.relid).map(|(condition, _)| (index, condition)));
                    }
                    pg_sys::RTEKind::RTE_SUBQUERY if !entry.subquery.is_null() => self.query(entry.subquery),
                    _ => {}
                }
            }
            if !conditions.is_empty() && !self.is_left_to_citus {
                let top = self.top;
                let may_tell = *self.may_tell.get_or_insert_with(|| query_may_tell(top, true));
                add(query, &conditions, may_tell);
            }
            if target != 0 && !(*query).onConflict.is_null() {
                self.on_conflict(query, target);
            }
            for cell in elements((*query).cteList) {
                let query = (*cell.ptr_value.cast::<pg_sys::CommonTableExpr>()).ctequery;
                if !query.is_null() && (*query).type_ == pg_sys::NodeTag::T_Query {
                    self.query(query.cast());
                }
            }
            if (*query).hasSubLinks {
                let flags = pg_sys::QTW_IGNORE_RT_SUBQUERIES | pg_sys::QTW_IGNORE_CTE_SUBQUERIES;
                pg_sys::query_tree_walker(query, Some(walk), ptr::from_mut(self).cast(), flags as i32);
            }
        }
    }

    /// ON CONFLICT DO UPDATE must neither update a hidden row that could not be removed, nor skip it silently.
    ///
    /// # Safety
    /// The query inserts into the relation with range table index `target`.
    unsafe fn on_conflict(&mut self, query: *mut pg_sys::Query, target: i32) {
        // SAFETY: as promised by the caller.
        unsafe {
            let conflict = &mut *(*query).onConflict;
            let cell = &elements((*query).rtable)[target as usize - 1];
            let relid = (*cell.ptr_value.cast::<pg_sys::RangeTblEntry>()).relid;
            if conflict.action == pg_sys::OnConflictAction::ONCONFLICT_UPDATE
                && let Some((condition, refusal)) = self.decide(relid)
            {
                let visible = condition.for_relation(target);
                let either =
                    pg_sys::lappend(pg_sys::lappend(ptr::null_mut(), visible), refusal_of(relid, refusal).cast());
                let either = pg_sys::makeBoolExpr(pg_sys::BoolExprType::OR_EXPR, either, -1);
                let mut both = pg_sys::lappend(ptr::null_mut(), either.cast());
                if !conflict.onConflictWhere.is_null() {
                    both = pg_sys::lappend(both, conflict.onConflictWhere.cast());
                }
                conflict.onConflictWhere = pg_sys::make_ands_explicit(both).cast();
            }
        }
    }

    /// Returns the condition and the refusal function for a relation.
    fn decide(&mut self, relid: Oid) -> Option<(Rc<Condition>, Oid)> {
        let decide = self.decide;
        let decision = asking(|| decide(relid))?;
        self.depends_on_role |= decision.depends_on_role;
        decision.condition.map(|condition| (condition, decision.refusal))
    }
}

/// Builds a call of the refusal function for a relation.
///
/// # Safety
/// Called while a query is being planned.
unsafe fn refusal_of(relid: Oid, function: Oid) -> *mut pg_sys::FuncExpr {
    let (none, by_value, is_null) = (pg_sys::InvalidOid, true, false);
    // SAFETY: makes nodes; an OID is passed by value.
    unsafe {
        let argument = pg_sys::makeConst(pg_sys::OIDOID, -1, none, 4, pg_sys::Datum::from(relid), is_null, by_value);
        let arguments = pg_sys::lappend(ptr::null_mut(), argument.cast());
        let format = pg_sys::CoercionForm::COERCE_EXPLICIT_CALL;
        pg_sys::makeFuncExpr(function, pg_sys::BOOLOID, arguments, none, none, format)
    }
}

/// Visits every node of a query's expressions to find subqueries.
#[pg_guard]
unsafe extern "C-unwind" fn walk(node: *mut pg_sys::Node, state: *mut c_void) -> bool {
    // SAFETY: the cast follows the node's tag; the state is the `Walk` that started this.
    unsafe {
        if node.is_null() {
            return false;
        }
        if (*node).type_ == pg_sys::NodeTag::T_Query {
            (*state.cast::<Walk>()).query(node.cast());
            return false;
        }
        pg_sys::expression_tree_walker(node, Some(walk), state)
    }
}

/// Called for every relation of a query once its conditions are known.
#[pg_guard]
unsafe extern "C-unwind" fn set_rel_pathlist(
    root: *mut pg_sys::PlannerInfo,
    relation: *mut pg_sys::RelOptInfo,
    index: pg_sys::Index,
    entry: *mut pg_sys::RangeTblEntry,
) {
    // SAFETY: called by PostgreSQL while it plans a query that has the relation.
    unsafe {
        let Some(hooks) = HOOKS.get() else { return };
        if let Some(next) = hooks.set_rel_pathlist {
            pg_sys::ffi::pg_guard_ffi_boundary(|| next(root, relation, index, entry));
        }
        if (*entry).rtekind != pg_sys::RTEKind::RTE_RELATION {
            return;
        }
        if let Some(condition) = hooks.condition((*entry).relid) {
            check_first(root, relation, index as i32, &condition);
        }
    }
}

compat::relation_info_hook!(
    HOOKS.get().and_then(|hooks| hooks.relation_info),
    |relation: *mut pg_sys::RelOptInfo, relid: Oid| {
        let hides = || HOOKS.get().is_some_and(|hooks| hooks.condition(relid).is_some());
        if !(*relation).indexlist.is_null() && hides() {
            keep_from_sorting(relation);
        }
    }
);

/// Keeps functions from being inlined. Set-returning SQL functions are inlined after our hook has seen the query; where
/// rows are hidden, their queries must be planned separately. Volatile functions that a sweep calls must be parsed when
/// they run, under the search path of the table's owner; filters and expressions, not volatile, are parsed under the
/// pinned one.
#[pg_guard]
unsafe extern "C-unwind" fn must_not_be_inlined(function: Oid) -> bool {
    // SAFETY: looks into the catalog caches.
    unsafe {
        let Some(hooks) = HOOKS.get() else { return false };
        if hooks.needs_fmgr.is_some_and(|next| pg_sys::ffi::pg_guard_ffi_boundary(|| next(function))) {
            return true;
        }
        if identity::awaits_users_path() && pg_sys::func_volatile(function) == pg_sys::PROVOLATILE_VOLATILE as c_char {
            return true;
        }
        pg_sys::IsTransactionState()
            && pg_sys::get_func_retset(function)
            && is_sql_function(function)
            && ask(hooks.is_concerned).unwrap_or(false)
    }
}

/// The OID of the SQL language in `pg_language`, the same in every database.
const SQL_LANGUAGE: u32 = 14;

/// # Safety
/// Within a transaction.
unsafe fn is_sql_function(function: Oid) -> bool {
    // SAFETY: the tuple is valid until it is released.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::PROCOID as _, pg_sys::Datum::from(function));
        if tuple.is_null() {
            return false;
        }
        let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_proc>();
        let is_sql = (*form).prolang == pg_sys::Oid::from(SQL_LANGUAGE);
        pg_sys::ReleaseSysCache(tuple);
        is_sql
    }
}
