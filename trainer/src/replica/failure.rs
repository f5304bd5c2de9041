//! Errors of a replica's steps and states, with what to do about them.

use millrace_streams::feed::FeedBatch;

use super::Replica;
use super::reduce::ReduceError;
use super::updater::{UpdateError, first_not_finite};
use crate::engine::{EngineError, NOT_FINITE, ParamLayout};
use crate::error::{Error, Result};
use crate::fixed::FixedError;
use crate::precision::Precision;

impl Replica {
    pub(super) fn bad_state(&self, reason: String) -> Error {
        Error::Checkpoint { place: format!("state of job {}", self.job.name), reason }
    }

    /// The error of a step that was not applied.
    pub(super) fn not_updated(&self, error: UpdateError, step: u64) -> Error {
        match error {
            UpdateError::Engine(error) => self.diverged(error),
            UpdateError::Optim(error) => error.into(),
            UpdateError::Gradient(error) => self.not_finite(&error),
            UpdateError::Weight { index, value } => bad_weight(self.engine.layout(), (index, value), step),
            UpdateError::Slot { index } => {
                let parameter = self.engine.layout().name_of(index).unwrap_or_default();
                let reason = format!(
                    "the optimizer's memory of parameter {parameter} overflowed, as its gradient is too large: clean or \
                     scale the labels, or set clip_norm{}",
                    self.advice()
                );
                Error::Diverged { step, reason }
            }
        }
    }

    pub(super) fn miscounted(&self, epoch: u64, reason: String) -> Error {
        Error::Count { job: self.job.name.to_string(), epoch, reason }
    }

    /// What else to do about numbers that are too large.
    fn advice(&self) -> &'static str {
        if self.job.precision == Precision::Fp16 {
            return "; fp16 holds magnitudes up to 65504: set precision = \"bf16\" or \"fp32\"";
        }
        let numbers = !self.job.loss.kind().counts_classes();
        match numbers && !self.job.standardize_labels {
            true => "; for labels of large numbers set standardize_labels = true",
            false => "",
        }
    }

    pub(super) fn unreduced(&self, error: ReduceError) -> Error {
        match error {
            ReduceError::Collective(error) => Error::Collective(error),
            ReduceError::Engine(error) => self.diverged(error),
            ReduceError::Thread(error) => Error::io("start the thread that sums gradients", error),
            ReduceError::Tally => self.miscounted(self.epochs(), format!("step {}: {error}", self.step)),
        }
    }

    /// The error of a shard that begins with row `first` of a batch.
    pub(super) fn diverged_at(&self, error: EngineError, batch: &FeedBatch, first: usize) -> Error {
        let EngineError::NonFinite { row, value } = error else { return self.diverged(error) };
        let place = self.order.row_name(batch, first + row);
        let reason = format!("the loss of {place} is {value}: {NOT_FINITE}{}", self.advice());
        Error::Diverged { step: self.step, reason }
    }

    pub(super) fn diverged(&self, error: EngineError) -> Error {
        match error {
            EngineError::NonFinite { .. } | EngineError::State { .. } => {
                let reason = format!("{error}{}", self.advice());
                Error::Diverged { step: self.step, reason }
            }
            other => Error::Engine(other),
        }
    }

    pub(super) fn not_finite(&self, error: &FixedError) -> Error {
        let param = error.index().and_then(|index| self.engine.layout().name_of(index));
        let advice = self.advice();
        let reason = match param {
            Some(param) => format!("parameter {param}: {error}{advice}"),
            None => format!("{error}{advice}"),
        };
        Error::Diverged { step: self.step, reason }
    }
}

/// Rejects weights that are not finite after `step`.
pub(crate) fn check_weights(layout: &ParamLayout, weights: &[f32], step: u64) -> Result<()> {
    first_not_finite(weights).map_or(Ok(()), |bad| Err(bad_weight(layout, bad, step)))
}

/// The error of a weight that is not finite after `step`, given its place and value.
fn bad_weight(layout: &ParamLayout, (index, value): (usize, f32), step: u64) -> Error {
    let reason = format!(
        "a weight of parameter {} became {value}: training diverged (lower the learning rate, or scale the inputs)",
        layout.name_of(index).unwrap_or_default()
    );
    Error::Diverged { step, reason }
}
