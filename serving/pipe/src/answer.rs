//! The answer step of a pipe: reads the rows of a batch of records, predicts them and writes the answers.
//! Records that cannot be predicted become dead letters, unless the server fails on all.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_streams::topic::{self, OutRecord, Records};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use super::answered_offsets::AnsweredOffsets;
use super::faults::Faults;
use super::output::Writer;
use super::waiting::Waiting;
use super::{CHUNK_BYTES_MAX, PipeReport, Until};
use crate::error::{Error, Result};
use millrace_serving_core::config::PipeConfig;
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::metrics::PIPE_RECORDS;
use millrace_serving_core::record::{Mapping, Row, RowOutputs, parse, row_outputs};
use millrace_serving_repository::infer::{Inference, Request};
use millrace_serving_repository::model::Model;

/// Longest time to write answers after the pipe was cancelled.
const DRAIN_MAX: Duration = Duration::from_secs(10);
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Most retries while the server is busy.
const ATTEMPTS_MAX: u32 = 100;
/// Most fields of a record that an error names.
const FIELDS_SHOWN_MAX: usize = 20;

/// The state that answers the records of one run.
pub(super) struct Pipe<'a> {
    pub(super) config: &'a PipeConfig,
    pub(super) inference: &'a Inference,
    pub(super) waiting: &'a Waiting,
    pub(super) faults: &'a Faults,
    pub(super) writer: Writer<'a>,
    pub(super) answered: AnsweredOffsets,
    pub(super) mapping: Option<(Arc<Model>, Mapping)>,
    /// Largest answer of the last call of this model in bytes; `None` before the first call.
    pub(super) answer_bytes: Option<usize>,
    /// Whether this run has warned of a dead letter: a wrong mapping rejects every record.
    pub(super) has_warned: bool,
    /// Whether a batch without a record that has the model's inputs becomes dead letters: always for a pipe that runs
    /// forever, else once a batch had such a record.
    pub(super) may_be_unfit: bool,
    pub(super) until: Until,
    pub(super) report: &'a mut PipeReport,
    pub(super) cancel: &'a CancellationToken,
}

/// A record whose inputs were read: its index in the batch and the fields that the answer carries over.
struct DecodedRecord {
    index: usize,
    carried: Map<String, Value>,
}

/// Kind of an output record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Prediction,
    DeadLetter,
    /// A dead letter without its record, which was too large with it.
    Short,
}

/// Records to write, each with the index of the record that it answers.
#[derive(Default)]
struct Outbox {
    records: Vec<OutRecord>,
    kinds: Vec<(usize, Kind)>,
    bytes: usize,
}

impl Outbox {
    fn push(&mut self, index: usize, kind: Kind, record: OutRecord) {
        self.bytes += bytes_of(&record);
        self.records.push(record);
        self.kinds.push((index, kind));
    }

    fn count(&self, kind: Kind) -> u64 {
        self.kinds.iter().filter(|(_, of)| *of == kind).count() as u64
    }
}

fn bytes_of(record: &OutRecord) -> usize {
    record.payload.as_ref().map_or(0, Bytes::len) + record.key.as_ref().map_or(0, Bytes::len)
}

/// The names of a record's fields, as an error tells them.
fn fields_of(record: &Map<String, Value>) -> String {
    if record.is_empty() {
        return "; it has no fields".to_owned();
    }
    let names: Vec<String> = record.keys().take(FIELDS_SHOWN_MAX).map(|name| quote(name)).collect();
    let more = match record.len() - names.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("; its fields are {}{more}", names.join(", "))
}

