//! Optimizers over one flat vector of weights: steps, schedules, clipping, and groups of parameters.
//!
//! A step is one fused pass over flat slices, single-threaded and in index order. Every worker that applies
//! the same mean gradient to the same weights therefore gets the same bits. All parameters decay alike, as in
//! PyTorch's optimizers without parameter groups, unless [`Groups`] freeze some or exempt them from decay.
//!
//! [`Optimizer`] keeps its slots on the host. `Course` is for slots on a device: it gives each step's constants to
//! [`crate::engine`].

mod average;
mod config;
mod course;
mod groups;
mod plateau;
mod steps;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub(crate) use average::Average;
pub use average::EmaConfig;
pub use config::{
    AdaGradConfig, AdamConfig, AdamWConfig, OptimizerConfig, RmsPropConfig, Schedule, SgdConfig,
};
pub(crate) use course::{Course, not_finite};
pub use groups::Groups;
use groups::Stretch;
pub use plateau::Plateau;
use steps::Step;

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
    /// The patterns of parameters do not fit the model.
    #[error("{key}: {reason}")]
    Pattern {
        /// The key of the job file.
        key: &'static str,
        /// The pattern and the remedy.
        reason: String,
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
    course: Course,
    slots: Vec<Vec<f32>>,
}

impl Optimizer {
    /// An optimizer in its initial state for `parameters` weights.
    pub fn new(config: &OptimizerConfig, parameters: usize) -> Result<Optimizer, OptimError> {
        Optimizer::with_groups(config, &Groups::all(parameters))
    }

    /// An optimizer in its initial state that leaves some parameters alone.
    pub fn with_groups(config: &OptimizerConfig, groups: &Groups) -> Result<Optimizer, OptimError> {
        let course = Course::new(config, groups)?;
        let slots = vec![vec![course.first_value(); course.parameters]; course.slot_names().len()];
        Ok(Optimizer { course, slots })
    }

    /// Sets the learning rate that follows from the losses of all evaluations so far, for
    /// [`Schedule::Plateau`]. It is not part of [`Optimizer::state`].
    pub fn follow(&mut self, losses: impl IntoIterator<Item = f64>) {
        self.course.follow(losses);
    }

    /// Steps applied so far.
    pub fn step(&self) -> u64 {
        self.course.step()
    }

    /// The learning rate that the next [`Optimizer::apply`] uses.
    pub fn learning_rate(&self) -> f64 {
        self.course.learning_rate()
    }

    /// Moves `weights` one step against the mean gradient `grad`.
    ///
    /// Fails, changing nothing, when a length differs from the number of parameters.
    pub fn apply(&mut self, weights: &mut [f32], grad: &[f32]) -> Result<(), OptimError> {
        let Course { config, parameters, stretches, .. } = &self.course;
        for (what, found) in [("the weights", weights.len()), ("the gradient", grad.len())] {
            if found != *parameters {
                return Err(OptimError::Length { what: what.to_owned(), expected: *parameters, found });
            }
        }
        let (rate, common) = (self.learning_rate(), config.common());
        let clip = clip_factor(grad, stretches, common.clip_norm);
        for Stretch { range, decays } in stretches {
            let decay = if *decays { common.weight_decay } else { 0.0 };
            let step = Step { rate, clip, step: self.course.step, decay };
            let (weights, grad) = (&mut weights[range.clone()], &grad[range.clone()]);
            let mut slots: Vec<&mut [f32]> =
                self.slots.iter_mut().map(|slot| &mut slot[range.clone()]).collect();
            match config {
                OptimizerConfig::Sgd(config) => steps::sgd(config, step, weights, grad, &mut slots),
                OptimizerConfig::AdamW(config) => steps::adamw(config, step, weights, grad, &mut slots),
                OptimizerConfig::Adam(config) => steps::adam(config, step, weights, grad, &mut slots),
                OptimizerConfig::AdaGrad(config) => steps::adagrad(config, step, weights, grad, &mut slots),
                OptimizerConfig::RmsProp(config) => steps::rmsprop(config, step, weights, grad, &mut slots),
            }
        }
        self.course.advance();
        Ok(())
    }

    /// A copy of the state, for a checkpoint or for a joining worker.
    pub fn state(&self) -> OptimizerState {
        self.course.state(self.slots.iter().cloned())
    }

    /// Restores a state that [`Optimizer::state`] of an optimizer with the same settings returned.
    ///
    /// Fails, changing nothing, when slots are missing, unknown or of the wrong length.
    pub fn load_state(&mut self, state: OptimizerState) -> Result<(), OptimError> {
        self.slots = self.course.load_state(state)?;
        Ok(())
    }

    /// The first parameter whose optimizer state is infinite or NaN. With such a state, steps change the
    /// weight not at all or to a useless value.
    pub(crate) fn not_finite(&self) -> Option<usize> {
        not_finite(&self.slots)
    }
}

/// The factor that scales the gradient of the trained parameters down to `clip_norm`; the norm is summed in
/// f64 and in index order.
fn clip_factor(grad: &[f32], stretches: &[Stretch], clip_norm: Option<f64>) -> f32 {
    let Some(limit) = clip_norm else { return 1.0 };
    let trained = stretches.iter().flat_map(|stretch| &grad[stretch.range.clone()]);
    let norm = trained.map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
    if norm > limit { (limit / norm) as f32 } else { 1.0 }
}
