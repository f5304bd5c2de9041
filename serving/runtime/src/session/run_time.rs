//! Run-time estimates of a model version: cost per input element, by row size and number of rows.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Size classes of batches: up to 1, 2, 4 and so on rows; the last one has no bound.
const BATCH_SIZES: usize = 13;
/// Size classes of rows: up to 1, 2, 4 and so on elements; the last one has no bound.
const ROW_SIZES: usize = 28;

/// A running estimate of a median. It moves toward each measurement by a small part of its own value, so that a run
/// during which the kernel preempted the thread hardly counts. The first steps are larger. 0 before the first
/// measurement; of two concurrent measurements, one may get lost.
#[derive(Debug, Default)]
pub(super) struct MedianEstimate<const PART: usize = 16> {
    value: AtomicUsize,
    /// Number of measurements, counted until steps have their final size.
    measurements: AtomicUsize,
}

impl<const PART: usize> MedianEstimate<PART> {
    pub(super) fn get(&self) -> usize {
        self.value.load(Ordering::Relaxed)
    }

    /// Adds a measurement.
    pub(super) fn record(&self, newest: u128) {
        let newest = usize::try_from(newest).unwrap_or(usize::MAX);
        let measurements = self.measurements.load(Ordering::Relaxed);
        let part = measurements / 2 + 1;
        if part < PART {
            self.measurements.store(measurements + 1, Ordering::Relaxed);
        }
        self.value.store(step(self.get(), newest, part.min(PART)), Ordering::Relaxed);
    }
}

/// The estimate after one step of at most `1 / part` of its value.
fn step(value: usize, newest: usize, part: usize) -> usize {
    let size = value / part + 1;
    match value {
        0 => newest,
        _ if newest > value => value.saturating_add(size).min(newest),
        _ => value.saturating_sub(size).max(newest),
    }
}

/// Costs of batches of one row size, by size class of the batch: picoseconds per element, 0 where unknown.
pub(super) type BatchCosts = [MedianEstimate<64>; BATCH_SIZES];

/// Run-time estimates of a model version.
#[derive(Debug, Default)]
pub(super) struct RunTimeEstimate {
    /// By size class of the row.
    costs: [BatchCosts; ROW_SIZES],
    /// Microseconds of a run of any shapes.
    run_micros: MedianEstimate,
}

impl RunTimeEstimate {
    /// Records the time of a run whose inputs have `rows` rows and `elements` elements; 0 rows count as one.
    pub(super) fn record(&self, rows: usize, elements: usize, elapsed: Duration) {
        self.run_micros.record(elapsed.as_micros());
        if let Some(picos) = elapsed.as_nanos().saturating_mul(1000).checked_div(elements as u128) {
            self.batch_costs(rows, elements)[batch_size(rows)].record(picos.max(1));
        }
    }

    /// Estimated time of a run: its cost per element times its elements. Uses runs of the same size class. If there
    /// were none, uses larger batches of rows of that size, as an upper bound. `None` if neither is known.
    pub(super) fn of(&self, rows: usize, elements: usize) -> Option<Duration> {
        let costs = self.batch_costs(rows, elements);
        let own = batch_size(rows);
        let known = (own..BATCH_SIZES).find(|size| costs[*size].get() > 0)?;
        let elements =
            if known == own { elements } else { (elements / rows.max(1)).saturating_mul(1 << known) };
        let nanos = costs[known].get().saturating_mul(elements) / 1000;
        Some(Duration::from_nanos(nanos as u64))
    }

    /// Costs of batches whose rows have the same size class.
    pub(super) fn batch_costs(&self, rows: usize, elements: usize) -> &BatchCosts {
        &self.costs[size_class(elements / rows.max(1)).min(ROW_SIZES - 1)]
    }

    /// Typical time of a run of any shapes.
    pub(super) fn typical(&self) -> Duration {
        Duration::from_micros(self.run_micros.get() as u64)
    }
}

/// The size class of a batch.
pub(super) fn batch_size(rows: usize) -> usize {
    size_class(rows).min(BATCH_SIZES - 1)
}

/// The exponent of the smallest power of two that is at least `number`.
fn size_class(number: usize) -> usize {
    number.max(1).checked_next_power_of_two().map_or(usize::BITS, usize::trailing_zeros) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_ignores_exceptions() {
        let estimate: MedianEstimate = MedianEstimate::default();
        assert_eq!(estimate.get(), 0);
        for run in 0..1000 {
            estimate.record(if run % 10 == 0 { 50_000 } else { 5 });
        }
        assert!(estimate.get() < 10, "{estimate:?}");
        for _ in 0..200 {
            estimate.record(3_000);
        }
        assert_eq!(estimate.get(), 3_000);
        estimate.record(u128::MAX);
        assert!(estimate.get() < 4_000, "{estimate:?}");
    }

    #[test]
    fn median_forgets_a_first_exception_soon() {
        let estimate: MedianEstimate<64> = MedianEstimate::default();
        estimate.record(1_000_000);
        for run in 1..20 {
            estimate.record(if run % 10 == 0 { 1_000_000 } else { 1_000 });
        }
        assert!(estimate.get() < 2_000, "{estimate:?}");
    }

    #[test]
    fn estimate_is_cost_per_element_times_elements() {
        let estimate = RunTimeEstimate::default();
        assert_eq!(estimate.of(1, 16), None, "nothing has run");
        estimate.record(4, 64, Duration::from_micros(64));
        assert_eq!(estimate.of(4, 64), Some(Duration::from_micros(64)));
        assert_eq!(estimate.of(3, 48), Some(Duration::from_micros(48)), "the same size class");
        assert_eq!(estimate.of(1, 16), Some(Duration::from_micros(64)), "the larger batch is the bound");
        assert_eq!(estimate.of(5, 80), None, "a larger batch");
        assert_eq!(estimate.typical(), Duration::from_micros(64));
    }

    #[test]
    fn longer_rows_are_unknown_until_some_have_run() {
        let estimate = RunTimeEstimate::default();
        estimate.record(1, 100, Duration::from_micros(10));
        assert!(estimate.of(1, 100).is_some());
        assert_eq!(estimate.of(1, 1000), None, "ten times as long");
        assert_eq!(estimate.of(0, 1000), None);
        estimate.record(0, 1000, Duration::from_millis(4));
        assert_eq!(estimate.of(1, 1000), Some(Duration::from_millis(4)));
        assert_eq!(estimate.of(1, 100), Some(Duration::from_micros(10)));
    }

    #[test]
    fn extreme_sizes_have_a_class() {
        let estimate = RunTimeEstimate::default();
        estimate.record(1, 0, Duration::from_secs(1));
        assert_eq!(estimate.of(1, 0), None, "a cost per element needs elements");
        estimate.record(usize::MAX, usize::MAX, Duration::MAX);
        estimate.record(1, usize::MAX, Duration::MAX);
        assert!(estimate.of(1, usize::MAX).is_some() && estimate.of(usize::MAX, usize::MAX).is_some());
    }
}
