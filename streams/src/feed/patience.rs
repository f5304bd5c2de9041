//! Patience of a feed's streams with brokers that stop to answer.
//!
//! A stream of a topic that has begun to give rows reads on after an outage, at the same row: the read that failed is
//! made again, and its records are checked against the plan as always. A read before the first row is no part of this: a
//! wrong address is told at once.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;

use crate::feed::error::{FeedError, Result};

/// Longest outage of one read, counted from its first failure.
pub(crate) const OUTAGE_MAX: Duration = Duration::from_secs(300);

/// Patience of all streams of a feed. Each read counts its own outage: a partition without a leader fails while the reads
/// of other partitions succeed.
pub(crate) struct Patience {
    limit: Duration,
    pauses: Backoff,
    /// Whether a read has succeeded.
    has_read: AtomicBool,
    /// Whether the log tells of an outage; the next success ends it.
    is_away: AtomicBool,
}

impl Default for Patience {
    fn default() -> Self {
        Self::new(OUTAGE_MAX, Backoff::new(Duration::from_millis(250), Duration::from_secs(5)))
    }
}

impl Patience {
    fn new(limit: Duration, pauses: Backoff) -> Self {
        Self { limit, pauses, has_read: AtomicBool::new(false), is_away: AtomicBool::new(false) }
    }

    /// The outcome of a read. One that fails because brokers do not answer is repeated, for [`OUTAGE_MAX`] at most.
    ///
    /// # Errors
    /// Those of the read: of the first one while none has succeeded yet, and of the last one after an outage.
    pub(crate) async fn outlast<T, F: Future<Output = Result<T>>>(
        &self,
        mut read: impl FnMut() -> F,
    ) -> Result<T> {
        let mut pauses = self.pauses.clone();
        let mut since = None;
        loop {
            let error = match read().await {
                Ok(rows) => {
                    self.has_read.store(true, Ordering::Relaxed);
                    if self.is_away.swap(false, Ordering::Relaxed) {
                        tracing::debug!("the brokers give records again");
                    }
                    return Ok(rows);
                }
                Err(error) => error,
            };
            if !self.goes_on(&error, &mut since) {
                return Err(error);
            }
            tokio::time::sleep(pauses.jittered()).await;
        }
    }

    /// Whether a read that has failed is made again. `since` is the time of its first failure. Logs the first failure of
    /// an outage.
    fn goes_on(&self, error: &FeedError, since: &mut Option<Instant>) -> bool {
        let FeedError::Topic { topic, source } = error else { return false };
        if !source.is_retryable() || !self.has_read.load(Ordering::Relaxed) {
            return false;
        }
        if let Some(since) = since {
            return since.elapsed() < self.limit;
        }
        *since = Some(Instant::now());
        if !self.is_away.swap(true, Ordering::Relaxed) {
            let error = source.to_string();
            let limit = self.limit.as_secs();
            tracing::warn!(topic, error, "the brokers give no records; trying again, for up to {limit} s");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use super::*;

    fn away() -> FeedError {
        let source = crate::Error::Unreachable {
            bootstrap_servers: "127.0.0.1:1".to_owned(),
            waited_ms: 1,
            reason: "refused".to_owned(),
        };
        FeedError::topic("t", source)
    }

    /// The outcome of a read whose first attempts fail with `error`, and its attempts.
    async fn read(patience: &Patience, failures: u32, error: impl Fn() -> FeedError) -> (Result<u32>, u32) {
        let made = Cell::new(0);
        let attempt = || {
            made.set(made.get() + 1);
            ready(if made.get() > failures { Ok(made.get()) } else { Err(error()) })
        };
        (patience.outlast(attempt).await, made.get())
    }

    fn patience(limit: Duration) -> Patience {
        Patience::new(limit, Backoff::new(Duration::ZERO, Duration::ZERO))
    }

    #[tokio::test]
    async fn a_read_outlasts_an_outage_once_one_has_succeeded() {
        let patience = patience(Duration::from_secs(3_600));
        assert!(matches!(read(&patience, 40, away).await, (Err(FeedError::Topic { .. }), 1)), "no first row");
        assert!(matches!(read(&patience, 0, away).await, (Ok(1), 1)));
        assert!(matches!(read(&patience, 40, away).await, (Ok(41), 41)));
    }

    #[tokio::test]
    async fn another_error_ends_the_read_at_once() {
        let patience = patience(Duration::from_secs(3_600));
        assert!(read(&patience, 0, away).await.0.is_ok());
        let gone = || {
            let (topic, bootstrap_servers) = ("t".to_owned(), "b".to_owned());
            FeedError::topic("t", crate::Error::UnknownTopic { topic, bootstrap_servers })
        };
        assert_eq!(read(&patience, 40, gone).await.1, 1);
        let stopped = || FeedError::Stopped { file: "a".to_owned() };
        assert_eq!(read(&patience, 40, stopped).await.1, 1);
    }

    #[tokio::test]
    async fn an_outage_beyond_the_limit_is_the_error_of_the_brokers() {
        let patience = patience(Duration::ZERO);
        assert!(read(&patience, 0, away).await.0.is_ok());
        let (outcome, attempts) = read(&patience, 40, away).await;
        assert!(outcome.is_err_and(|error| error.to_string().contains("topic t")));
        assert_eq!(attempts, 2, "the first failure begins the outage");
    }

    #[tokio::test]
    async fn successes_of_other_reads_do_not_prolong_an_outage() {
        let patience = patience(Duration::ZERO);
        assert!(read(&patience, 0, away).await.0.is_ok());
        let made = Cell::new(0);
        let stuck = || async {
            made.set(made.get() + 1);
            // Another stream reads another partition meanwhile.
            assert!(read(&patience, 0, away).await.0.is_ok());
            if made.get() > 40 { Ok(()) } else { Err(away()) }
        };
        assert!(patience.outlast(stuck).await.is_err());
        assert_eq!(made.get(), 2, "its first failure begins its outage");
    }
}
