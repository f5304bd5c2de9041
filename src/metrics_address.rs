//! A metrics address that passes from a process to its successor.

use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;
use millrace_serving::{Error, MetricsServer, Result};

/// First and longest pause between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

/// Starts a metrics server at an address that a predecessor is about to release. While another process has the address,
/// `attempt` is repeated for up to `patience`.
///
/// # Errors
/// The last error of `attempt`.
pub(crate) async fn take<F>(patience: Duration, attempt: impl Fn() -> F) -> Result<MetricsServer>
where
    F: Future<Output = Result<MetricsServer>>,
{
    let began = Instant::now();
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    loop {
        match attempt().await {
            Err(Error::Bind { is_taken: true, .. }) if began.elapsed() < patience => {
                tokio::time::sleep(backoff.pause()).await;
            }
            done => return done,
        }
    }
}
