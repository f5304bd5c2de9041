//! Closes files of objects that were deleted, by any process: the disk gets their space back with the last close.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::runtime::Io;

/// How often files that are kept open are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A file that was used within this time is left alone: its reader would have to look for it again.
const IDLE_MIN: Duration = Duration::from_secs(1);

/// Something that keeps files of objects open between uses.
pub(super) trait KeepsOpen: Send + Sync + 'static {
    /// Closes those that have no name any more and are not in use.
    fn close_deleted(&self);
}

/// Looks after something that keeps files open, for as long as that is there.
pub(super) fn look_after(io: &Io, keeper: &Arc<impl KeepsOpen>) {
    let keeper = Arc::downgrade(keeper);
    io.start_future(async move {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(keeper) = keeper.upgrade() else { return };
            // The close of a large file that has no name any more takes the disk a while.
            if let Err(error) = tokio::task::spawn_blocking(move || keeper.close_deleted()).await {
                tracing::error!(%error, "closing deleted objects");
            }
        }
    });
}

/// Whether the file has no name any more. What the system does not tell is taken for a file that has one.
pub(super) fn is_deleted(file: &File) -> bool {
    file.metadata().is_ok_and(|file| file.nlink() == 0)
}

/// Whether what was used then is not in use.
pub(super) fn is_idle(used: Instant) -> bool {
    used.elapsed() >= IDLE_MIN
}
