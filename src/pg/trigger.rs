//! A row that is being written, as a trigger sees it.

use super::compat;
use super::plan::Tid;
use crate::error::TtlError;
use pgrx::datum::DatumWithOid;
use pgrx::pg_sys::{self, Datum, Oid};
use std::ffi::{CStr, CString};
use std::marker::PhantomData;

/// The call of a BEFORE INSERT or UPDATE row trigger.
pub struct Change<'a>(&'a pg_sys::TriggerData);

/// A column of the row.
#[derive(Clone, Copy)]
pub struct Column {
    attnum: i32,
    pub type_oid: Oid,
}

/// The call of a C function. PostgreSQL passes it as the function's argument; nothing else creates one.
#[repr(transparent)]
pub struct Call<'a>(&'a pg_sys::FunctionCallInfoBaseData);

/// The row that a trigger returns to be written.
pub struct NewRow<'a>(Datum, PhantomData<&'a pg_sys::TriggerData>);

impl Call<'_> {
    /// Returns the result of a BEFORE INSERT or UPDATE row trigger: the row that `work` makes.
    pub fn answer(self, work: for<'c> fn(&'c Change<'_>) -> Result<NewRow<'c>, TtlError>) -> Datum {
        let change = Change::of(self).ok_or(TtlError::NotOurTrigger);
        match change.and_then(|change| work(&change).map(|row| row.0)) {
            Ok(row) => row,
            Err(error) => error.raise(),
        }
    }
}

impl<'a> Change<'a> {
    /// Returns `None` if the function was not called as a BEFORE INSERT or UPDATE row trigger.
    fn of(call: Call<'a>) -> Option<Self> {
        // SAFETY: the cast follows a check of the node's tag.
        unsafe {
            let context = call.0.context.cast::<pg_sys::TriggerData>();
            if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_TriggerData {
                return None;
            }
            let when = pg_sys::TRIGGER_EVENT_TIMINGMASK | pg_sys::TRIGGER_EVENT_ROW;
            let is_before_row = (*context).tg_event & when == pg_sys::TRIGGER_EVENT_BEFORE | pg_sys::TRIGGER_EVENT_ROW;
            let change = Self(&*context);
            (is_before_row && (change.is(pg_sys::TRIGGER_EVENT_INSERT) || change.is_update())).then_some(change)
        }
    }

    fn is(&self, event: u32) -> bool {
        self.0.tg_event & pg_sys::TRIGGER_EVENT_OPMASK == event
    }

    pub fn is_update(&self) -> bool {
        self.is(pg_sys::TRIGGER_EVENT_UPDATE)
    }

    /// The new row.
    pub(super) fn tuple(&self) -> pg_sys::HeapTuple {
        if self.is_update() { self.0.tg_newtuple } else { self.0.tg_trigtuple }
    }

    /// The first argument the trigger was created with.
    pub fn argument(&self) -> Option<&str> {
        // SAFETY: a trigger has as many arguments as it says.
        unsafe {
            let trigger = &*self.0.tg_trigger;
            if trigger.tgnargs > 0 { CStr::from_ptr(*trigger.tgargs).to_str().ok() } else { None }
        }
    }

    pub fn relid(&self) -> Oid {
        // SAFETY: the relation is open.
        unsafe { (*self.0.tg_relation).rd_id }
    }

    pub fn column(&self, name: &str) -> Option<Column> {
        let name = CString::new(name).ok()?;
        // SAFETY: the relation is open; only user columns have positive numbers.
        unsafe {
            let descriptor = (*self.0.tg_relation).rd_att;
            let attnum = pg_sys::SPI_fnumber(descriptor, name.as_ptr());
            (attnum > 0).then(|| Column { attnum, type_oid: pg_sys::SPI_gettypeid(descriptor, attnum) })
        }
    }

    /// Whether the statement changes the value of a column, or the column had none.
    pub fn changes(&self, attnum: i16) -> bool {
        // SAFETY: the relation is open, and has the column.
        let type_oid = unsafe { pg_sys::SPI_gettypeid((*self.0.tg_relation).rd_att, attnum.into()) };
        self.kept_value(Column { attnum: attnum.into(), type_oid }).is_none()
    }

    /// Whether the update sets the column, to whatever value.
    pub fn sets(&self, column: Column) -> bool {
        // SAFETY: null or a set of column numbers, counted from the first system column.
        unsafe {
            pg_sys::bms_is_member(column.attnum - pg_sys::FirstLowInvalidHeapAttributeNumber, self.0.tg_updatedcols)
        }
    }

    /// The column's value, if it is not null and the update leaves it unchanged.
    pub fn kept_value(&self, column: Column) -> Option<DatumWithOid<'_>> {
        if !self.is_update() {
            return None;
        }
        // SAFETY: both versions of the row are there and have the relation's columns.
        unsafe {
            let descriptor = (*self.0.tg_relation).rd_att;
            let [old, new] = [self.0.tg_trigtuple, self.0.tg_newtuple].map(|tuple| {
                let mut is_null = false;
                let value = pg_sys::SPI_getbinval(tuple, descriptor, column.attnum, &mut is_null);
                (!is_null).then_some(value)
            });
            let (mut length, mut by_value) = (0_i16, false);
            let is_same = |old, new, by_value, length: i16| {
                pg_sys::ffi::pg_guard_ffi_boundary(|| compat::datum_image_eq(old, new, by_value, length.into()))
            };
            let type_oid = pg_sys::SPI_gettypeid(descriptor, column.attnum);
            pg_sys::get_typlenbyval(type_oid, &mut length, &mut by_value);
            let kept = new.filter(|new| old.is_some_and(|old| is_same(old, *new, by_value, length)));
            kept.map(|value| DatumWithOid::new(value, type_oid))
        }
    }

    /// The new row, unchanged.
    pub fn row(&self) -> NewRow<'_> {
        NewRow(Datum::from(self.tuple()), PhantomData)
    }

    /// The new row, in a slot.
    pub(super) fn slot(&self) -> *mut pg_sys::TupleTableSlot {
        if self.is_update() { self.0.tg_newslot } else { self.0.tg_trigslot }
    }

    pub(super) fn relation(&self) -> pg_sys::Relation {
        self.0.tg_relation
    }

    /// The TID of the row that is being updated.
    pub fn old_place(&self) -> Option<Tid> {
        // SAFETY: the tuple outlives the call of the trigger.
        self.is_update().then(|| unsafe { (*self.0.tg_trigtuple).t_self })
    }

    /// The new row with another value in a column, which must be of the column's type.
    pub fn row_with(&self, column: Column, value: &DatumWithOid<'_>) -> Result<NewRow<'_>, TtlError> {
        let datum = value.datum().map(pgrx::datum::Datum::sans_lifetime);
        let (mut attnum, mut is_null) = (column.attnum, datum.is_none());
        let mut datum = datum.unwrap_or(Datum::null());
        // SAFETY: the new version of the row has the relation's columns, and the copy has one other value, of its type.
        unsafe {
            let (row, descriptor) = (self.tuple(), (*self.0.tg_relation).rd_att);
            if pg_sys::SPI_gettypeid(descriptor, attnum) != value.oid() {
                return Err(TtlError::Mismatch);
            }
            let (attnum, datum, is_null) = (&raw mut attnum, &raw mut datum, &raw mut is_null);
            let row = pg_sys::heap_modify_tuple_by_cols(row, descriptor, 1, attnum, datum, is_null);
            Ok(NewRow(Datum::from(row), PhantomData))
        }
    }
}
