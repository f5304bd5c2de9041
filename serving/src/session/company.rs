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
use std::time::Duration;

use super::thrift::Thrift;

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
    /// Whether it is worth it to look where there is somebody to be found: the first way is to look.
    looking: Thrift,
}

impl Company {
    /// Whether to look before the next run, which is one for `client`; `beside` says whether others run.
    pub(super) fn is_likely(&self, client: Option<SocketAddr>, beside: bool) -> bool {
        let port = client.map_or(0, |client| usize::from(client.port()));
        let same = self.last.load(Ordering::Relaxed) == port;
        if !same {
            self.last.store(port, Ordering::Relaxed);
        }
        let is_found = self.is_found();
        (is_found && self.looking.is_first())
            || ((beside || !same || is_found)
                && self.passed.fetch_add(1, Ordering::Relaxed) % TRIAL_EACH == TRIAL_EACH - 1)
    }

    fn is_found(&self) -> bool {
        self.typical.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Counts rows of a run, which the process has spent its time for: so much so far, if that can be told.
    pub(super) fn ran(&self, rows: usize, spent: impl FnOnce() -> Option<Duration>) {
        if self.is_found() {
            self.looking.served(rows, spent);
        }
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
    fn company_that_costs_more_than_it_spares_is_left_alone() {
        let company = Company::default();
        company.found(12);
        let mut spent = Duration::ZERO;
        let mut rounds = 0;
        // Until the other way is the usual one, and not in a trial.
        while rounds < 1000 || company.looking.is_first() {
            rounds += 1;
            assert!(rounds < 1100, "it looks still");
            let nanos = if company.looking.is_first() { 12_000 } else { 10_000 };
            for _ in 0..512 {
                spent += Duration::from_nanos(nanos);
                company.ran(4, || Some(spent));
            }
        }
        let looked: usize = (0..8).map(|_| looks(&company)).sum();
        assert_eq!(looked, 8, "a trial each, to know that there is company still");
        for _ in 0..16 {
            company.found(1);
        }
        for _ in 0..1024 {
            company.ran(4, || unreachable!("what runs where there is no company is not measured"));
        }
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
