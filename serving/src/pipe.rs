//! Topic to topic: JSON records of one topic become predictions in another.
//!
//! Delivery is **at least once**: progress is committed after the predictions were acknowledged, so after
//! a crash the records since the last commit are predicted again. Every prediction names its source
//! (`source: {topic, partition, offset}` in the value, `millrace-source` in the headers), by which a
//! consumer can drop doubles. Records that cannot be predicted go to the dead-letter topic with the
//! reason; nothing is dropped.

mod output;
mod progress;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_datafs::View;
use millrace_streams::KafkaConfig;
use millrace_streams::topic::{self, Consumer, EARLIEST, OutRecord, Producer, Records};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::config::PipeConfig;
use crate::error::{Error, InferError, Result, quote};
use crate::infer::{Inference, Request};
use crate::metrics::PIPE_RECORDS;
use crate::record::{Mapping, Row, RowOutputs, parse, row_outputs};
use crate::repository::{Model, chain};
use output::Writer;
use progress::Progress;

/// Records between two commits: enough that a commit costs little beside them.
const CHUNK_ROWS_MAX: usize = 4096;
const CHUNK_BYTES_MAX: usize = 8 << 20;
/// How long to wait for records before looking around.
const POLL: Duration = Duration::from_millis(250);
/// How long a pipe that is to catch up waits for offsets that never come (deleted or control records).
const IDLE_MAX: Duration = Duration::from_secs(10);
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// How long a pipe that runs for ever waits before it starts over after brokers or volume failed.
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// What a pipe works with.
#[derive(Debug, Clone)]
pub struct Deps {
    /// Brokers of both topics.
    pub kafka: KafkaConfig,
    /// The models.
    pub inference: Inference,
    /// Live volume whose keys `pipe/<name>/<topic>/<partition>` hold the next offset.
    pub progress: View,
}

/// When a pipe ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Never; it waits for its model and for records.
    Forever,
    /// Once everything that the input topic held at the start was answered. The model must be ready.
    CaughtUp,
}

/// What a pipe did.
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

/// Runs a pipe until it has caught up, fails, or is cancelled; then everything read is answered and
/// committed, or will be read again by the next run. Resumes where the last run committed, else at the
/// earliest record. Partitions are looked up at the start. A pipe that runs for ever starts over from its
/// last commit when brokers fail in a way that may pass.
///
/// # Errors
/// [`Error::Config`]; [`Error::Streams`]; [`Error::Datafs`]; [`Error::PipeFenced`] when another process
/// runs the same pipe; [`Error::Infer`] when the model is not ready and the pipe is only to catch up.
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
                if cancel.run_until_cancelled(tokio::time::sleep(RESTART_AFTER)).await.is_none() {
                    return Ok(report);
                }
            }
            outcome => return outcome.map(|()| report),
        }
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
    let marks = topic::watermarks(&deps.kafka, &config.input).await?;
    let partitions = i32::try_from(marks.len()).unwrap_or(1).max(1);
    topic::create_topic(&deps.kafka, &config.output, partitions).await?;
    let mut progress =
        Progress::read(deps.progress.clone(), &config.name, &config.input, marks.keys()).await?;
    let start: Vec<(String, i32, i64)> = marks
        .keys()
        .map(|partition| {
            (config.input.clone(), *partition, progress.next(*partition).unwrap_or(EARLIEST))
        })
        .collect();
    let mut consumer = Consumer::assign(&deps.kafka, &start).await?;
    let writer = Writer {
        producer: Producer::connect(&deps.kafka).await?,
        output_partitions: topic::watermarks(&deps.kafka, &config.output).await?.len(),
        kafka: deps.kafka.clone(),
        config,
    };
    let mut pipe = Pipe {
        config,
        inference: &deps.inference,
        writer,
        mapping: None,
        until,
        report,
        cancel,
    };
    tracing::info!(pipe = config.name, input = config.input, output = config.output, "the pipe runs");
    let mut last_record = Instant::now();
    loop {
        for ((_, partition), offset) in consumer.positions() {
            pipe.report.offsets.insert(*partition, *offset);
        }
        if until == Until::CaughtUp && caught_up(&marks, &pipe.report.offsets, last_record, config) {
            break;
        }
        let rows_max = config.batch_rows_max.max(CHUNK_ROWS_MAX);
        let next = consumer.next(rows_max, CHUNK_BYTES_MAX, POLL);
        let batch = match cancel.run_until_cancelled(next).await {
            None => break,
            Some(Err(error)) if error.is_retryable() && until == Until::Forever => {
                tracing::warn!(pipe = config.name, %error, "the pipe waits for the brokers");
                continue;
            }
            Some(batch) => batch?,
        };
        let Some(batch) = batch else { continue };
        last_record = Instant::now();
        if !pipe.answer(&Records::new(&batch)?).await? {
            break;
        }
        let positions = consumer.positions().iter().map(|((_, p), offset)| (*p, *offset)).collect();
        progress.commit(positions).await?;
    }
    Ok(())
}

