//! Budgets of the mappings and descriptors that all shared caches of a process use together.
//!
//! A process may have many feeds, and each may serve. What the kernel limits by process is therefore counted by process.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use nix::sys::resource::{Resource, getrlimit};

use super::MAPPINGS_MAX;

/// Descriptors that the shared caches of a process use at most.
const DESCRIPTORS_MAX: u64 = 512;
/// The part of the descriptors of a process that the shared caches use at most.
const DESCRIPTORS_PART: u64 = 8;

/// A number of things that a process may have at a time.
pub(super) struct Budget {
    held: AtomicUsize,
    max: usize,
}

/// One of the things, or the right to make it.
pub(super) struct Held(Arc<Budget>);

impl Budget {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { held: AtomicUsize::new(0), max })
    }

    /// The mappings of this process.
    pub(super) fn of_mappings() -> Arc<Self> {
        static ALL: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(MAPPINGS_MAX));
        Arc::clone(&ALL)
    }

    /// The right to make one more, if there are fewer than the limit.
    pub(super) fn hold(self: &Arc<Self>) -> Option<Held> {
        let add = |held| (held < self.max).then_some(held + 1);
        self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).ok()?;
        Some(Held(Arc::clone(self)))
    }

    /// Whether there is no right left at this moment.
    pub(super) fn is_spent(&self) -> bool {
        self.held.load(Ordering::Acquire) >= self.max
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The descriptors of shared caches. Files and connections have a half each, so that files do not end all connections.
#[derive(Clone)]
pub(super) struct Descriptors {
    /// Memory files that servers keep.
    pub(super) files: Arc<Budget>,
    /// Both ends of connections.
    pub(super) connections: Arc<Budget>,
}

impl Descriptors {
    pub(super) fn new(max: usize) -> Self {
        Self { files: Budget::new(max / 2), connections: Budget::new(max - max / 2) }
    }

    /// Those of this process. The limit is that of the first use.
    pub(super) fn of_process() -> Self {
        static ALL: LazyLock<Descriptors> = LazyLock::new(|| {
            let soft = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
            Descriptors::new(descriptors_max(soft))
        });
        ALL.clone()
    }
}

/// Descriptors for shared caches in a process that may have `soft` in all.
fn descriptors_max(soft: u64) -> usize {
    (soft / DESCRIPTORS_PART).min(DESCRIPTORS_MAX) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_spends_an_eighth_of_its_descriptors_at_most() {
        for (soft, max) in [(0, 0), (7, 0), (64, 8), (1_024, 128), (4_096, 512), (u64::MAX, 512)] {
            assert_eq!(descriptors_max(soft), max, "of {soft}");
            let all = Descriptors::new(max);
            assert_eq!(all.files.max + all.connections.max, max);
        }
    }

    #[test]
    fn a_budget_is_held_up_to_its_limit() {
        let budget = Budget::new(2);
        let held = [budget.hold(), budget.hold()];
        assert!(held.iter().all(Option::is_some) && budget.is_spent());
        assert!(budget.hold().is_none());
        drop(held);
        assert_eq!(budget.held(), 0);
        assert!(budget.hold().is_some());
    }
}
