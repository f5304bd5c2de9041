//! Reads of a feed's rows that outlast an outage of the volumes or of the brokers of topics.
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_leaf::backoff::Backoff;
use millrace_streams::feed::{AnyFeed, FeedBatch, FeedError};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::collective::Ring;
use crate::error::{Error, Result};
use crate::outage::{Attempts, Outage};

/// First and longest pause before another attempt.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Attempts at a read that was answered with an error.
const ATTEMPTS: u32 = 5;
/// Interval at which a read notices that it need not go on.
const POLL: Duration = Duration::from_millis(50);
/// Time without an answer after which a read counts as failing for an [`Interrupt`]. A client of brokers reports the first
/// failure after up to 30 s.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// A read in progress.
pub(crate) type Reading = JoinHandle<Result<FeedBatch, FeedError>>;

/// Whether a read need not go on; the argument tells whether an attempt has failed, or takes long.
pub(crate) type Interrupt<'a> = &'a dyn Fn(bool) -> bool;

/// What a member wants of a step or of a round of an evaluation, which the ring sums.
#[derive(Clone, Copy)]
pub(crate) struct Wishes<'a> {
    /// To leave, so that another worker can join.
    pub(crate) leave: bool,
    /// To stop the job.
    pub(crate) stop: bool,
    /// Whether this worker was asked to leave, or the job to stop, by now.
    pub(crate) asked_to_end: &'a dyn Fn() -> bool,
}

impl Wishes<'_> {
    /// Whether a read need not go on: the ring is over, or the read fails and this worker has to leave or to stop. Then
    /// the state after the last complete step is saved, without the rows of the next one.
    pub(crate) fn end_read(&self, ring: &Ring<'_>, is_failing: bool) -> bool {
        ring.is_over() || (is_failing && (self.asked_to_end)())
    }
}

/// Reads rows. A read that the volumes or the brokers do not answer is tried again, for as long as the patience allows.
#[derive(Debug)]
pub(crate) struct Reader {
    job: String,
    patience: Duration,
    /// As [`SILENCE_MAX`].
    silence_max: Duration,
    outage: Arc<Outage>,
    pauses: Backoff,
    runtime: Handle,
}

impl Reader {
    pub(crate) fn new(job: String, patience: Duration, runtime: Handle) -> Reader {
        let pauses = Backoff::new(PAUSE, PAUSE_MAX);
        Reader { job, patience, silence_max: SILENCE_MAX, outage: Arc::default(), pauses, runtime }
    }

    /// Begins anew with this patience.
    pub(crate) fn reset(&mut self, patience: Duration) {
        self.patience = patience;
        self.outage.clear();
    }

    /// How long the volumes or brokers have not given rows.
    pub(crate) fn outage(&self) -> Arc<Outage> {
        Arc::clone(&self.outage)
    }

    /// The rows in `slots` of batch `batch`; none if it was interrupted. The first attempt may be in progress.
    /// `what` names the read.
    pub(crate) fn read(
        &self,
        feed: &AnyFeed,
        (batch, slots): (u64, Range<usize>),
        first: Option<Reading>,
        what: &str,
        interrupted: Interrupt<'_>,
    ) -> Result<Option<FeedBatch>> {
        let mut first = first;
        let attempt = async || {
            // A task that has panicked or was aborted has read nothing.
            let begun = match first.take() {
                Some(reading) => reading.await.ok(),
                None => None,
            };
            match begun {
                Some(outcome) => outcome,
                None => feed.batch(batch, slots.clone()).await,
            }
        };
        self.runtime.block_on(self.repeat(attempt, what, interrupted))
    }

