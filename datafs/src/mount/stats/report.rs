//! What is told of a mount, to programs and across processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::Latency;

/// What a mount has done since it was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MountStats {
    /// The process that serves it.
    pub pid: u32,
    /// The volume or snapshot.
    pub volume: String,
    /// Where it is mounted.
    pub path: PathBuf,
    /// How it opens files, in words.
    pub opening: String,
    /// When it was mounted.
    pub since: SystemTime,
    /// How long it has been mounted, in seconds.
    pub uptime_s: f64,
    /// The kinds of requests that there were. A request counts from when the mount has read it to when
    /// it has answered; one for a lock that waits, to when it waits.
    pub operations: Vec<OperationStats>,
    /// Files opened that the kernel may serve by itself: with pages that it has kept, or from a file that
    /// it was handed. Where it opens files without telling nobody can count.
    pub kernel_served_opens: u64,
    /// Files that are open.
    pub open_files: u64,
    /// Requests that the kernel has waiting, those included that are being answered. None where the
    /// system does not tell (it tells root, mostly).
    pub waiting: Option<u64>,
    /// Counters of the whole process, by the names that they have as metrics: caches, commits, objects.
    pub process: BTreeMap<String, u64>,
    /// Where requests are written down.
    pub trace: Option<TraceStats>,
}

/// The requests of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStats {
    /// The kind.
    pub op: String,
    /// Those that failed: answers like "no such file" or "no such attribute" are not failures.
    pub errors: u64,
    /// Bytes that they read or wrote.
    pub bytes: u64,
    /// Requests that are being answered.
    pub in_flight: u64,
    /// How long the others took.
    pub latency: Latency,
}

/// A trace that is being written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStats {
    /// The file; the one before it has the suffix `.1`.
    pub file: PathBuf,
    /// Bytes that each of the two may have.
    pub file_bytes_max: u64,
    /// Requests that were written.
    pub written: u64,
    /// Requests that were not: they came faster than the disk takes them, or it refused.
    pub lost: u64,
}

impl MountStats {
    /// What has happened since an earlier look at the same mount. What is not counted but is as it is
    /// (open files and the like) stays.
    #[must_use]
    pub fn since(&self, earlier: &MountStats) -> MountStats {
        let mut new = self.clone();
        new.uptime_s -= earlier.uptime_s;
        new.kernel_served_opens = new.kernel_served_opens.saturating_sub(earlier.kernel_served_opens);
        for (name, value) in &mut new.process {
            *value = value.saturating_sub(earlier.process.get(name).copied().unwrap_or(0));
        }
        for operation in &mut new.operations {
            if let Some(before) = earlier.operations.iter().find(|before| before.op == operation.op) {
                operation.errors = operation.errors.saturating_sub(before.errors);
                operation.bytes = operation.bytes.saturating_sub(before.bytes);
                operation.latency = operation.latency.since(&before.latency);
            }
        }
        new
    }
}
