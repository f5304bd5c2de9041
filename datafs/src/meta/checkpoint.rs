//! Checkpoints: copying SQLite's write-ahead log back into the metadata file, alongside the commits.
//!
//! A thread copies most of the log while commits go on. SQLite restarts the log only when nothing is left to
//! copy and no reader uses the log, which never happens under steady writing. So the committing thread copies
//! the small rest between two batches, after it has dropped idle snapshots.

use std::sync::atomic::{AtomicU32, Ordering};

use super::group::Shared;
use crate::error::Error;
use crate::failpoint;

/// Log length in pages at which it is copied back: 16 MiB.
const PAGES_MAX: u32 = 4_096;
/// Growth of the log in pages before the next attempt: readers may have blocked the last one.
const PAGES_STEP: u32 = 1_024;

/// Schedule of the checkpoints.
#[derive(Debug)]
pub(super) struct Checkpoints {
    /// Pages in the log after the newest commit.
    pages: AtomicU32,
    /// Log length in pages at which the next copy is due.
    due: AtomicU32,
    /// 1 while the log is copied except for a rest, else 0.
    rest: AtomicU32,
}

impl Default for Checkpoints {
    fn default() -> Checkpoints {
        Checkpoints { pages: AtomicU32::new(0), due: AtomicU32::new(PAGES_MAX), rest: AtomicU32::new(0) }
    }
}

impl Checkpoints {
    /// Records the length of the log after a commit. Returns whether the checkpoint thread has work.
    pub(super) fn committed(&self, pages: u32) -> bool {
        self.pages.store(pages, Ordering::Release);
        if pages < PAGES_STEP {
            // SQLite has restarted the log.
            self.due.store(PAGES_MAX, Ordering::Release);
        }
        self.is_due()
    }

    fn is_due(&self) -> bool {
        self.pages.load(Ordering::Acquire) >= self.due.load(Ordering::Acquire)
    }
}

/// Runs the checkpoint thread.
pub(super) fn run(shared: &Shared) {
    loop {
        {
            let mut state = shared.state.lock();
            while !state.stopping && !shared.checkpoints.is_due() {
                shared.checkpoint.wait(&mut state);
            }
            if state.stopping {
                return;
            }
        }
        let checkpoints = &shared.checkpoints;
        checkpoints.due.store(checkpoints.pages.load(Ordering::Acquire) + PAGES_STEP, Ordering::Release);
        failpoint::hit("checkpoint-begun");
        let copied = shared.engine.checkpoint();
        failpoint::hit("checkpoint-copied");
        match copied {
            Ok(()) => checkpoints.rest.store(1, Ordering::Release),
            Err(error) => tracing::debug!(%error, "copying the metadata log back; it is tried again"),
        }
    }
}

/// Copies the rest between two batches, so that the next batch restarts the log.
pub(super) fn finish(shared: &Shared) {
    if shared.checkpoints.rest.swap(0, Ordering::AcqRel) == 0 {
        return;
    }
    drop_idle(shared);
    if let Err(error) = shared.engine.checkpoint() {
        tracing::debug!(%error, "copying the rest of the metadata log back; it is tried again");
    }
    failpoint::hit("checkpoint-finished");
}

/// Copies as much of the log as readers allow, after dropping idle snapshots. When all of it is copied, the
/// disk gets its space back. Returns false when a reader or writer blocked that, or on an error other than
/// lack of space.
pub(super) fn empty(shared: &Shared) -> bool {
    drop_idle(shared);
    shared.engine.empty_log().unwrap_or_else(|error| {
        tracing::debug!(%error, "copying the metadata log back for its space");
        matches!(error, Error::NoSpace { .. })
    })
}

fn drop_idle(shared: &Shared) {
    let idle = std::mem::take(&mut shared.state.lock().idle);
    drop(idle);
}
