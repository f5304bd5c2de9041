//! The end of a metadata file's use by this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Waits until this process has closed a metadata file.
///
/// Threads that run a call keep the file open after the last handle of the caller is gone. A process that forks
/// meanwhile breaks SQLite: the child takes the locks of its parent for its own. Another process may then replace the
/// log under the child, and commits are lost.
#[derive(Debug, Clone)]
pub struct Closing(Option<Arc<Latch>>);

/// Part of an open metadata file. Dropping it reports that the file is closed.
#[derive(Debug, Default)]
pub(super) struct Open(Arc<Latch>);

#[derive(Debug, Default)]
struct Latch {
    is_closed: Mutex<bool>,
    changed: Condvar,
}

impl Closing {
    /// For metadata on a server: a child never uses the connections that it inherits.
    pub(super) const NONE: Closing = Closing(None);

    /// Waits, at most `limit`. Returns whether the file is closed. Not to be called by a thread that uses the file.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        let Some(latch) = &self.0 else { return true };
        let mut is_closed = latch.is_closed.lock();
        let until = Instant::now() + limit;
        while !*is_closed {
            if latch.changed.wait_until(&mut is_closed, until).timed_out() {
                return *is_closed;
            }
        }
        true
    }
}

impl Open {
    pub(super) fn closing(&self) -> Closing {
        Closing(Some(Arc::clone(&self.0)))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *self.0.is_closed.lock() = true;
        self.0.changed.notify_all();
    }
}
