//! Whether workers sweep this database.

use super::Catalog;
use crate::error::TtlError;
use crate::pg::spi;

impl Catalog {
    pub fn is_sweeping_on(&self) -> Result<bool, TtlError> {
        let sql = format!("SELECT NOT EXISTS (SELECT FROM {}.ttl_worker_off)", self.schema);
        let on = self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))?;
        Ok(on == [Some(true)])
    }

    /// Switches sweeping on or off. Returns `false` if it was on or off already. Rules that wait after a restore no longer do when
    /// it is switched on.
    pub fn set_sweeping(&self, on: bool) -> Result<bool, TtlError> {
        if on {
            let sql = format!("DELETE FROM {}.ttl_worker_off", self.schema);
            let has_changed = self.with_rights(|| spi::execute(&sql, &[]))? > 0;
            self.release(None)?;
            Ok(has_changed)
        } else {
            self.switch_off(None)
        }
    }

    /// Why sweeping is off, if nobody has asked for that.
    pub fn off_because(&self) -> Result<Option<String>, TtlError> {
        let sql = format!("SELECT because FROM {}.ttl_worker_off", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))?.into_iter().flatten().next())
    }

    fn switch_off(&self, because: Option<&str>) -> Result<bool, TtlError> {
        let sql = format!("INSERT INTO {}.ttl_worker_off (because) VALUES ($1) ON CONFLICT DO NOTHING", self.schema);
        Ok(self.with_rights(|| spi::execute(&sql, &[because.into()]))? > 0)
    }

    /// Whether the rows of this database may come from the recovery with this number, and nobody has looked at them since.
    pub fn is_recovered(&self, recovery: i64) -> Result<bool, TtlError> {
        let sql = format!("SELECT NOT EXISTS (SELECT FROM {}.ttl_recovery WHERE id = $1)", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[recovery.into()], |row| row.get(1)))? == [Some(true)])
    }

    /// Takes note of a recovery, and switches sweeping off because of it if that is asked for. Returns whether it was on.
    pub fn acknowledge_recovery(&self, recovery: i64, holds: bool) -> Result<bool, TtlError> {
        let sql = format!("INSERT INTO {}.ttl_recovery (id) VALUES ($1) ON CONFLICT DO NOTHING", self.schema);
        self.with_rights(|| spi::execute(&sql, &[recovery.into()]))?;
        if holds { self.switch_off(Some("recovery")) } else { Ok(false) }
    }

    /// Whether a worker is in this database, as the server sees it.
    pub fn has_worker(&self) -> Result<bool, TtlError> {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM {}.ttl_worker_status() WHERE database_name = current_database())",
            self.schema
        );
        Ok(spi::read(&sql, &[], |row| row.get(1))? == [Some(true)])
    }
}
