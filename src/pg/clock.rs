//! The wall clock beside the time since the machine was started, which nobody sets.

use super::compat;
use once_cell::sync::OnceCell;
use std::cell::RefCell;
use std::time::Duration;

/// How far the wall clock is ahead of the time since the machine was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Tells one start of the machine from another.
    pub boot: String,
    /// In microseconds.
    pub ahead: i64,
}

impl Clock {
    /// Returns how far the wall clock has been set ahead since another reading, in microseconds; `None` if the machine
    /// was started meanwhile.
    pub fn moved_since(&self, before: &Self) -> Option<i64> {
        (self.boot == before.boot).then(|| self.ahead - before.ahead)
    }
}

/// Reads the clocks; `None` if the machine does not tell.
pub fn read() -> Option<Clock> {
    static BOOT: OnceCell<Option<String>> = OnceCell::new();
    let look = || Some(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned());
    let boot = BOOT.get_or_init(look).clone()?;
    let wall = i64::try_from(std::time::UNIX_EPOCH.elapsed().ok()?.as_micros()).ok()?;
    let running = i64::try_from(compat::time_since_boot()?.as_micros()).ok()?;
    Some(Clock { boot, ahead: wall - running })
}

/// Returns a clock in microseconds, the same in all processes, that setting the wall clock does not change where the machine
/// has one.
pub fn steady() -> i64 {
    let running = compat::time_since_boot().and_then(|since| i64::try_from(since.as_micros()).ok());
    running.unwrap_or_else(|| pgrx::datum::datetime_support::clock_timestamp().into())
}

thread_local! {
    static TRUSTED: RefCell<Option<Clock>> = const { RefCell::new(None) };
}

/// Keeps a reading of a clock that is right.
pub fn trust(clock: Clock) {
    TRUSTED.set(Some(clock));
}

/// Whether the wall clock has been set ahead by more than `most` since the reading that is trusted, if there is one.
pub fn has_jumped(most: Option<Duration>) -> bool {
    let Some(most) = most else { return false };
    TRUSTED.with_borrow(|trusted| {
        let moved = trusted.as_ref().and_then(|trusted| read()?.moved_since(trusted));
        moved.is_some_and(|moved| moved > most.as_micros() as i64)
    })
}
