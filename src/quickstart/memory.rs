//! Peak memory of this process and its descendants, sampled while the pipeline runs.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Sampling interval. A worker lives for seconds, so its peak is not missed.
const PERIOD: Duration = Duration::from_millis(50);

/// A running sampler. It adds up resident sizes, so shared pages count once per process.
pub(crate) struct PeakMemory {
    peak_kib: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PeakMemory {
    /// Starts sampling.
    pub(crate) fn start() -> std::io::Result<PeakMemory> {
        let peak_kib = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (peak, stopped) = (peak_kib.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("peak-memory".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                peak.fetch_max(family_rss_kib(), Ordering::Relaxed);
                std::thread::park_timeout(PERIOD);
            }
        })?;
        Ok(PeakMemory { peak_kib, stop, thread: Some(thread) })
    }

    /// The largest sum seen so far, in MiB.
    pub(crate) fn peak_mib(&self) -> u64 {
        self.peak_kib.fetch_max(family_rss_kib(), Ordering::Relaxed);
        self.peak_kib.load(Ordering::Relaxed).div_ceil(1024)
    }
}

impl Drop for PeakMemory {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            thread.join().ok();
        }
    }
}

/// Resident KiB of this process and its descendants. Processes that end during the scan count 0.
fn family_rss_kib() -> u64 {
    let mut parents: HashMap<u32, u32> = HashMap::new();
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    for pid in entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        if let Some(parent) = parent_of(pid) {
            parents.insert(pid, parent);
        }
    }
    let root = std::process::id();
    let of_family = |mut pid: u32| {
        // Bounded by the number of processes, so a reused pid cannot cause an endless loop.
        for _ in 0..=parents.len() {
            if pid == root {
                return true;
            }
            match parents.get(&pid) {
                Some(&parent) => pid = parent,
                None => return false,
            }
        }
        false
    };
    parents.keys().copied().filter(|&pid| of_family(pid)).map(rss_kib).sum()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may contain any text; the state and the parent follow its last bracket.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn rss_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
