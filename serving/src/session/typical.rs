//! What something takes typically.

use std::sync::atomic::{AtomicUsize, Ordering};

/// An estimate that follows the rule and not the exception. 0 before the first measurement; of two that are noted
/// at once one may get lost.
#[derive(Debug, Default)]
pub(super) struct Typical(AtomicUsize);

impl Typical {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Notes the newest measurement.
    pub(super) fn note(&self, newest: u128) {
        let newest = usize::try_from(newest).unwrap_or(usize::MAX);
        self.0.store(towards(self.get(), newest), Ordering::Relaxed);
    }
}

/// The next estimate: a small step towards the newest measurement, whatever its distance, so that a run during
/// which the thread was off the processor hardly counts.
fn towards(typical: usize, newest: usize) -> usize {
    let step = typical / 16 + 1;
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
        let typical = Typical::default();
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
}
