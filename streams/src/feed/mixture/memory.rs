//! Division of a mixture's cache among its sources.

use super::Mixture;

impl Mixture {
    /// The parts of a cache of `total` bytes, by source; all are 0 for 0, with which each feed derives its own size.
    ///
    /// A source has its working set first, whatever its weight: below it, the feed decodes row groups again and again. What
    /// is left is divided by weight. A cache below the sum of the working sets is divided in proportion to them.
    pub(super) fn cache_parts(&self, total: u64) -> Vec<u64> {
        let needs = self.sources.iter().map(|source| source.plan.working_set_bytes());
        divided(total, &self.turns.weights().zip(needs).collect::<Vec<_>>())
    }

    /// The decoded row groups that the sources need at a time, in bytes, for readers of whole batches.
    pub fn working_set_bytes(&self) -> u64 {
        self.sources.iter().fold(0, |sum, source| sum.saturating_add(source.plan.working_set_bytes()))
    }
}

/// Divides `total` among sources with a weight and a need each. Parts of a total above 0 are at least 1.
fn divided(total: u64, sources: &[(u64, u64)]) -> Vec<u64> {
    if total == 0 {
        return vec![0; sources.len()];
    }
    let total = u128::from(total);
    // Sums stay below 2^70, and products of two numbers of 64 bits below 2^128.
    let needed: u128 = sources.iter().map(|(_, need)| u128::from(*need)).sum();
    let weights: u128 = sources.iter().map(|(weight, _)| u128::from(*weight)).sum();
    let part = |(weight, need): &(u64, u64)| {
        let (weight, need) = (u128::from(*weight), u128::from(*need));
        let part = match total.checked_sub(needed) {
            Some(left) => need + left * weight / weights.max(1),
            None => total * need / needed,
        };
        // At most the total.
        (part as u64).max(1)
    };
    sources.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_the_working_sets_leave_is_divided_by_weight() {
        // Without needs, by weight alone.
        assert_eq!(divided(1_000, &[(9, 0), (1, 0)]), [900, 100]);
        // The source with a tenth of the weight and the larger row groups keeps its working set.
        assert_eq!(divided(1_000, &[(9, 100), (1, 400)]), [100 + 450, 400 + 50]);
        assert_eq!(divided(500, &[(9, 100), (1, 400)]), [100, 400]);
    }

    #[test]
    fn a_cache_below_the_working_sets_is_divided_by_them() {
        assert_eq!(divided(250, &[(9, 100), (1, 400)]), [50, 200]);
        assert_eq!(divided(1, &[(1, 1), (1, 400)]), [1, 1], "0 would derive a size");
        assert_eq!(divided(0, &[(9, 100), (1, 400)]), [0, 0]);
    }

    proptest! {
        #[test]
        fn parts_fill_the_total_and_keep_what_each_source_needs(
            total in 64u64..=u64::MAX,
            sources in prop::collection::vec((1u64..1 << 60, 0u64..=u64::MAX), 1..=64),
        ) {
            let parts = divided(total, &sources);
            let sum: u128 = parts.iter().map(|part| u128::from(*part)).sum();
            let needed: u128 = sources.iter().map(|(_, need)| u128::from(*need)).sum();
            prop_assert!(sum <= u128::from(total) + sources.len() as u128, "{sum} of {total}");
            prop_assert!(sum + sources.len() as u128 >= u128::from(total), "{sum} of {total}");
            if needed <= u128::from(total) {
                prop_assert!(parts.iter().zip(&sources).all(|(part, (_, need))| part >= need));
            }
        }
    }
}
