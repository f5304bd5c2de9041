//! Copying the log back into the metadata file, beside the commits.
//!
//! A thread copies most of it while commits go on. Only when nothing is left to copy, and nobody reads
//! from the log, does SQLite begin it anew; under steady writing that never happens by itself. So
//! the committing thread copies the small rest between two batches, with idle snapshots out of the way.

use std::sync::atomic::{AtomicU32, Ordering};

use super::group::Shared;
use crate::error::Error;
use crate::failpoint;

/// Pages in the log after which it is copied back: 16 MiB.
const PAGES_MAX: u32 = 4_096;
/// After an attempt the log grows by this much before the next one: readers may have been in the way.
const PAGES_STEP: u32 = 1_024;

/// When to do what.
#[derive(Debug)]
pub(super) struct Checkpoints {
    /// Pages in the log after the newest commit.
    pages: AtomicU32,
    /// Pages at which it is copied.
    due: AtomicU32,
    /// It was copied but for a rest.
    rest: AtomicU32,
}

impl Default for Checkpoints {
    fn default() -> Checkpoints {
        Checkpoints { pages: AtomicU32::new(0), due: AtomicU32::new(PAGES_MAX), rest: AtomicU32::new(0) }
    }
}

impl Checkpoints {
    /// Notes how long the log is. Returns whether the copying thread has something to do.
    pub(super) fn committed(&self, pages: u32) -> bool {
        self.pages.store(pages, Ordering::Release);
        if pages < PAGES_STEP {
            // It began anew.
            self.due.store(PAGES_MAX, Ordering::Release);
        }
        self.is_due()
    }

    fn is_due(&self) -> bool {
        self.pages.load(Ordering::Acquire) >= self.due.load(Ordering::Acquire)
    }
}

/// The thread that copies.
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

/// Copies the rest, between two batches, so that the next one begins the log anew.
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

/// Copies as much as readers allow, with idle snapshots out of the way. When that is all, the space of the log goes
/// back to the disk. Returns false where somebody was in the way.
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
