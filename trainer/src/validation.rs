//! Validation: evaluations of a run's weights on rows that are not trained on.
//!
//! The workers share the batches of an evaluation. The ring carries the bits of each batch's figures, and every
//! worker adds them in the order of the batches. All workers therefore hold the same result, whatever their
//! number. An evaluation is part of the replicated state once it is complete; one that was interrupted begins
//! again.
use std::slice;
use std::sync::Arc;

use millrace_streams::dataset::OpenDataset;
use millrace_streams::feed::{AnyFeed, Plan, PlanOptions};
use serde::{Deserialize, Serialize};

use crate::collective::Ring;
use crate::data::Columns;
use crate::elastic::proto;
use crate::engine::{Engine, Loss, Measures};
use crate::error::{Error, Result};
use crate::job::{JobFile, Validation};
use crate::order::Order;
use crate::reader::{Interrupt, Reader, Wishes};
use crate::source::{self, Use};

mod auc;
#[cfg(test)]
mod tests;

pub(crate) use auc::Scores;

/// Integers that carry the figures of a batch.
const LANES: usize = 7;
/// Integers before them: members that want to leave, and members that were told to stop.
const LANES_FIXED: usize = 2;

/// The figures of the weights after some epoch, on the rows of the validation dataset.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Epochs of training before it.
    pub epoch: u64,
    /// Steps of training before it.
    pub step: u64,
    /// Rows of the validation dataset.
    pub rows: u64,
    /// Mean loss.
    pub loss: f64,
    /// Share of the rows that were classified correctly; for `cross_entropy`, `bce` and `kl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Share of the rows whose label is among the `top_k` classes with the largest outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<f64>,
    /// Mean absolute error of the outputs, in the unit of the dataset's labels; for regression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mae: Option<f64>,
    /// The exponential of the loss, for `cross_entropy`; none above the range of numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Area under the ROC curve of two classes, 0.5 for guesses; none unless `validation.auc` asks for it, and
    /// none on rows of one class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,
}

impl Evaluation {
    /// Names and values of the figures, for bundles and people.
    pub fn figures(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let optional = [
            ("accuracy", self.accuracy),
            ("top_k", self.top_k),
            ("mae", self.mae),
            ("perplexity", self.perplexity),
            ("auc", self.auc),
        ];
        let present = optional.into_iter().filter_map(|(name, value)| Some((name, value?)));
        std::iter::once(("loss", self.loss)).chain(present)
    }
}

/// The evaluation with the lowest loss, the first one of equals.
pub(crate) fn best(evaluations: &[Evaluation]) -> Option<&Evaluation> {
    evaluations.iter().reduce(|best, next| if next.loss < best.loss { next } else { best })
}

/// Whether the state with these epochs and evaluations waits for an evaluation.
pub(crate) fn due(job: &JobFile, epochs: usize, evaluations: &[Evaluation]) -> bool {
    job.validation.as_ref().is_some_and(|validation| {
        let last = evaluations.last().map_or(0, |evaluation| evaluation.epoch);
        epochs as u64 / validation.every_epochs > last / validation.every_epochs
    })
}

/// The evaluation after which the job ends early, if there is one.
pub(crate) fn early_end<'e>(job: &JobFile, evaluations: &'e [Evaluation]) -> Option<&'e Evaluation> {
    let patience = job.validation.as_ref()?.early_stopping?;
    let (mut lowest, mut since) = (f64::INFINITY, 0);
    evaluations.iter().find(|evaluation| {
        if evaluation.loss < lowest {
            (lowest, since) = (evaluation.loss, 0);
        } else {
            since += 1;
        }
        since >= patience
    })
}

/// Options that decide the rows and their order, which is that of the files.
pub(crate) fn plan_options(job: &JobFile) -> Result<PlanOptions> {
    let what = || format!("job {}: validation", job.name);
    let selection = job.validation_selection().map_err(|e| Error::feed(what(), e))?;
    let batch_rows = job.batch_rows;
    Ok(PlanOptions { batch_rows, lanes: 1, window_rows: 1, selection, ..PlanOptions::default() })
}

/// The rows to evaluate on.
pub(crate) struct Validator {
    feed: AnyFeed,
    columns: Columns,
    loss: Loss,
    top_k: Option<usize>,
    auc: bool,
    /// Rows that are computed at a time: those of a virtual shard, so that memory suffices as in training.
    chunk_rows: usize,
}

