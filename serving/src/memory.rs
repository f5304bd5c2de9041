//! Memory that a peak of load or an unloaded model leaves behind goes back to the system.
//!
//! What is freed stays with the allocator of the C library, for the next request. That is right while there
//! is load, so it is given back only when the load has fallen to half of what it was, and after versions
//! were unloaded.

mod allocator;

use std::time::Duration;

use crate::blocking::blocking;
use crate::infer::Inference;
pub(crate) use allocator::Mapping;

/// How often the load is looked at.
const PERIOD: Duration = Duration::from_secs(1);
/// How many times after something happened.
const PERIODS: u32 = 5;
/// Growth of the memory in use that is worth giving back: a part of what was in use before, and bytes.
const GROWTH_PARTS: u64 = 20;
const GROWTH_BYTES: u64 = 4 << 20;

/// Gives memory back until it is dropped.
pub(crate) async fn release_after_peaks(inference: Inference) {
    let mut changes = inference.repository().changes();
    let mut load = Load::default();
    let mut in_use = resident_bytes();
    // Periods that are left after a change of versions, which loading at the start is as well, and after the
    // load fell: the last requests hold a version and their buffers for a while.
    let (mut changed, mut fallen) = (1u32, 0u32);
    loop {
        tokio::time::sleep(PERIOD).await;
        if changes.has_changed().unwrap_or(false) {
            changes.borrow_and_update();
            changed = PERIODS;
        }
        let answered: u64 =
            inference.repository().ready(None).iter().map(|model| model.metrics.ok.get()).sum();
        if load.has_fallen(answered) {
            fallen = PERIODS;
        }
        let (after_change, after_fall) = (changed > 0, fallen > 0);
        changed = changed.saturating_sub(1);
        fallen = fallen.saturating_sub(1);
        if !(after_change || after_fall) {
            continue;
        }
        let now = resident_bytes();
        let grown = now > in_use + in_use / GROWTH_PARTS + GROWTH_BYTES;
        if !(after_change || grown) {
            in_use = in_use.min(now);
            continue;
        }
        // It takes some milliseconds for a large heap.
        let released = blocking("giving memory back", || {
            trim();
            Ok(resident_bytes())
        });
        match released.await {
            Ok(after) => {
                in_use = after;
                tracing::debug!(bytes = now.saturating_sub(after), "gave memory back");
            }
            Err(error) => tracing::debug!(%error, "no memory was given back"),
        }
    }
}

/// Requests from one look to the next.
#[derive(Debug, Default)]
struct Load {
    answered: u64,
    /// The most since it last fell.
    peak: u64,
}

impl Load {
    /// Whether the load is half of what it was, or less; it is measured from there on.
    fn has_fallen(&mut self, answered: u64) -> bool {
        // Counts of versions that have gone are missing.
        let now = answered.saturating_sub(self.answered);
        self.answered = answered;
        self.peak = self.peak.max(now);
        let fallen = now < self.peak && now <= self.peak / 2;
        if fallen {
            self.peak = now;
        }
        fallen
    }
}

/// Bytes of memory that the process has in use; 0 where the system does not say.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn trim() {
    // SAFETY: it takes a number, and the allocator locks what it gives back against its users.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators give memory back by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_falls_once_for_each_peak() {
        let mut load = Load::default();
        let mut answered = 0;
        let mut falls = |now: u64| {
            answered += now;
            load.has_fallen(answered)
        };
        let steps = [(0, false), (100, false), (90, false), (51, false), (50, true), (50, false), (10, true)];
        for (now, fallen) in steps {
            assert_eq!(falls(now), fallen, "{now}");
        }
        for (now, fallen) in [(0, true), (0, false), (1, false), (0, true), (0, false)] {
            assert_eq!(falls(now), fallen, "{now}");
        }
        assert!(!load.has_fallen(0), "versions have gone");
    }

    #[test]
    fn memory_in_use_is_known() {
        assert!(resident_bytes() > 1 << 20);
    }
}
