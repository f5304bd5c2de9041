//! Spans of inference requests for a collector of OpenTelemetry: which requests have some, what is noted
//! of them while they run, and the way to the task that sends them.
//!
//! Without a collector there is none of this. With one, a request that is not sampled costs the look at its
//! path and its `traceparent`; one that is leaves a record of what it was in a bounded queue, and never waits:
//! where the queue is full, the record is dropped and counted.

mod context;
mod export;
mod message;
mod span;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio_rustls::rustls::crypto::SecureRandom;

use crate::config::Telemetry as Settings;
use crate::error::Result;
use crate::metrics::TELEMETRY_SPANS;
pub(crate) use context::{Parent, TRACE_PARENT};
use export::Exporter;
pub(crate) use export::Exporting;
use span::Finished;
pub(crate) use span::{Active, Open, answered, current, failed, nested};

/// Requests whose spans wait to be sent, at most; each takes some 2 KiB at the worst.
const QUEUE_MAX: usize = 2_048;

/// Decides which requests have spans, and takes them when they end.
#[derive(Debug)]
pub(crate) struct Telemetry {
    /// The part of the requests without a parent that is sampled, of 2^64.
    part: u64,
    count: AtomicU64,
    random: &'static dyn SecureRandom,
    queue: mpsc::Sender<Box<Finished>>,
    tally: Arc<Tally>,
}

/// What becomes of spans.
#[derive(Debug)]
struct Tally {
    /// In the queue, or on their way.
    waiting: AtomicU64,
    sent: IntCounter,
    dropped: IntCounter,
    rejected: IntCounter,
}

impl Tally {
    fn new() -> Tally {
        let spans = |outcome| TELEMETRY_SPANS.with_label_values(&[outcome]);
        Tally {
            waiting: AtomicU64::new(0),
            sent: spans("sent"),
            dropped: spans("dropped"),
            rejected: spans("rejected"),
        }
    }

    /// So many that waited were sent, but for those that the collector did not take.
    fn sent(&self, spans: u64, rejected: u64) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        let rejected = rejected.min(spans);
        self.sent.inc_by(spans - rejected);
        self.rejected.inc_by(rejected);
    }

    /// So many that waited never will be.
    fn dropped(&self, spans: u64) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        self.dropped.inc_by(spans);
    }
}

/// A checked collector that nothing is sent to yet.
pub(crate) struct Opened {
    telemetry: Arc<Telemetry>,
    exporter: Exporter,
}

impl Opened {
    /// Reads the certificates, where there are some; connects to nobody.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for settings that cannot be.
    pub(crate) fn open(settings: &Settings) -> Result<Opened> {
        let secure = settings.check()?;
        let (queue, receiver) = mpsc::channel(QUEUE_MAX);
        let tally = Arc::new(Tally::new());
        let random = crate::tls::provider().secure_random;
        let exporter = Exporter::new(settings, secure, receiver, random, tally.clone())?;
        // A conversion from floating point saturates.
        let part = (settings.sample_rate * 2f64.powi(64)) as u64;
        let telemetry = Telemetry { part, count: AtomicU64::new(0), random, queue, tally };
        Ok(Opened { telemetry: Arc::new(telemetry), exporter })
    }

    /// Begins to send.
    pub(crate) fn start(self) -> Exporting {
        Exporting::new(self.telemetry, self.exporter)
    }
}

impl Telemetry {
    /// Whether the next request without a parent is sampled: spread evenly at any count, as shadows are.
    fn turn(&self) -> bool {
        let place = self.count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        place < self.part || self.part == u64::MAX
    }

    /// A number that no other trace or span has; `None` where the operating system gives none.
    fn id<const BYTES: usize>(&self) -> Option<[u8; BYTES]> {
        random_id(self.random)
    }

    /// Takes a span that has ended. Never waits.
    fn take(&self, finished: Box<Finished>) {
        let spans = finished.spans();
        self.tally.waiting.fetch_add(spans, Ordering::Relaxed);
        if self.queue.try_send(finished).is_err() {
            self.tally.dropped(spans);
        }
    }
}

/// An id is a number that is not 0.
fn random_id<const BYTES: usize>(random: &dyn SecureRandom) -> Option<[u8; BYTES]> {
    let mut id = [0; BYTES];
    random.fill(&mut id).ok()?;
    (id != [0; BYTES]).then_some(id)
}

#[cfg(test)]
mod tests;