impl Pipe<'_> {
    /// Predicts a batch and writes the answers; `false` if cancelled before they were written.
    ///
    /// # Errors
    /// Among others [`Error::Unfit`], before anything is written.
    pub(super) async fn answer(&mut self, records: &Records<'_>) -> Result<bool> {
        let Some(model) = self.model().await? else {
            return Ok(false);
        };
        if model.sequences.is_some() {
            // Checked before reading: otherwise each record would become a dead letter.
            return Err(InferError::invalid(format!(
                "pipe {:?}: model {:?} keeps a state for each sequence of requests, and records belong to none: pipes \
                 cannot use it",
                self.config.name, self.config.model
            ))
            .into());
        }
        let mapping = match &self.mapping {
            Some((known, mapping)) if Arc::ptr_eq(known, &model) => mapping.clone(),
            _ => {
                self.answer_bytes = None;
                Mapping::of_trained(model.signature(), &self.config.columns, &model.manifest().fields)?
            }
        };
        self.mapping = Some((model.clone(), mapping.clone()));
        let mut out = Outbox::default();
        let mut reads: Vec<DecodedRecord> = Vec::new();
        let mut rows: Vec<Row> = Vec::new();
        let mut unfit: Vec<(usize, InferError)> = Vec::new();
        for index in 0..records.len() {
            let (partition, offset) = (records.partition(index), records.offset(index));
            if self.answered.take(partition, offset, records.timestamp_ms(index))? {
                continue;
            }
            match self.read(&mapping, records.value(index)) {
                Ok((row, carried)) => {
                    reads.push(DecodedRecord { index, carried });
                    rows.push(row);
                }
                Err(error) => unfit.push((index, error)),
            }
        }
        self.may_be_unfit |= unfit.len() < records.len();
        if let (false, Some((index, error))) = (self.may_be_unfit, unfit.first()) {
            return Err(self.unfit(records, *index, error));
        }
        for (index, error) in &unfit {
            let letter = self.reject(records, *index, error);
            out.push(*index, Kind::DeadLetter, letter);
        }
        let rows_max = if model.rows().are_independent() { self.config.batch_rows_max } else { 1 };
        let mut done = 0;
        while done < rows.len() {
            let count = mapping.fitting(&rows[done..], rows_max.min(self.rows_that_fit()));
            let slice = done..done + count;
            let answers = self.predict(&model, &mapping, &rows[slice.clone()]).await?;
            let Some(answers) = answers else {
                return Ok(false);
            };
            let mut largest = 0;
            for (read, answer) in reads[slice].iter().zip(answers) {
                match answer {
                    Ok(answer) => {
                        let record =
                            self.writer.prediction(records, read.index, &read.carried, &model, answer);
                        largest = bytes_of(&record).max(largest);
                        out.push(read.index, Kind::Prediction, record);
                    }
                    Err(error) => {
                        let letter = self.reject(records, read.index, &error);
                        out.push(read.index, Kind::DeadLetter, letter);
                    }
                }
            }
            if largest > 0 {
                self.answer_bytes = Some(largest);
            }
            done += count;
            // A record that was written as a dead letter is never predicted: whether the server has a fault is known
            // first. The batch's records bound what waits meanwhile.
            if out.bytes >= CHUNK_BYTES_MAX
                && self.faults.is_zero()
                && !self.write_unless_cancelled(records, std::mem::take(&mut out)).await?
            {
                return Ok(false);
            }
        }
        if !self.write_unless_cancelled(records, out).await? {
            return Ok(false);
        }
        self.report.records += records.len() as u64;
        Ok(true)
    }

    /// The error for a first batch without a record that has the model's inputs; the record at `index` is the first one.
    fn unfit(&self, records: &Records<'_>, index: usize, error: &InferError) -> Error {
        let (partition, offset) = (records.partition(index), records.offset(index));
        let record = records.value(index).and_then(|value| parse(value).ok());
        let fields = record.as_ref().map(fields_of).unwrap_or_default();
        Error::Unfit {
            name: self.config.name.clone(),
            topic: self.config.input.clone(),
            model: self.config.model.clone(),
            records: records.len(),
            reason: format!("at partition {partition} offset {offset}, {error}{fields}"),
        }
    }

    /// The dead letter of a record. Warns of the first one of a run; metrics count all.
    fn reject(&mut self, records: &Records<'_>, index: usize, error: &InferError) -> OutRecord {
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                pipe = self.config.name,
                topic = self.config.input,
                partition = records.partition(index),
                offset = records.offset(index),
                %error,
                "a record cannot be predicted and goes to {}; further ones are only counted",
                self.config.dead_letter_topic()
            );
        }
        self.writer.dead_letter(records, index, &error.to_string())
    }

    /// Most rows of a call so that its answers fit into a chunk, estimated from the last call. The first call
    /// of a model has one row, as its answers may be of any size.
    fn rows_that_fit(&self) -> usize {
        self.answer_bytes.map_or(1, |bytes| CHUNK_BYTES_MAX / bytes.max(1)).max(1)
    }

    /// Writes answers; `false` if the brokers have not acknowledged all of them [`DRAIN_MAX`] after a
    /// cancellation. The next run finds the written ones at the ends of the topics.
    async fn write_unless_cancelled(&mut self, records: &Records<'_>, out: Outbox) -> Result<bool> {
        let cancel = self.cancel;
        let given_up = async {
            cancel.cancelled().await;
            tokio::time::sleep(DRAIN_MAX).await;
        };
        let name = self.config.name.as_str();
        tokio::select! {
            written = self.write(records, out) => written.map(|()| true),
            () = given_up => {
                tracing::warn!(pipe = name, "the pipe ends before the brokers accepted its last answers");
                Ok(false)
            }
        }
    }

    /// Writes answers. An answer that is too large for its topic becomes a dead letter with the reason; a
    /// dead letter that is too large is written without its record.
    async fn write(&mut self, records: &Records<'_>, mut out: Outbox) -> Result<()> {
        let mut written = [0; 2];
        while !out.records.is_empty() {
            if out.count(Kind::Prediction) < out.records.len() as u64 {
                self.writer.ensure_dead_letter_topic().await?;
            }
            let too_large = self.writer.producer.send_fitting(&out.records).await?;
            let mut next = Outbox::default();
            for at in too_large {
                let (record, (index, kind)) = (&out.records[at], out.kinds[at]);
                let (bytes, topic) = (bytes_of(record), &record.topic);
                match kind {
                    Kind::Prediction => {
                        let reason = format!(
                            "the answer has {bytes} bytes, which is too large for topic {topic}: raise \
                             message.max.bytes (and queue.buffering.max.kbytes, where it is set) under \
                             [streams.properties] and the limit of the topic or its brokers \
                             (max.message.bytes, streams.broker.message_bytes_max)"
                        );
                        tracing::warn!(
                            pipe = self.config.name,
                            topic,
                            bytes,
                            partition = records.partition(index),
                            offset = records.offset(index),
                            "an answer is too large and becomes a dead letter"
                        );
                        let letter = self.writer.dead_letter(records, index, &reason);
                        next.push(index, Kind::DeadLetter, letter);
                    }
                    Kind::DeadLetter => {
                        tracing::warn!(
                            pipe = self.config.name,
                            topic,
                            bytes,
                            partition = records.partition(index),
                            offset = records.offset(index),
                            "a dead letter is too large and is written without its record"
                        );
                        next.push(index, Kind::Short, self.writer.shortened(record));
                    }
                    Kind::Short => {
                        let topic = topic.clone();
                        return Err(millrace_streams::Error::RecordTooLarge { topic, bytes }.into());
                    }
                }
            }
            let predicted = out.count(Kind::Prediction) - next.count(Kind::DeadLetter);
            written[0] += predicted;
            written[1] += (out.records.len() - next.records.len()) as u64 - predicted;
            out = next;
        }
        let [predicted, dead_letters] = written;
        self.report.predicted += predicted;
        self.report.dead_letters += dead_letters;
        let name = self.config.name.as_str();
        PIPE_RECORDS.with_label_values(&[name, "predicted"]).inc_by(predicted);
        PIPE_RECORDS.with_label_values(&[name, "dead_letter"]).inc_by(dead_letters);
        Ok(())
    }

    /// Writes one dead letter for a batch of the input that cannot be decoded, offsets `first..next`; `false`
    /// if cancelled before it was written.
    pub(super) async fn undecodable(
        &mut self,
        partition: i32,
        (first, next): (i64, i64),
        reason: &str,
    ) -> Result<bool> {
        if self.answered.take(partition, first, None)? {
            return Ok(true);
        }
        let batch = topic::blank_record(&self.config.input, partition, first)?;
        let last = next - 1;
        let reason = format!("the batch with offsets {first} to {last} cannot be decoded: {reason}");
        tracing::warn!(pipe = self.config.name, partition, first, last, "a batch becomes a dead letter");
        let records = Records::new(&batch)?;
        let mut out = Outbox::default();
        out.push(0, Kind::DeadLetter, self.writer.dead_letter(&records, 0, &reason));
        if !self.write_unless_cancelled(&records, out).await? {
            return Ok(false);
        }
        self.report.records += 1;
        Ok(true)
    }

    fn read(&self, mapping: &Mapping, value: Option<&[u8]>) -> Result<(Row, Map<String, Value>), InferError> {
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

    /// The model. A pipe that runs forever waits for it; `None` if cancelled meanwhile.
    async fn model(&self) -> Result<Option<Arc<Model>>> {
        let mut changes = self.inference.repository().changes();
        let mut told = false;
        loop {
            changes.mark_unchanged();
            let repository = self.inference.repository();
            let found = self.inference.find(&self.config.model, self.config.version);
            match found.and_then(|model| repository.check_steps(&model).map(|()| model)) {
                Ok(model) => {
                    if told {
                        self.waiting.set(false);
                        tracing::info!(
                            pipe = self.config.name,
                            model = self.config.model,
                            "the model is available"
                        );
                    }
                    return Ok(Some(model));
                }
                Err(error) if self.until == Until::CaughtUp => return Err(error.into()),
                Err(error) if !told => {
                    told = true;
                    self.waiting.set(true);
                    tracing::info!(
                        pipe = self.config.name, model = self.config.model, %error, "the pipe waits for its model"
                    );
                }
                Err(_) => {}
            }
            match self.cancel.run_until_cancelled(changes.changed()).await {
                None | Some(Err(_)) => return Ok(None),
                Some(Ok(())) => {}
            }
        }
    }

    /// Runs rows of one shape in one call. If the call fails, runs them one at a time, so that a bad row does
    /// not fail the others. `None` if cancelled while the server was busy.
    ///
    /// # Errors
    /// Those of [`Pipe::call`], and [`crate::Error::Infer`] when the server fails on every row.
    async fn predict(
        &self,
        model: &Model,
        mapping: &Mapping,
        rows: &[Row],
    ) -> Result<Option<Vec<Result<RowOutputs, InferError>>>> {
        let Some(together) = self.call(model, mapping, rows).await? else {
            return Ok(None);
        };
        match together {
            Ok(answers) => {
                self.faults.clear();
                return Ok(Some(answers.into_iter().map(Ok).collect()));
            }
            Err(error) if rows.len() == 1 => {
                self.faults.note(self.config, &error)?;
                return Ok(Some(vec![Err(error)]));
            }
            Err(error) => {
                tracing::debug!(pipe = self.config.name, %error, "a batch failed, its rows run one by one")
            }
        }
        let mut answers = Vec::with_capacity(rows.len());
        for row in rows {
            let Some(alone) = self.call(model, mapping, std::slice::from_ref(row)).await? else {
                return Ok(None);
            };
            let answer = alone.and_then(|mut answers| {
                answers.pop().ok_or_else(|| InferError::internal("the model gave no row"))
            });
            match &answer {
                Ok(_) => self.faults.clear(),
                Err(error) => self.faults.note(self.config, error)?,
            }
            answers.push(answer);
        }
        Ok(Some(answers))
    }

    /// One call, retried while the server is busy; `None` if cancelled meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Infer`] if a single row finds the server busy for ten seconds. Several rows may exceed
    /// the rest of the model's queue, so their error is returned in the `Ok` value and the caller splits
    /// them.
    async fn call(
        &self,
        model: &Model,
        mapping: &Mapping,
        rows: &[Row],
    ) -> Result<Option<Result<Vec<RowOutputs>, InferError>>> {
        let mut attempts = 0;
        loop {
            let decode = || Ok((Request { inputs: mapping.batch(rows)?, ..Default::default() }, ()));
            match self.inference.answer(model, decode, |response, ()| Ok(response)).await {
                Ok(response) => {
                    let row = |row| row_outputs(&response.outputs, row, rows.len());
                    return Ok(Some((0..rows.len()).map(row).collect()));
                }
                Err(error) if error.is_retryable() && attempts < ATTEMPTS_MAX => {
                    attempts += 1;
                    let pause = tokio::time::sleep(RETRY_AFTER);
                    if self.cancel.run_until_cancelled(pause).await.is_none() {
                        return Ok(None);
                    }
                }
                Err(error) if error.is_retryable() && rows.len() == 1 => return Err(error.into()),
                Err(error) => return Ok(Some(Err(error))),
            }
        }
    }
}