/// An evaluation in progress.
#[derive(Debug, Default)]
pub(crate) struct Partial {
    /// The scores of the rows, for the area under the ROC curve.
    scores: Scores,
    /// Batches whose figures are in `sum`.
    batches: u64,
    sum: Measures,
}

/// The outcome of a round of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Round {
    /// Every batch has been computed.
    pub(crate) complete: bool,
    /// At least one member wants to leave so that another worker can join.
    pub(crate) leave: bool,
    /// At least one member was told to stop.
    pub(crate) stop: bool,
}

impl Validator {
    /// Opens the rows of `plan`. `trained` are the columns of the training data.
    pub(crate) fn open(
        job: &JobFile,
        validation: &Validation,
        plan: Arc<Plan>,
        dataset: &OpenDataset,
        trained: &Columns,
        cache_bytes_max: u64,
    ) -> Result<Validator> {
        if validation.auc {
            let workers = job.workers_max.unwrap_or(job.virtual_shards);
            let largest = batch_rows(plan.rows(), plan.batch_rows());
            auc::check(trained.loss, trained.output_width, plan.rows(), largest, workers).map_err(
                |error| Error::Job {
                    job: job.name.to_string(),
                    reason: format!("validation.auc = true on {}: {error}", dataset.spec()),
                },
            )?;
        }
        Ok(Validator {
            feed: source::open_feed(
                job,
                &plan.into(),
                slice::from_ref(dataset),
                cache_bytes_max,
                Use::Evaluation,
            )?,
            columns: Columns { dataset: dataset.spec().to_string(), ..trained.clone() },
            loss: job.loss.kind(),
            top_k: validation.top_k,
            auc: validation.auc,
            chunk_rows: job.batch_rows.div_ceil(job.virtual_shards).max(1),
        })
    }

    /// Checks columns, types and the first rows.
    pub(crate) async fn probe(&self) -> Result<()> {
        source::probe(&self.feed, &self.columns).await
    }

    fn batches(&self) -> u64 {
        self.feed.rows().div_ceil(self.feed.batch_rows() as u64)
    }

