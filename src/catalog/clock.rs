//! The clock that this database's sweeps go by. If it jumps ahead, everything seems to have expired: nothing is removed
//! until the clock is back, or somebody says that it is right.

use super::Catalog;
use crate::error::TtlError;
use crate::guc;
use crate::pg::clock::{self, Clock};
use crate::pg::{access, memo, spi};

/// What has become of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    None,
    /// It has jumped ahead, and sweeping is off.
    Jumped,
    /// It is back, and sweeping is on again.
    Back,
}

/// Why sweeping is off.
pub(super) const BECAUSE: &str = "clock";

/// First key of the advisory lock of who notes the clock.
const CLOCK_LOCK_CLASS: u32 = 0x7474_6c01;

/// Changes of this many microseconds are noted, so that they do not add up.
const NOTED: i64 = 1_000_000;

impl Catalog {
    /// Follows the clock, and switches sweeping off and on with it. Writes nothing while the clock goes as before.
    pub fn watch_clock(&self) -> Result<Change, TtlError> {
        let is_held = self.is_held_by_clock()?;
        let (Some(most), Some(now)) = (guc::max_clock_jump(), clock::read()) else {
            return if is_held { self.go_on() } else { Ok(Change::None) };
        };
        let known = self.trusted_clock()?;
        let moved = known.as_ref().and_then(|known| now.moved_since(known));
        match (known, moved) {
            (Some(known), Some(moved)) if moved > most.as_micros() as i64 => {
                clock::trust(known);
                if is_held || !self.switch_off(Some(BECAUSE))? {
                    return Ok(Change::None);
                }
                memo::forget(self.relid);
                Ok(Change::Jumped)
            }
            (Some(known), Some(moved)) => {
                clock::trust(known);
                if moved.abs() > NOTED {
                    self.note_clock()?;
                }
                if is_held { self.go_on() } else { Ok(Change::None) }
            }
            // The machine was started meanwhile. A clock from before the jump has been set back; one from before all that
            // was seen is yet to be set, which is no jump.
            _ if is_held && !self.is_before_jump()? => Ok(Change::None),
            _ if !is_held && self.is_behind()? => Ok(Change::None),
            _ => {
                self.note_clock()?;
                if is_held { self.go_on() } else { Ok(Change::None) }
            }
        }
    }

    /// Fails if the clock has jumped ahead, and nobody has said that it is right. The first sweep after a start of the
    /// machine trusts it.
    pub fn check_clock(&self) -> Result<(), TtlError> {
        if self.is_clock_in_doubt()? {
            return Err(TtlError::ClockJumped);
        }
        let (Some(_), Some(now)) = (guc::max_clock_jump(), clock::read()) else { return Ok(()) };
        match self.trusted_clock()? {
            Some(known) if known.boot == now.boot => clock::trust(known),
            Some(_) if self.is_behind()? => {}
            _ => self.note_clock()?,
        }
        Ok(())
    }

    /// Whether the clock has jumped ahead, and nobody has said that it is right.
    pub fn is_clock_in_doubt(&self) -> Result<bool, TtlError> {
        let (Some(most), Some(now)) = (guc::max_clock_jump(), clock::read()) else { return Ok(false) };
        let moved = self.trusted_clock()?.and_then(|known| now.moved_since(&known));
        Ok(match moved {
            Some(moved) => moved > most.as_micros() as i64,
            None => self.is_held_by_clock()?,
        })
    }

    /// Notes the clock, unless another transaction has just done so: a session that leaves one open must keep nobody from
    /// sweeping.
    pub(super) fn note_clock(&self) -> Result<(), TtlError> {
        if access::try_advisory_lock(CLOCK_LOCK_CLASS, 0, false) { self.trust_clock() } else { Ok(()) }
    }

    /// Takes the clock as it is for right.
    pub fn trust_clock(&self) -> Result<(), TtlError> {
        let Some(now) = clock::read() else { return Ok(()) };
        let sql = format!(
            "INSERT INTO {}.ttl_clock (boot, ahead, seen) VALUES ($1, $2, clock_timestamp())
             ON CONFLICT (only_one) DO UPDATE SET boot = excluded.boot, ahead = excluded.ahead, seen = excluded.seen",
            self.schema
        );
        self.with_rights(|| spi::execute(&sql, &[now.boot.as_str().into(), now.ahead.into()]))?;
        clock::trust(now);
        Ok(())
    }

    fn trusted_clock(&self) -> Result<Option<Clock>, TtlError> {
        let sql = format!("SELECT boot, ahead FROM {}.ttl_clock", self.schema);
        let found = self.with_rights(|| {
            spi::read(&sql, &[], |row| {
                Ok(Clock { boot: row.get(1)?.unwrap_or_default(), ahead: row.get(2)?.unwrap_or_default() })
            })
        })?;
        Ok(found.into_iter().next())
    }

    /// Whether sweeping is off because the clock has jumped ahead.
    pub fn is_held_by_clock(&self) -> Result<bool, TtlError> {
        Ok(self.off_because()?.as_deref() == Some(BECAUSE))
    }

    fn go_on(&self) -> Result<Change, TtlError> {
        let sql = format!("DELETE FROM {}.ttl_worker_off WHERE because = $1", self.schema);
        self.with_rights(|| spi::execute(&sql, &[BECAUSE.into()]))?;
        memo::forget(self.relid);
        Ok(Change::Back)
    }

    fn is_behind(&self) -> Result<bool, TtlError> {
        let sql = format!("SELECT clock_timestamp() < seen FROM {}.ttl_clock", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[], |row| row.get(1)))? == [Some(true)])
    }

    fn is_before_jump(&self) -> Result<bool, TtlError> {
        let sql = format!("SELECT clock_timestamp() < since FROM {}.ttl_worker_off WHERE because = $1", self.schema);
        Ok(self.with_rights(|| spi::read(&sql, &[BECAUSE.into()], |row| row.get(1)))? == [Some(true)])
    }
}
