//! Whether it pays to look for company before a run.
//!
//! A request that finds a session free could run at once. Where many clients ask, others would be there a
//! moment later, and one run for all costs little more than one for each. A request does not see them: they
//! are in sockets that its thread has not read yet, because it runs. So now and then one looks before it
//! runs, which costs microseconds, and as long as that finds enough, all do.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Of so many requests that do not look, one does.
const TRIAL_EACH: usize = 256;
/// Estimates are kept in parts of a request.
const PARTS: usize = 16;
/// Who looks has to find that two run together, his own included, or it costs more than it spares.
const ENOUGH: usize = 2 * PARTS;

/// What those found lately who looked.
#[derive(Debug, Default)]
pub(super) struct Company {
    /// Requests that run together typically, in parts.
    typical: AtomicUsize,
    /// Requests that did not look.
    passed: AtomicUsize,
}

impl Company {
    /// Whether to look before the next run.
    pub(super) fn is_likely(&self) -> bool {
        self.typical.load(Ordering::Relaxed) >= ENOUGH
            || self.passed.fetch_add(1, Ordering::Relaxed) % TRIAL_EACH == TRIAL_EACH - 1
    }

    /// Notes how many ran together after somebody looked. Of two at once one may get lost.
    pub(super) fn found(&self, requests: usize) {
        let typical = self.typical.load(Ordering::Relaxed);
        let next = (3 * typical + requests.saturating_mul(PARTS)) / 4;
        self.typical.store(next, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(company: &Company) -> usize {
        (0..TRIAL_EACH).filter(|_| company.is_likely()).count()
    }

    #[test]
    fn who_finds_company_goes_on_looking_and_who_does_not_ends() {
        let company = Company::default();
        assert_eq!(looks(&company), 1, "a trial");
        company.found(1);
        assert_eq!(looks(&company), 1, "nobody was there");
        company.found(12);
        assert_eq!(looks(&company), TRIAL_EACH);
        for _ in 0..8 {
            company.found(1);
        }
        assert_eq!(looks(&company), 1, "they have gone");
    }
}
