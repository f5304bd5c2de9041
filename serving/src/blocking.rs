//! Blocking work (metadata, graph optimisation, compression) beside the asynchronous tasks.

use tokio::runtime::{Handle, RuntimeFlavor};

use crate::error::{Error, Result};

/// Runs blocking work on a thread of its own. A panic of the work goes on in the caller.
///
/// # Errors
/// What the work says; [`Error::Service`] when the runtime shuts down before the work has begun.
pub(crate) async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(Error::Service { service: what, reason: "the process is stopping".into() }),
        },
    }
}

/// Works on this thread; its other tasks go to another one first, where it is long work.
pub(crate) fn in_place<T>(long: bool, work: impl FnOnce() -> T) -> T {
    let has_others =
        || Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
    if long && has_others() { tokio::task::block_in_place(work) } else { work() }
}
