//! An exponential moving average of the weights, as PyTorch's `AveragedModel` keeps it.
//!
//! It is computed in f32 in index order, so that every worker holds the same bits.

use serde::{Deserialize, Serialize};

use super::{Groups, OptimError};

/// The `ema` table of a job file: an average of the weights over the steps, which is evaluated and published
/// in their place.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmaConfig {
    /// Share of the average that stays at each step, 0 to below 1; 0.999 when absent.
    #[serde(default = "default_decay")]
    pub decay: f64,
    /// Begins with a smaller decay: after n steps it is at most (1 + n) / (10 + n). The default, `false`, uses
    /// `decay` from the second step on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warmup: bool,
}

fn default_decay() -> f64 {
    0.999
}

impl EmaConfig {
    /// The share of the weights after `step` steps of the optimizer in their average.
    pub(crate) fn share(&self, step: u64) -> f32 {
        (1.0 - self.decay_after(step.saturating_sub(1))) as f32
    }

    /// The decay of the step after `steps` others.
    fn decay_after(&self, steps: u64) -> f64 {
        match self.warmup {
            true => self.decay.min((1.0 + steps as f64) / (10.0 + steps as f64)),
            false => self.decay,
        }
    }
}

/// The average after some steps. The first step sets it to the weights.
#[derive(Debug, Clone)]
pub(crate) struct Average {
    config: EmaConfig,
    values: Option<Vec<f32>>,
}

impl Average {
    pub(crate) fn new(config: EmaConfig) -> Average {
        Average { config, values: None }
    }

    /// None before the first step.
    pub(crate) fn values(&self) -> Option<&Vec<f32>> {
        self.values.as_ref()
    }

    pub(crate) fn values_mut(&mut self) -> Option<&mut Vec<f32>> {
        self.values.as_mut()
    }

    /// Adds the weights after `step` steps of the optimizer. Those that do not train keep their bits.
    pub(crate) fn add(&mut self, groups: &Groups, weights: &[f32], step: u64) {
        let Some(values) = &mut self.values else {
            self.values = Some(weights.to_vec());
            return;
        };
        let share = self.config.share(step);
        for stretch in groups.stretches() {
            let range = stretch.range.clone();
            for (value, weight) in values[range.clone()].iter_mut().zip(&weights[range]) {
                // As `torch.lerp`, which keeps the end that is nearer.
                *value = match share < 0.5 {
                    true => *value + share * (weight - *value),
                    false => weight - (weight - *value) * (1.0 - share),
                };
            }
        }
    }

    /// Restores the average after `step` steps of the optimizer.
    pub(crate) fn restore(
        &mut self,
        values: Option<Vec<f32>>,
        groups: &Groups,
        step: u64,
    ) -> Result<(), OptimError> {
        Average::check(values.as_deref(), groups, step)?;
        self.values = values;
        Ok(())
    }

    /// Rejects values that no average has after `step` steps of the optimizer.
    pub(crate) fn check(values: Option<&[f32]>, groups: &Groups, step: u64) -> Result<(), OptimError> {
        let (expected, found) = (groups.elements(), values.map_or(0, <[f32]>::len));
        if values.is_some() != (step > 0) || (step > 0 && found != expected) {
            return Err(OptimError::Length { what: "the state ema".to_owned(), expected, found });
        }
        Ok(())
    }
}