fn check(config: &PipeConfig) -> Result<()> {
    let config_error = |reason: String| Error::Config { reason };
    let name = &config.name;
    if name.is_empty()
        || name.len() > 128
        || !name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    {
        return Err(config_error(format!(
            "pipe name {} is not 1 to 128 of A-Z a-z 0-9 . _ -",
            quote(name)
        )));
    }
    for (key, value) in
        [("input", &config.input), ("output", &config.output), ("model", &config.model)]
    {
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

fn caught_up(
    marks: &BTreeMap<i32, (i64, i64)>,
    offsets: &BTreeMap<i32, i64>,
    last_record: Instant,
    config: &PipeConfig,
) -> bool {
    let behind = |(partition, (low, high)): (&i32, &(i64, i64))| {
        high > low && offsets.get(partition).is_none_or(|offset| offset < high)
    };
    if !marks.iter().any(behind) {
        return true;
    }
    let idle = last_record.elapsed() > IDLE_MAX;
    if idle {
        tracing::warn!(pipe = config.name, "no record came for a while, the pipe ends");
    }
    idle
}

struct Pipe<'a> {
    config: &'a PipeConfig,
    inference: &'a Inference,
    writer: Writer<'a>,
    mapping: Option<(Arc<Model>, Mapping)>,
    until: Until,
    report: &'a mut PipeReport,
    cancel: &'a CancellationToken,
}

/// A record that was read: what it carries on, and its inputs or why it has none.
struct Read {
    index: usize,
    carried: Map<String, Value>,
}

impl Pipe<'_> {
    /// Predicts a batch and writes the answers; `false` when cancelled before they were written.
    async fn answer(&mut self, records: &Records<'_>) -> Result<bool> {
        let Some(model) = self.model().await? else { return Ok(false) };
        let mapping = match &self.mapping {
            Some((known, mapping)) if Arc::ptr_eq(known, &model) => mapping.clone(),
            _ => Mapping::new(model.signature(), &self.config.columns)?,
        };
        self.mapping = Some((model.clone(), mapping.clone()));
        let mut out: Vec<OutRecord> = Vec::with_capacity(records.len());
        let mut dead: Vec<OutRecord> = Vec::new();
        let mut reads: Vec<Read> = Vec::new();
        let mut rows: Vec<Row> = Vec::new();
        for index in 0..records.len() {
            match self.read(&mapping, records.value(index)) {
                Ok((row, carried)) => {
                    reads.push(Read { index, carried });
                    rows.push(row);
                }
                Err(error) => {
                    dead.push(self.writer.dead_letter(records, index, &error.to_string()));
                }
            }
        }
        let mut done = 0;
        while done < rows.len() {
            let count = mapping.fitting(&rows[done..], self.config.batch_rows_max);
            let slice = done..done + count;
            let answers = self.predict(&model, &mapping, &rows[slice.clone()]).await?;
            let Some(answers) = answers else { return Ok(false) };
            for (read, answer) in reads[slice].iter().zip(answers) {
                match answer {
                    Ok(answer) => {
                        out.push(self.writer.prediction(records, read.index, &read.carried, &model, answer));
                    }
                    Err(error) => {
                        dead.push(self.writer.dead_letter(records, read.index, &error.to_string()));
                    }
                }
            }
            done += count;
        }
        let (predicted, dead_letters) = (out.len() as u64, dead.len() as u64);
        if !dead.is_empty() {
            self.writer.ensure_dead_letter_topic().await?;
        }
        out.append(&mut dead);
        self.writer.producer.send_all(out).await?;
        self.report.records += records.len() as u64;
        self.report.predicted += predicted;
        self.report.dead_letters += dead_letters;
        let name = self.config.name.as_str();
        PIPE_RECORDS.with_label_values(&[name, "predicted"]).inc_by(predicted);
        PIPE_RECORDS.with_label_values(&[name, "dead_letter"]).inc_by(dead_letters);
        Ok(true)
    }

    fn read(
        &self,
        mapping: &Mapping,
        value: Option<&[u8]>,
    ) -> Result<(Row, Map<String, Value>), InferError> {
        let value = value.ok_or_else(|| InferError::invalid("the record has no value"))?;
        let mut record = parse(value)?;
        let row = mapping.row(&record)?;
        let carried = self
            .config
            .carry
            .iter()
            .filter_map(|field| record.remove(field).map(|value| (field.clone(), value)))
            .collect();
        Ok((row, carried))
    }

    /// The model, waited for when the pipe runs for ever; `None` when cancelled meanwhile.
    async fn model(&self) -> Result<Option<Arc<Model>>> {
        let mut changes = self.inference.repository().changes();
        let mut told = false;
        loop {
            changes.mark_unchanged();
            match self.inference.find(&self.config.model, self.config.version) {
                Ok(model) => return Ok(Some(model)),
                Err(error) if self.until == Until::CaughtUp => return Err(error.into()),
                Err(error) if !told => {
                    told = true;
                    tracing::info!(pipe = self.config.name, %error, "the pipe waits for its model");
                }
                Err(_) => {}
            }
            match self.cancel.run_until_cancelled(changes.changed()).await {
                None | Some(Err(_)) => return Ok(None),
                Some(Ok(())) => {}
            }
        }
    }

    /// Runs rows of one shape: together, and one by one when that fails, so that a single bad row does
    /// not take the others along. `None` when cancelled while the server was busy.
    async fn predict(
        &self,
        model: &Model,
        mapping: &Mapping,
        rows: &[Row],
    ) -> Result<Option<Vec<Result<RowOutputs, InferError>>>> {
        let Some(together) = self.call(model, mapping, rows).await else { return Ok(None) };
        match together {
            Ok(answers) => return Ok(Some(answers.into_iter().map(Ok).collect())),
            Err(error) if rows.len() == 1 => return Ok(Some(vec![Err(error)])),
            Err(error) => tracing::debug!(pipe = self.config.name, %error, "a batch failed, rows go alone"),
        }
        let mut answers = Vec::with_capacity(rows.len());
        for row in rows {
            let Some(alone) = self.call(model, mapping, std::slice::from_ref(row)).await else {
                return Ok(None);
            };
            answers.push(alone.and_then(|mut answers| {
                answers.pop().ok_or_else(|| InferError::internal("the model gave no row"))
            }));
        }
        Ok(Some(answers))
    }

    async fn call(
        &self,
        model: &Model,
        mapping: &Mapping,
        rows: &[Row],
    ) -> Option<Result<Vec<RowOutputs>, InferError>> {
        loop {
            let decode = || Ok((Request { inputs: mapping.batch(rows)?, ..Default::default() }, ()));
            match self.inference.answer(model, decode).await {
                Ok((response, ())) => {
                    let row = |row| row_outputs(&response.outputs, row, rows.len());
                    return Some((0..rows.len()).map(row).collect());
                }
                Err(error) if error.is_retryable() => {
                    let pause = tokio::time::sleep(RETRY_AFTER);
                    self.cancel.run_until_cancelled(pause).await?;
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
