//! Watch over a lease that another process renews.
//!
//! A lease is a record that its holder changes several times within the time of the lease. The watch tells when the
//! record has been the same for that time, by the clock of the observer alone. No clock of another machine is read, and
//! no wall clock.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Time since the machine started, including the time that it was suspended.
#[must_use]
pub fn boot_time() -> Duration {
    // The clock exists on every Linux that Millrace runs on.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// How long an observer has seen the same record.
#[derive(Debug, Default)]
pub struct Watch {
    seen: Option<(Vec<u8>, Duration)>,
    looked: Duration,
}

impl Watch {
    /// Whether the record was the same for `lease`. `began` and `ended` are the times around its read. The observer
    /// looks at least twice within the time of a lease: after a longer pause, the holder gets its time again, because
    /// the observer or the place of the record may have been away.
    pub fn has_expired(
        &mut self,
        value: &[u8],
        lease: Duration,
        (began, ended): (Duration, Duration),
    ) -> bool {
        let is_steady = ended.saturating_sub(self.looked) <= lease / 2;
        self.looked = ended;
        match &self.seen {
            Some((seen, since)) if seen == value && is_steady => began.saturating_sub(*since) >= lease,
            _ => {
                self.seen = Some((value.to_vec(), ended));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    #[test]
    fn a_record_expires_once_it_was_the_same_for_its_lease() {
        let mut watch = Watch::default();
        let at = |second| (Duration::from_secs(second), Duration::from_secs(second));
        assert!(!watch.has_expired(b"a", LEASE, at(100)));
        assert!((102..110).step_by(2).all(|second| !watch.has_expired(b"a", LEASE, at(second))));
        assert!(watch.has_expired(b"a", LEASE, at(110)));
        // A renewal, and then a pause of the observer.
        assert!(!watch.has_expired(b"b", LEASE, at(112)));
        assert!(!watch.has_expired(b"b", LEASE, at(130)));
        assert!(!watch.has_expired(b"b", LEASE, at(134)));
        assert!(!watch.has_expired(b"b", LEASE, at(138)));
        assert!(watch.has_expired(b"b", LEASE, at(141)));
    }
}
