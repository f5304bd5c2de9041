//! A pipe from topic to topic: reads JSON records from one topic and writes the model's predictions to
//! another.
//!
//! Delivery is **at least once**: the pipe commits progress after the brokers acknowledged the predictions.
//! After a crash the next run reads the ends of the output topics and does not answer again the records that
//! were answered since the last commit. A prediction that the brokers append only later (the last request of
//! a process that was just killed) can still appear twice. Every prediction names its source (`source:
//! {topic, partition, offset}` in the value, `millrace-source` in the headers), so that a consumer can drop
//! duplicates. Records that cannot be predicted go to the dead-letter topic with the reason; no record is
//! dropped. A bounded run ([`Until::CaughtUp`]) whose first batch has no record with the model's inputs ends with
//! [`Error::Unfit`] and writes nothing: a wrong field name would make dead letters of the whole topic. A fault of the server is not the record's: after 16 internal errors without an answer between, the pipe
//! ends and does not commit the batch.
//!
//! A pipe is identified by its name, model, input and output; positions and answers belong to one identity.
//! Answers carry the timestamp of their record, so a pipe detects that its input topic was deleted and
//! created again. It then fails with [`Error::InputChanged`], because resuming would skip records.
//!
//! An answer that is too large for its topic becomes a dead letter, too. The memory of a pipe is bounded: at
//! most 8 MiB of records, their inputs, and 8 MiB of answers that are not yet written.

mod answer;
mod answered_offsets;
mod error;
mod faults;
mod output;
mod progress;
mod waiting;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use millrace_datafs::View;
use millrace_streams::KafkaConfig;
use millrace_streams::topic::{self, Consumer, EARLIEST, Producer, Records};
use tokio_util::sync::CancellationToken;

use answer::Pipe;
use answered_offsets::{AnsweredOffsets, Tail};
pub use error::{Error, Result};
pub use faults::Faults;
use millrace_serving_core::config::PipeConfig;
use millrace_serving_core::error::{chain, quote};
use millrace_serving_repository::infer::Inference;
use output::Writer;
use progress::Progress;
pub use progress::offsets;
pub use waiting::Waiting;

/// Most records between two commits: enough that the cost of a commit is small.
const CHUNK_ROWS_MAX: usize = 4096;
/// The same bound when `batch_rows_max` asks for more.
const CHUNK_ROWS_LIMIT: usize = 1 << 16;
/// Most bytes of the records between two commits, and of answers that wait to be written. A single record or
/// answer may be larger.
const CHUNK_BYTES_MAX: usize = 8 << 20;
/// Longest wait for records in one iteration of the loop.
const POLL: Duration = Duration::from_millis(250);
/// Delay before a pipe that runs forever restarts after an error of the brokers or the volume.
const RESTART_AFTER: Duration = Duration::from_secs(1);
/// The client reports unreachable brokers every 30 s. After this long without a report they count as
/// reachable.
const BACK_AFTER: Duration = Duration::from_secs(45);

/// Dependencies of a pipe.
#[derive(Debug, Clone)]
pub struct Deps {
    /// Brokers of both topics.
    pub kafka: KafkaConfig,
    /// The models.
    pub inference: Inference,
    /// Live volume whose keys below `pipe/<name>/` hold the next offsets.
    pub progress: View,
    /// Receives a callback when the pipe starts or stops waiting.
    pub waiting: Waiting,
    /// Failures of the server in a row. Those of the run before, where a pipe is started again after an error.
    pub faults: Faults,
    /// Under [`Until::CaughtUp`]: go on when no record of the first batch has the model's inputs, and make dead letters of
    /// them, instead of [`Error::Unfit`].
    pub allow_unfit: bool,
}

/// When a pipe ends without being cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Never; it waits for its model and for records.
    Forever,
    /// Once it has answered everything that the input topic held at the start. The model must be ready.
    CaughtUp,
}

/// Counts of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PipeReport {
    /// Records read.
    pub records: u64,
    /// Predictions written.
    pub predicted: u64,
    /// Records written to the dead-letter topic.
    pub dead_letters: u64,
    /// Next offset by partition of the input topic.
    pub offsets: BTreeMap<i32, i64>,
}

/// Runs a pipe until it has caught up, fails, or is cancelled. On return, each record that was read is
/// answered and committed, or the next run reads it again. Resumes at the last commit, else at the earliest
/// record. The partitions are those at the start. A pipe that runs forever restarts from its last commit
/// after a retryable error.
///
/// # Errors
/// [`Error::Server`]; [`Error::Streams`]; [`Error::Datafs`]; [`Error::Fenced`] when another process runs
/// the same pipe; [`Error::InputChanged`] when the input is not the topic that the pipe has read;
/// [`Error::Infer`] when the server fails on every record, and under [`Until::CaughtUp`] when the model is not ready
/// or stays busy; [`Error::Unfit`] under [`Until::CaughtUp`] without [`Deps::allow_unfit`].
pub async fn run(
    config: &PipeConfig,
    deps: Deps,
    until: Until,
    cancel: CancellationToken,
) -> Result<PipeReport> {
    check(config)?;
    let mut report = PipeReport::default();
    loop {
        match run_once(config, &deps, until, &cancel, &mut report).await {
            Err(error) if until == Until::Forever && error.is_retryable() => {
                tracing::warn!(pipe = config.name, error = %chain(&error), "the pipe starts over");
                deps.waiting.set(true);
                if cancel.run_until_cancelled(tokio::time::sleep(RESTART_AFTER)).await.is_none() {
                    return Ok(report);
                }
            }
            outcome => return outcome.map(|()| report),
        }
    }
}

