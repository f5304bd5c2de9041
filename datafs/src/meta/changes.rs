//! What other processes have committed, for those who keep something that it may outdate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What was committed by others since the last call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Changed {
    /// It is not known what: anything may be different.
    Anything,
    /// Live records that were written or removed: volume and record key, in no order.
    Records(Vec<(u64, Vec<u8>)>),
}

/// Is called with what changed.
pub(crate) type ChangeListener = Box<dyn FnMut(&Changed) + Send>;

/// Listening lasts until this is dropped; a call that is under way then still ends.
#[derive(Debug)]
#[must_use = "the listener is not called any more once this is dropped"]
pub(crate) struct Subscription {
    stopped: Arc<AtomicBool>,
}

impl Subscription {
    /// A subscription, and what its listener's thread asks whether to stop.
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
