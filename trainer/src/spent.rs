//! Where the time of a worker's steps goes.

use serde::Serialize;

/// Microseconds of steps, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Spent {
    /// Waiting for rows.
    pub feed_us: u64,
    /// Computing gradients and applying them.
    pub compute_us: u64,
    /// Waiting for sums over the workers.
    pub communication_us: u64,
    /// Copying the state for a checkpoint, which is then written in the background, and waiting for the one before.
    pub checkpoint_us: u64,
}

impl Spent {
    /// What was spent since `before`, an earlier total. A worker that took over from another one begins at 0.
    #[must_use]
    pub fn since(self, before: Spent) -> Spent {
        if self.total_us() < before.total_us() {
            return self;
        }
        Spent {
            feed_us: self.feed_us.saturating_sub(before.feed_us),
            compute_us: self.compute_us.saturating_sub(before.compute_us),
            communication_us: self.communication_us.saturating_sub(before.communication_us),
            checkpoint_us: self.checkpoint_us.saturating_sub(before.checkpoint_us),
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Spent) -> Spent {
        Spent {
            feed_us: self.feed_us.saturating_add(other.feed_us),
            compute_us: self.compute_us.saturating_add(other.compute_us),
            communication_us: self.communication_us.saturating_add(other.communication_us),
            checkpoint_us: self.checkpoint_us.saturating_add(other.checkpoint_us),
        }
    }

    fn total_us(self) -> u64 {
        self.parts().iter().fold(0, |total, (_, part)| total.saturating_add(*part))
    }

    /// Each cause with its microseconds.
    pub(crate) fn parts(self) -> [(&'static str, u64); 4] {
        [
            ("feed", self.feed_us),
            ("compute", self.compute_us),
            ("communication", self.communication_us),
            ("checkpoint", self.checkpoint_us),
        ]
    }

    /// Each cause with its share of the time, from 0 to 1; none where no time was spent.
    pub fn shares(self) -> Option<[(&'static str, f64); 4]> {
        let total = self.total_us();
        (total > 0).then(|| self.parts().map(|(cause, part)| (cause, part as f64 / total as f64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spent(parts: [u64; 4]) -> Spent {
        let [feed_us, compute_us, communication_us, checkpoint_us] = parts;
        Spent { feed_us, compute_us, communication_us, checkpoint_us }
    }

    #[test]
    fn shares_are_of_the_time_since_the_last_report() {
        let (before, now) = (spent([10, 70, 15, 5]), spent([30, 130, 35, 5]));
        assert_eq!(now.since(before), spent([20, 60, 20, 0]));
        let shares = now.since(before).shares().unwrap();
        assert_eq!(shares, [("feed", 0.2), ("compute", 0.6), ("communication", 0.2), ("checkpoint", 0.0)]);
        assert_eq!(before.plus(now.since(before)), now);
        assert_eq!(Spent::default().shares(), None);
    }

    #[test]
    fn another_worker_begins_at_zero() {
        assert_eq!(spent([1, 2, 3, 4]).since(spent([100; 4])), spent([1, 2, 3, 4]));
    }
}
