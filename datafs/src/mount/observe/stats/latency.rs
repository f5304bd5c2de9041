//! A latency histogram of requests, with four buckets for each doubling.
//!
//! A quantile is within a quarter of the true value at worst, mostly within a tenth.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The first bucket holds durations below 2 to this power, in nanoseconds: 1.024 µs.
const FIRST_LOG2: u32 = 10;
/// The last bucket holds all durations from 2 to this power on: 68.7 s.
const LAST_LOG2: u32 = 36;
/// Buckets of a histogram.
pub(crate) const BUCKETS: usize = ((LAST_LOG2 - FIRST_LOG2) * 4 + 2) as usize;

/// The bucket of a duration.
pub(crate) fn bucket(nanos: u64) -> usize {
    if nanos < 1 << FIRST_LOG2 {
        return 0;
    }
    let log2 = nanos.ilog2();
    if log2 >= LAST_LOG2 {
        return BUCKETS - 1;
    }
    let quarter = nanos >> (log2 - 2) & 3;
    1 + ((log2 - FIRST_LOG2) * 4) as usize + quarter as usize
}

/// The shortest duration of a bucket, in nanoseconds.
fn lower_bound(bucket: usize) -> u64 {
    match bucket.checked_sub(1) {
        None => 0,
        Some(i) => {
            let log2 = FIRST_LOG2 + (i / 4) as u32;
            (4 + (i % 4) as u64) << (log2 - 2)
        }
    }
}

/// A histogram of request durations.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Sum of all durations, in nanoseconds.
    pub nanos: u64,
    /// Number of requests in each bucket that has any.
    pub(crate) buckets: BTreeMap<u16, u64>,
}

impl Latency {
    /// Number of requests.
    pub fn count(&self) -> u64 {
        self.buckets.values().sum()
    }

    /// The mean duration; zero without requests.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.nanos.checked_div(self.count()).unwrap_or(0))
    }

    /// The duration that a share of the requests, 0 to 1, did not exceed, interpolated within a bucket. Zero
    /// without requests.
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = share.clamp(0.0, 1.0) * self.count() as f64;
        let mut below = 0.0;
        for (&bucket, &count) in &self.buckets {
            let (low, high) = (lower_bound(bucket.into()), lower_bound(usize::from(bucket) + 1));
            if count > 0 && below + count as f64 >= rank {
                let within = (rank - below) / count as f64;
                return Duration::from_nanos(low + ((high - low) as f64 * within) as u64);
            }
            below += count as f64;
        }
        Duration::ZERO
    }

    /// Cumulative counts for Prometheus: the upper bounds in seconds, powers of two of nanoseconds from 2^10
    /// on, and the number of requests below each.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        (FIRST_LOG2..=LAST_LOG2).map(|log2| {
            let end = bucket(1 << log2) as u16;
            let count = self.buckets.range(..end).map(|(_, count)| count).sum();
            ((1_u64 << log2) as f64 / 1e9, count)
        })
    }

    /// Adds `count` requests to a bucket.
    pub(crate) fn add(&mut self, bucket: usize, count: u64) {
        if count > 0 {
            *self.buckets.entry(bucket as u16).or_default() += count;
        }
    }

    /// The requests since an earlier state of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Latency) -> Latency {
        let mut new = Latency { nanos: self.nanos.saturating_sub(earlier.nanos), ..Latency::default() };
        for (&bucket, &count) in &self.buckets {
            let before = earlier.buckets.get(&bucket).copied().unwrap_or(0);
            new.add(bucket.into(), count.saturating_sub(before));
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_hold_what_they_say() {
        for bucket_of in 0..BUCKETS {
            let low = lower_bound(bucket_of);
            assert_eq!(bucket(low), bucket_of);
            if bucket_of > 0 {
                assert_eq!(bucket(low - 1), bucket_of - 1);
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_close_to_the_truth() {
        let mut latency = Latency::default();
        for micros in 1..=1_000_u64 {
            latency.add(bucket(micros * 1_000), 1);
            latency.nanos += micros * 1_000;
        }
        assert_eq!((latency.count(), latency.mean()), (1_000, Duration::from_nanos(500_500)));
        for (share, micros) in [(0.5, 500.0), (0.99, 990.0), (0.1, 100.0)] {
            let found = latency.quantile(share).as_secs_f64() * 1e6;
            assert!((found / micros - 1.0).abs() < 0.13, "{share}: {found}");
        }
        let earlier = latency.clone();
        latency.add(bucket(5_000_000), 2);
        latency.nanos += 10_000_000;
        let new = latency.since(&earlier);
        assert_eq!((new.count(), new.mean()), (2, Duration::from_millis(5)));
        assert_eq!(Latency::default().quantile(0.5), Duration::ZERO);
        let cumulative: Vec<_> = earlier.cumulative().collect();
        assert_eq!(cumulative.first(), Some(&(1.024e-6, 1)));
        assert_eq!(cumulative.last().map(|(_, count)| *count), Some(1_000));
        assert!(cumulative.is_sorted_by_key(|(_, count)| *count));
    }
}
