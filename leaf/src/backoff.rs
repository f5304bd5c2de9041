//! Growing pauses between the attempts of a retry.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

/// Pauses that double from a first one to a longest one.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// Pauses of `first`, twice `first` and so on, up to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff { first, next: first, longest }
    }

    /// The pause before the next attempt.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next.min(self.longest);
        self.next = pause.saturating_mul(2);
        pause
    }

    /// As [`pause`](Self::pause), less a random part of up to half, so that clients do not move in step.
    pub fn jittered(&mut self) -> Duration {
        self.pause().mul_f64(1.0 - random_fraction() / 2.0)
    }

    /// Begins again with the first pause, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

fn random_fraction() -> f64 {
    // `RandomState` is seeded by the operating system per process and differs for each value.
    let bits = RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_again() {
        let mut backoff = Backoff::new(10 * MS, 35 * MS);
        assert_eq!([(); 4].map(|()| backoff.pause()), [10, 20, 35, 35].map(|ms| ms * MS));
        backoff.reset();
        assert_eq!(backoff.pause(), 10 * MS);
        assert_eq!(Backoff::new(Duration::MAX, Duration::MAX).pause(), Duration::MAX);
    }

    #[test]
    fn jitter_takes_at_most_half_of_a_pause() {
        let mut backoff = Backoff::new(10 * MS, 10 * MS);
        for _ in 0..100 {
            assert!((5 * MS..=10 * MS).contains(&backoff.jittered()));
        }
    }
}
