//! Prometheus metrics of this crate, in the default registry. Labels carry only the names of loaded models:
//! names from requests never become label values.

use std::sync::{LazyLock, Weak};

use parking_lot::Mutex;
use prometheus::local::{LocalHistogram, LocalIntCounter};
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts};

/// Registers a collector. A name is never registered twice, as each static is initialized once.
fn registered<C: prometheus::core::Collector + Clone + 'static>(collector: C) -> C {
    if let Err(error) = prometheus::register(Box::new(collector.clone())) {
        tracing::warn!(%error, "a metric is not exported");
    }
    collector
}

fn counter_vec(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    // Cannot fail: names and labels are constants of this file, and a test renders them all.
    registered(IntCounterVec::new(Opts::new(name, help), labels).expect("a valid metric"))
}

fn counter(name: &str, help: &str) -> IntCounter {
    registered(IntCounter::new(name, help).expect("a valid metric"))
}

fn gauge(name: &str, help: &str) -> IntGauge {
    registered(IntGauge::new(name, help).expect("a valid metric"))
}

fn gauge_vec(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    registered(IntGaugeVec::new(Opts::new(name, help), labels).expect("a valid metric"))
}

fn seconds_vec(name: &str, help: &str, labels: &[&str]) -> HistogramVec {
    let buckets = vec![
        0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05,
        0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
    ];
    registered(
        HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), labels).expect("a valid metric"),
    )
}

/// Answered requests by model, version and outcome: `ok`, the kind of error, or `cancelled` if the client
/// disconnected before the answer. Requests for unknown models have an empty model name.
pub static REQUESTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_requests_total",
        "Inference requests answered",
        &["model", "version", "outcome"],
    )
});

/// Rows predicted, by model and version.
pub static ROWS: LazyLock<IntCounterVec> =
    LazyLock::new(|| counter_vec("millrace_serving_rows_total", "Rows predicted", &["model", "version"]));

/// Seconds from a checked request to its outputs, including the wait for a session.
pub static REQUEST_SECONDS: LazyLock<HistogramVec> = LazyLock::new(|| {
    seconds_vec(
        "millrace_serving_request_seconds",
        "Seconds from a checked request to its outputs",
        &["model", "version"],
    )
});

/// Seconds inside ONNX Runtime.
pub static COMPUTE_SECONDS: LazyLock<HistogramVec> = LazyLock::new(|| {
    seconds_vec("millrace_serving_compute_seconds", "Seconds inside ONNX Runtime", &["model", "version"])
});

/// Rows of a run, of one request or of a batch.
pub static BATCH_ROWS: LazyLock<HistogramVec> = LazyLock::new(|| {
    let options = HistogramOpts::new("millrace_serving_batch_rows", "Rows that ran together")
        .buckets((0..=12).map(|power| f64::from(1 << power)).collect());
    registered(HistogramVec::new(options, &["model", "version"]).expect("a valid metric"))
});

/// Requests in progress.
pub static IN_FLIGHT: LazyLock<IntGauge> =
    LazyLock::new(|| gauge("millrace_serving_in_flight_requests", "Requests being answered"));

/// Large request bodies that wait for a decoding turn or have one.
pub static LARGE_BODIES: LazyLock<IntGauge> = LazyLock::new(|| {
    gauge("millrace_serving_large_bodies", "Large request bodies being read or waiting to be")
});

/// Open connections, by service.
pub static CONNECTIONS: LazyLock<IntGaugeVec> =
    LazyLock::new(|| gauge_vec("millrace_serving_open_connections", "Open connections", &["service"]));

/// Connections refused because too many were open, by service.
pub static CONNECTIONS_REFUSED: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_refused_connections_total",
        "Connections refused because too many were open",
        &["service"],
    )
});

/// Connections that the server ended because the client read no answers or cancelled too many calls, by
/// service.
pub static CONNECTIONS_CUT: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_cut_connections_total",
        "Connections ended because the client took no answers or cancelled too many calls",
        &["service"],
    )
});

/// Failed TLS handshakes: clients without TLS, or without a trusted certificate.
pub static HANDSHAKES_FAILED: LazyLock<IntCounter> =
    LazyLock::new(|| counter("millrace_serving_failed_handshakes_total", "Handshakes of TLS that failed"));

/// Calls refused because of their token, by reason: `missing`, `unknown` or `denied`.
pub static CALLERS_REFUSED: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec("millrace_serving_refused_callers_total", "Calls refused for their token", &["reason"])
});

/// Reloads of changed files, by content (`certificates` or `tokens`) and outcome (`ok`, `failed`, `expired`).
pub static RELOADS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_reloads_total",
        "Times that changed files were read again",
        &["what", "outcome"],
    )
});

/// Model versions by state, `ready` or `failed`.
pub static MODELS: LazyLock<IntGaugeVec> =
    LazyLock::new(|| gauge_vec("millrace_serving_model_versions", "Model versions by state", &["state"]));

/// Sessions of loaded model versions, by the device that they run on and the device that was configured.
pub static SESSIONS: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec(
        "millrace_serving_sessions",
        "Sessions of loaded model versions, by the device they run on and the requested device",
        &["model", "version", "device", "asked"],
    )
});

