//! Receivers that take rows straight from the executor: copying them into a result first would cost half as much as
//! finding them.

use super::compat;
use super::plan::{Deleted, Tid, position};
use crate::error::TtlError;
use pgrx::pg_sys;
use pgrx::prelude::*;
use std::ffi::CStr;
use std::iter::Peekable;
use std::slice::Iter;

/// Collects the TIDs of rows.
#[repr(C)]
pub(super) struct Collector {
    pub(super) receiver: pg_sys::DestReceiver,
    pub(super) tids: Vec<Tid>,
    pub(super) last: Option<Value>,
}

/// A value that outlives the row it came from.
pub(super) struct Value {
    type_oid: pg_sys::Oid,
    length: i16,
    by_value: bool,
    datum: pg_sys::Datum,
    /// The bytes that `datum` points to, if it is passed by reference; aligned for every type.
    bytes: Vec<u64>,
}

impl Value {
    fn of_type(type_oid: pg_sys::Oid) -> Self {
        let (mut length, mut by_value) = (0, false);
        // SAFETY: looks into the type cache.
        unsafe { pg_sys::get_typlenbyval(type_oid, &mut length, &mut by_value) };
        Self { type_oid, length, by_value, datum: pg_sys::Datum::null(), bytes: Vec::new() }
    }

    /// # Safety
    /// `datum` is a value of this type, not null.
    unsafe fn set(&mut self, datum: pg_sys::Datum) {
        self.datum = datum;
        if !self.by_value {
            // SAFETY: as promised by the caller; the buffer has room for as many bytes as the value has.
            unsafe {
                let size =
                    pg_sys::ffi::pg_guard_ffi_boundary(|| compat::datumGetSize(datum, false, self.length.into()));
                self.bytes.resize(size.div_ceil(size_of::<u64>()), 0);
                std::ptr::copy_nonoverlapping(datum.cast_mut_ptr::<u8>(), self.bytes.as_mut_ptr().cast(), size);
            }
            self.datum = pg_sys::Datum::from(self.bytes.as_ptr());
        }
    }

    pub(super) fn into_text(self) -> String {
        // SAFETY: the output function is that of the type the value has; the text is copied.
        unsafe {
            let (mut output, mut is_varlena) = (pg_sys::InvalidOid, false);
            pg_sys::getTypeOutputInfo(self.type_oid, &mut output, &mut is_varlena);
            CStr::from_ptr(pg_sys::OidOutputFunctionCall(output, self.datum)).to_string_lossy().into_owned()
        }
    }
}

pub(super) type Receive = unsafe extern "C-unwind" fn(*mut pg_sys::TupleTableSlot, *mut pg_sys::DestReceiver) -> bool;

impl Collector {
    pub(super) fn receiver(receive: Receive) -> pg_sys::DestReceiver {
        pg_sys::DestReceiver {
            receiveSlot: Some(receive),
            rStartup: Some(start_with_ctids),
            rShutdown: Some(end),
            rDestroy: Some(end),
            mydest: pg_sys::CommandDest::DestNone,
        }
    }
}

impl Default for Collector {
    fn default() -> Self {
        Self { receiver: Self::receiver(receive), tids: Vec::new(), last: None }
    }
}

/// Deletes rows as the executor finds them.
#[repr(C)]
pub(super) struct Deleter<'a> {
    pub(super) receiver: pg_sys::DestReceiver,
    pub(super) relation: pg_sys::Relation,
    pub(super) command: pg_sys::CommandId,
    pub(super) listed: Option<Peekable<Iter<'a, Tid>>>,
    /// How many rows it takes before it stops.
    pub(super) most: usize,
    pub(super) deleted: Deleted,
    pub(super) last: Option<Value>,
}

/// Called for every row: deletes it if it is wanted.
#[pg_guard]
pub(super) unsafe extern "C-unwind" fn delete(
    slot: *mut pg_sys::TupleTableSlot,
    receiver: *mut pg_sys::DestReceiver,
) -> bool {
    // SAFETY: the receiver is a deleter, and the slot has the columns that the query names, the first a ctid. The heap
    // does not wait, and locks the page itself.
    unsafe {
        let columns = deform(slot);
        let slot = &*slot;
        if *slot.tts_isnull {
            return true;
        }
        let tid = *(*slot.tts_values).cast_mut_ptr::<Tid>();
        let deleter = &mut *receiver.cast::<Deleter>();
        if let Some(listed) = &mut deleter.listed {
            while listed.next_if(|wanted| position(wanted) < position(&tid)).is_some() {}
            if listed.next_if(|wanted| position(wanted) == position(&tid)).is_none() {
                return true;
            }
        }
        let result = compat::heap_delete(deleter.relation, tid, deleter.command);
        let deleted = &mut deleter.deleted;
        if result == pg_sys::TM_Result::TM_Ok {
            deleted.tids.push(tid)
        } else {
            deleted.left.push(tid)
        };
        deleted.last = Some(tid);
        if columns > 1 {
            remember(slot, 2, &mut deleter.last);
        }
        deleted.seen() < deleter.most
    }
}

