//! Helpers for blocking work (metadata, graph optimization, compression) next to asynchronous tasks.

use millrace_leaf::blocking::{self, Stopping};
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::error::{Error, Result};

/// From this size on, reading single elements takes long: 0.3 ms for JSON. Taking a turn costs 20 to 60 us.
pub const READ_BYTES: usize = 64 << 10;
/// From this size on, copying takes long: 0.3 ms and more.
pub const COPIED_BYTES: usize = 1 << 20;

/// Runs blocking work on a thread of Tokio's blocking pool. A panic of the work continues in the caller.
///
/// # Errors
/// The error of the work; [`Error::Service`] when the runtime shuts down before the work has begun.
pub async fn blocking<T: Send + 'static, E: From<Error> + Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let stopped =
        |Stopping| Err(Error::Service { service: what, reason: "the process is stopping".into() }.into());
    blocking::run(work).await.unwrap_or_else(stopped)
}

/// Runs work on this thread. If it is `long`, a multi-threaded runtime first moves the thread's other tasks to
/// another.
pub fn in_place<T>(long: bool, work: impl FnOnce() -> T) -> T {
    let has_others =
        || Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
    if long && has_others() { tokio::task::block_in_place(work) } else { work() }
}
