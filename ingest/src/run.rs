//! A run of a job: it reads the topic from the volume's offsets to the topic's end, or until it is cancelled.

mod recognise;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_datafs::{Datafs, VolumeSpec};
use millrace_leaf::blocking::{self, Stopping};
use millrace_streams::KafkaConfig;
use millrace_streams::topic::{self, Consumer, Producer};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{DeadLetter, Job, JobConfig};
use crate::error::{Error, Result};
use crate::land::{Input, Lander};
use crate::metrics;
use crate::progress::{IngestReport, Progress};
use crate::state::{JobState, volume_error};

/// Largest batch in rows and bytes; the lander works on one batch while another waits.
const BATCH_ROWS_MAX: u64 = 16_384;
const BATCH_BYTES_MAX: u64 = 4 << 20;
/// Longest wait for records in one iteration of the read loop.
const WAIT: Duration = Duration::from_millis(200);
/// Interval at which an endless run asks for the ends of the partitions.
const MARKS_EVERY: Duration = Duration::from_secs(5);
/// Time without a record after which the brokers are asked whether the topic still exists.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Condition that ends a run without cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Never: only cancellation ends it.
    Forever,
    /// When everything that the topic held as the run started is committed, however long the
    /// brokers take. Records of transactions that were open then may be left for the next run.
    CaughtUp,
}

/// Low and high offset per partition.
type Marks = BTreeMap<i32, (i64, i64)>;

/// Lands one topic: reads from the offsets that the volume holds, and publishes until `until` or
/// cancellation. It publishes all records that were read before it returns.
///
/// Dropping the future stops reading; the landing thread still publishes the records read so far.
///
/// # Errors
/// [`Error`]. After any error the volume holds complete publishes only, and a later run continues from there.
pub async fn run(
    job: &JobConfig,
    datafs: &Datafs,
    kafka: &KafkaConfig,
    cancel: CancellationToken,
    until: Until,
) -> Result<IngestReport> {
    let (progress, _) = watch::channel(Progress::default());
    run_with_progress(job, datafs, kafka, cancel, until, progress).await
}

/// As [`run`], and sends its progress after every batch and every publish.
///
/// # Errors
/// As [`run`].
pub async fn run_with_progress(
    job: &JobConfig,
    datafs: &Datafs,
    kafka: &KafkaConfig,
    cancel: CancellationToken,
    until: Until,
    progress: watch::Sender<Progress>,
) -> Result<IngestReport> {
    let started = Instant::now();
    let job = Arc::new(job.validate()?);
    let reached = async {
        let marks = watermarks(&job, kafka).await?;
        let producer = dead_letter_producer(&job, kafka).await?;
        Ok((marks, producer))
    };
    // Brokers that do not answer must not delay a shutdown.
    let (marks, producer) = tokio::select! {
        biased;
        () = cancel.cancelled() => return Ok(IngestReport::default()),
        reached = reached => reached?,
    };

    let claim = {
        let (job, datafs) = (job.clone(), datafs.clone());
        move || {
            let spec = VolumeSpec::live(job.volume.clone());
            let view = datafs.view(&spec).map_err(|e| match e {
                millrace_datafs::Error::NotFound { .. } => {
                    Error::VolumeMissing { job: job.name().to_owned(), volume: job.config.volume.clone() }
                }
                e => volume_error(&job, e),
            })?;
            let state = JobState::claim(&view, &job)?;
            Ok((view, state))
        }
    };
    let (view, state) = blocking(&job, claim).await?;
    let positions = start(&job, &state.offsets, &marks)?;
    tokio::select! {
        biased;
        () = cancel.cancelled() => return Ok(IngestReport::default()),
        recognised = recognise::check(&job, kafka, &state.last, &marks) => recognised?,
    }
    tracing::info!(
        job = job.name(),
        topic = job.topic(),
        volume = job.config.volume,
        path = job.path,
        partitions = positions.len(),
        "landing"
    );
    progress.send_modify(|p| {
        p.offsets.clone_from(&positions);
        p.high = marks.iter().map(|(p, (_, high))| (*p, *high)).collect();
    });

    let runtime = Handle::current();
    let lander = Lander::new(
        job.clone(),
        view,
        state,
        positions.clone(),
        producer.map(|producer| (producer, runtime.clone())),
        progress.clone(),
    )?;
    let (inputs, received) = mpsc::channel(1);
    let landing = tokio::task::spawn_blocking(move || lander.run(received, &runtime));

    let mut reader = Reader { job: job.clone(), kafka: kafka.clone(), positions, inputs, progress };
    let read = reader.run(&cancel, until, marks).await;
    // Closing the channel makes the lander publish the rest and end.
    drop(reader);
    let landed = landing.await.unwrap_or_else(|_| Err(Error::Stopped { job: job.name().to_owned() }));
    // The lander's error is the cause when both have one.
    let mut report = landed?;
    read?;
    report.elapsed = started.elapsed();
    tracing::info!(
        job = job.name(),
        landed = report.landed,
        dead_letters = report.dead_letters,
        tombstones_skipped = report.tombstones_skipped,
        files = report.files,
        elapsed_ms = report.elapsed.as_millis() as u64,
        "stopped landing"
    );
    Ok(report)
}

