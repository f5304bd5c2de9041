//! Scrape of the metrics: the registry of the process, and figures that are computed from the loaded versions.

mod drift;
mod triton;

use prometheus::proto::MetricFamily;

use millrace_serving_core::metrics;
use millrace_serving_repository::repository::Repository;

/// All metrics of the process in the Prometheus text format, with the statistics of a server's models under
/// Triton's names.
pub(crate) fn render(repository: Option<&Repository>) -> String {
    metrics::flush();
    let mut families: Vec<MetricFamily> = prometheus::gather();
    families.extend(repository.map(triton::gather).unwrap_or_default());
    families.extend(repository.map(drift::gather).unwrap_or_default());
    let encoder = prometheus::TextEncoder::new();
    encoder.encode_to_string(&families).unwrap_or_else(|error| {
        tracing::warn!(%error, "the metrics cannot be written");
        String::new()
    })
}
