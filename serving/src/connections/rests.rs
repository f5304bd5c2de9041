//! What is tried again and again as long as it is worth it, and less and less often where it is not.

use std::sync::atomic::{AtomicUsize, Ordering};

/// So many times are left out, at most, before it is tried again.
const RESTS_MAX: usize = 64;

/// Whether to try something. One at a time asks.
#[derive(Debug, Default)]
pub(super) struct Rests {
    /// How often in a row it was in vain.
    in_vain: AtomicUsize,
    /// How often it is still to be left out.
    left: AtomicUsize,
}

impl Rests {
    /// Counts a time at which it could be tried; whether it is to be.
    pub(super) fn are_over(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    /// Notes whether it was in vain. The first time in a row may be chance; with each one more, twice as many are left
    /// out.
    pub(super) fn note(&self, in_vain: bool) {
        let row = if in_vain { self.in_vain.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.in_vain.store(row, Ordering::Relaxed);
        let doubled =
            row.checked_sub(2).map_or(0, |times| 1_usize.checked_shl(times as u32).unwrap_or(RESTS_MAX));
        self.left.store(doubled.min(RESTS_MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_vain_is_tried_less_and_less() {
        let rests = Rests::default();
        let tried: Vec<usize> = (0..300)
            .filter(|_| {
                let tried = rests.are_over();
                if tried {
                    rests.note(true);
                }
                tried
            })
            .collect();
        assert_eq!(tried, [0, 1, 3, 6, 11, 20, 37, 70, 135, 200, 265]);
    }

    #[test]
    fn what_was_worth_it_once_is_tried_each_time_again() {
        let rests = Rests::default();
        let left = |in_vain| {
            rests.note(in_vain);
            rests.left.load(Ordering::Relaxed)
        };
        assert_eq!([true, true, true, true, false, true, true].map(left), [0, 1, 2, 4, 0, 0, 1]);
    }
}