async fn blocking<T: Send + 'static>(
    job: &Job,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let stopped = |Stopping| Err(Error::Stopped { job: job.name().to_owned() });
    blocking::run(work).await.unwrap_or_else(stopped)
}

fn topic_error(job: &Job, kafka: &KafkaConfig, source: millrace_streams::Error) -> Error {
    match source {
        millrace_streams::Error::UnknownTopic { topic, .. } => Error::TopicMissing {
            job: job.name().to_owned(),
            topic,
            bootstrap_servers: kafka.bootstrap_servers.clone(),
        },
        millrace_streams::Error::OffsetOutOfRange { topic: _, partition, requested, low, high } => {
            offset_lost(job, partition, requested, (low, high))
        }
        source => Error::Topic {
            job: job.name().to_owned(),
            topic: job.topic().to_owned(),
            source: Box::new(source),
        },
    }
}

fn offset_lost(job: &Job, partition: i32, committed: i64, (low, high): (i64, i64)) -> Error {
    Error::OffsetLost {
        job: job.name().to_owned(),
        topic: job.topic().to_owned(),
        partition,
        committed,
        low,
        high,
        why: if committed > high {
            "the topic was created again or truncated"
        } else {
            "records were deleted before they landed"
        },
    }
}

async fn watermarks(job: &Job, kafka: &KafkaConfig) -> Result<Marks> {
    topic::watermarks(kafka, job.topic()).await.map_err(|e| topic_error(job, kafka, e))
}

/// Connects for dead letters when they go to a topic, which is created when it is missing.
async fn dead_letter_producer(job: &Job, kafka: &KafkaConfig) -> Result<Option<Producer>> {
    let DeadLetter::Topic(dead) = &job.dead_letter else {
        return Ok(None);
    };
    topic::create_topic(kafka, dead, 1).await.map_err(|e| topic_error(job, kafka, e))?;
    let producer = Producer::connect(kafka).await.map_err(|e| topic_error(job, kafka, e))?;
    Ok(Some(producer))
}

/// Start offset of each partition: the volume's offset, else its first record.
fn start(job: &Job, committed: &BTreeMap<i32, i64>, marks: &Marks) -> Result<BTreeMap<i32, i64>> {
    if let Some((partition, committed)) =
        committed.iter().find(|(partition, next)| **next > 0 && !marks.contains_key(partition))
    {
        return Err(offset_lost(job, *partition, *committed, (0, 0)));
    }
    marks
        .iter()
        .map(|(&partition, &(low, high))| match committed.get(&partition) {
            Some(&next) if !(low..=high).contains(&next) => {
                Err(offset_lost(job, partition, next, (low, high)))
            }
            Some(&next) => Ok((partition, next)),
            None => Ok((partition, low)),
        })
        .collect()
}

/// Reads the topic into the lander's channel; a full channel slows it down.
struct Reader {
    job: Arc<Job>,
    kafka: KafkaConfig,
    /// Next offset to read per partition.
    positions: BTreeMap<i32, i64>,
    inputs: mpsc::Sender<Input>,
    progress: watch::Sender<Progress>,
}

