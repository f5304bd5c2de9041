//! Optimizers over one flat vector of weights: SGD and AdamW, schedules and clipping.
//!
//! A step is one fused pass over flat slices, single-threaded and in index order. Every worker that applies
//! the same mean gradient to the same weights therefore gets the same bits. All parameters decay alike, as in
//! PyTorch's optimizers without parameter groups.

mod config;
#[cfg(test)]
mod tests;

use thiserror::Error;

use config::validate;
pub use config::{AdamWConfig, OptimizerConfig, Schedule, SgdConfig};

/// An error of building, restoring or applying an optimizer.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum OptimError {
    /// A setting is outside its bounds.
    #[error("optimizer setting {setting} is {value}, expected {expected}")]
    Setting {
        /// Name of the setting in the job file.
        setting: &'static str,
        /// The value given.
        value: f64,
        /// The allowed values.
        expected: &'static str,
    },
    /// Weights, gradients or state of the wrong length.
    #[error("the optimizer holds {expected} parameters but {what} has {found}")]
    Length {
        /// The wrong vector.
        what: String,
        /// Parameters of the model.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// A checkpoint holds the state of a different optimizer.
    #[error(
        "the checkpoint holds optimizer state {found:?}, this optimizer needs {expected:?} (resume with the settings of the checkpoint)"
    )]
    State {
        /// Slots this optimizer keeps.
        expected: Vec<&'static str>,
        /// Slots found.
        found: Vec<String>,
    },
}

/// Everything an optimizer remembers between steps, for checkpoints.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OptimizerState {
    /// Steps applied so far.
    pub step: u64,
    /// Named vectors, each as long as the weights, in a fixed order.
    pub slots: Vec<(String, Vec<f32>)>,
}

/// An optimizer with its state.
#[derive(Debug, Clone)]
pub struct Optimizer {
    config: OptimizerConfig,
    parameters: usize,
    step: u64,
    slots: Vec<Vec<f32>>,
}

impl Optimizer {
    /// An optimizer in its initial state for `parameters` weights.
    pub fn new(config: &OptimizerConfig, parameters: usize) -> Result<Optimizer, OptimError> {
        validate(config)?;
        Ok(Optimizer {
            slots: vec![vec![0.0; parameters]; slot_names(config).len()],
            config: config.clone(),
            parameters,
            step: 0,
        })
    }

    /// Steps applied so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The learning rate that the next [`Optimizer::apply`] uses.
    pub fn learning_rate(&self) -> f64 {
        let (rate, schedule) = match &self.config {
            OptimizerConfig::Sgd(c) => (c.learning_rate, c.schedule),
            OptimizerConfig::AdamW(c) => (c.learning_rate, c.schedule),
        };
        rate * schedule.factor(self.step)
    }

    /// Moves `weights` one step against the mean gradient `grad`.
    ///
    /// Fails, changing nothing, when a length differs from the number of parameters.
    pub fn apply(&mut self, weights: &mut [f32], grad: &[f32]) -> Result<(), OptimError> {
        for (what, found) in [("the weights", weights.len()), ("the gradient", grad.len())] {
            if found != self.parameters {
                return Err(OptimError::Length { what: what.to_owned(), expected: self.parameters, found });
            }
        }
        let rate = self.learning_rate();
        match &self.config {
            OptimizerConfig::Sgd(config) => {
                let clip = clip_factor(grad, config.clip_norm);
                sgd(config, rate, clip, weights, grad, &mut self.slots);
            }
            OptimizerConfig::AdamW(config) => {
                let clip = clip_factor(grad, config.clip_norm);
                adamw(config, rate, clip, self.step, weights, grad, &mut self.slots);
            }
        }
        self.step += 1;
        Ok(())
    }

    /// A copy of the state, for a checkpoint or for a joining worker.
    pub fn state(&self) -> OptimizerState {
        OptimizerState {
            step: self.step,
            slots: slot_names(&self.config)
                .iter()
                .zip(&self.slots)
                .map(|(name, slot)| ((*name).to_owned(), slot.clone()))
                .collect(),
        }
    }

