//! Partition bounds as PostgreSQL stores them.

use super::expression::elements;
use super::spi;
use crate::error::TtlError;
use pgrx::pg_sys;
use std::ffi::CStr;

/// The range of the first partition key column, as text that its type reads back as the same value. `None` stands for
/// an unbounded end.
#[derive(Debug, Default)]
pub struct Range {
    pub lower: Option<String>,
    pub upper: Option<String>,
}

/// Returns the range of a partition; `None` if it has no range bound.
pub fn range_of(relid: pg_sys::Oid) -> Option<Range> {
    // SAFETY: the pg_class tuple is valid until released, and its values are copied. A bound is a PartitionBoundSpec.
    unsafe {
        let row = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as _, pg_sys::Datum::from(relid));
        if row.is_null() {
            return None;
        }
        let (cache, attribute) = (pg_sys::SysCacheIdentifier::RELOID as _, pg_sys::Anum_pg_class_relpartbound as i16);
        let mut is_null = true;
        let bound = pg_sys::SysCacheGetAttr(cache, row, attribute, &mut is_null);
        let text = if is_null { std::ptr::null_mut() } else { pg_sys::text_to_cstring(bound.cast_mut_ptr()) };
        pg_sys::ReleaseSysCache(row);
        if text.is_null() {
            return None;
        }
        let bound: *mut pg_sys::PartitionBoundSpec = pg_sys::stringToNode(text).cast();
        let is_range = (*bound).strategy as u8 == b'r' && !(*bound).is_default;
        is_range.then(|| Range { lower: first((*bound).lowerdatums), upper: first((*bound).upperdatums) })
    }
}

/// Returns the first datum of a lower or upper bound, if it is a value.
///
/// # Safety
/// `datums` is the list of lower or upper datums of a range bound.
unsafe fn first(datums: *mut pg_sys::List) -> Option<String> {
    // SAFETY: as promised by the caller; a value is a non-null constant, and its text is copied.
    unsafe {
        let datum: *mut pg_sys::PartitionRangeDatum = elements(datums).first()?.ptr_value.cast();
        if (*datum).kind != pg_sys::PartitionRangeDatumKind::PARTITION_RANGE_DATUM_VALUE {
            return None;
        }
        let value: *mut pg_sys::Const = (*datum).value.cast();
        let (mut output, mut is_varlena) = (pg_sys::InvalidOid, false);
        pg_sys::getTypeOutputInfo((*value).consttype, &mut output, &mut is_varlena);
        let text = pg_sys::OidOutputFunctionCall(output, (*value).constvalue);
        Some(CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

/// SQL that tells whether one of these columns, an array of names, is in the partition key of a relation, directly or in
/// an expression: PostgreSQL records that such a column depends on its own table.
pub fn partition_key_sql(relid: &str, columns: &str) -> String {
    format!(
        "EXISTS (SELECT FROM pg_partitioned_table p
                 JOIN pg_attribute key ON key.attrelid = p.partrelid AND key.attname = ANY ({columns})
                 JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = p.partrelid AND d.objsubid = key.attnum
                  AND d.refclassid = d.classid AND d.refobjid = d.objid AND d.refobjsubid = 0 AND d.deptype = 'i'
                 WHERE p.partrelid = {relid})"
    )
}

/// Whether one of these columns is in the partition key of an ancestor of the relation.
pub fn is_partition_key_above(relid: pg_sys::Oid, columns: &[String]) -> Result<bool, TtlError> {
    let sql = format!(
        "SELECT FROM pg_partition_ancestors($1) AS above WHERE above.relid <> $1 AND {}",
        partition_key_sql("above.relid", "$2")
    );
    Ok(!spi::read(&sql, &[relid.into(), columns.to_vec().into()], |_| Ok(()))?.is_empty())
}

/// Whether one of these columns is in the partition key of the relation, an ancestor or a descendant.
pub fn is_partition_key(relid: pg_sys::Oid, columns: &[String]) -> Result<bool, TtlError> {
    let sql = format!("SELECT FROM pg_partition_tree($1) AS tree WHERE {}", partition_key_sql("tree.relid", "$2"));
    let is_below = !spi::read(&sql, &[relid.into(), columns.to_vec().into()], |_| Ok(()))?.is_empty();
    Ok(is_below || is_partition_key_above(relid, columns)?)
}
