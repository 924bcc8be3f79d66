//! The table that expired rows move to, and whether it can hold them.

use crate::catalog::Catalog;
use crate::error::TtlError;
use crate::pg::relation::{self, Lock, Shape, tree};
use crate::pg::{access, spi, storage};
use pgrx::pg_sys::{self, Oid};
use pgrx::spi::quote_identifier;

/// An archive for the rows of one relation.
pub struct Archive {
    relid: Oid,
    /// Qualified and quoted.
    pub name: String,
    /// The copied columns, quoted.
    pub columns: Vec<String>,
    shape: Shape,
}

impl Archive {
    /// Opens the archive, if it has every column of `source` and needs no value that a row from there lacks. Locks it
    /// as an INSERT does.
    pub fn open(relid: Oid, source: Oid, owner: Oid) -> Result<Self, TtlError> {
        let shape = relation::lock(relid, Lock::Change).ok_or(TtlError::UnknownTable(relid.to_u32()))?;
        storage::check(relid)?;
        let name = shape.qualified_name();
        // Triggers of the archive and its partitions run with the rights of the rows' owner.
        let others = spi::query(
            "SELECT FROM pg_class WHERE oid = ANY ($1) AND relowner <> $2",
            &[tree(relid).into(), owner.into()],
            |_| Ok(()),
        )?;
        if shape.owner() != owner || !others.is_empty() {
            return Err(TtlError::ArchiveOwner(name));
        }
        let columns = spi::query(
            "SELECT coalesce(s.attname, a.attname)::text, s.atttypid, s.atttypmod, a.atttypid, a.atttypmod,
                    coalesce(a.attgenerated, '') <> '',
                    s.attname IS NOT NULL OR NOT a.attnotnull OR a.atthasdef OR a.attidentity <> ''
             FROM (SELECT * FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped) AS s
             FULL JOIN (SELECT * FROM pg_attribute WHERE attrelid = $2 AND attnum > 0 AND NOT attisdropped) AS a
                  USING (attname)
             ORDER BY coalesce(s.attnum, a.attnum)",
            &[source.into(), relid.into()],
            |row| {
                Ok(Column {
                    name: row.get(1)?.unwrap_or_default(),
                    source: row.get(2)?.zip(row.get(3)?),
                    archive: row.get(4)?.zip(row.get(5)?),
                    is_generated: row.get(6)?.unwrap_or_default(),
                    is_filled: row.get(7)?.unwrap_or_default(),
                })
            },
        )?;
        let mut copied = Vec::new();
        for column in columns {
            if column.fits(&name)? {
                copied.push(quote_identifier(&column.name));
            }
        }
        Ok(Self { relid, name, columns: copied, shape })
    }

    /// Refuses an archive whose tree overlaps with the table's, and one that a crash would empty.
    pub fn check_apart(relid: Oid, table: Oid) -> Result<(), TtlError> {
        let parts = tree(table);
        if tree(relid).iter().any(|part| parts.contains(part)) {
            return Err(TtlError::ArchiveIsSource(access::relation_name(table).unwrap_or_default()));
        }
        let unlogged = spi::query(
            "SELECT a.relname::text FROM pg_class a WHERE a.oid = ANY ($1) AND a.relpersistence = 'u'
             AND EXISTS (SELECT FROM pg_class t WHERE t.oid = ANY ($2) AND t.relpersistence <> 'u')",
            &[tree(relid).into(), parts.into()],
            |row| Ok(row.get(1)?.unwrap_or_default()),
        )?;
        match unlogged.into_iter().next() {
            Some(name) => Err(TtlError::ArchiveUnlogged(name)),
            None => Ok(()),
        }
    }

    /// Refuses an archive from which other rules move rows back to `table`: rows would circulate forever. `but` is the
    /// rule being checked.
    pub fn check_end(catalog: &Catalog, relid: Oid, table: Oid, but: Option<i64>) -> Result<(), TtlError> {
        let moves = catalog.archives(but)?;
        let (parts, mut reached) = (tree(table), vec![relid]);
        let mut place = 0;
        while let Some(here) = reached.get(place).map(|relid| tree(*relid)) {
            if here.iter().any(|part| parts.contains(part)) {
                return Err(TtlError::ArchiveCircle(access::relation_name(relid).unwrap_or_default()));
            }
            for (from, to) in &moves {
                if !reached.contains(to) && tree(*from).iter().any(|part| here.contains(part)) {
                    reached.push(*to);
                }
            }
            place += 1;
        }
        Ok(())
    }

    /// Locks the archive and checks that it is unchanged: statements name it, and must keep their meaning.
    pub fn is_unchanged(&self) -> bool {
        relation::lock(self.relid, Lock::Change).as_ref() == Some(&self.shape)
    }
}

/// A column of either table, with its type and modifier in both.
struct Column {
    name: String,
    source: Option<(Oid, i32)>,
    archive: Option<(Oid, i32)>,
    is_generated: bool,
    /// Whether a row from the source has a value for the column, or needs none.
    is_filled: bool,
}

impl Column {
    /// Whether the column is copied; a column that the archive generates is not.
    fn fits(&self, archive: &str) -> Result<bool, TtlError> {
        match (self.source, self.archive) {
            (Some(_), None) => Err(TtlError::ArchiveMissing { archive: archive.into(), column: self.name.clone() }),
            (Some(from), Some(to)) if !self.is_generated && !keeps_value(from, to) => {
                Err(TtlError::ArchiveType { archive: archive.into(), column: self.name.clone() })
            }
            (None, _) if !self.is_filled => {
                Err(TtlError::ArchiveNeeds { archive: archive.into(), column: self.name.clone() })
            }
            (from, _) => Ok(from.is_some() && !self.is_generated),
        }
    }
}

/// Lossless conversions, besides those that change nothing.
const WIDENING: [(Oid, &[Oid]); 5] = [
    (pg_sys::INT2OID, &[pg_sys::INT4OID, pg_sys::INT8OID, pg_sys::NUMERICOID]),
    (pg_sys::INT4OID, &[pg_sys::INT8OID, pg_sys::NUMERICOID, pg_sys::FLOAT8OID]),
    (pg_sys::INT8OID, &[pg_sys::NUMERICOID]),
    (pg_sys::FLOAT4OID, &[pg_sys::FLOAT8OID]),
    (pg_sys::DATEOID, &[pg_sys::TIMESTAMPOID]),
];

/// Whether one type, with its modifier, can hold every value of another unchanged.
fn keeps_value((from, from_modifier): (Oid, i32), (to, to_modifier): (Oid, i32)) -> bool {
    let (from, from_modifier) = access::base_type_and_modifier(from, from_modifier);
    let (to, to_modifier) = access::base_type_and_modifier(to, to_modifier);
    let is_wider = WIDENING.iter().any(|(narrow, wide)| *narrow == from && wide.contains(&to));
    let is_text = |type_oid| [pg_sys::TEXTOID, pg_sys::VARCHAROID].contains(&type_oid);
    let is_same = from == to || (is_text(from) && is_text(to));
    let is_longer = from == pg_sys::VARCHAROID && to == from && from_modifier > 0 && to_modifier > from_modifier;
    let keeps_length = to_modifier < 0 || is_longer || (from, from_modifier) == (to, to_modifier);
    (is_same || is_wider) && keeps_length
}
