//! Durations of a load: quantiles from an HDR histogram, at most 1/128 above the true value; exact mean and maximum.

use std::time::Duration;

use hdrhistogram::Histogram as Counts;

/// Significant decimal digits of a count's duration; 2 makes 128 buckets for each power of two.
const DIGITS: u8 = 2;

/// Counts of durations, by size.
#[derive(Debug, Clone, Default)]
pub struct Histogram {
    /// None until the first duration is recorded, as the buckets take 60 KB.
    counts: Option<Counts<u64>>,
    nanos: u128,
    longest: u64,
}

impl Histogram {
    /// Records a duration.
    pub fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts.get_or_insert_with(empty).saturating_record(nanos);
        self.nanos += u128::from(nanos);
        self.longest = self.longest.max(nanos);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        if let Some(counts) = &other.counts {
            *self.counts.get_or_insert_with(empty) += counts;
        }
        self.nanos += other.nanos;
        self.longest = self.longest.max(other.longest);
    }

    /// Number of recorded durations.
    pub fn count(&self) -> u64 {
        self.counts.as_ref().map_or(0, Counts::len)
    }

    /// The duration that a share `quantile` of all does not exceed: at most 1/128 above the true value, never below
    /// for a share above 0. Zero when nothing was recorded.
    pub fn quantile(&self, quantile: f64) -> Duration {
        let nanos = self.counts.as_ref().map_or(0, |counts| counts.value_at_quantile(quantile));
        // The bucket of the longest duration may end beyond it.
        Duration::from_nanos(nanos.min(self.longest))
    }

    /// The exact mean; zero when nothing was recorded.
    pub fn mean(&self) -> Duration {
        let mean = self.nanos.checked_div(u128::from(self.count())).unwrap_or(0);
        Duration::from_nanos(u64::try_from(mean).unwrap_or(u64::MAX))
    }

    /// The exact maximum; zero when nothing was recorded.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest)
    }
}

/// Counts for durations of up to 292 years.
fn empty() -> Counts<u64> {
    Counts::new_with_bounds(1, i64::MAX as u64, DIGITS)
        .expect("bounds and digits are within those of the histogram")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_duration_is_at_most_1_128_below_its_bucket_end(nanos in prop_oneof![0..1000u64, 0..i64::MAX as u64]) {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_nanos(nanos));
            histogram.record(Duration::from_nanos(i64::MAX as u64));
            let found = histogram.quantile(0.5).as_nanos() as u64;
            prop_assert!(nanos <= found && found - nanos <= nanos / 128, "{nanos} in a bucket up to {found}");
            prop_assert_eq!(histogram.quantile(1.0), histogram.longest());
        }

        #[test]
        fn quantiles_are_those_of_the_sorted_times(
            times in prop::collection::vec(0..10_000_000_000u64, 1..300),
            quantile in 1e-9..=1.0f64,
            parts in 1..4usize,
        ) {
            let mut histogram = Histogram::default();
            for part in times.chunks(times.len().div_ceil(parts)) {
                let mut counted = Histogram::default();
                part.iter().for_each(|nanos| counted.record(Duration::from_nanos(*nanos)));
                histogram.merge(&counted);
            }
            let mut sorted = times.clone();
            sorted.sort_unstable();
            let rank = ((quantile * times.len() as f64).ceil() as usize).max(1);
            let (truth, found) = (sorted[rank - 1], histogram.quantile(quantile).as_nanos() as u64);
            prop_assert!(truth <= found && found - truth <= truth / 128, "{found}, the truth is {truth}");
            prop_assert_eq!(histogram.count(), times.len() as u64);
            prop_assert_eq!(histogram.longest().as_nanos() as u64, sorted[sorted.len() - 1]);
            let mean = times.iter().sum::<u64>() / times.len() as u64;
            prop_assert_eq!(histogram.mean().as_nanos() as u64, mean);
        }
    }

    #[test]
    fn empty_histogram_is_zero() {
        let nothing = Histogram::default();
        assert_eq!(nothing.quantile(0.99), Duration::ZERO);
        assert_eq!((nothing.mean(), nothing.longest(), nothing.count()), (Duration::ZERO, Duration::ZERO, 0));
    }
}