/// State at the beginning of a run.
struct Start<'a> {
    /// First and next offset of the input by partition.
    marks: BTreeMap<i32, (i64, i64)>,
    writer: Writer<'a>,
    progress: Progress,
    answered: AnsweredOffsets,
    consumer: Consumer,
}

impl<'a> Start<'a> {
    async fn new(config: &'a PipeConfig, deps: &Deps) -> Result<Start<'a>> {
        let marks = topic::watermarks(&deps.kafka, &config.input).await?;
        let partitions = i32::try_from(marks.len()).unwrap_or(1).max(1);
        topic::create_topic(&deps.kafka, &config.output, partitions).await?;
        let mut writer = Writer {
            producer: Producer::connect(&deps.kafka).await?,
            output_partitions: topic::watermarks(&deps.kafka, &config.output).await?.len(),
            kafka: deps.kafka.clone(),
            config,
            id: String::new(),
        };
        let tail = Tail::read(&writer).await?;
        let adopt = tail.allows_adoption(config);
        let progress = Progress::read(deps.progress.clone(), config, marks.keys(), adopt).await?;
        writer.id.clone_from(&progress.id);
        let answered = AnsweredOffsets::new(tail, config, &progress);
        // Read again: another process of this pipe that has just ended may have read beyond the first marks.
        let marks_now = topic::watermarks(&deps.kafka, &config.input).await?;
        progress.check(&marks_now)?;
        answered.check(&deps.kafka, &marks_now).await?;
        let start: Vec<(String, i32, i64)> = marks
            .keys()
            .map(|partition| {
                (config.input.clone(), *partition, progress.next(*partition).unwrap_or(EARLIEST))
            })
            .collect();
        let consumer = Consumer::assign(&deps.kafka, &start).await?;
        Ok(Start { marks, writer, progress, answered, consumer })
    }
}

async fn run_once(
    config: &PipeConfig,
    deps: &Deps,
    until: Until,
    cancel: &CancellationToken,
    report: &mut PipeReport,
) -> Result<()> {
    if until == Until::CaughtUp {
        deps.inference.find(&config.model, config.version)?;
    }
    let Some(start) = cancel.run_until_cancelled(Start::new(config, deps)).await else { return Ok(()) };
    let Start { marks, writer, mut progress, answered, mut consumer } = start?;
    let mut pipe = Pipe {
        config,
        inference: &deps.inference,
        waiting: &deps.waiting,
        faults: &deps.faults,
        writer,
        answered,
        mapping: None,
        answer_bytes: None,
        has_warned: false,
        may_be_unfit: until == Until::Forever || deps.allow_unfit,
        until,
        report,
        cancel,
    };
    tracing::info!(pipe = config.name, input = config.input, output = config.output, "the pipe runs");
    deps.waiting.set(false);
    let mut away: Option<Instant> = None;
    let mut at = consumer.positions().clone();
    loop {
        for ((_, partition), offset) in consumer.positions() {
            pipe.report.offsets.insert(*partition, *offset);
        }
        if until == Until::CaughtUp && caught_up(&marks, &pipe.report.offsets) {
            break;
        }
        if away.is_some_and(|since| since.elapsed() >= BACK_AFTER) {
            away = None;
            deps.waiting.set(false);
        }
        let next = consumer.next(chunk_rows(config), CHUNK_BYTES_MAX, POLL);
        let batch = match cancel.run_until_cancelled(next).await {
            None => break,
            Some(Err(error)) if error.is_retryable() && until == Until::Forever => {
                tracing::warn!(pipe = config.name, %error, "the pipe waits for the brokers");
                away = Some(Instant::now());
                deps.waiting.set(true);
                continue;
            }
            Some(Err(millrace_streams::Error::Undecodable { partition, first, next, reason, .. })) => {
                if !pipe.undecodable(partition, (first, next), &reason).await? {
                    break;
                }
                None
            }
            Some(batch) => batch?,
        };
        if let Some(batch) = batch {
            if away.take().is_some() {
                deps.waiting.set(false);
            }
            if !pipe.answer(&Records::new(&batch)?).await? {
                break;
            }
        }
        if *consumer.positions() != at {
            at.clone_from(consumer.positions());
            progress.commit(at.iter().map(|((_, p), offset)| (*p, *offset)).collect()).await?;
        }
    }
    Ok(())
}

/// Most records between two commits.
fn chunk_rows(config: &PipeConfig) -> usize {
    config.batch_rows_max.clamp(CHUNK_ROWS_MAX, CHUNK_ROWS_LIMIT)
}

/// Checks the settings of a pipe alone.
///
/// # Errors
/// An error of the configuration, with the pipe and the setting.
pub fn check(config: &PipeConfig) -> Result<()> {
    let config_error = Error::config;
    let name = &config.name;
    if name.is_empty()
        || name.len() > 128
        || !name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    {
        return Err(config_error(format!("pipe name {} is not 1 to 128 of A-Z a-z 0-9 . _ -", quote(name))));
    }
    for (key, value) in [("input", &config.input), ("output", &config.output), ("model", &config.model)] {
        if value.is_empty() {
            return Err(config_error(format!("pipe {name:?}: {key} is not set")));
        }
    }
    let dead = config.dead_letter_topic();
    if config.input == config.output || config.input == dead || config.output == dead {
        return Err(config_error(format!(
            "pipe {name:?}: input, output and dead-letter topic must be three topics"
        )));
    }
    Ok(())
}

/// Whether the positions, which also pass offsets without records, reached the ends seen at the start.
fn caught_up(marks: &BTreeMap<i32, (i64, i64)>, offsets: &BTreeMap<i32, i64>) -> bool {
    marks.iter().all(|(partition, (low, high))| {
        high <= low || offsets.get(partition).is_some_and(|offset| offset >= high)
    })
}
