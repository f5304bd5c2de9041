//! The gate in front of the request handlers of a mount, which a planned handover closes.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard};

/// The gate. A request that arrives after it was closed waits until its process ends: the next server gets it
/// from the kernel again.
#[derive(Debug, Default)]
pub(in crate::mount) struct Gate {
    requests: RwLock<()>,
    closed: AtomicBool,
}

impl Gate {
    /// Passes a request, until the guard is dropped.
    pub(in crate::mount) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.requests.read()
    }

    /// Closes the gate for good. Returns once all requests before have been handled.
    pub(super) fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            std::mem::forget(self.requests.write());
        }
    }
}
