//! Retries of requests to a remote store: errors that may be temporary are retried with growing pauses, for a
//! bounded time. Then one error tells how long.

use std::error::Error as StdError;
use std::future::Future;
use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;

use super::error::{ObjectError, Result};
use crate::metrics;

/// The first pause; each further one is twice as long. A random part of up to half is subtracted.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// A single try may take 1/3 of the whole limit, so that a server that accepts a request and never responds
/// is asked again.
const TRIES_MIN: u32 = 3;

/// Runs `attempt` (its argument is the number of earlier tries) until it succeeds, fails permanently, or
/// `limit` is over.
pub(super) async fn insist<T, Fut>(
    operation: &'static str,
    place: &str,
    limit: Duration,
    mut attempt: impl FnMut(u32) -> Fut,
) -> Result<T>
where
    Fut: Future<Output = object_store::Result<T>>,
{
    let started = Instant::now();
    let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
    for tries in 0.. {
        let left = limit.saturating_sub(started.elapsed());
        let cause: Box<dyn StdError + Send + Sync> =
            match tokio::time::timeout(left.min(limit / TRIES_MIN), attempt(tries)).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) if !may_pass(&error) => {
                    return Err(ObjectError::store(operation, place, error));
                }
                Ok(Err(error)) => error.into(),
                Err(_) => "the store accepted the request and did not answer".into(),
            };
        let pause = backoff.jittered();
        if started.elapsed() + pause >= limit {
            let (place, tried_ms) = (place.to_owned(), started.elapsed().as_millis() as u64);
            return Err(ObjectError::Away { operation, place, tried_ms, source: cause });
        }
        metrics::STORE_RETRIES.inc();
        tracing::debug!(operation, place, tries, error = %cause, "asking the object store again");
        tokio::time::sleep(pause).await;
    }
    unreachable!("the loop counts until the time is over")
}

/// Whether the same request may succeed later.
fn may_pass(error: &object_store::Error) -> bool {
    match error {
        object_store::Error::Generic { source, .. } => !is_refusal(&source.to_string()),
        object_store::Error::JoinError { .. } => true,
        _ => false,
    }
}

/// Whether a message reports a 4xx status that no retry can fix. `object_store` does not export the type of
/// this error.
fn is_refusal(message: &str) -> bool {
    let status = message.split("status code: ").nth(1).and_then(|rest| rest.get(..3)?.parse::<u16>().ok());
    status.is_some_and(|status| (400..500).contains(&status) && !matches!(status, 408 | 425 | 429))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(message: &str) -> object_store::Error {
        object_store::Error::Generic { store: "test", source: message.into() }
    }

    #[test]
    fn refusals_are_told_from_trouble() {
        let status = |code: &str| {
            generic(&format!("Error performing GET in 1ms - Server returned non-2xx status code: {code}: "))
        };
        assert!(may_pass(&status("500 Internal Server Error")));
        assert!(may_pass(&status("503 Service Unavailable")));
        assert!(may_pass(&status("429 Too Many Requests")));
        assert!(!may_pass(&status("400 Bad Request")));
        assert!(may_pass(&generic("HTTP error: error sending request")));
        assert!(!may_pass(&object_store::Error::NotImplemented {
            operation: "x".into(),
            implementer: "y".into()
        }));
    }

    #[tokio::test]
    async fn trouble_is_tried_again_and_bounded() {
        let mut calls = 0;
        let done = insist("read", "s3://b", Duration::from_secs(60), |tries| {
            calls += 1;
            async move { if tries < 2 { Err(generic("reset")) } else { Ok(tries) } }
        });
        assert_eq!(done.await.unwrap(), 2);
        assert_eq!(calls, 3);
        let limit = Duration::from_millis(120);
        let error = insist::<(), _>("read", "s3://b", limit, |_| async { Err(generic("reset")) });
        let error = error.await.unwrap_err();
        assert!(matches!(&error, ObjectError::Away { operation: "read", place, .. } if place == "s3://b"));
        let mut calls = 0;
        let refused = insist::<(), _>("read", "s3://b", Duration::from_secs(60), |_| {
            calls += 1;
            async { Err(generic("status code: 400 Bad Request")) }
        });
        assert!(matches!(refused.await.unwrap_err(), ObjectError::Store { .. }));
        assert_eq!(calls, 1);
    }
}
