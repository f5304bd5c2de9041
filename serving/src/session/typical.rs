//! What something takes typically.

use std::sync::atomic::{AtomicUsize, Ordering};

/// An estimate that follows the rule and not the exception, in steps of so small a part of itself, larger ones at
/// first. 0 before the first measurement; of two that are noted at once one may get lost.
#[derive(Debug, Default)]
pub(super) struct Typical<const PART: usize = 16> {
    value: AtomicUsize,
    /// How many measurements there were, up to those that make steps as small as they become.
    notes: AtomicUsize,
}

impl<const PART: usize> Typical<PART> {
    pub(super) fn get(&self) -> usize {
        self.value.load(Ordering::Relaxed)
    }

    /// Notes the newest measurement.
    pub(super) fn note(&self, newest: u128) {
        let newest = usize::try_from(newest).unwrap_or(usize::MAX);
        let notes = self.notes.load(Ordering::Relaxed);
        let part = notes / 2 + 1;
        if part < PART {
            self.notes.store(notes + 1, Ordering::Relaxed);
        }
        self.value.store(towards(self.get(), newest, part.min(PART)), Ordering::Relaxed);
    }
}

/// The next estimate: a small step towards the newest measurement, whatever its distance, so that a run during
/// which the thread was off the processor hardly counts.
fn towards(typical: usize, newest: usize, part: usize) -> usize {
    let step = typical / part + 1;
    match newest.cmp(&typical) {
        _ if typical == 0 => newest,
        std::cmp::Ordering::Greater => typical.saturating_add(step).min(newest),
        std::cmp::Ordering::Less => typical.saturating_sub(step).max(newest),
        std::cmp::Ordering::Equal => typical,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_the_rule_not_the_exception() {
        let typical: Typical = Typical::default();
        assert_eq!(typical.get(), 0);
        for run in 0..1000 {
            typical.note(if run % 10 == 0 { 50_000 } else { 5 });
        }
        assert!(typical.get() < 10, "{typical:?}");
        for _ in 0..200 {
            typical.note(3_000);
        }
        assert_eq!(typical.get(), 3_000);
        typical.note(u128::MAX);
        assert!(typical.get() < 4_000, "{typical:?}");
    }

    #[test]
    fn a_first_measurement_that_was_an_exception_is_soon_forgotten() {
        let typical: Typical<64> = Typical::default();
        typical.note(1_000_000);
        for run in 1..20 {
            typical.note(if run % 10 == 0 { 1_000_000 } else { 1_000 });
        }
        assert!(typical.get() < 2_000, "{typical:?}");
    }
}
