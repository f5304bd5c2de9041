//! Prometheus metrics of ingest. Counters count committed records and files, never records that were only
//! read.

use std::sync::LazyLock;

use crate::progress::Progress;

use prometheus::{
    HistogramVec, IntCounterVec, IntGaugeVec, register_histogram_vec, register_int_counter_vec,
    register_int_gauge_vec,
};

/// Rows in published files. Label: job.
pub const LANDED_RECORDS: &str = "millrace_ingest_landed_records_total";
/// Dead letters published. Labels: job, reason.
pub const DEAD_LETTERS: &str = "millrace_ingest_dead_letters_total";
/// Committed records without a value that the job skips. Label: job.
pub const TOMBSTONES_SKIPPED: &str = "millrace_ingest_tombstones_skipped_total";
/// Bytes of keys and values of committed records. Label: job.
pub const COMMITTED_BYTES: &str = "millrace_ingest_committed_bytes_total";
/// Files published, dead-letter files included. Label: job.
pub const FILES: &str = "millrace_ingest_files_total";
/// Seconds from the decision to publish until it is durable. Label: job.
pub const COMMIT_SECONDS: &str = "millrace_ingest_commit_seconds";
/// Records of the topic that are not committed yet. Labels: job, partition.
pub const LAG_RECORDS: &str = "millrace_ingest_lag_records";

pub(crate) struct Metrics {
    pub(crate) landed: IntCounterVec,
    pub(crate) dead_letters: IntCounterVec,
    pub(crate) skipped: IntCounterVec,
    pub(crate) bytes: IntCounterVec,
    pub(crate) files: IntCounterVec,
    pub(crate) commit_seconds: HistogramVec,
    pub(crate) lag: IntGaugeVec,
}

/// Registers all of them; a second copy of this crate in one process is the only way to fail.
static METRICS: LazyLock<Option<Metrics>> = LazyLock::new(|| match register() {
    Ok(metrics) => Some(metrics),
    Err(error) => {
        tracing::warn!(%error, "ingest metrics are off");
        None
    }
});

pub(crate) fn metrics() -> Option<&'static Metrics> {
    METRICS.as_ref()
}

/// Sets the lag of each partition whose end is known.
pub(crate) fn set_lag(job: &str, progress: &Progress) {
    let Some(metrics) = metrics() else { return };
    for (partition, high) in &progress.high {
        let next = progress.offsets.get(partition).copied().unwrap_or(0);
        metrics.lag.with_label_values(&[job, &partition.to_string()]).set(high.saturating_sub(next).max(0));
    }
}

fn register() -> prometheus::Result<Metrics> {
    Ok(Metrics {
        landed: register_int_counter_vec!(LANDED_RECORDS, "Rows in published files", &["job"])?,
        dead_letters: register_int_counter_vec!(DEAD_LETTERS, "Dead letters published", &["job", "reason"])?,
        skipped: register_int_counter_vec!(
            TOMBSTONES_SKIPPED,
            "Committed records without a value that the job skips",
            &["job"]
        )?,
        bytes: register_int_counter_vec!(
            COMMITTED_BYTES,
            "Bytes of keys and values of committed records",
            &["job"]
        )?,
        files: register_int_counter_vec!(FILES, "Files published", &["job"])?,
        commit_seconds: register_histogram_vec!(
            COMMIT_SECONDS,
            "Seconds of a publish",
            &["job"],
            vec![0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
        )?,
        lag: register_int_gauge_vec!(
            LAG_RECORDS,
            "Records of the topic that are not committed yet",
            &["job", "partition"]
        )?,
    })
}