impl Reader {
    async fn run(&mut self, cancel: &CancellationToken, until: Until, marks: Marks) -> Result<()> {
        let ends: BTreeMap<i32, i64> = marks.iter().map(|(p, (_, high))| (*p, *high)).collect();
        let (updates, mut updated) = watch::channel(marks);
        let watching = match until {
            Until::Forever => Some(self.watch_marks(updates)),
            Until::CaughtUp => None,
        };
        let rows = self.job.config.flush_rows_max.min(BATCH_ROWS_MAX) as usize;
        let bytes = self.job.config.flush_bytes_max.min(BATCH_BYTES_MAX) as usize;
        let mut consumer = tokio::select! {
            biased;
            () = cancel.cancelled() => return Ok(()),
            consumer = self.assign() => consumer?,
        };
        // Time of the last record, or of the brokers' last answer.
        let mut heard = Instant::now();
        loop {
            if until == Until::CaughtUp && self.has_reached(&ends) {
                return Ok(());
            }
            let next = tokio::select! {
                biased;
                () = cancel.cancelled() => return Ok(()),
                // The lander ended; its result gives the reason.
                () = self.inputs.closed() => return Ok(()),
                _ = updated.changed(), if watching.is_some() => {
                    let marks = updated.borrow_and_update().clone();
                    let added = self.adopt(&marks);
                    if !added.is_empty() {
                        match self.assign().await {
                            Ok(wider) => consumer = wider,
                            Err(error) if error.is_retryable() => {
                                tracing::warn!(job = self.job.name(), topic = self.job.topic(), %error, "cannot list the partitions; new ones are read once the brokers answer");
                                for partition in added {
                                    self.positions.remove(&partition);
                                }
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    continue;
                }
                next = consumer.next(rows, bytes, WAIT) => next,
            };
            let input = match next {
                Ok(Some(batch)) => Some(Input::Records(batch)),
                Ok(None) => self.passed(&consumer).map(Input::Passed),
                Err(millrace_streams::Error::Undecodable { partition, first, next, reason, .. }) => {
                    tracing::warn!(
                        job = self.job.name(),
                        topic = self.job.topic(),
                        partition,
                        first,
                        last = next - 1,
                        reason,
                        "a batch cannot be decoded: it becomes a dead letter"
                    );
                    Some(Input::Undecodable { partition, offsets: (first, next), reason })
                }
                Err(error) if error.is_retryable() && until == Until::Forever => {
                    tracing::warn!(job = self.job.name(), topic = self.job.topic(), %error, "reading continues once the brokers answer");
                    None
                }
                Err(error) => return Err(self.failed(error)),
            };
            if let Some(input) = input {
                for ((_, partition), next) in consumer.positions() {
                    self.positions.insert(*partition, *next);
                }
                if self.inputs.send(input).await.is_err() {
                    return Ok(());
                }
                // After the send, which may have waited long for the lander.
                heard = Instant::now();
            } else if until == Until::CaughtUp && heard.elapsed() >= SILENCE_MAX {
                // Fails when no broker answers or the topic is gone.
                let marks = watermarks(&self.job, &self.kafka).await?;
                self.check_ends(&ends, &marks)?;
                tracing::info!(
                    job = self.job.name(),
                    topic = self.job.topic(),
                    "waiting for the brokers to send the rest of the topic"
                );
                heard = Instant::now();
            }
        }
    }

    /// The error of a read.
    fn failed(&self, error: millrace_streams::Error) -> Error {
        match error {
            // The position is still in the topic: only records that were not read yet are lost.
            millrace_streams::Error::OffsetOutOfRange { partition, requested: end, low, high, .. }
                if self.positions.get(&partition).is_some_and(|at| (low..=high).contains(at)) =>
            {
                self.shorter(partition, end, high)
            }
            error => topic_error(&self.job, &self.kafka, error),
        }
    }

    /// Fails where the topic is shorter than at the start of the run: it would never reach these ends.
    fn check_ends(&self, ends: &BTreeMap<i32, i64>, marks: &Marks) -> Result<()> {
        for (&partition, &end) in ends {
            let (_, high) = marks.get(&partition).copied().unwrap_or_default();
            if high < end {
                return Err(self.shorter(partition, end, high));
            }
        }
        Ok(())
    }

    fn shorter(&self, partition: i32, end: i64, high: i64) -> Error {
        let (job, topic) = (self.job.name().to_owned(), self.job.topic().to_owned());
        Error::TopicShorter { job, topic, partition, end, high }
    }

    /// Positions that moved without a record.
    fn passed(&self, consumer: &Consumer) -> Option<BTreeMap<i32, i64>> {
        let moved: BTreeMap<i32, i64> = consumer
            .positions()
            .iter()
            .filter(|((_, partition), next)| self.positions.get(partition).is_none_or(|at| at < next))
            .map(|((_, partition), next)| (*partition, *next))
            .collect();
        (!moved.is_empty()).then_some(moved)
    }

    async fn assign(&self) -> Result<Consumer> {
        let topic = self.job.topic();
        let start: Vec<(String, i32, i64)> =
            self.positions.iter().map(|(partition, next)| (topic.to_owned(), *partition, *next)).collect();
        Consumer::assign(&self.kafka, &start).await.map_err(|e| topic_error(&self.job, &self.kafka, e))
    }

    fn has_reached(&self, ends: &BTreeMap<i32, i64>) -> bool {
        ends.iter().all(|(partition, end)| self.positions.get(partition).is_some_and(|at| at >= end))
    }

    /// Takes in new ends of the partitions; returns the partitions that are not read yet.
    fn adopt(&mut self, marks: &Marks) -> Vec<i32> {
        let mut added = Vec::new();
        for (partition, (low, _)) in marks {
            if !self.positions.contains_key(partition) {
                self.positions.insert(*partition, *low);
                added.push(*partition);
            }
        }
        self.progress.send_modify(|p| {
            for (partition, (low, high)) in marks {
                p.high.insert(*partition, *high);
                p.offsets.entry(*partition).or_insert(*low);
            }
        });
        metrics::set_lag(self.job.name(), &self.progress.borrow());
        added
    }

    /// Asks for the ends of the partitions at intervals, in a separate task.
    fn watch_marks(&self, updates: watch::Sender<Marks>) -> AbortOnDropHandle<()> {
        let (job, kafka) = (self.job.clone(), self.kafka.clone());
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                tokio::time::sleep(MARKS_EVERY).await;
                match topic::watermarks(&kafka, job.topic()).await {
                    Ok(marks) => {
                        if updates.send(marks).is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        tracing::debug!(job = job.name(), %error, "the topic's ends are unknown");
                    }
                }
            }
        }))
    }
}
