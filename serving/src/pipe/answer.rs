//! Answering the records of a pipe: rows are read, predicted and written; what cannot be predicted goes to
//! the dead letters.

use std::sync::Arc;
use std::time::Duration;

use millrace_streams::topic::{self, OutRecord, Records};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use super::answered::Answered;
use super::output::Writer;
use super::{PipeReport, Until};
use crate::config::PipeConfig;
use crate::error::{InferError, Result};
use crate::infer::{Inference, Request};
use crate::metrics::PIPE_RECORDS;
use crate::record::{Mapping, Row, RowOutputs, parse, row_outputs};
use crate::repository::Model;

const RETRY_AFTER: Duration = Duration::from_millis(100);

/// What answers the records of one run.
pub(super) struct Pipe<'a> {
    pub(super) config: &'a PipeConfig,
    pub(super) inference: &'a Inference,
    pub(super) writer: Writer<'a>,
    pub(super) answered: Answered,
    pub(super) mapping: Option<(Arc<Model>, Mapping)>,
    pub(super) until: Until,
    pub(super) report: &'a mut PipeReport,
    pub(super) cancel: &'a CancellationToken,
}

/// A record that was read: what it carries on, and its inputs or why it has none.
struct Read {
    index: usize,
    carried: Map<String, Value>,
}

impl Pipe<'_> {
    /// Predicts a batch and writes the answers; `false` when cancelled before they were written.
    pub(super) async fn answer(&mut self, records: &Records<'_>) -> Result<bool> {
        let Some(model) = self.model().await? else {
            return Ok(false);
        };
        if model.sequences.is_some() {
            // Before anything is read: each record would go to the dead letters.
            return Err(InferError::invalid(format!(
                "pipe {:?}: model {:?} keeps a state for each sequence of requests, and records belong to none: pipes \
                 cannot use it",
                self.config.name, self.config.model
            ))
            .into());
        }
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
            if self.answered.take(records.partition(index), records.offset(index)) {
                continue;
            }
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
        let rows_max = if model.rows().are_independent() { self.config.batch_rows_max } else { 1 };
        let mut done = 0;
        while done < rows.len() {
            let count = mapping.fitting(&rows[done..], rows_max);
            let slice = done..done + count;
            let answers = self.predict(&model, &mapping, &rows[slice.clone()]).await?;
            let Some(answers) = answers else {
                return Ok(false);
            };
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

    /// Writes one dead letter for a batch of the input that cannot be decoded, offsets `first..next`.
    pub(super) async fn undecodable(
        &mut self,
        partition: i32,
        (first, next): (i64, i64),
        reason: &str,
    ) -> Result<()> {
        if self.answered.take(partition, first) {
            return Ok(());
        }
        let batch = topic::blank_record(&self.config.input, partition, first)?;
        let last = next - 1;
        let reason = format!("the batch with offsets {first} to {last} cannot be decoded: {reason}");
        tracing::warn!(pipe = self.config.name, partition, first, last, "a batch becomes a dead letter");
        let letter = self.writer.dead_letter(&Records::new(&batch)?, 0, &reason);
        self.writer.ensure_dead_letter_topic().await?;
        self.writer.producer.send_all([letter]).await?;
        self.report.records += 1;
        self.report.dead_letters += 1;
        PIPE_RECORDS.with_label_values(&[self.config.name.as_str(), "dead_letter"]).inc();
        Ok(())
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

    /// The model, waited for when the pipe runs for ever; `None` when cancelled meanwhile.
    async fn model(&self) -> Result<Option<Arc<Model>>> {
        let mut changes = self.inference.repository().changes();
        let mut told = false;
        loop {
            changes.mark_unchanged();
            let repository = self.inference.repository();
            let found = self.inference.find(&self.config.model, self.config.version);
            match found.and_then(|model| repository.check_steps(&model).map(|()| model)) {
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
        let Some(together) = self.call(model, mapping, rows).await else {
            return Ok(None);
        };
        match together {
            Ok(answers) => return Ok(Some(answers.into_iter().map(Ok).collect())),
            Err(error) if rows.len() == 1 => return Ok(Some(vec![Err(error)])),
            Err(error) => {
                tracing::debug!(pipe = self.config.name, %error, "a batch failed, rows go alone")
            }
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
            match self.inference.answer(model, decode, |response, ()| Ok(response)).await {
                Ok(response) => {
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
