//! The traffic split: distributes requests that name no version between versions by weight.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The split. A version answers the requests whose hash lies below its bound and not below the previous
/// bound.
#[derive(Debug)]
pub(super) struct Split {
    /// Bounds, ascending, with their versions; the last bound is `u64::MAX`.
    bounds: Vec<(u64, u64)>,
    /// Number of requests without an id so far.
    count: AtomicU64,
}

impl PartialEq for Split {
    fn eq(&self, other: &Split) -> bool {
        self.bounds == other.bounds
    }
}

impl Split {
    /// A split by these weights; `None` when no weight is positive.
    pub(super) fn new(weights: &BTreeMap<u64, f64>) -> Option<Split> {
        let total: f64 = weights.values().sum();
        let mut sum = 0.0;
        let mut bounds: Vec<(u64, u64)> = weights
            .iter()
            .filter(|(_, weight)| **weight > 0.0)
            .map(|(version, weight)| {
                sum += weight;
                // The conversion from floating point saturates.
                ((sum / total * 2f64.powi(64)) as u64, *version)
            })
            .collect();
        bounds.last_mut()?.0 = u64::MAX;
        Some(Split { bounds, count: AtomicU64::new(0) })
    }

    /// The versions with a positive weight.
    pub(super) fn versions(&self) -> impl Iterator<Item = u64> {
        self.bounds.iter().map(|(_, version)| *version)
    }

    /// The version for a request. An id always gets the same version, in every process; requests without an
    /// id are spread evenly.
    pub(super) fn version(&self, id: &str) -> u64 {
        let place = if id.is_empty() {
            // Multiples of the golden ratio, modulo one, are evenly spread at any count.
            self.count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        } else {
            hash(id)
        };
        let found = self.bounds.iter().find(|(bound, _)| place < *bound).or(self.bounds.last());
        found.map_or(0, |(_, version)| *version)
    }
}

/// FNV-1a, with splitmix64's mixing of the high bits: consecutive ids differ in the low bits only.
fn hash(id: &str) -> u64 {
    let fnv = id.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let mixed = (fnv ^ (fnv >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(split: &Split, ids: impl Iterator<Item = String>) -> BTreeMap<u64, usize> {
        let mut counts = BTreeMap::new();
        for id in ids {
            *counts.entry(split.version(&id)).or_default() += 1;
        }
        counts
    }

    #[test]
    fn shares_are_the_weights_with_ids_and_without() {
        let split = Split::new(&[(3, 95.0), (4, 5.0), (9, 0.0)].into()).unwrap();
        let counted = shares(&split, (0..10_000).map(|_| String::new()));
        assert!(counted[&4].abs_diff(500) <= 10 && !counted.contains_key(&9), "{counted:?}");
        let named = shares(&split, (0..10_000).map(|n| format!("request-{n}")));
        assert!(named[&4].abs_diff(500) <= 100 && named.len() == 2, "{named:?}");
        // Even a few requests are spread evenly.
        let few = Split::new(&[(1, 1.0), (2, 1.0)].into()).unwrap();
        assert!(shares(&few, (0..8).map(|_| String::new()))[&1].abs_diff(4) <= 1);
    }

    #[test]
    fn requests_with_one_id_stay_with_one_version() {
        let split = Split::new(&[(3, 0.5), (4, 0.5)].into()).unwrap();
        for n in 0..100 {
            let id = n.to_string();
            assert_eq!(split.version(&id), split.version(&id));
        }
        // A larger weight takes requests from other versions and gives none away.
        let more = Split::new(&[(3, 0.4), (4, 0.6)].into()).unwrap();
        assert!((0..1000).map(|n| n.to_string()).all(|id| split.version(&id) == 3 || more.version(&id) == 4));
    }

    #[test]
    fn single_version_takes_all_requests_and_no_version_is_no_split() {
        let one = Split::new(&[(7, 1e-300)].into()).unwrap();
        assert_eq!(shares(&one, (0..100).map(|n| n.to_string())).keys().copied().collect::<Vec<_>>(), [7]);
        assert!(Split::new(&BTreeMap::new()).is_none());
        assert!(Split::new(&[(1, 0.0)].into()).is_none());
    }
}
