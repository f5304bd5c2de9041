//! Schedule of an open loop: the times at which it sends requests.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// Arrival times of a Poisson process, from its start: every moment is equally likely, as for requests of many
/// independent users. The same seed gives the same times.
#[derive(Debug, Clone)]
pub struct Poisson {
    random: StdRng,
    gap_nanos: f64,
    nanos: f64,
}

impl Poisson {
    /// A process of `rate` arrivals per second; `rate` must be positive.
    pub fn new(rate: f64, seed: u64) -> Poisson {
        Poisson { random: StdRng::seed_from_u64(seed), gap_nanos: 1e9 / rate, nanos: 0.0 }
    }
}

impl Iterator for Poisson {
    type Item = Duration;

    /// Never `None`.
    fn next(&mut self) -> Option<Duration> {
        // From the half-open interval [0, 1), so the logarithm is of a positive number.
        let uniform: f64 = self.random.random();
        self.nanos -= (1.0 - uniform).ln() * self.gap_nanos;
        Some(Duration::from_nanos(self.nanos as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_have_the_mean_and_the_spread_of_the_process() {
        const ARRIVALS: usize = 200_000;
        for (rate, seed) in [(3.0, 1), (1000.0, 2), (80_000.0, 3)] {
            let times: Vec<f64> =
                Poisson::new(rate, seed).take(ARRIVALS).map(|at| at.as_secs_f64() * rate).collect();
            // In units of the mean gap, mean and deviation of an exponential distribution are 1. Five standard errors
            // of each are allowed; the seeds are fixed.
            let gaps = times.iter().zip([0.0].iter().chain(&times)).map(|(to, from)| to - from);
            let (sum, squares) =
                gaps.fold((0.0, 0.0), |(sum, squares), gap| (sum + gap, squares + gap * gap));
            let mean = sum / ARRIVALS as f64;
            let variance = squares / ARRIVALS as f64 - mean * mean;
            assert!((mean - 1.0).abs() < 5.0 / (ARRIVALS as f64).sqrt(), "mean {mean} at {rate}/s");
            assert!(
                (variance - 1.0).abs() < 15.0 / (ARRIVALS as f64).sqrt(),
                "variance {variance} at {rate}/s"
            );
        }
    }

    #[test]
    fn counts_of_equal_intervals_vary_as_much_as_their_mean() {
        // 5000 intervals with 20 arrivals each on average; for a regular schedule the variance would be 0.
        let mut counts = vec![0.0f64; 5000];
        for at in Poisson::new(20.0, 7).take_while(|at| at.as_secs() < 5000) {
            counts[at.as_secs() as usize] += 1.0;
        }
        let mean = counts.iter().sum::<f64>() / 5000.0;
        let variance = counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / 5000.0;
        assert!((mean - 20.0).abs() < 0.5, "mean {mean}");
        assert!((variance / mean - 1.0).abs() < 0.15, "variance {variance}, mean {mean}");
    }

    #[test]
    fn seed_determines_the_schedule() {
        let first = |seed| Poisson::new(100.0, seed).take(50).collect::<Vec<_>>();
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
        assert!(first(1).is_sorted());
    }
}
