//! A metrics address that passes from a process to its successor.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;
use millrace_serving::{Error, MetricsServer, Result};

/// First and longest pause between attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));
/// First and longest interval between reminders that another process still has the address. A handover takes less.
pub(crate) const REMINDERS: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(3_600));

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

/// Calls `tell` with the time since this call, at `intervals` that double from the first to the longest. Goes on until it
/// is dropped.
pub(crate) async fn remind(intervals: (Duration, Duration), mut tell: impl FnMut(Duration)) -> Infallible {
    let began = Instant::now();
    let mut backoff = Backoff::new(intervals.0, intervals.1);
    loop {
        tokio::time::sleep(backoff.pause()).await;
        tell(began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reminders_come_at_growing_intervals_until_they_are_dropped() {
        let (sender, mut told) = tokio::sync::mpsc::unbounded_channel();
        let ms = Duration::from_millis(1);
        let reminders = remind((ms, 4 * ms), move |waited| sender.send(waited).unwrap());
        let three = async {
            let mut waits = Vec::new();
            while waits.len() < 3 {
                waits.push(told.recv().await.unwrap());
            }
            waits
        };
        let waits = tokio::select! {
            never = reminders => match never {},
            waits = three => waits,
        };
        assert!(waits[0] >= ms && waits[1] >= 3 * ms && waits[2] >= 7 * ms, "{waits:?}");
        assert!(REMINDERS.0 < REMINDERS.1);
    }
}
