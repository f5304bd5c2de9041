//! Load on a model server, and what it answers: for `millrace serve bench` and `make bench-serving`.
//!
//! Two kinds. In a closed loop each of a number of clients sends a request when it has its answer, over a
//! connection of its own: what a server can do at most, and how long a request takes at that. In an open
//! loop requests are sent at times that a Poisson process has fixed beforehand, whether the server keeps
//! up or not, as users who know nothing of each other do. There a request's time counts from when it was
//! to be sent: a server that stalls, or a generator that falls behind, shows in every request that had to
//! wait for it, not only in those that were under way.
//!
//! Requests are encoded once and answers are not decoded, so that the generator takes as little as it can
//! of a machine that it may share with the server. Where it was the bottleneck it says so
//! ([`Measured::limits`]).

mod client;
mod clock;
mod closed;
mod histogram;
mod open;
mod picture;
mod requests;
mod schedule;

use std::collections::BTreeMap;
use std::time::Duration;

pub use closed::{Closed, closed, closed_with};
pub use histogram::Histogram;
pub use open::{Open, open, open_with};
pub use picture::{Point, QUANTILES, picture};
pub use requests::{Requests, drawn_inputs};
pub use schedule::Poisson;

use crate::client::ClientError;
use crate::error::InferError;

/// Most clients, and most connections, of a load: each takes a file.
pub const CLIENTS_MAX: usize = 10_000;
/// Highest rate of a load, in requests per second.
pub const RATE_MAX: f64 = 1e6;

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The server cannot be reached, or refused the request that is tried first.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The requests cannot be made.
    #[error(transparent)]
    Requests(#[from] InferError),
    /// The load is none that can be made.
    #[error("{0}")]
    Load(String),
    /// The kernel gives no timer.
    #[error("no timer for the times at which requests are sent: {0}")]
    Timer(#[from] std::io::Error),
}

/// What a load has measured, its warm-up left out.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// How long the requests took that succeeded: in an open loop since they were to be sent.
    pub latency: Histogram,
    /// Requests that succeeded within their deadline, where there was one.
    pub in_time: u64,
    /// Requests that failed, by gRPC status.
    pub failed: BTreeMap<&'static str, u64>,
    /// Requests of an open loop that were not sent: too many waited for their answers, or their deadline
    /// had passed before the generator came to them.
    pub unsent: u64,
    /// How much later than they were to be the requests of an open loop were sent.
    pub late: Histogram,
    /// How long was measured.
    pub elapsed: Duration,
    /// Processor time of this process meanwhile.
    pub processor: Duration,
}

impl Measured {
    /// Requests that succeeded, per second.
    pub fn rate(&self) -> f64 {
        per_second(self.latency.count(), self.elapsed)
    }

    /// Requests that succeeded within their deadline, per second.
    pub fn goodput(&self) -> f64 {
        per_second(self.in_time, self.elapsed)
    }

    /// How many requests failed, whatever the status.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// In what the generator was the bottleneck, a sentence each; empty when the server was.
    pub fn limits(&self) -> Vec<String> {
        let mut limits = Vec::new();
        if self.unsent > 0 {
            limits.push(format!(
                "{} requests were not sent: {} waited for their answers already, or their deadline had passed",
                self.unsent,
                open::UNANSWERED_MAX
            ));
        }
        let late = self.late.quantile(0.99);
        if late > LATE_MAX && late.saturating_mul(4) > self.latency.quantile(0.99) {
            limits.push(format!(
                "1 of 100 requests was sent {:.1} ms late or more, which their times include",
                late.as_secs_f64() * 1e3
            ));
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let used = self.processor.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9);
        if used > 0.9 * processors as f64 {
            limits.push(format!("the generator itself used {used:.1} of {processors} processors"));
        }
        limits
    }

    /// Adds what another client of the same load has measured at the same time.
    fn merge(&mut self, other: &Measured) {
        self.latency.merge(&other.latency);
        self.late.merge(&other.late);
        self.in_time += other.in_time;
        self.unsent += other.unsent;
        for (status, count) in &other.failed {
            *self.failed.entry(status).or_default() += count;
        }
    }
}

/// Lateness that is the timer's and the scheduler's and no sign of a generator that falls behind.
const LATE_MAX: Duration = Duration::from_millis(1);

fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

/// Processor time of this process so far; none where the kernel does not say.
fn processor_time() -> Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| {
            let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
            let micros = u64::try_from(time.tv_usec()).unwrap_or(0);
            Duration::from_secs(seconds) + Duration::from_micros(micros)
        })
        .sum()
}

#[cfg(test)]
mod tests;
