//! Commands that fire an event trigger.

use super::expression::elements;
use crate::error::TtlError;
use pgrx::pg_sys;
use std::ffi::{CStr, c_char};

/// An event trigger call.
pub struct Event<'a>(&'a pg_sys::EventTriggerData);

/// Handles an event trigger call. An error of `work` becomes an error of the command.
pub fn answer(call: pg_sys::FunctionCallInfo, work: fn(&Event<'_>) -> Result<(), TtlError>) -> pg_sys::Datum {
    // SAFETY: `call` is the call we are in; the cast follows a check of the node's tag.
    let event = unsafe {
        let context = (*call).context.cast::<pg_sys::EventTriggerData>();
        let is_event = !context.is_null() && (*context).type_ == pg_sys::NodeTag::T_EventTriggerData;
        is_event.then(|| Event(&*context))
    };
    match event.ok_or(TtlError::NotOurTrigger).and_then(|event| work(&event)) {
        Ok(()) => pg_sys::Datum::null(),
        Err(error) => error.raise(),
    }
}

impl Event<'_> {
    /// Whether the event is `sql_drop`.
    pub fn is_drop(&self) -> bool {
        // SAFETY: the name of the event.
        unsafe { CStr::from_ptr(self.0.event) == c"sql_drop" }
    }

    fn tag(&self) -> &[u8] {
        // SAFETY: every tag has a name with static lifetime.
        unsafe { CStr::from_ptr(pg_sys::GetCommandTagName(self.0.tag)) }.to_bytes()
    }

    /// Whether the command is about functions alone, and not about objects that use them.
    pub fn is_about_functions(&self) -> bool {
        // SAFETY: the cast follows the node's tag.
        unsafe {
            let statement = self.0.parsetree.cast::<pg_sys::DropStmt>();
            let is_drop = !statement.is_null() && (*statement).type_ == pg_sys::NodeTag::T_DropStmt;
            let cascades = is_drop && (*statement).behavior == pg_sys::DropBehavior::DROP_CASCADE;
            let kinds: [&[u8]; 3] = [b" FUNCTION", b" PROCEDURE", b" ROUTINE"];
            !cascades && kinds.iter().any(|kind| self.tag().ends_with(kind))
        }
    }

    /// Returns the columns whose values the command has recomputed from the old ones: `ALTER COLUMN … TYPE … USING …`.
    pub fn recomputed_columns(&self) -> Vec<String> {
        // SAFETY: the casts follow the nodes' tags, or the parser's output for this command.
        unsafe {
            let statement = self.0.parsetree.cast::<pg_sys::AlterTableStmt>();
            if statement.is_null() || (*statement).type_ != pg_sys::NodeTag::T_AlterTableStmt {
                return Vec::new();
            }
            elements((*statement).cmds)
                .iter()
                .map(|cell| &*cell.ptr_value.cast::<pg_sys::AlterTableCmd>())
                .filter(|command| command.subtype == pg_sys::AlterTableType::AT_AlterColumnType)
                .filter(|command| {
                    let definition = command.def.cast::<pg_sys::ColumnDef>();
                    !definition.is_null()
                        && (!(*definition).raw_default.is_null() || !(*definition).cooked_default.is_null())
                })
                .map(|command| text(command.name))
                .collect()
        }
    }
}

/// # Safety
/// `name` is null or a C string.
unsafe fn text(name: *const c_char) -> String {
    // SAFETY: as promised by the caller.
    if name.is_null() { String::new() } else { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() }
}
