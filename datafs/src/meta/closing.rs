//! The end of a process's use of its metadata.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Waits until this process has closed its metadata and its session.
///
/// Threads that run a call keep both open after the last handle of the caller is gone. A process that forks meanwhile
/// breaks SQLite: the child takes the locks of its parent for its own. Another process may then replace the log under
/// the child, and commits are lost.
#[derive(Debug, Clone)]
pub struct Closing(Arc<Latch>);

/// Part of all that must be closed. Dropping the last clone reports that it is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Open(Arc<Mark>);

#[derive(Debug, Default)]
struct Mark(Arc<Latch>);

#[derive(Debug, Default)]
struct Latch {
    is_closed: Mutex<bool>,
    changed: Condvar,
}

impl Closing {
    /// Waits, at most `limit`. Returns whether all is closed. A thread that uses the metadata must not call it.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        let latch = &self.0;
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
    /// Waits for the drop of this and of all its clones.
    pub(crate) fn closing(&self) -> Closing {
        Closing(Arc::clone(&self.0.0))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        *self.0.is_closed.lock() = true;
        self.0.changed.notify_all();
    }
}
