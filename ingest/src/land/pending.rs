//! Counts of the records decoded since the last publish, added to the report and the metrics once they are
//! published.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::decode::RejectClass;
use crate::metrics::metrics;
use crate::progress::IngestReport;
use crate::state::LastRecord;

/// Records that no publish holds yet.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    pub(crate) landed: u64,
    pub(crate) dead: BTreeMap<RejectClass, u64>,
    /// Tombstones that the job skips.
    pub(crate) skipped: u64,
    /// Bytes of keys and values.
    pub(crate) bytes: u64,
    /// Memory that the records take, which is more than their bytes where they are tiny.
    pub(crate) memory: u64,
    /// The last of them per partition.
    pub(crate) last: BTreeMap<i32, LastRecord>,
    /// Whether positions moved without a record.
    pub(crate) passed: bool,
    /// Time at which the oldest of them was taken from the topic.
    pub(crate) since: Option<Instant>,
}

impl Pending {
    pub(crate) fn records(&self) -> u64 {
        self.landed + self.dead_letters() + self.skipped
    }

    fn dead_letters(&self) -> u64 {
        self.dead.values().sum()
    }

    pub(crate) fn add_to(&self, report: &mut IngestReport, files: u64) {
        report.records += self.records();
        report.landed += self.landed;
        report.dead_letters += self.dead_letters();
        report.tombstones_skipped += self.skipped;
        report.files += files;
        report.bytes += self.bytes;
        report.commits += 1;
    }

    pub(crate) fn publish_metrics(&self, job: &str, files: u64, elapsed: Duration) {
        let Some(metrics) = metrics() else { return };
        metrics.landed.with_label_values(&[job]).inc_by(self.landed);
        metrics.bytes.with_label_values(&[job]).inc_by(self.bytes);
        metrics.files.with_label_values(&[job]).inc_by(files);
        metrics.commit_seconds.with_label_values(&[job]).observe(elapsed.as_secs_f64());
        metrics.skipped.with_label_values(&[job]).inc_by(self.skipped);
        for (class, count) in &self.dead {
            metrics.dead_letters.with_label_values(&[job, class.label()]).inc_by(*count);
        }
    }
}
