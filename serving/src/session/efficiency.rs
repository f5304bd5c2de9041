//! How many rows a model had better run at once, learned from what its runs take.
//!
//! Rows that run together share what a run costs by itself, weights that are read above all, so that more of them take
//! less each; but only up to a size that depends on the model and the processor, and beyond another one what lies
//! between the layers is out of the nearest cache and each row takes more again (seen: a perceptron of 1.3 million
//! weights, 75 us for one row, 27 for each of 4 to 44, 30 for each of 64). So runs are measured by their size, and
//! those that wait are split among the sessions that are free as far as that costs nothing: on many cores they all are
//! answered sooner.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::typical::Typical;

/// Sizes up to 1, 2, 4 and so on count as alike, the largest with all beyond.
const SIZES: usize = 13;
/// Sizes are as good as the best one up to this part of its time: splitting and answering have their price, too, and
/// measurements their error.
const TOLERANCE_PART: usize = 20;
/// One of so many runs is of another size, each in turn, since what is never measured is never known.
const TRIAL_EACH: usize = 32;

/// What runs of each size take for an element of their inputs. Of elements, since rows may be of several shapes.
#[derive(Debug, Default)]
pub(super) struct Efficiency {
    /// Picoseconds for each; 0 where that is not known.
    element_picos: [Typical<64>; SIZES],
    /// Runs that were asked about, of which some are trials.
    runs: AtomicUsize,
}

impl Efficiency {
    /// Notes how long a run of so many rows took that had so many elements.
    pub(super) fn ran(&self, rows: usize, elements: usize, elapsed: Duration) {
        if let Some(picos) = elapsed.as_nanos().saturating_mul(1000).checked_div(elements as u128) {
            self.element_picos[size(rows)].note(picos.max(1));
        }
    }

    /// How many rows to run at once of so many that could, up to `rows_max`, where so many sessions are free for the
    /// rest. All, as long as it is not known how these run.
    pub(super) fn share(&self, rows: usize, rows_max: usize, free: usize) -> usize {
        let all = rows.min(rows_max);
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        if run % TRIAL_EACH == TRIAL_EACH - 1 {
            return all.min(1 << (run / TRIAL_EACH % (size(all) + 1)));
        }
        let sizes = &self.element_picos[..=size(all)];
        let known = || sizes.iter().map(Typical::get).enumerate().filter(|(_, picos)| *picos > 0);
        let best = known().map(|(_, picos)| picos).min().unwrap_or(0);
        let mut good = known().filter(|(_, picos)| *picos <= best + best / TOLERANCE_PART);
        let (Some((least, _)), true) = (good.next(), sizes[size(all)].get() > 0) else { return all };
        let most = good.last().map_or(least, |(most, _)| most);
        rows.div_ceil(free + 1).clamp(1 << least, 1 << most).min(all)
    }
}

/// The place of a size among those that are told from each other.
fn size(rows: usize) -> usize {
    (rows.max(1).next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a model of which a row of 10 elements takes `row(rows)` nanoseconds in a run of so many rows.
    fn learned(sizes: &[usize], row: impl Fn(usize) -> usize) -> Efficiency {
        let efficiency = Efficiency::default();
        for rows in sizes {
            efficiency.ran(*rows, 10 * rows, Duration::from_nanos((rows * row(*rows)) as u64));
        }
        efficiency
    }

    /// What is run at once, but for trials.
    fn share(efficiency: &Efficiency, rows: usize, rows_max: usize, free: usize) -> usize {
        let shares: Vec<usize> =
            (0..TRIAL_EACH - 1).map(|_| efficiency.share(rows, rows_max, free)).collect();
        assert!(efficiency.share(rows, rows_max, free) <= rows.min(rows_max), "a trial");
        assert!(shares.iter().all(|share| *share == shares[0]), "{shares:?}");
        shares[0]
    }

    #[test]
    fn what_is_not_known_runs_together() {
        let nothing = Efficiency::default();
        assert_eq!(share(&nothing, 50, 64, 3), 50);
        assert_eq!(share(&nothing, 500, 64, 3), 64);
        let one = learned(&[1], |_| 100);
        assert_eq!(share(&one, 50, 64, 3), 50);
    }

    #[test]
    fn a_model_whose_runs_cost_as_much_whatever_their_size_runs_all_rows_together() {
        let fixed = learned(&[1, 2, 4, 8, 16, 32, 64], |rows| 6400 / rows);
        assert_eq!(share(&fixed, 64, 64, 3), 64);
        assert_eq!(share(&fixed, 9, 64, 3), 9);
    }

    #[test]
    fn a_model_that_gains_nothing_from_more_rows_shares_them_among_the_sessions() {
        let linear = learned(&[1, 2, 4, 8, 16, 32, 64], |_| 100);
        assert_eq!(share(&linear, 64, 64, 0), 64);
        assert_eq!(share(&linear, 64, 64, 3), 16);
        assert_eq!(share(&linear, 3, 64, 3), 1);
    }

    #[test]
    fn runs_are_neither_smaller_nor_larger_than_is_good_for_them() {
        let both = learned(&[1, 2, 4, 8, 16, 32, 64], |rows| match rows {
            1..4 => 75,
            4..=32 => 27,
            _ => 30,
        });
        assert_eq!(share(&both, 64, 64, 0), 32);
        assert_eq!(share(&both, 64, 64, 3), 16);
        assert_eq!(share(&both, 64, 64, 63), 4);
        assert_eq!(share(&both, 3, 64, 63), 3);
        assert_eq!(share(&both, 64, 20, 0), 20, "the limit of the configuration");
    }

    #[test]
    fn every_size_is_tried_now_and_then() {
        let efficiency = learned(&[64], |_| 1);
        let mut tried: Vec<usize> = (0..8 * TRIAL_EACH).map(|_| efficiency.share(50, 64, 0)).collect();
        tried.sort_unstable();
        tried.dedup();
        assert_eq!(tried, [1, 2, 4, 8, 16, 32, 50]);
    }

    #[test]
    fn rows_of_several_shapes_are_compared_by_their_elements() {
        let efficiency = Efficiency::default();
        efficiency.ran(2, 2 * 100, Duration::from_nanos(2 * 1000));
        efficiency.ran(64, 64 * 10, Duration::from_nanos(64 * 90));
        assert_eq!(share(&efficiency, 64, 64, 3), 64);
        efficiency.ran(1, 0, Duration::from_secs(1));
        assert_eq!(efficiency.element_picos[0].get(), 0, "there is nothing to divide by");
    }
}
