//! Whether workers sweep this database.

use super::Catalog;
use super::clock::BECAUSE as BECAUSE_OF_CLOCK;
use crate::error::TtlError;
use crate::pg::spi;

impl Catalog {
    pub fn is_sweeping_on(&self) -> Result<bool, TtlError> {
        let sql = format!("SELECT NOT EXISTS (SELECT FROM {}.ttl_worker_off)", self.schema);
        let on = self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))?;
        Ok(on == [Some(true)])
    }

    /// Switches sweeping on or off. Returns `false` if it already was. Switching on releases rules held by a restore, and
    /// takes the clock for right.
    pub fn set_sweeping(&self, on: bool) -> Result<bool, TtlError> {
        if on {
            let sql = format!("DELETE FROM {}.ttl_worker_off", self.schema);
            let has_changed = self.with_rights(|| spi::execute(&sql, &[]))? > 0;
            self.release(None)?;
            // Only a clock in doubt is worth waiting for somebody who has just noted it.
            if self.is_clock_in_doubt()? {
                self.trust_clock()?
            } else {
                self.note_clock()?
            }
            Ok(has_changed)
        } else {
            self.switch_off(None)
        }
    }

    /// Returns why sweeping is off, unless a user has switched it off.
    pub fn off_because(&self) -> Result<Option<String>, TtlError> {
        let sql = format!("SELECT because FROM {}.ttl_worker_off", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))?.into_iter().flatten().next())
    }

    pub(super) fn switch_off(&self, because: Option<&str>) -> Result<bool, TtlError> {
        // Any other reason lasts longer than a clock that has jumped.
        let sql = format!(
            "INSERT INTO {}.ttl_worker_off AS off (because) VALUES ($1) ON CONFLICT (only_one) DO UPDATE
             SET because = excluded.because, since = excluded.since
             WHERE off.because = '{BECAUSE_OF_CLOCK}' AND excluded.because IS DISTINCT FROM off.because",
            self.schema
        );
        Ok(self.with_rights(|| spi::execute(&sql, &[because.into()]))? > 0)
    }

    /// Whether this database's rows may come from the recovery with this number, not acknowledged here yet.
    pub fn is_recovered(&self, recovery: i64) -> Result<bool, TtlError> {
        let sql = format!("SELECT NOT EXISTS (SELECT FROM {}.ttl_recovery WHERE id = $1)", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[recovery.into()], |row| row.get(1)))? == [Some(true)])
    }

    /// Records a recovery and, if `holds`, switches sweeping off. Returns whether it was on and is now off.
    pub fn acknowledge_recovery(&self, recovery: i64, holds: bool) -> Result<bool, TtlError> {
        let sql = format!("INSERT INTO {}.ttl_recovery (id) VALUES ($1) ON CONFLICT DO NOTHING", self.schema);
        self.with_rights(|| spi::execute(&sql, &[recovery.into()]))?;
        if holds { self.switch_off(Some("recovery")) } else { Ok(false) }
    }

    /// Whether this database has a worker, according to the server.
    pub fn has_worker(&self) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM {}.ttl_worker_status() WHERE database_name = current_database())",
            self.schema
        );
        Ok(spi::read(&sql, &[], |row| row.get(1))? == [Some(true)])
    }
}
