//! Blocking work (metadata, graph optimisation) beside the asynchronous tasks.

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
