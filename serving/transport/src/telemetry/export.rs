//! The task that sends spans in batches, bounded by size and delay. Spans that the collector does not accept
//! are not sent again, because they would delay later ones. One log line reports the failure until the
//! collector accepts spans again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::rustls::crypto::SecureRandom;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

use super::span::FinishedSpan;
use super::{SpanCounters, Telemetry, message};
use millrace_serving_client::client::{Connector, Credentials};
use millrace_serving_core::config::Telemetry as Settings;
use millrace_serving_core::error::{Error, Result, quote};

/// Most requests in one message: keeps it below the 4 MiB that collectors accept.
const BATCH_MAX: usize = 512;
/// Longest delay of a span for batching, and the pause after a failure.
const DELAY: Duration = Duration::from_secs(1);
/// Longest time to connect, and to send a message.
const CONNECT_MAX: Duration = Duration::from_secs(5);
const SEND_MAX: Duration = Duration::from_secs(10);
/// Longest time for a stopping server to send the remaining spans.
const FLUSH_MAX: Duration = Duration::from_secs(2);

/// Sends spans until it is stopped and none are left.
pub(super) struct Exporter {
    endpoint: Endpoint,
    connector: Option<Connector>,
    headers: MetadataMap,
    resource: Resource,
    random: &'static dyn SecureRandom,
    pub(super) queue: mpsc::Receiver<Box<FinishedSpan>>,
    tally: Arc<SpanCounters>,
    failing: bool,
}

impl Exporter {
    pub(super) fn new(
        settings: &Settings,
        secure: bool,
        queue: mpsc::Receiver<Box<FinishedSpan>>,
        random: &'static dyn SecureRandom,
        tally: Arc<SpanCounters>,
    ) -> Result<Exporter> {
        let wrong = |reason: String| Error::Config { reason: format!("telemetry: {reason}") };
        let endpoint = Endpoint::from_shared(settings.endpoint.clone())
            .map_err(|error| wrong(format!("endpoint: {error}")))?
            .connect_timeout(CONNECT_MAX)
            .tcp_nodelay(true);
        let credentials = Credentials { ca: settings.ca.clone(), ..Credentials::default() };
        let connector = secure.then(|| credentials.connector()).transpose();
        Ok(Exporter {
            endpoint,
            connector: connector.map_err(|error| wrong(error.to_string()))?,
            headers: settings.metadata()?,
            resource: message::resource(&settings.service_name),
            random,
            queue,
            tally,
            failing: false,
        })
    }

    /// Connects with the first message, and again after a lost connection.
    fn client(&self) -> TraceServiceClient<Channel> {
        TraceServiceClient::new(match &self.connector {
            Some(connector) => self.endpoint.connect_with_connector_lazy(connector.clone()),
            None => self.endpoint.connect_lazy(),
        })
    }

    async fn run(mut self, stop: CancellationToken) {
        let mut client = self.client();
        let mut batch = Vec::new();
        while self.gather(&mut batch, &stop).await {
            let sent = self.send(&mut client, &batch).await;
            let spans: u64 = batch.iter().map(|request| request.spans()).sum();
            batch.clear();
            match sent {
                Ok(rejected) => {
                    self.tally.sent(spans, rejected);
                    if std::mem::take(&mut self.failing) {
                        tracing::info!(endpoint = %self.endpoint.uri(), "the collector accepts spans again");
                    }
                }
                Err(reason) => {
                    self.tally.dropped(spans);
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::warn!(
                            endpoint = %self.endpoint.uri(), error = reason,
                            "cannot send spans: they are dropped until the collector is reachable (millrace_serving_telemetry_spans_total)"
                        );
                    }
                    // Reconnects: the kernel would keep a connection to a dead host for a long time.
                    client = self.client();
                    // Limits the rate of retries, as messages may fill up faster.
                    stop.run_until_cancelled(sleep(DELAY)).await;
                }
            }
        }
        self.queue.close();
        while let Ok(late) = self.queue.try_recv() {
            self.tally.dropped(late.spans());
        }
    }

    /// Waits for spans, then briefly for more; false once stopped with none left.
    #[allow(clippy::vec_box, reason = "as they come from the queue, whose places are small that way")]
    async fn gather(&mut self, batch: &mut Vec<Box<FinishedSpan>>, stop: &CancellationToken) -> bool {
        let first = tokio::select! {
            biased;
            first = self.queue.recv() => first,
            () = stop.cancelled() => self.queue.try_recv().ok(),
        };
        let Some(first) = first else { return false };
        batch.push(first);
        let late = sleep(DELAY);
        tokio::pin!(late);
        while batch.len() < BATCH_MAX {
            let next = tokio::select! {
                biased;
                next = self.queue.recv() => next,
                () = stop.cancelled() => self.queue.try_recv().ok(),
                () = late.as_mut() => None,
            };
            let Some(next) = next else { break };
            batch.push(next);
        }
        true
    }

    /// Sends one message; returns the number of spans that the collector rejected.
    async fn send(
        &mut self,
        client: &mut TraceServiceClient<Channel>,
        batch: &[Box<FinishedSpan>],
    ) -> std::result::Result<u64, String> {
        let mut request = tonic::Request::new(message::export(&self.resource, batch, self.random));
        *request.metadata_mut() = self.headers.clone();
        match timeout(SEND_MAX, client.export(request)).await {
            Ok(Ok(reply)) => {
                let partial = reply.into_inner().partial_success.unwrap_or_default();
                let rejected = u64::try_from(partial.rejected_spans).unwrap_or(0);
                if rejected > 0 {
                    let reason = quote(&partial.error_message);
                    tracing::debug!(rejected, reason, "the collector did not accept all spans");
                }
                Ok(rejected)
            }
            Ok(Err(status)) => Err(format!("{:?}: {}", status.code(), quote(status.message()))),
            Err(_) => Err(format!("no answer within {} s", SEND_MAX.as_secs())),
        }
    }
}

/// The running task.
#[derive(Debug)]
pub(crate) struct ExportTask {
    telemetry: Arc<Telemetry>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl ExportTask {
    pub(super) fn new(telemetry: Arc<Telemetry>, exporter: Exporter) -> ExportTask {
        let stop = CancellationToken::new();
        let task = tokio::spawn(exporter.run(stop.clone()));
        ExportTask { telemetry, stop, task }
    }

    /// The sampler with which requests begin their spans.
    pub(crate) fn telemetry(&self) -> Arc<Telemetry> {
        self.telemetry.clone()
    }

    /// Sends the remaining spans, as far as the collector accepts them in time.
    pub(crate) async fn finish(mut self) {
        self.stop.cancel();
        if timeout(FLUSH_MAX, &mut self.task).await.is_err() {
            self.task.abort();
            // The task no longer changes the counters once it has ended.
            let _ = (&mut self.task).await;
            let tally = &self.telemetry.tally;
            let left = tally.waiting.swap(0, Ordering::Relaxed);
            tally.dropped.inc_by(left);
            tracing::warn!(spans = left, "spans are dropped: the collector did not accept them in time");
        }
    }
}