/// Scans of the repository, by outcome.
pub static REFRESHES: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_repository_refreshes_total",
        "Looks through the model repository",
        &["outcome"],
    )
});

/// Copies of requests for a shadow version, by outcome: `compared` with the response, `unlike` it in shape or
/// type, `failed`, or `dropped` because too many copies were running.
pub static SHADOW_REQUESTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_shadow_requests_total",
        "Copies of requests for a shadow version",
        &["model", "version", "outcome"],
    )
});

/// The largest difference between a number of a response and that of the shadow version.
pub static SHADOW_DIFFERENCE: LazyLock<HistogramVec> = LazyLock::new(|| {
    let buckets = std::iter::once(0.0).chain((-7..=3).map(|power| 10f64.powi(power))).collect();
    let options = HistogramOpts::new(
        "millrace_serving_shadow_difference",
        "Largest distance between the numbers of a reply and of the shadow version",
    )
    .buckets(buckets);
    registered(HistogramVec::new(options, &["model", "version"]).expect("a valid metric"))
});

/// Rows by label: `same` if the shadow version gives the same label as the response, else `other`.
pub static SHADOW_ROWS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "millrace_serving_shadow_rows_total",
        "Rows by whether the shadow version gives them the same label",
        &["model", "version", "label"],
    )
});

/// Bytes of the response cache in use.
pub static RESPONSE_CACHE_BYTES: LazyLock<IntGauge> = LazyLock::new(|| {
    gauge("millrace_serving_response_cache_bytes", "Bytes of the answers that are kept to be given again")
});

/// Evictions from the response cache.
pub static RESPONSE_CACHE_EVICTIONS: LazyLock<IntCounter> = LazyLock::new(|| {
    counter(
        "millrace_serving_response_cache_evictions_total",
        "Responses that were evicted from the cache to free memory for others",
    )
});

/// Spans of requests by outcome: `sent`, `rejected` by the collector, or `dropped` because it was unreachable
/// or too slow.
pub static TELEMETRY_SPANS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec("millrace_serving_telemetry_spans_total", "Spans of requests, by outcome", &["outcome"])
});

/// Records of a pipe, by outcome: `predicted` or `dead_letter`.
pub static PIPE_RECORDS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec("millrace_serving_pipe_records_total", "Records of a pipe", &["pipe", "outcome"])
});

/// Server starts in this process; makes the registry non-empty from the first scrape on.
pub static STARTS: LazyLock<IntCounter> =
    LazyLock::new(|| counter("millrace_serving_starts_total", "Server starts in this process"));

/// Local counters of one model version. They are flushed to the registry at each scrape, and when the version
/// is dropped.
#[derive(Debug)]
pub(crate) struct ModelMetrics {
    /// Requests that were answered.
    pub ok: LocalIntCounter,
    /// Rows predicted.
    pub rows: LocalIntCounter,
    /// As [`REQUEST_SECONDS`].
    pub(crate) request_seconds: LocalHistogram,
    /// As [`COMPUTE_SECONDS`].
    pub(crate) compute_seconds: LocalHistogram,
    /// As [`BATCH_ROWS`].
    pub batch_rows: LocalHistogram,
}

impl ModelMetrics {
    /// Counters at zero.
    pub(crate) fn new(model: &str, version: u64) -> ModelMetrics {
        let version = version.to_string();
        let labels = [model, version.as_str()];
        ModelMetrics {
            ok: REQUESTS.with_label_values(&[model, &version, "ok"]).local(),
            rows: ROWS.with_label_values(&labels).local(),
            request_seconds: REQUEST_SECONDS.with_label_values(&labels).local(),
            compute_seconds: COMPUTE_SECONDS.with_label_values(&labels).local(),
            batch_rows: BATCH_ROWS.with_label_values(&labels).local(),
        }
    }

    /// Flushes the counts to the registry.
    pub(crate) fn publish(&self) {
        self.ok.flush();
        self.rows.flush();
        for histogram in [&self.request_seconds, &self.compute_seconds, &self.batch_rows] {
            histogram.flush();
        }
    }
}

impl Drop for ModelMetrics {
    fn drop(&mut self) {
        self.publish();
    }
}

/// Local counts that are not in the registry yet.
pub trait LocalCounts: Send + Sync {
    /// Flushes them to the registry.
    fn publish(&self);
}

static LOCAL_COUNTS: Mutex<Vec<Weak<dyn LocalCounts>>> = Mutex::new(Vec::new());

/// Registers counts to be flushed at each scrape.
pub fn register_counts(kept: Weak<dyn LocalCounts>) {
    let mut all = LOCAL_COUNTS.lock();
    all.retain(|kept| kept.strong_count() > 0);
    all.push(kept);
}

/// Flushes the local counts of all loaded versions to the registry.
pub fn flush() {
    let kept: Vec<_> = LOCAL_COUNTS.lock().iter().filter_map(Weak::upgrade).collect();
    kept.iter().for_each(|kept| kept.publish());
}
