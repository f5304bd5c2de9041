//! Whether it pays to look for company before a run.
//!
//! A request that finds a session free could run at once. Where many clients ask, others would be there a
//! moment later, and one run for all costs little more than one for each. A request does not see them: they
//! are in sockets that its thread has not read yet, because it runs. So now and then one looks before it
//! runs, which costs microseconds, and as long as that finds enough, all do. Requests of a client that is alone never
//! look: a look wakes another thread of the server, and with a client that is quick to ask again the threads then
//! wake each other for every request (seen: 60 us for one that takes 36 otherwise).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Of so many requests beside those of others that do not look, one does.
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
    /// Requests beside those of others that did not look.
    passed: AtomicUsize,
    /// The port of the client that asked last, which tells those from each other well enough.
    last: AtomicUsize,
}

impl Company {
    /// Whether to look before the next run, which is one for `client`; `beside` says whether others run.
    pub(super) fn is_likely(&self, client: Option<SocketAddr>, beside: bool) -> bool {
        let port = client.map_or(0, |client| usize::from(client.port()));
        let same = self.last.load(Ordering::Relaxed) == port;
        if !same {
            self.last.store(port, Ordering::Relaxed);
        }
        self.typical.load(Ordering::Relaxed) >= ENOUGH
            || ((beside || !same)
                && self.passed.fetch_add(1, Ordering::Relaxed) % TRIAL_EACH == TRIAL_EACH - 1)
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
        (0..TRIAL_EACH).filter(|_| company.is_likely(None, true)).count()
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

    #[test]
    fn who_is_alone_does_not_look() {
        let company = Company::default();
        let client = |port| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        let looks = |ports: &[u16]| {
            (0..2 * TRIAL_EACH).filter(|i| company.is_likely(client(ports[i % ports.len()]), false)).count()
        };
        assert!(looks(&[7]) <= 1);
        assert_eq!(looks(&[7]), 0);
        assert!(looks(&[7, 8]) >= 1);
        company.found(64);
        assert_eq!(looks(&[7]), 2 * TRIAL_EACH, "it was worth it just now");
    }
}
