//! Statements planned once, under settings that need not be in force when they run.

use super::identity::{self, Setting};
use super::planner;
use super::receiver::{Collector, Counter, Deleter, Value, delete, ignore, start};
use crate::error::TtlError;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys;
use pgrx::prelude::*;
use pgrx::spi::Spi;
use std::ffi::{CStr, CString, c_char};

/// A prepared statement that keeps its plan, whatever its parameters.
pub struct Plan {
    statement: pg_sys::SPIPlanPtr,
    /// The types of its parameters.
    parameters: Vec<pg_sys::Oid>,
    /// Whether it is a statement of the engine, which sees hidden rows.
    is_engine: bool,
    /// The settings under which it is planned, again and again if something changes. It runs under those of the session.
    settings: &'static [Setting<'static>],
}

/// Rows come in the order of an index.
pub const IN_ORDER: &[Setting<'_>] =
    &[(c"enable_seqscan", c"off"), (c"enable_bitmapscan", c"off"), (c"enable_sort", c"off")];

/// Rows are looked up by TID. No other row is looked at: a condition may fail on it.
pub const BY_TID: &[Setting<'_>] = &[
    (c"enable_tidscan", c"on"),
    (c"enable_seqscan", c"off"),
    (c"enable_bitmapscan", c"off"),
    (c"enable_indexscan", c"off"),
];

/// The position of a row in its table.
pub type Tid = pg_sys::ItemPointerData;

/// Which rows a statement is about.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    All,
    Listed(&'a [Tid]),
    /// Both ends included.
    Between(&'a Tid, &'a Tid),
    /// The first rows with values beyond one, which is given as text, and how many of them.
    Beyond(&'a str, i64),
    /// The rows with values beyond one, and up to another.
    Within(&'a str, &'a str),
}

/// Which of the rows that a query finds are deleted.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    /// The rows at these TIDs. These are sorted, and so are the rows that the query finds.
    Listed(&'a [Tid]),
    /// All rows, until this many have been seen.
    Upto(usize),
}

/// The result of deleting the rows that a query found.
#[derive(Debug, Default)]
pub struct Deleted {
    pub tids: Vec<Tid>,
    /// Rows that other transactions have locked, updated or deleted.
    pub left: Vec<Tid>,
    /// The last row seen.
    pub last: Option<Tid>,
    /// Its value as text, if the query returns one.
    pub value: Option<String>,
}

impl Deleted {
    /// Returns how many rows the query found.
    pub fn seen(&self) -> usize {
        self.tids.len() + self.left.len()
    }
}

/// Returns the block of a TID, and its offset there.
pub fn position(tid: &Tid) -> (u32, u16) {
    ((u32::from(tid.ip_blkid.bi_hi) << 16) | u32::from(tid.ip_blkid.bi_lo), tid.ip_posid)
}

/// Rows found, in the order they were found.
pub struct Found {
    pub tids: Vec<Tid>,
    /// The value of the last one, as text.
    pub last: Option<String>,
}

impl Plan {
    /// Plans a query without parameters.
    pub fn for_search(sql: &str, settings: &'static [Setting<'static>]) -> Self {
        Self::under(settings, sql, &mut [])
    }

    /// Plans a statement about the rows at some TIDs, its parameter.
    pub fn for_rows(sql: &str) -> Self {
        Self::under(BY_TID, sql, &mut [pg_sys::TIDARRAYOID])
    }

    /// Plans a statement about the rows between two TIDs, its parameters.
    pub fn for_range(sql: &str) -> Self {
        Self::under(BY_TID, sql, &mut [pg_sys::TIDOID, pg_sys::TIDOID])
    }

    /// Plans a query whose parameters are the value that rows must lie beyond, and how many of them to find, in order.
    pub fn for_rows_beyond(sql: &str) -> Self {
        Self::under(IN_ORDER, sql, &mut [pg_sys::TEXTOID, pg_sys::INT8OID])
    }

    /// Plans a statement whose parameters are the value that rows must lie beyond, and the last value.
    pub fn for_rows_within(sql: &str) -> Self {
        Self::under(IN_ORDER, sql, &mut [pg_sys::TEXTOID, pg_sys::TEXTOID])
    }

    /// Plans a statement with parameters of these types.
    pub fn new(sql: &str, parameters: &mut [pg_sys::Oid]) -> Self {
        Self::under(&[], sql, parameters)
    }

    fn under(settings: &'static [Setting<'static>], sql: &str, parameters: &mut [pg_sys::Oid]) -> Self {
        let sql = CString::new(sql).unwrap_or_default();
        Spi::connect(|_| {
            // SAFETY: within an SPI connection. The statement is kept before it is planned, because keeping it discards
            // a plan; Drop frees it even if planning fails. A kept statement's plan is pinned by the resource owner.
            unsafe {
                let options = pg_sys::CURSOR_OPT_GENERIC_PLAN as i32;
                let count = parameters.len() as i32;
                let plan = identity::with_standard_syntax(|| {
                    pg_sys::SPI_prepare_cursor(sql.as_ptr(), count, parameters.as_mut_ptr(), options)
                });
                if plan.is_null() {
                    TtlError::Mismatch.raise();
                }
                pg_sys::SPI_keepplan(plan);
                let is_engine = sql.to_bytes().starts_with(planner::ENGINE_TAG.as_bytes());
                let kept = Self { statement: plan, parameters: parameters.to_vec(), is_engine, settings };
                kept.make();
                kept
            }
        })
    }

    /// Makes the plan, or remakes it if something has changed. A statement of the engine is planned as such.
    ///
    /// # Safety
    /// There is an SPI connection.
    unsafe fn make(&self) {
        let make = || {
            // SAFETY: as promised by the caller; the plan that is pinned is released at once.
            unsafe {
                let plan = pg_sys::SPI_plan_get_cached_plan(self.statement);
                if !plan.is_null() {
                    pg_sys::ReleaseCachedPlan(plan, pg_sys::CurrentResourceOwner);
                }
            }
        };
        let tag = if self.is_engine { planner::ENGINE_TAG } else { "" };
        identity::with_settings(self.settings, || planner::planning(tag, make));
    }

    /// Runs a statement and returns how many rows it found or changed.
    pub fn run(&self, rows: Rows<'_>) -> usize {
        Spi::connect(|_| {
            let mut nobody = pg_sys::DestReceiver { rStartup: Some(start), ..Collector::receiver(ignore) };
            // SAFETY: within an SPI connection; the receiver outlives the call.
            unsafe {
                self.execute(rows, 0, &mut nobody);
                pg_sys::SPI_processed as usize
            }
        })
    }

    /// Runs a query and returns its first row, as text.
    pub fn row(&self, rows: Rows<'_>) -> Vec<Option<String>> {
        Spi::connect(|_| {
            // SAFETY: within an SPI connection, which collects the rows itself without a receiver; texts are copied.
            unsafe {
                self.execute(rows, 0, std::ptr::null_mut());
                let table = pg_sys::SPI_tuptable;
                if table.is_null() || pg_sys::SPI_processed == 0 {
                    return Vec::new();
                }
                let (row, description) = (*(*table).vals, (*table).tupdesc);
                let text = |column| {
                    let text = pg_sys::SPI_getvalue(row, description, column);
                    (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
                };
                (1..=(*description).natts).map(text).collect()
            }
        })
    }

    /// Runs a query whose first column is a `ctid`, for at most `limit` rows.
    pub fn find(&self, rows: Rows<'_>, limit: usize) -> Found {
        Spi::connect(|_| {
            let mut collector = Collector::default();
            // SAFETY: within an SPI connection; the collector begins with a receiver, and outlives the call.
            unsafe { self.execute(rows, limit, std::ptr::from_mut(&mut collector).cast()) };
            Found { tids: collector.tids, last: collector.last.map(Value::into_text) }
        })
    }

    /// Runs a query with one column, and returns how many rows it found and the last value, as text.
    pub fn count(&self, rows: Rows<'_>) -> (usize, Option<String>) {
        Spi::connect(|_| {
            let mut counter = Counter::default();
            // SAFETY: within an SPI connection; the counter begins with a receiver, and outlives the call.
            unsafe { self.execute(rows, 0, std::ptr::from_mut(&mut counter).cast()) };
            (counter.rows, counter.last.map(Value::into_text))
        })
    }

    /// Runs a query whose first column is a `ctid`, and deletes the rows it finds without waiting for locks.
    ///
    /// Only the row version that met the query's conditions is deleted: if another transaction has updated it, or is
    /// about to, the heap says so, and the row is left.
    pub fn delete(&self, rows: Rows<'_>, relid: pg_sys::Oid, wanted: Wanted<'_>) -> Deleted {
        Spi::connect(|_| {
            // SAFETY: within an SPI connection; the relation's lock and access method allow deleting from it, and the
            // deleter begins with a receiver and outlives the call.
            unsafe {
                let relation = pg_sys::relation_open(relid, pg_sys::NoLock as pg_sys::LOCKMODE);
                let lock = pg_sys::RowExclusiveLock as pg_sys::LOCKMODE;
                let is_heap = (*(*relation).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID;
                if !is_heap || !pg_sys::CheckRelationLockedByMe(relation, lock, true) {
                    TtlError::Mismatch.raise();
                }
                pg_sys::CheckCmdReplicaIdentity(relation, pg_sys::CmdType::CMD_DELETE);
                let (listed, most) = match wanted {
                    Wanted::Listed(tids) => (Some(tids.iter().peekable()), tids.len()),
                    Wanted::Upto(most) => (None, most),
                };
                let mut deleter = Deleter {
                    receiver: Collector::receiver(delete),
                    relation,
                    command: pg_sys::GetCurrentCommandId(true),
                    listed,
                    most,
                    deleted: Deleted::default(),
                    last: None,
                };
                self.execute(rows, 0, std::ptr::from_mut(&mut deleter).cast());
                pg_sys::relation_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
                pg_sys::CommandCounterIncrement();
                Deleted { value: deleter.last.map(Value::into_text), ..deleter.deleted }
            }
        })
    }

    /// Runs a statement with these arguments in the session as it is, and returns how many rows it found or changed,
    /// and the first column of the first row. The statement sees everything that this transaction did before.
    pub fn call<T: Scalar>(&self, arguments: &[DatumWithOid<'_>]) -> (usize, Option<T>) {
        let (mut values, nulls) = self.values_of(arguments);
        Spi::connect(|_| {
            // SAFETY: within an SPI connection, with arguments of the planned number and types. A result has at least
            // one column, which is read as its own type and, as a scalar, outlives the connection.
            unsafe {
                if self.is_engine {
                    self.make();
                }
                pg_sys::SPI_execute_plan(self.statement, values.as_mut_ptr(), nulls.as_ptr(), false, 0);
                let (count, table) = (pg_sys::SPI_processed as usize, pg_sys::SPI_tuptable);
                if table.is_null() || count == 0 {
                    return (count, None);
                }
                let mut is_null = false;
                let datum = pg_sys::SPI_getbinval(*(*table).vals, (*table).tupdesc, 1, &mut is_null);
                let found = T::try_from_datum(datum, is_null, pg_sys::SPI_gettypeid((*table).tupdesc, 1));
                (count, found.unwrap_or_else(|_| TtlError::Mismatch.raise()))
            }
        })
    }

    /// Runs a query with these arguments and returns the first column of its first row, copied into the caller's memory
    /// context.
    pub fn value<'a>(&self, arguments: &'a [DatumWithOid<'a>]) -> Option<DatumWithOid<'a>> {
        let (mut values, nulls) = self.values_of(arguments);
        Spi::connect(|_| {
            // SAFETY: within an SPI connection, with arguments of the planned number and types. A result has at least
            // one column, whose value keeps its type and is copied out of the connection.
            unsafe {
                pg_sys::SPI_execute_plan(self.statement, values.as_mut_ptr(), nulls.as_ptr(), true, 1);
                if pg_sys::SPI_processed == 0 || pg_sys::SPI_tuptable.is_null() {
                    return None;
                }
                let table = &*pg_sys::SPI_tuptable;
                let (mut is_null, mut length, mut by_value) = (false, 0, false);
                let datum = pg_sys::SPI_getbinval(*table.vals, table.tupdesc, 1, &mut is_null);
                let type_oid = pg_sys::SPI_gettypeid(table.tupdesc, 1);
                pg_sys::get_typlenbyval(type_oid, &mut length, &mut by_value);
                let copy = || pg_sys::SPI_datumTransfer(datum, by_value, length.into());
                (!is_null).then(|| DatumWithOid::new(copy(), type_oid))
            }
        })
    }

    /// Returns the arguments as PostgreSQL takes them, and which are null. Fails if they are not of the planned types.
    fn values_of(&self, arguments: &[DatumWithOid<'_>]) -> (Vec<pg_sys::Datum>, Vec<c_char>) {
        self.check_types(arguments.iter().map(DatumWithOid::oid));
        let value = |argument: &DatumWithOid<'_>| argument.datum().map(pgrx::datum::Datum::sans_lifetime);
        let is_null = |argument: &DatumWithOid<'_>| if argument.datum().is_some() { b' ' } else { b'n' } as c_char;
        let values = arguments.iter().map(|argument| value(argument).unwrap_or(pg_sys::Datum::null())).collect();
        (values, arguments.iter().map(is_null).collect())
    }

    /// Fails on arguments of other types: a statement reads its arguments as the planned types, whatever they are.
    fn check_types(&self, given: impl Iterator<Item = pg_sys::Oid>) {
        if !given.eq(self.parameters.iter().copied()) {
            TtlError::Mismatch.raise();
        }
    }

    /// Executes the statement with a new snapshot that sees what this transaction did before. Assigns no transaction ID
    /// unless the statement writes.
    ///
    /// # Safety
    /// There is an SPI connection, and `dest` is a receiver or null.
    unsafe fn execute(&self, rows: Rows<'_>, limit: usize, dest: *mut pg_sys::DestReceiver) {
        let pointer = |tid: &Tid| pg_sys::Datum::from(std::ptr::from_ref(tid));
        let text = |value: &str| value.into_datum().unwrap_or(pg_sys::Datum::null());
        let values = match rows {
            Rows::All => vec![],
            Rows::Listed(tids) => vec![(pg_sys::TIDARRAYOID, make_array(tids))],
            Rows::Between(first, last) => {
                vec![(pg_sys::TIDOID, pointer(first)), (pg_sys::TIDOID, pointer(last))]
            }
            Rows::Beyond(value, count) => {
                vec![(pg_sys::TEXTOID, text(value)), (pg_sys::INT8OID, pg_sys::Datum::from(count))]
            }
            Rows::Within(beyond, last) => vec![(pg_sys::TEXTOID, text(beyond)), (pg_sys::TEXTOID, text(last))],
        };
        self.check_types(values.iter().map(|(type_oid, _)| *type_oid));
        // SAFETY: as promised by the caller; a parameter list has room for as many as it was made for. A statement
        // without parameters gets none: other planners take an empty list for one that they can look into.
        unsafe {
            if self.is_engine {
                self.make();
            }
            let mut params = std::ptr::null_mut();
            if !values.is_empty() {
                params = pg_sys::makeParamList(values.len() as i32);
                for (param, (ptype, value)) in (*params).params.as_mut_slice(values.len()).iter_mut().zip(values) {
                    *param = pg_sys::ParamExternData { value, isnull: false, pflags: 0, ptype };
                }
            }
            let tcount = limit as u64;
            let options = pg_sys::SPIExecuteOptions { params, tcount, dest, ..pg_sys::SPIExecuteOptions::default() };
            pg_sys::SPI_execute_plan_extended(self.statement, &options);
        }
    }
}

/// A value that is passed by value or copied, and not in memory that a statement frees.
pub trait Scalar: FromDatum + IntoDatum {}

impl Scalar for bool {}
impl Scalar for i32 {}
impl Scalar for f64 {}
impl Scalar for pgrx::datum::Interval {}
impl Scalar for Vec<i64> {}

impl Drop for Plan {
    /// Frees the plan even while unwinding: a kept plan outlives the transaction, so its abort does not free it.
    fn drop(&mut self) {
        // SAFETY: kept by us and not used any more; needs neither a connection nor a transaction.
        unsafe { pg_sys::SPI_freeplan(self.statement) };
    }
}

const TID_LENGTH: i32 = size_of::<Tid>() as i32;
const TID_ALIGNMENT: std::ffi::c_char = pg_sys::TYPALIGN_SHORT as std::ffi::c_char;

/// Makes a `tid[]` in one go: element by element it would cost more than removing the rows.
fn make_array(tids: &[Tid]) -> pg_sys::Datum {
    let mut elements: Vec<_> = tids.iter().map(|tid| pg_sys::Datum::from(std::ptr::from_ref(tid))).collect();
    // SAFETY: the elements point to TIDs that outlive the call, which copies them.
    let array = unsafe {
        let count = elements.len() as i32;
        pg_sys::construct_array(elements.as_mut_ptr(), count, pg_sys::TIDOID, TID_LENGTH, false, TID_ALIGNMENT)
    };
    pg_sys::Datum::from(array)
}

#[cfg(any(test, feature = "pg_test"))]
#[pgrx::pg_schema]
mod tests {
    use super::*;
    use crate::pg::transaction::subtransaction;

    #[pg_test]
    fn a_statement_takes_arguments_of_its_types_and_no_others() {
        let plan = Plan::new("SELECT $1", &mut [pg_sys::FLOAT8OID]);
        assert_eq!(plan.call::<f64>(&[1.5_f64.into()]), (1, Some(1.5)));
        assert_eq!(plan.call::<f64>(&[DatumWithOid::null::<f64>()]), (1, None));
        for arguments in [vec!["1.5".into()], vec![], vec![1.5_f64.into(), 1.5_f64.into()]] {
            assert!(subtransaction(|| Ok(plan.call::<f64>(&arguments))).is_err());
            assert!(subtransaction(|| Ok(plan.value(&arguments).is_some())).is_err());
        }
        assert!(subtransaction(|| Ok(plan.call::<i32>(&[1.5_f64.into()]))).is_err(), "a result of another type");
        assert!(subtransaction(|| Ok(plan.run(Rows::All))).is_err());
    }

    #[pg_test]
    fn row_positions_are_not_read_from_other_columns() {
        let plan = Plan::for_search("SELECT 8::int8 WHERE true", &[]);
        assert!(subtransaction(|| Ok(plan.find(Rows::All, 0).tids.len())).is_err());
        assert_eq!(Plan::for_search("SELECT NULL::tid", &[]).find(Rows::All, 0).tids.len(), 0);
    }
}
