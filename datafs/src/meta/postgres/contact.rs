//! Contact tracking: how long this process has reached the server without a break.
//!
//! After a break, a process cannot tell a client that died from one that could not reach the server either
//! and will be back soon. So it declares another client's lease lapsed only after contact for as long as the
//! lease.

use std::time::{Duration, Instant};

pub(super) struct Contact {
    last: Instant,
    /// End of the last break.
    restored: Option<Instant>,
}

impl Contact {
    pub(super) fn new(now: Instant) -> Contact {
        Contact { last: now, restored: None }
    }

    /// Records an answer of the server.
    pub(super) fn made(&mut self, now: Instant, lease: Duration) {
        if self.was_broken(now, lease) {
            self.restored = Some(now);
        }
        self.last = now;
    }

    /// Whether all live clients have had the time to renew their leases since the last break.
    pub(super) fn is_steady(&self, now: Instant, lease: Duration) -> bool {
        let rested = |restored| now.saturating_duration_since(restored) > lease;
        !self.was_broken(now, lease) && self.restored.is_none_or(rested)
    }

    fn was_broken(&self, now: Instant, lease: Duration) -> bool {
        now.saturating_duration_since(self.last) > lease / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_break_others_are_given_their_lease() {
        let lease = Duration::from_secs(60);
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut contact = Contact::new(begin);
        assert!(contact.is_steady(at(1), lease));
        contact.made(at(20), lease);
        assert!(contact.is_steady(at(40), lease));
        // Nothing was heard for more than half a lease, and the server has just answered a query.
        assert!(!contact.is_steady(at(200), lease));
        contact.made(at(201), lease);
        assert!(!contact.is_steady(at(202), lease));
        for seconds in (204..=261).step_by(3) {
            contact.made(at(seconds), lease);
            assert!(!contact.is_steady(at(seconds), lease));
        }
        contact.made(at(264), lease);
        assert!(contact.is_steady(at(265), lease));
    }
}
