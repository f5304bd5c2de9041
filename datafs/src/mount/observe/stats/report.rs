//! The report of a mount's statistics, for programs and for other processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::Latency;

/// Statistics since the mount began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MountStats {
    /// The process that serves it.
    pub pid: u32,
    /// The volume or snapshot.
    pub volume: String,
    /// The mount point.
    pub path: PathBuf,
    /// How the mount opens files, in words.
    pub opening: String,
    /// Start time of the mount.
    pub since: SystemTime,
    /// Time since the mount began, in seconds.
    pub uptime_s: f64,
    /// The kinds of requests that occurred. A request counts from when the mount has read it until the reply. A
    /// waiting lock request counts until it is queued.
    pub operations: Vec<OperationStats>,
    /// Files opened that the kernel may serve without read requests: from cached pages or from a backing file.
    /// Opens without a request are not counted.
    pub kernel_served_opens: u64,
    /// Number of open files.
    pub open_files: u64,
    /// Requests waiting in the kernel, including those being served. `None` where the system does not tell;
    /// mostly only root may read it.
    pub waiting: Option<u64>,
    /// Counters of the whole process, by their metric names: caches, commits, objects.
    pub process: BTreeMap<String, u64>,
    /// The running trace.
    pub trace: Option<TraceStats>,
}

/// The requests of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStats {
    /// The FUSE operation.
    pub op: String,
    /// Failed requests. Errors like "no such file" or "no such attribute" are not failures.
    pub errors: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// Requests being served.
    pub in_flight: u64,
    /// Durations of the answered requests.
    pub latency: Latency,
}

/// The state of a running trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStats {
    /// The trace file; the previous one has the suffix `.1`.
    pub file: PathBuf,
    /// Most bytes of each of the two files.
    pub file_bytes_max: u64,
    /// Requests written to the file.
    pub written: u64,
    /// Requests not written: they arrived faster than the disk accepts them, or the write failed.
    pub lost: u64,
}

impl MountStats {
    /// The difference to an earlier state of the same mount. Values that are not counters (open files and the
    /// like) stay as they are.
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
