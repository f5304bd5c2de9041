//! Change notifications: reports of other processes' commits, for components that keep data which these may
//! outdate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Changes by other processes or writers since the last call.
///
/// Known records are reported beside an unknown change as well: who caches names can revoke those that it is
/// told, but has no list of all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    /// Live records that were written or removed: volume and record key, in no order.
    pub(crate) records: Vec<(u64, Vec<u8>)>,
    /// Any other record may be different as well.
    pub(crate) anything: bool,
}

impl Changed {
    /// Changes of these records only.
    pub(crate) fn records(records: Vec<(u64, Vec<u8>)>) -> Changed {
        Changed { records, anything: false }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty() && !self.anything
    }

    /// Adds later changes. Records beyond `records_max` are reported as an unknown change.
    pub(crate) fn add(&mut self, more: impl IntoIterator<Item = (u64, Vec<u8>)>, records_max: usize) {
        for record in more {
            if self.records.len() >= records_max {
                self.anything = true;
                break;
            }
            self.records.push(record);
        }
    }
}

/// Callback that gets the changes.
pub(crate) type ChangeListener = Box<dyn FnMut(&Changed) + Send>;

/// Registration of a listener, which ends when this is dropped; a call in progress still completes.
#[derive(Debug)]
#[must_use = "the listener is not called any more once this is dropped"]
pub(crate) struct Subscription {
    stopped: Arc<AtomicBool>,
}

impl Subscription {
    /// A subscription, and the flag that tells the listener's thread to stop.
    pub(crate) fn new() -> (Subscription, Arc<AtomicBool>) {
        let stopped = Arc::new(AtomicBool::new(false));
        (Subscription { stopped: Arc::clone(&stopped) }, stopped)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_records_are_kept_beside_an_unknown_change() {
        let record = |i: u8| (1, vec![i]);
        let mut changed = Changed { anything: true, ..Changed::default() };
        changed.add([record(1), record(2)], 3);
        assert_eq!(changed, Changed { records: vec![record(1), record(2)], anything: true });
        let mut changed = Changed::records(vec![record(1)]);
        changed.add([record(2)], 2);
        assert!(!changed.anything);
        changed.add([record(3)], 2);
        assert_eq!(changed, Changed { records: vec![record(1), record(2)], anything: true });
    }
}
