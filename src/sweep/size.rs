//! How many rows a batch removes.

use crate::catalog::Rule;
use crate::guc;
use std::time::Duration;

/// The size of a rule's batches. Without a size of its own, a rule's batches take as many rows as fit into the target
/// time: few where a trigger is slow, many where rows are only deleted, and fewer while other sessions wait.
pub struct Size {
    rows: usize,
    /// How long a batch should take, and the smallest and largest size.
    aim: Option<(Duration, usize, usize)>,
}

impl Size {
    pub fn of(rule: &Rule) -> Self {
        let rows = |size: i32| size.unsigned_abs() as usize;
        match rule.options.batch_size {
            Some(size) => Self { rows: rows(size), aim: None },
            None => Self::aiming_at(guc::target_batch_time(), rows(guc::batch_size())),
        }
    }

    /// Begins small: nobody knows yet how long a row takes.
    fn aiming_at(target: Duration, usual: usize) -> Self {
        let part = |divisor: usize| (usual / divisor).max(1);
        match target.is_zero() {
            true => Self { rows: usual, aim: None },
            false => Self { rows: part(100), aim: Some((target, part(1_000), usual.saturating_mul(10))) },
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many TIDs are searched for at once: several batches, so that finding rows costs little compared with removing
    /// them, but never more than fits easily into memory.
    pub fn of_harvest(&self) -> usize {
        self.rows.saturating_mul(10).clamp(10_000, 100_000)
    }

    /// Learns from a batch that removed `removed` rows, and that other sessions waited for or not.
    pub fn learn(&mut self, removed: usize, took: Duration, is_awaited: bool) {
        let Some((target, least, most)) = self.aim else { return };
        let factor =
            if is_awaited { 0.5 } else { (target.as_secs_f64() / took.as_secs_f64().max(1e-6)).clamp(0.25, 4.0) };
        // A batch that was not full does not tell how long a larger one takes.
        if factor < 1.0 || removed >= self.rows {
            self.rows = ((self.rows as f64 * factor) as usize).clamp(least, most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(100);

    /// The size after some batches in which each row takes this long.
    fn settled(row: Duration) -> usize {
        let mut size = Size::aiming_at(TARGET, 10_000);
        for _ in 0..20 {
            size.learn(size.rows(), row * size.rows() as u32, false);
        }
        size.rows()
    }

    #[test]
    fn a_batch_takes_as_many_rows_as_fit_into_the_target_time() {
        assert_eq!(settled(Duration::from_nanos(400)), 100_000, "no more, however fast");
        assert!((9_000..=11_000).contains(&settled(Duration::from_micros(10))));
        assert!((450..=550).contains(&settled(Duration::from_micros(200))));
        assert_eq!(settled(Duration::from_secs(1)), 10, "no fewer, however slow");
    }

    #[test]
    fn a_batch_shrinks_while_others_wait_and_does_not_grow_on_hearsay() {
        let mut size = Size::aiming_at(TARGET, 10_000);
        assert_eq!(size.rows(), 100, "it begins small");
        size.learn(100, TARGET / 100, true);
        assert_eq!(size.rows(), 50);
        size.learn(20, TARGET / 100, false);
        assert_eq!(size.rows(), 50, "20 rows tell nothing");
        size.learn(50, TARGET / 100, false);
        assert_eq!(size.rows(), 200);
    }

    #[test]
    fn a_size_of_ones_own_or_no_target_is_kept() {
        let mut size = Size::aiming_at(Duration::ZERO, 10_000);
        size.learn(10_000, TARGET * 100, true);
        assert_eq!(size.rows(), 10_000);
    }
}
