//! The observable state of a mount.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use super::stats::{MountStats, Stats};
use super::trace::{self, Trace};
use crate::metrics;
use crate::mount::handles::Handles;
use crate::mount::outcome::Outcome;

/// The observable state of one mount: identity, statistics and trace.
#[derive(Debug)]
pub(in crate::mount) struct Watch {
    volume: String,
    path: PathBuf,
    opening: OnceLock<String>,
    device: OnceLock<Device>,
    since: (SystemTime, Instant),
    handles: Arc<Handles>,
    pub(in crate::mount) stats: Stats,
    pub(in crate::mount) trace: Trace,
}

/// The device of a mount.
#[derive(Debug)]
struct Device {
    number: Option<u64>,
    /// The file in which the kernel publishes the number of waiting requests.
    waiting: PathBuf,
}

impl Watch {
    pub(in crate::mount) fn new(volume: &str, path: &Path, handles: &Arc<Handles>) -> Watch {
        Watch {
            volume: volume.to_owned(),
            path: path.to_owned(),
            opening: OnceLock::new(),
            device: OnceLock::new(),
            since: (SystemTime::now(), Instant::now()),
            handles: Arc::clone(handles),
            stats: Stats::default(),
            trace: Trace::default(),
        }
    }

    /// Notes facts that are known only once the mount serves: how it opens files, and its device as
    /// `major:minor`.
    ///
    /// Nothing here accesses the mounted path: a process killed while it waits for its own reply never ends.
    pub(in crate::mount) fn attached(&self, opening: &str, device: &str) {
        let (major, minor) = device.split_once(':').unwrap_or_default();
        let waiting = Path::new("/sys/fs/fuse/connections").join(minor).join("waiting");
        let number = major.parse().ok().zip(minor.parse().ok());
        let number = number.map(|(major, minor)| nix::sys::stat::makedev(major, minor));
        self.device.get_or_init(|| Device { number, waiting });
        self.opening.get_or_init(|| opening.to_owned());
    }

    /// The device number that `stat` shows for files of the mount.
    pub(in crate::mount) fn device(&self) -> Option<u64> {
        self.device.get()?.number
    }

    /// Counts and traces a request that was answered, or is about to be.
    pub(in crate::mount) fn answered(&self, request: &trace::Request<'_>, outcome: Outcome, took: Duration) {
        self.stats.end(request.op, took.as_nanos() as u64, outcome);
        if self.trace.is_on() {
            self.trace.note(request, outcome, took);
        }
    }

    pub(in crate::mount) fn stats(&self) -> MountStats {
        let waiting = self.device.get().and_then(|device| std::fs::read_to_string(&device.waiting).ok());
        MountStats {
            pid: std::process::id(),
            volume: self.volume.clone(),
            path: self.path.clone(),
            opening: self.opening.get().cloned().unwrap_or_default(),
            since: self.since.0,
            uptime_s: self.since.1.elapsed().as_secs_f64(),
            operations: self.stats.operations(),
            kernel_served_opens: self.stats.kernel_served_opens(),
            open_files: self.handles.count() as u64,
            waiting: waiting.and_then(|text| text.trim().parse().ok()),
            process: metrics::snapshot(),
            trace: self.trace.stats(),
        }
    }
}