    async fn repeat<T>(
        &self,
        mut attempt: impl AsyncFnMut() -> Result<T, FeedError>,
        what: &str,
        interrupted: Interrupt<'_>,
    ) -> Result<Option<T>> {
        let mut attempts = Attempts::new(&self.outage);
        let mut backoff = self.pauses.clone();
        let began = Instant::now();
        // An outage that began in an earlier ring lasts until a read succeeds.
        let (mut refused, mut is_failing) = (0, !self.outage.elapsed().is_zero());
        if is_failing {
            attempts.failed()?;
        }
        loop {
            let is_late = || is_failing || began.elapsed() >= self.silence_max;
            let outcome = tokio::select! {
                biased;
                outcome = attempt() => outcome,
                () = interruption(interrupted, is_late) => {
                    if is_late() {
                        self.outage.begin();
                    }
                    return Ok(None);
                }
            };
            let error = match outcome {
                Ok(rows) => {
                    drop(attempts);
                    if self.outage.clear() {
                        tracing::info!(job = self.job, what, "rows can be read again");
                    }
                    return Ok(Some(rows));
                }
                Err(error) => error,
            };
            is_failing = true;
            let is_retryable = error.is_retryable();
            let error = Error::feed(what, error);
            let cause = error.one_line();
            if is_retryable && error.is_outage() {
                attempts.failed()?;
                // From the first attempt on, also if that was in another ring.
                let failing = self.outage.elapsed();
                let seconds = failing.as_secs();
                if failing >= self.patience {
                    let silent = if error.is_of_brokers() { "brokers" } else { "volumes" };
                    return Err(Error::Outage {
                        reason: format!(
                            "job {}: the {silent} gave no rows for {seconds} s ({cause}): start the job again when they \
                             answer, and it goes on from the last checkpoint",
                            self.job
                        ),
                    });
                }
                let limit = self.patience.as_secs();
                tracing::warn!(
                    job = self.job,
                    error = cause,
                    "cannot read rows for {seconds} s; trying again, for up to {limit} s"
                );
            } else {
                refused += 1;
                if !is_retryable || refused == ATTEMPTS {
                    drop(attempts);
                    self.outage.clear();
                    return Err(error);
                }
                tracing::warn!(job = self.job, error = cause, "cannot read rows; trying again");
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.jittered()) => {}
                () = interruption(interrupted, || true) => return Ok(None),
            }
        }
    }
}