    /// Restores a state that [`Optimizer::state`] of an optimizer with the same settings returned.
    ///
    /// Fails, changing nothing, when slots are missing, unknown or of the wrong length.
    pub fn load_state(&mut self, state: OptimizerState) -> Result<(), OptimError> {
        let expected = slot_names(&self.config);
        if !state.slots.iter().map(|(name, _)| name.as_str()).eq(expected.iter().copied()) {
            return Err(OptimError::State {
                expected: expected.to_vec(),
                found: state.slots.into_iter().map(|(name, _)| name).collect(),
            });
        }
        if let Some((name, slot)) = state.slots.iter().find(|(_, slot)| slot.len() != self.parameters) {
            return Err(OptimError::Length {
                what: format!("the state {name}"),
                expected: self.parameters,
                found: slot.len(),
            });
        }
        self.step = state.step;
        self.slots = state.slots.into_iter().map(|(_, slot)| slot).collect();
        Ok(())
    }
}

impl Optimizer {
    /// The first parameter whose optimizer state is infinite or NaN. With such a state, steps change the
    /// weight not at all or to a useless value.
    pub(crate) fn not_finite(&self) -> Option<usize> {
        let is_finite = |slot: &[f32]| slot.iter().fold(true, |finite, value| finite & value.is_finite());
        let of_slot = |slot: &Vec<f32>| slot.iter().position(|value| !value.is_finite());
        self.slots.iter().filter(|slot| !is_finite(slot)).find_map(of_slot)
    }
}

fn slot_names(config: &OptimizerConfig) -> &'static [&'static str] {
    match config {
        OptimizerConfig::Sgd(c) if c.momentum == 0.0 => &[],
        OptimizerConfig::Sgd(_) => &["momentum"],
        OptimizerConfig::AdamW(_) => &["first_moment", "second_moment"],
    }
}

/// The factor that scales the gradient down to `clip_norm`; the norm is summed in f64 and in index order.
fn clip_factor(grad: &[f32], clip_norm: Option<f64>) -> f32 {
    let Some(limit) = clip_norm else { return 1.0 };
    let norm = grad.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
    if norm > limit { (limit / norm) as f32 } else { 1.0 }
}

fn sgd(config: &SgdConfig, rate: f64, clip: f32, weights: &mut [f32], grad: &[f32], slots: &mut [Vec<f32>]) {
    let (rate, decay, momentum) = (rate as f32, config.weight_decay as f32, config.momentum as f32);
    match slots.first_mut() {
        None => {
            for (w, g) in weights.iter_mut().zip(grad) {
                *w -= rate * (g * clip + decay * *w);
            }
        }
        Some(velocity) => {
            for ((w, g), v) in weights.iter_mut().zip(grad).zip(velocity.iter_mut()) {
                let g = g * clip + decay * *w;
                *v = momentum * *v + g;
                let direction = if config.nesterov { g + momentum * *v } else { *v };
                *w -= rate * direction;
            }
        }
    }
}

fn adamw(
    config: &AdamWConfig,
    rate: f64,
    clip: f32,
    step: u64,
    weights: &mut [f32],
    grad: &[f32],
    slots: &mut [Vec<f32>],
) {
    let [first, second] = slots else { return };
    let [b1, b2] = config.betas;
    let power = i32::try_from(step + 1).unwrap_or(i32::MAX);
    let step_size = (rate / (1.0 - b1.powi(power))) as f32;
    let root_correction = (1.0 / (1.0 - b2.powi(power)).sqrt()) as f32;
    let keep = (1.0 - rate * config.weight_decay) as f32;
    let epsilon = config.epsilon as f32;
    let (a1, a2) = (b1 as f32, b2 as f32);
    let (c1, c2) = ((1.0 - b1) as f32, (1.0 - b2) as f32);
    for (((w, g), m), v) in weights.iter_mut().zip(grad).zip(first.iter_mut()).zip(second.iter_mut()) {
        let g = g * clip;
        *m = a1 * *m + c1 * g;
        *v = a2 * *v + c2 * g * g;
        *w = *w * keep - step_size * *m / (v.sqrt() * root_correction + epsilon);
    }
}
