//! Prometheus metrics of topics and of the embedded broker, in the default registry.

use std::sync::LazyLock;

use prometheus::{IntCounter, IntGauge};

fn counter(name: &'static str, help: &'static str) -> IntCounter {
    // A second registration of the same name can only come from a second copy of this crate in
    // one process; its numbers are then counted but not exported.
    prometheus::register_int_counter!(name, help).unwrap_or_else(|_| detached_counter(name, help))
}

fn gauge(name: &'static str, help: &'static str) -> IntGauge {
    prometheus::register_int_gauge!(name, help).unwrap_or_else(|_| detached_gauge(name, help))
}

#[allow(clippy::expect_used)]
fn detached_counter(name: &'static str, help: &'static str) -> IntCounter {
    IntCounter::new(name, help).expect("metric names are constants of this file")
}

#[allow(clippy::expect_used)]
fn detached_gauge(name: &'static str, help: &'static str) -> IntGauge {
    IntGauge::new(name, help).expect("metric names are constants of this file")
}

/// Records acknowledged to our producers.
pub static PRODUCED_RECORDS: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("millrace_streams_produced_records_total", "Records acknowledged to producers.")
});

/// Records handed out by our consumers.
pub static CONSUMED_RECORDS: LazyLock<IntCounter> =
    LazyLock::new(|| counter("millrace_streams_consumed_records_total", "Records returned by consumers."));

/// Key and value bytes handed out by our consumers.
pub static CONSUMED_BYTES: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("millrace_streams_consumed_bytes_total", "Key and value bytes returned by consumers.")
});

/// Open client connections of the embedded broker.
pub static BROKER_CONNECTIONS: LazyLock<IntGauge> = LazyLock::new(|| {
    gauge("millrace_streams_broker_connections", "Open client connections of the embedded broker.")
});

/// Connections that the embedded broker refused at a limit, or closed because of malformed or excessive
/// input.
pub static BROKER_REFUSED: LazyLock<IntCounter> = LazyLock::new(|| {
    counter(
        "millrace_streams_broker_refused_total",
        "Connections closed by the embedded broker because of malformed or excessive input.",
    )
});

/// Records appended to the logs of the embedded broker.
pub static BROKER_APPENDED_RECORDS: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("millrace_streams_broker_appended_records_total", "Records appended to the broker's logs.")
});

/// Bytes appended to the logs of the embedded broker.
pub static BROKER_APPENDED_BYTES: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("millrace_streams_broker_appended_bytes_total", "Bytes appended to the broker's logs.")
});

/// Bytes of record batches sent to consumers by the embedded broker.
pub static BROKER_FETCHED_BYTES: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("millrace_streams_broker_fetched_bytes_total", "Record batch bytes sent to consumers.")
});
