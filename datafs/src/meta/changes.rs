//! Change notifications: reports of other processes' commits, for components that keep data which these may
//! outdate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Changes by other processes or writers since the last call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Changed {
    /// The changes are unknown: any record may be different.
    Anything,
    /// Live records that were written or removed: volume and record key, in no order.
    Records(Vec<(u64, Vec<u8>)>),
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
