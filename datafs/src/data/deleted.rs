//! Closing of deleted objects' files, whichever process deleted them: the disk frees their space with the
//! last close.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_leaf::error_chain;

use super::runtime::Io;

/// How often open files are checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A file used within this time stays open: otherwise its reader would have to find it again.
const IDLE_MIN: Duration = Duration::from_secs(1);

/// A holder of object files that stay open between uses.
pub(super) trait KeepsOpen: Send + Sync + 'static {
    /// Closes idle files that have been unlinked.
    fn close_deleted(&self);
}

/// Calls [`KeepsOpen::close_deleted`] every second until `keeper` is dropped.
pub(super) fn look_after(io: &Io, keeper: &Arc<impl KeepsOpen>) {
    let keeper = Arc::downgrade(keeper);
    io.start_future(async move {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(keeper) = keeper.upgrade() else { return };
            // The last close of a large unlinked file takes the disk a while.
            if let Err(error) = tokio::task::spawn_blocking(move || keeper.close_deleted()).await {
                tracing::error!(error = error_chain::one_line(&error), "closing deleted objects");
            }
        }
    });
}

/// Whether the file has been unlinked; false when the system cannot tell.
pub(super) fn is_deleted(file: &File) -> bool {
    file.metadata().is_ok_and(|file| file.nlink() == 0)
}

/// Whether a file last used at `used` is idle.
pub(super) fn is_idle(used: Instant) -> bool {
    used.elapsed() >= IDLE_MIN
}
