//! OpenTelemetry spans of inference requests: sampling, recording while a request runs, and the queue to the
//! export task.
//!
//! Without a collector this module does nothing. With one, an unsampled request costs a look at its path and
//! its `traceparent`. A sampled one puts a record into a bounded queue and never waits: if the queue is full,
//! the record is dropped and counted.

mod context;
mod export;
mod message;
mod span;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio_rustls::rustls::crypto::SecureRandom;

pub(crate) use context::{Parent, TRACE_PARENT};
pub(crate) use export::ExportTask;
use export::Exporter;
use millrace_serving_core::config::Telemetry as Settings;
use millrace_serving_core::error::Result;
use millrace_serving_core::metrics::TELEMETRY_SPANS;
use span::FinishedSpan;
pub(crate) use span::{ActiveSpan, OpenSpan, current, nested};

/// Most requests whose spans wait for export; each takes at most about 2 KiB.
const QUEUE_MAX: usize = 2_048;

/// Samples requests, and queues their spans when they end.
#[derive(Debug)]
pub(crate) struct Telemetry {
    /// The fraction of requests without a parent that is sampled, in units of 2^-64.
    part: u64,
    count: AtomicU64,
    random: &'static dyn SecureRandom,
    queue: mpsc::Sender<Box<FinishedSpan>>,
    tally: Arc<SpanCounters>,
}

/// Counters of span outcomes.
#[derive(Debug)]
struct SpanCounters {
    /// In the queue or being sent.
    waiting: AtomicU64,
    sent: IntCounter,
    dropped: IntCounter,
    rejected: IntCounter,
}

impl SpanCounters {
    fn new() -> SpanCounters {
        let spans = |outcome| TELEMETRY_SPANS.with_label_values(&[outcome]);
        SpanCounters {
            waiting: AtomicU64::new(0),
            sent: spans("sent"),
            dropped: spans("dropped"),
            rejected: spans("rejected"),
        }
    }

    /// Counts waiting spans as sent, except those that the collector rejected.
    fn sent(&self, spans: u64, rejected: u64) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        let rejected = rejected.min(spans);
        self.sent.inc_by(spans - rejected);
        self.rejected.inc_by(rejected);
    }

    /// Counts waiting spans as dropped.
    fn dropped(&self, spans: u64) {
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        self.dropped.inc_by(spans);
    }
}

/// A checked configuration of a collector; nothing is sent yet.
pub(crate) struct CheckedCollector {
    telemetry: Arc<Telemetry>,
    exporter: Exporter,
}

impl CheckedCollector {
    /// Reads the certificates, if any; does not connect.
    ///
    /// # Errors
    /// [`millrace_serving_core::Error::Config`] for invalid settings.
    pub(crate) fn open(settings: &Settings) -> Result<CheckedCollector> {
        let secure = settings.check()?;
        let (queue, receiver) = mpsc::channel(QUEUE_MAX);
        let tally = Arc::new(SpanCounters::new());
        let random = millrace_serving_core::tls::provider().secure_random;
        let exporter = Exporter::new(settings, secure, receiver, random, tally.clone())?;
        // The conversion from floating point saturates.
        let part = (settings.sample_rate * 2f64.powi(64)) as u64;
        let telemetry = Telemetry { part, count: AtomicU64::new(0), random, queue, tally };
        Ok(CheckedCollector { telemetry: Arc::new(telemetry), exporter })
    }

    /// Starts the export task.
    pub(crate) fn start(self) -> ExportTask {
        ExportTask::new(self.telemetry, self.exporter)
    }
}

impl Telemetry {
    /// Whether to sample the next request without a parent; evenly spread, like shadow traffic.
    fn is_sampled(&self) -> bool {
        let place = self.count.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        place < self.part || self.part == u64::MAX
    }

    /// A random trace or span id; `None` if the operating system fails to provide one.
    fn id<const BYTES: usize>(&self) -> Option<[u8; BYTES]> {
        random_id(self.random)
    }

    /// Queues an ended span; never waits.
    fn take(&self, finished: Box<FinishedSpan>) {
        let spans = finished.spans();
        self.tally.waiting.fetch_add(spans, Ordering::Relaxed);
        if self.queue.try_send(finished).is_err() {
            self.tally.dropped(spans);
        }
    }
}

/// A random id; 0 is not a valid one.
fn random_id<const BYTES: usize>(random: &dyn SecureRandom) -> Option<[u8; BYTES]> {
    let mut id = [0; BYTES];
    random.fill(&mut id).ok()?;
    (id != [0; BYTES]).then_some(id)
}

#[cfg(test)]
mod tests;