/// Waits until a read need not go on.
async fn interruption(interrupted: Interrupt<'_>, is_failing: impl Fn() -> bool) {
    while !interrupted(is_failing()) {
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use millrace_datafs::Error as E;
    use millrace_streams::Error as S;

    use super::*;

    /// Longer than any test.
    const LONG: Duration = Duration::from_secs(3_600);

    fn failed(error: E) -> FeedError {
        let source = object_store::Error::Generic { store: "volume", source: Box::new(error) };
        FeedError::Store { file: "a.parquet".to_owned(), source: Arc::new(source) }
    }

    fn away() -> FeedError {
        let source = "timeout".into();
        failed(E::StoreAway { place: "s3://b".into(), operation: "read", tried_ms: 1, source })
    }

    fn topic(source: S) -> FeedError {
        FeedError::Topic { topic: "t".to_owned(), source: Arc::new(source) }
    }

    fn brokers_away() -> FeedError {
        topic(S::Unreachable {
            bootstrap_servers: "b:9092".to_owned(),
            waited_ms: 1,
            reason: "topic t partition 3 gave no record at offset 7: no broker leads it".to_owned(),
        })
    }

    fn reader(patience: Duration) -> (tokio::runtime::Runtime, Reader) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let reader = Reader::new("j".to_owned(), patience, runtime.handle().clone());
        let at_once = Backoff::new(Duration::ZERO, Duration::ZERO);
        (runtime, Reader { pauses: at_once, ..reader })
    }

    /// The outcome of a read whose attempts fail with `error` until that many were made, and its attempts.
    fn read(
        (runtime, reader): &(tokio::runtime::Runtime, Reader),
        error: impl Fn() -> FeedError,
        failures: u32,
        interrupted: Interrupt<'_>,
    ) -> (Result<Option<u32>>, u32) {
        let made = Cell::new(0);
        let attempt = async || {
            made.set(made.get() + 1);
            if made.get() > failures { Ok(made.get()) } else { Err(error()) }
        };
        (runtime.block_on(reader.repeat(attempt, "step 3: read dataset d", interrupted)), made.get())
    }

    #[test]
    fn a_read_outlasts_an_outage_but_not_an_error() {
        let reader = reader(LONG);
        let on = |_| false;
        assert!(matches!(read(&reader, away, 40, &on), (Ok(Some(41)), 41)));
        assert!(reader.1.outage.elapsed().is_zero());
        // This process's own trouble: another one may read.
        let denied = || {
            let source = std::io::Error::from_raw_os_error(libc::EMFILE);
            failed(E::Io { operation: "open", path: "/home".into(), source })
        };
        let (outcome, attempts) = read(&reader, denied, 40, &on);
        assert!(outcome.is_err_and(|error| error.is_local()) && attempts == ATTEMPTS);
        let damaged = || failed(E::Corrupt { what: "object".to_owned(), reason: "checksum".to_owned() });
        assert_eq!(read(&reader, damaged, 40, &on).1, ATTEMPTS);
        assert!(reader.1.outage.elapsed().is_zero());
    }

    #[test]
    fn a_read_outlasts_brokers_that_do_not_answer_and_changes_of_leaders() {
        let reader = reader(LONG);
        let on = |_| false;
        assert!(matches!(read(&reader, brokers_away, 40, &on), (Ok(Some(41)), 41)));
        let (outcome, attempts) = read(&self::reader(Duration::from_millis(1)), brokers_away, 40, &on);
        let error = outcome.unwrap_err();
        let text = error.one_line();
        assert!(matches!(error, Error::Outage { .. }) && attempts == 1, "{text}");
        assert!(text.contains("the brokers gave no rows") && text.contains("topic t partition 3"), "{text}");
        // The records are not there any more.
        let removed = || topic(S::RecordsChanged { topic: "t".to_owned(), partition: 3, first: 0, next: 9 });
        let (outcome, attempts) = read(&reader, removed, 40, &on);
        assert!(outcome.is_err_and(|error| !error.is_local() && !error.is_outage()) && attempts == 1);
    }

    #[test]
    fn a_long_outage_is_an_error_that_names_the_step_and_the_remedy() {
        let reader = reader(Duration::from_millis(1));
        let (outcome, attempts) = read(&reader, away, 40, &|_| false);
        let error = outcome.unwrap_err();
        let text = error.one_line();
        assert!(matches!(error, Error::Outage { .. }) && attempts == 1, "{text}");
        assert!(text.contains("job j") && text.contains("step 3") && text.contains("s3://b"), "{text}");
    }

    #[test]
    fn a_read_without_an_answer_ends_when_it_is_asked_to_before_its_first_failure() {
        let (runtime, reader) = reader(LONG);
        let is_asked = |is_failing: bool| is_failing;
        let end = |reader: &Reader| {
            let silent = async || std::future::pending::<Result<u32, FeedError>>().await;
            runtime.block_on(reader.repeat(silent, "step 3: read dataset d", &is_asked))
        };
        let reader = Reader { silence_max: Duration::ZERO, ..reader };
        assert!(matches!(end(&reader), Ok(None)));
        assert!(!reader.outage.elapsed().is_zero(), "the coordinator learns that this worker has no rows");
        // The outage goes on in the next ring.
        let reader = Reader { silence_max: LONG, ..reader };
        assert!(matches!(end(&reader), Ok(None)));
    }

    #[test]
    fn an_interrupted_read_goes_on_with_its_patience_in_the_next_ring() {
        let mut reader = reader(LONG);
        let is_over = Cell::new(0);
        let after_some = |is_failing: bool| {
            is_over.set(is_over.get() + u32::from(is_failing));
            is_over.get() > 5
        };
        assert!(matches!(read(&reader, away, 1_000, &after_some), (Ok(None), 1..)));
        assert!(!reader.1.outage.elapsed().is_zero(), "heartbeats still tell");
        reader.1.patience = Duration::ZERO;
        assert!(matches!(read(&reader, away, 1, &|_| false).0, Err(Error::Outage { .. })));
        // Under the next coordinator.
        reader.1.reset(LONG);
        assert!(reader.1.outage.elapsed().is_zero());
        assert!(matches!(read(&reader, away, 1, &|_| false).0, Ok(Some(2))));
    }
}
