//! Learned batch sizes: the number of rows that a model version runs most efficiently at once.
//!
//! A larger batch spreads the fixed cost of a run, mostly the reading of the weights, over more rows. Beyond some
//! size the values between the layers leave the processor's cache, and the cost of each row rises again. Measured: a
//! perceptron of 1.3 million weights takes 75 us for one row, 27 us for each of 4 to 44, 30 us for each of 64. The
//! sizer splits rows among the idle sessions as far as that costs nothing.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::run_time::{BatchCosts, MedianEstimate, batch_size};

/// Sizes whose cost is within 1/20 of the best cost count as equally good.
const TOLERANCE_PART: usize = 20;
/// One of 32 batches is a trial of another size. Trials take the sizes in turn, so that every size is measured.
const TRIAL_EACH: usize = 32;

/// Chooses batch sizes by measured costs.
#[derive(Debug, Default)]
pub(super) struct BatchSizer {
    batches: AtomicUsize,
}

impl BatchSizer {
    /// Rows of the next batch when `rows` compatible rows wait, at most `rows_max` fit, and `idle` further sessions
    /// can take the rest. Takes as many as fit while the cost of a batch of that size is unknown.
    pub(super) fn rows(&self, costs: &BatchCosts, rows: usize, rows_max: usize, idle: usize) -> usize {
        let all = rows.min(rows_max);
        let largest = batch_size(all);
        let batch = self.batches.fetch_add(1, Ordering::Relaxed);
        if batch % TRIAL_EACH == TRIAL_EACH - 1 {
            return all.min(1 << (batch / TRIAL_EACH % (largest + 1)));
        }
        let known = || {
            let costs = costs.iter().map(MedianEstimate::get).take(largest + 1);
            costs.enumerate().filter(|(_, picos)| *picos > 0)
        };
        let best = known().map(|(_, picos)| picos).min().unwrap_or(0);
        let mut good = known().filter(|(_, picos)| *picos <= best + best / TOLERANCE_PART);
        let (Some((least, _)), true) = (good.next(), costs[largest].get() > 0) else { return all };
        let most = good.last().map_or(least, |(most, _)| most);
        rows.div_ceil(idle + 1).clamp(1 << least, 1 << most).min(all)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::run_time::RunTimeEstimate;
    use super::*;

    /// Elements of a row.
    const WIDTH: usize = 10;

    /// A model of which each row takes `row(rows)` nanoseconds in a run of `rows` rows.
    fn learned(sizes: &[usize], row: impl Fn(usize) -> usize) -> RunTimeEstimate {
        let estimate = RunTimeEstimate::default();
        for rows in sizes {
            estimate.record(*rows, WIDTH * rows, Duration::from_nanos((rows * row(*rows)) as u64));
        }
        estimate
    }

    /// The size chosen outside of trials.
    fn chosen(estimate: &RunTimeEstimate, rows: usize, rows_max: usize, idle: usize) -> usize {
        let (sizer, costs) = (BatchSizer::default(), estimate.batch_costs(1, WIDTH));
        let sizes: Vec<usize> =
            (0..TRIAL_EACH - 1).map(|_| sizer.rows(costs, rows, rows_max, idle)).collect();
        assert!(sizer.rows(costs, rows, rows_max, idle) <= rows.min(rows_max), "a trial");
        assert!(sizes.iter().all(|size| *size == sizes[0]), "{sizes:?}");
        sizes[0]
    }

    #[test]
    fn all_rows_run_together_while_costs_are_unknown() {
        let nothing = RunTimeEstimate::default();
        assert_eq!(chosen(&nothing, 50, 64, 3), 50);
        assert_eq!(chosen(&nothing, 500, 64, 3), 64);
        let one = learned(&[1], |_| 100);
        assert_eq!(chosen(&one, 50, 64, 3), 50);
    }

    #[test]
    fn runs_of_fixed_cost_take_all_rows() {
        let fixed = learned(&[1, 2, 4, 8, 16, 32, 64], |rows| 6400 / rows);
        assert_eq!(chosen(&fixed, 64, 64, 3), 64);
        assert_eq!(chosen(&fixed, 9, 64, 3), 9);
    }

    #[test]
    fn runs_of_linear_cost_are_split_among_idle_sessions() {
        let linear = learned(&[1, 2, 4, 8, 16, 32, 64], |_| 100);
        assert_eq!(chosen(&linear, 64, 64, 0), 64);
        assert_eq!(chosen(&linear, 64, 64, 3), 16);
        assert_eq!(chosen(&linear, 3, 64, 3), 1);
    }

    #[test]
    fn batches_stay_within_the_efficient_sizes() {
        let both = learned(&[1, 2, 4, 8, 16, 32, 64], |rows| match rows {
            1..4 => 75,
            4..=32 => 27,
            _ => 30,
        });
        assert_eq!(chosen(&both, 64, 64, 0), 32);
        assert_eq!(chosen(&both, 64, 64, 3), 16);
        assert_eq!(chosen(&both, 64, 64, 63), 4);
        assert_eq!(chosen(&both, 3, 64, 63), 3);
        assert_eq!(chosen(&both, 64, 20, 0), 20, "the limit of the configuration");
    }

    #[test]
    fn every_size_is_tried_now_and_then() {
        let (sizer, estimate) = (BatchSizer::default(), learned(&[64], |_| 1));
        let costs = estimate.batch_costs(1, WIDTH);
        let mut tried: Vec<usize> = (0..8 * TRIAL_EACH).map(|_| sizer.rows(costs, 50, 64, 0)).collect();
        tried.sort_unstable();
        tried.dedup();
        assert_eq!(tried, [1, 2, 4, 8, 16, 32, 50]);
    }
}