    /// Computes one batch on each rank and adds them to `partial`.
    ///
    /// On an error `partial` must not be used any more.
    pub(crate) fn round(
        &self,
        engine: &Engine,
        partial: &mut Partial,
        ring: &mut Ring<'_>,
        (position, wishes): (u64, Wishes<'_>),
        reader: &Reader,
    ) -> Result<Round> {
        let own = partial.batches + ring.rank() as u64;
        let size =
            LANES + if self.auc { 1 + batch_rows(self.feed.rows(), self.feed.batch_rows()) } else { 0 };
        let mut lanes = vec![0i64; LANES_FIXED + size * ring.world()];
        (lanes[0], lanes[1]) = (i64::from(wishes.leave), i64::from(wishes.stop));
        if own < self.batches() {
            let mut scores = Scores::default();
            let interrupted = |is_failing| wishes.end_read(ring, is_failing);
            let Some(measures) = self.batch(engine, own, (reader, &interrupted), &mut scores)? else {
                return Err(ring.over().into());
            };
            let lanes = &mut lanes[LANES_FIXED + size * ring.rank()..][..size];
            lanes[..LANES].copy_from_slice(&encode(&measures));
            scores.encode(&mut lanes[LANES..]);
        }
        ring.all_reduce(position, &mut lanes)?;
        let left = self.batches().saturating_sub(partial.batches);
        let computed = left.min(ring.world() as u64);
        for batch in lanes[LANES_FIXED..].chunks_exact(size).take(computed as usize) {
            let measures = decode(batch);
            add(&mut partial.sum, &measures);
            let scored = measures.rows.saturating_sub(measures.ignored) as usize;
            partial.scores.add_encoded(&batch[LANES..], scored);
        }
        partial.batches += computed;
        Ok(Round { complete: computed == left, leave: lanes[0] > 0, stop: lanes[1] > 0 })
    }

    /// The figures of a batch; none if the read was interrupted.
    fn batch(
        &self,
        engine: &Engine,
        batch: u64,
        (reader, interrupted): (&Reader, Interrupt<'_>),
        scores: &mut Scores,
    ) -> Result<Option<Measures>> {
        let batch_rows = self.feed.batch_rows();
        let left = self.feed.rows() - batch * batch_rows as u64;
        let count = usize::try_from(left).map_or(batch_rows, |left| left.min(batch_rows));
        let what = format!("read validation dataset {}", self.columns.dataset);
        let read = reader.read(&self.feed, (batch, 0..count), None, &what, interrupted)?;
        let Some(read) = read else { return Ok(None) };
        let rows = source::decode(&Order::of(&self.feed), &self.columns, &read)?;
        let units = self.columns.scale.as_ref().map_or(&[][..], |scale| scale.deviations());
        let mut sum = Measures::default();
        for first in (0..count).step_by(self.chunk_rows) {
            let shard = rows.shard(first..(first + self.chunk_rows).min(count));
            let scores = self.auc.then_some(&mut *scores);
            add(&mut sum, &engine.measure(&shard, self.top_k.unwrap_or(0), units, scores)?);
        }
        Ok(Some(sum))
    }

    /// The figures of a complete evaluation.
    pub(crate) fn conclude(&self, partial: &mut Partial, epoch: u64, step: u64) -> Result<Evaluation> {
        let auc = partial.scores.area();
        if self.auc && auc.is_none() {
            let dataset = &self.columns.dataset;
            tracing::warn!(dataset, "no auc: the validation data has rows of one class only");
        }
        let sum = &partial.sum;
        if sum.weight <= 0.0 {
            return Err(Error::Data {
                dataset: self.columns.dataset.clone(),
                reason: "no row of the validation data counts: each label is loss.ignore_index or has the weight 0 in \
                         loss.class_weights"
                    .to_owned(),
            });
        }
        let share = |count: u64| count as f64 / sum.rows.saturating_sub(sum.ignored).max(1) as f64;
        let loss = sum.loss / sum.weight;
        if !loss.is_finite() {
            return Err(Error::Data {
                dataset: self.columns.dataset.clone(),
                reason: format!(
                    "the validation loss is {loss}: training diverged, or values are out of range"
                ),
            });
        }
        let entropy = self.loss == Loss::CrossEntropy;
        Ok(Evaluation {
            epoch,
            step,
            rows: sum.rows,
            loss,
            accuracy: self.loss.counts_classes().then(|| share(sum.correct)),
            top_k: self.top_k.map(|_| share(sum.within_top)),
            mae: (!self.loss.counts_classes()).then(|| sum.absolute / sum.rows.max(1) as f64),
            perplexity: Some(loss.exp()).filter(|value| entropy && value.is_finite()),
            auc,
        })
    }
}

/// Rows of the largest batch.
fn batch_rows(rows: u64, batch_rows: usize) -> usize {
    usize::try_from(rows).map_or(batch_rows, |rows| rows.min(batch_rows))
}

fn add(sum: &mut Measures, part: &Measures) {
    sum.rows += part.rows;
    sum.loss += part.loss;
    sum.weight += part.weight;
    sum.correct += part.correct;
    sum.ignored += part.ignored;
    sum.within_top += part.within_top;
    sum.absolute += part.absolute;
}

fn encode(measures: &Measures) -> [i64; LANES] {
    let Measures { rows, loss, weight, correct, ignored, within_top, absolute } = *measures;
    [rows, loss.to_bits(), weight.to_bits(), correct, ignored, within_top, absolute.to_bits()]
        .map(|v| v as i64)
}

fn decode(lanes: &[i64]) -> Measures {
    let lane = |index: usize| lanes.get(index).copied().unwrap_or_default() as u64;
    Measures {
        rows: lane(0),
        loss: f64::from_bits(lane(1)),
        weight: f64::from_bits(lane(2)),
        correct: lane(3),
        ignored: lane(4),
        within_top: lane(5),
        absolute: f64::from_bits(lane(6)),
    }
}

impl From<Evaluation> for proto::Evaluation {
    fn from(evaluation: Evaluation) -> proto::Evaluation {
        let Evaluation { epoch, step, rows, loss, accuracy, top_k, mae, perplexity, auc } = evaluation;
        proto::Evaluation { epoch, step, rows, loss, accuracy, top_k, mae, perplexity, auc }
    }
}

impl From<proto::Evaluation> for Evaluation {
    fn from(message: proto::Evaluation) -> Evaluation {
        let proto::Evaluation { epoch, step, rows, loss, accuracy, top_k, mae, perplexity, auc } = message;
        Evaluation { epoch, step, rows, loss, accuracy, top_k, mae, perplexity, auc }
    }
}