/// Deforms all columns of a slot, as a projection does, and returns how many there are.
///
/// # Safety
/// The slot has a row.
unsafe fn deform(slot: *mut pg_sys::TupleTableSlot) -> i32 {
    // SAFETY: as promised by the caller.
    unsafe {
        let columns = (*(*slot).tts_tupleDescriptor).natts;
        if i32::from((*slot).tts_nvalid) < columns {
            pg_sys::slot_getsomeattrs_int(slot, columns);
        }
        columns
    }
}

/// Keeps the value of a column, if it is not null.
///
/// # Safety
/// The slot has that column, and it is deformed.
unsafe fn remember(slot: &pg_sys::TupleTableSlot, column: i32, last: &mut Option<Value>) {
    // SAFETY: as promised by the caller; a column has the type that its description says.
    unsafe {
        let place = column as usize - 1;
        if !*slot.tts_isnull.add(place) {
            let type_oid = || pg_sys::SPI_gettypeid(slot.tts_tupleDescriptor, column);
            last.get_or_insert_with(|| Value::of_type(type_oid())).set(*slot.tts_values.add(place));
        }
    }
}

/// Counts rows, and keeps the value of the last.
#[repr(C)]
pub(super) struct Counter {
    receiver: pg_sys::DestReceiver,
    pub(super) rows: usize,
    pub(super) last: Option<Value>,
}

impl Default for Counter {
    fn default() -> Self {
        let receiver = pg_sys::DestReceiver { rStartup: Some(start), ..Collector::receiver(count) };
        Self { receiver, rows: 0, last: None }
    }
}

/// Called for every row: counts it.
#[pg_guard]
unsafe extern "C-unwind" fn count(slot: *mut pg_sys::TupleTableSlot, receiver: *mut pg_sys::DestReceiver) -> bool {
    // SAFETY: the receiver is a counter, and the slot has a column.
    unsafe {
        deform(slot);
        let counter = &mut *receiver.cast::<Counter>();
        counter.rows += 1;
        remember(&*slot, 1, &mut counter.last);
    }
    true
}

/// Ignores a row, for statements whose rows the executor itself counts.
pub(super) unsafe extern "C-unwind" fn ignore(
    _slot: *mut pg_sys::TupleTableSlot,
    _receiver: *mut pg_sys::DestReceiver,
) -> bool {
    true
}

/// Called for every row: collects its TID.
#[pg_guard]
pub(super) unsafe extern "C-unwind" fn receive(
    slot: *mut pg_sys::TupleTableSlot,
    receiver: *mut pg_sys::DestReceiver,
) -> bool {
    // SAFETY: the receiver is a collector, and the slot has the columns that the query names, the first a ctid.
    unsafe {
        let columns = deform(slot);
        let collector = &mut *receiver.cast::<Collector>();
        let slot = &*slot;
        if *slot.tts_isnull {
            return true;
        }
        collector.tids.push(*(*slot.tts_values).cast_mut_ptr::<Tid>());
        if columns > 1 {
            remember(slot, 2, &mut collector.last);
        }
    }
    true
}

/// Called before the first row: checks that the first column, which is read as a `ctid`, is one.
#[pg_guard]
pub(super) unsafe extern "C-unwind" fn start_with_ctids(
    _receiver: *mut pg_sys::DestReceiver,
    _operation: i32,
    columns: pg_sys::TupleDesc,
) {
    // SAFETY: the rows to come have these columns.
    if unsafe { pg_sys::SPI_gettypeid(columns, 1) } != pg_sys::TIDOID {
        TtlError::Mismatch.raise();
    }
}

pub(super) unsafe extern "C-unwind" fn start(
    _receiver: *mut pg_sys::DestReceiver,
    _operation: i32,
    _type: pg_sys::TupleDesc,
) {
}

pub(super) unsafe extern "C-unwind" fn end(_receiver: *mut pg_sys::DestReceiver) {}
