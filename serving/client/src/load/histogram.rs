//! Histogram of durations with logarithmic buckets: bounded memory for any number of requests, and quantiles at most
//! 1/128 above the true value.

use std::time::Duration;

/// Logarithm of the number of buckets for each power of two; the relative error is one bucket.
const SPLIT_BITS: u32 = 7;
/// Enough for every 64-bit number of nanoseconds.
const BUCKETS: usize = ((u64::BITS - SPLIT_BITS + 1) as usize) << SPLIT_BITS;

/// Counts of durations, by size.
#[derive(Debug, Clone, Default)]
pub struct Histogram {
    /// Empty until the first duration is recorded.
    buckets: Vec<u64>,
    count: u64,
    nanos: u128,
    longest: u64,
}

impl Histogram {
    /// Records a duration.
    pub fn record(&mut self, time: Duration) {
        if self.buckets.is_empty() {
            self.buckets = vec![0; BUCKETS];
        }
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(nanos)] += 1;
        self.count += 1;
        self.nanos += u128::from(nanos);
        self.longest = self.longest.max(nanos);
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        if self.buckets.is_empty() {
            self.buckets.clone_from(&other.buckets);
        } else {
            for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
                *mine += theirs;
            }
        }
        self.count += other.count;
        self.nanos += other.nanos;
        self.longest = self.longest.max(other.longest);
    }

    /// Number of recorded durations.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The duration that a share `quantile` of all does not exceed: at most 1/128 above the true value, never below.
    /// Zero when nothing was recorded.
    pub fn quantile(&self, quantile: f64) -> Duration {
        let rank = ((quantile * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut below = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            below += count;
            if below >= rank {
                return Duration::from_nanos(top(index).min(self.longest));
            }
        }
        Duration::ZERO
    }

    /// The exact mean; zero when nothing was recorded.
    pub fn mean(&self) -> Duration {
        let mean = self.nanos.checked_div(u128::from(self.count)).unwrap_or(0);
        Duration::from_nanos(u64::try_from(mean).unwrap_or(u64::MAX))
    }

    /// The exact maximum; zero when nothing was recorded.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest)
    }
}

/// Bucket of a duration: below 2^8 ns each value has one; every further power of two is split into 2^7.
fn bucket(nanos: u64) -> usize {
    let shift = (u64::BITS - nanos.leading_zeros()).saturating_sub(SPLIT_BITS + 1);
    ((shift as usize) << SPLIT_BITS) + (nanos >> shift) as usize
}

/// The longest duration of a bucket.
fn top(bucket: usize) -> u64 {
    let shift = (bucket >> SPLIT_BITS).saturating_sub(1);
    let first = ((bucket - (shift << SPLIT_BITS)) as u64) << shift;
    first + ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_bucket_has_its_times_and_no_wide_range(nanos in prop_oneof![0..1000u64, any::<u64>()]) {
            let index = bucket(nanos);
            prop_assert!(index < BUCKETS);
            let top = top(index);
            prop_assert!(nanos <= top && top - nanos <= nanos / 128, "{nanos} in a bucket up to {top}");
        }

        #[test]
        fn quantiles_are_those_of_the_sorted_times(
            times in prop::collection::vec(0..10_000_000_000u64, 1..300),
            quantile in 0.0..=1.0f64,
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
    fn of_nothing_all_is_zero() {
        let nothing = Histogram::default();
        assert_eq!(nothing.quantile(0.99), Duration::ZERO);
        assert_eq!((nothing.mean(), nothing.longest(), nothing.count()), (Duration::ZERO, Duration::ZERO, 0));
    }
}
