//! Progress of a running ingest, and the report of a finished one.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// A snapshot of a running ingest, sent on a watch channel after every batch and every commit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// Records read and decoded by this run, committed or not.
    pub records: u64,
    /// Rows committed by this run.
    pub landed: u64,
    /// Dead letters committed by this run.
    pub dead_letters: u64,
    /// Tombstones that this run has skipped and committed.
    pub tombstones_skipped: u64,
    /// Bytes of keys and values committed by this run.
    pub bytes: u64,
    /// Files committed by this run, dead-letter files included.
    pub files: u64,
    /// Publishes by this run.
    pub commits: u64,
    /// Committed position per partition.
    pub offsets: BTreeMap<i32, i64>,
    /// Offset after the topic's last record per partition, as the brokers last reported it.
    pub high: BTreeMap<i32, i64>,
}

impl Progress {
    /// Copies the counters and offsets that a publish has changed.
    pub(crate) fn adopt(&mut self, report: &IngestReport) {
        self.landed = report.landed;
        self.dead_letters = report.dead_letters;
        self.tombstones_skipped = report.tombstones_skipped;
        self.bytes = report.bytes;
        self.files = report.files;
        self.commits = report.commits;
        self.offsets.extend(&report.offsets);
    }

    /// Offsets between the committed positions and the ends of the partitions: an upper bound of
    /// the records to come, because offsets have gaps.
    #[must_use]
    pub fn lag(&self) -> u64 {
        let next = |partition| self.offsets.get(partition).copied();
        self.high.iter().map(|(partition, high)| partition_lag(next(partition), (0, *high))).sum()
    }
}

/// Offsets of one partition between the next one to read and the end: an upper bound of the records to come.
/// `marks` are the first offset and the one after the last; without a position, reading begins at the first.
#[must_use]
pub fn partition_lag(next: Option<i64>, (low, high): (i64, i64)) -> u64 {
    let next = next.map_or(low, |next| next.max(low));
    u64::try_from(high.saturating_sub(next)).unwrap_or(0)
}

/// Report of a run. `records` is always `landed + dead_letters + tombstones_skipped`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct IngestReport {
    /// Records taken from the topic and committed.
    pub records: u64,
    /// Rows in the published files.
    pub landed: u64,
    /// Dead letters.
    pub dead_letters: u64,
    /// Records without a value that the job skips.
    pub tombstones_skipped: u64,
    /// Files published, dead-letter files included.
    pub files: u64,
    /// Publishes.
    pub commits: u64,
    /// Bytes of keys and values.
    pub bytes: u64,
    /// Next offset per partition, as committed.
    pub offsets: BTreeMap<i32, i64>,
    /// Likely mistakes in the configuration, one line each.
    pub warnings: Vec<String>,
    /// How long the run took.
    #[serde(rename = "elapsed_ms", serialize_with = "as_millis")]
    pub elapsed: Duration,
}

impl IngestReport {
    /// Adds the report of a later run of the same job.
    pub fn add(&mut self, later: IngestReport) {
        self.records += later.records;
        self.landed += later.landed;
        self.dead_letters += later.dead_letters;
        self.tombstones_skipped += later.tombstones_skipped;
        self.files += later.files;
        self.commits += later.commits;
        self.bytes += later.bytes;
        self.offsets.extend(later.offsets);
        self.warnings.extend(later.warnings);
        self.elapsed += later.elapsed;
    }
}

fn as_millis<S: serde::Serializer>(elapsed: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::partition_lag;

    #[test]
    fn lag_begins_at_the_position_or_at_the_first_record() {
        for (next, marks, lag) in [
            (None, (0, 0), 0),
            (None, (5, 9), 4),
            (Some(7), (5, 9), 2),
            (Some(9), (5, 9), 0),
            // Records from 2 to 4 were removed.
            (Some(2), (5, 9), 4),
            // The topic was created again.
            (Some(12), (0, 3), 0),
        ] {
            assert_eq!(partition_lag(next, marks), lag, "{next:?} {marks:?}");
        }
    }
}
