//! Load generator for a model server, with measurements: used by `millrace serve bench` and `make bench-serving`.
//!
//! There are two kinds of load. In a closed loop, each client sends its next request when it has its response, over a
//! separate connection. This measures the maximum throughput of a server, and the latency at that throughput. In an
//! open loop, the generator sends requests like independent users, at times that a Poisson process has fixed
//! beforehand, even if the server does not keep up. There the latency counts from the scheduled time. A server that
//! stalls, or a generator that falls behind, shows in every request that had to wait, not only in those in progress.
//!
//! The generator encodes requests once and does not decode responses, so that it uses little of a machine that it may
//! share with the server. If the generator was the bottleneck, the result says so ([`Measured::limits`]).

mod client;
mod clock;
mod closed;
mod histogram;
mod open;
mod requests;
mod schedule;

use std::collections::BTreeMap;
use std::time::Duration;

pub use closed::{Closed, closed, closed_with};
pub use histogram::Histogram;
pub use open::{Open, open, open_with};
pub use requests::{Requests, drawn_inputs};
pub use schedule::Poisson;

use crate::client::ClientError;
use millrace_serving_core::error::InferError;

/// Maximum number of clients or connections of a load: each takes a file descriptor.
pub const CLIENTS_MAX: usize = 10_000;
/// Highest rate of a load, in requests per second.
pub const RATE_MAX: f64 = 1e6;

/// Error that prevented a measurement.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The server cannot be reached, or the credentials cannot be used.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The requests cannot be generated.
    #[error(transparent)]
    Requests(#[from] InferError),
    /// A parameter of the load is out of range.
    #[error("{0}")]
    Load(String),
    /// The kernel provided no timer.
    #[error("no timer for the times at which requests are sent: {0}")]
    Timer(#[from] std::io::Error),
}

/// Measurements of a load, without its warm-up.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// Latency of successful requests; in an open loop, since their scheduled time.
    pub latency: Histogram,
    /// Number of requests that succeeded within their deadline, if any.
    pub in_time: u64,
    /// Number of failed requests, by gRPC status.
    pub failed: BTreeMap<&'static str, u64>,
    /// Requests of an open loop that were not sent: too many requests were unanswered, or the deadline had passed
    /// before the generator came to them.
    pub unsent: u64,
    /// Delay of requests of an open loop behind their scheduled time.
    pub late: Histogram,
    /// Duration of the measurement.
    pub elapsed: Duration,
    /// Processor time that this process used during the measurement.
    pub processor: Duration,
}

impl Measured {
    /// Successful requests per second.
    pub fn rate(&self) -> f64 {
        per_second(self.latency.count(), self.elapsed)
    }

    /// Requests per second that succeeded within their deadline.
    pub fn goodput(&self) -> f64 {
        per_second(self.in_time, self.elapsed)
    }

    /// Number of failed requests of any status.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Ways in which the generator was the bottleneck, one sentence each; empty when the server was.
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

    /// Adds the measurements of another client of the same load at the same time.
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

/// Delay that the timer and the kernel's scheduler cause; a generator that falls behind exceeds it.
const LATE_MAX: Duration = Duration::from_millis(1);

fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

/// Processor time of this process so far; zero if the kernel does not report it.
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
