//! Turns: the source of each place of a mixture, by weights alone.
//!
//! The first source has `⌊n·w₁/(w₁+w₂+…)⌋` of the first `n` places, the second its part of the places that are left, and so
//! on: Bresenham's line, once for each source. A count never falls and grows by at most one per place.

use std::ops::Range;

/// The turns of sources with some weights, reduced by their common divisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Turns {
    /// The weight of each source, and the sum of it and the following ones; below 2^60 and 2^66.
    weights: Vec<(u64, u128)>,
}

impl Turns {
    /// The turns of sources with these weights, all above 0.
    pub(crate) fn new(weights: &[u64]) -> Self {
        let divisor = weights.iter().fold(0, |divisor, weight| gcd(*weight, divisor)).max(1);
        let mut sum = 0u128;
        let mut with_sums = Vec::with_capacity(weights.len());
        for weight in weights.iter().rev() {
            let weight = weight / divisor;
            sum += u128::from(weight);
            with_sums.push((weight, sum));
        }
        with_sums.reverse();
        Self { weights: with_sums }
    }

    /// The reduced weights.
    pub(crate) fn weights(&self) -> impl Iterator<Item = u64> {
        self.weights.iter().map(|(weight, _)| *weight)
    }

    /// How many of the first `places` places each source has; `places` is at most 2^61.
    pub(crate) fn counts(&self, places: u64) -> Vec<u64> {
        let mut left = places;
        let count = |(weight, sum): &(u64, u128)| {
            // At most `left`, since the weight is at most the sum.
            let count = (u128::from(left) * u128::from(*weight) / sum) as u64;
            left -= count;
            count
        };
        self.weights.iter().map(count).collect()
    }

    /// The source of each of some places.
    pub(crate) fn sources(&self, places: Range<u64>) -> Vec<usize> {
        // The remainders of the divisions in `counts`, from which the next places follow without a division.
        let mut left = places.start;
        let remainder = |(weight, sum): &(u64, u128)| {
            let product = u128::from(left) * u128::from(*weight);
            left -= (product / sum) as u64;
            product % sum
        };
        let mut remainders: Vec<u128> = self.weights.iter().map(remainder).collect();
        let next = |_| {
            for (at, ((weight, sum), remainder)) in self.weights.iter().zip(&mut remainders).enumerate() {
                *remainder += u128::from(*weight);
                if *remainder >= *sum {
                    *remainder -= *sum;
                    return at;
                }
            }
            // The last source takes what is left: its weight is its sum.
            self.weights.len() - 1
        };
        places.map(next).collect()
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sources_take_their_share_of_every_prefix(
            weights in prop::collection::vec(1u64..1000, 1..8),
            start in 0u64..1 << 40,
        ) {
            let turns = Turns::new(&weights);
            let total: u64 = weights.iter().sum();
            let places = start..start + 300;
            let sources = turns.sources(places.clone());
            let mut counts = turns.counts(start);
            for (place, source) in places.zip(sources) {
                counts[source] += 1;
                prop_assert_eq!(&counts, &turns.counts(place + 1));
                prop_assert_eq!(counts.iter().sum::<u64>(), place + 1);
                for (count, weight) in counts.iter().zip(&weights) {
                    let exact = u128::from(place + 1) * u128::from(*weight);
                    let off = (u128::from(*count) * u128::from(total)).abs_diff(exact) / u128::from(total);
                    prop_assert!(off < weights.len() as u128, "{count} of {} with {weight}/{total}", place + 1);
                }
            }
        }
    }

    #[test]
    fn weights_count_relative_to_each_other_up_to_the_bounds() {
        assert_eq!(Turns::new(&[700, 300]), Turns::new(&[7, 3]));
        assert_eq!(Turns::new(&[7, 3]).sources(0..10), [1, 0, 0, 1, 0, 0, 1, 0, 0, 0]);
        let largest = 1_000_000_000_000_000_000;
        let turns = Turns::new(&[largest; 64]);
        assert_eq!(turns.counts(1 << 61).iter().sum::<u64>(), 1 << 61);
        let unequal = Turns::new(&[1, largest]);
        assert_eq!(unequal.counts(1 << 61), [2, (1 << 61) - 2]);
    }
}
