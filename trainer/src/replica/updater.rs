//! The optimizer of a replica with its slots and the average of the weights: on the host, or on the device.

use super::reduce::Reduction;
use crate::engine::{Device, Engine, EngineError, Gradient, StepError};
use crate::error::Error;
use crate::fixed::FixedError;
use crate::job::JobFile;
use crate::optim::{
    Average, Course, EmaConfig, Groups, OptimError, Optimizer, OptimizerConfig, OptimizerState, not_finite,
};
use crate::strategy::Strategy;

#[cfg(test)]
mod tests;

/// The memory that holds slots and average, and where steps are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    Host,
    Device,
}

impl Home {
    /// The device for `allreduce`, unless it is the processor. The host's loops are the fastest ones there, and exact sums
    /// are on the host.
    pub(super) fn of(job: &JobFile) -> Home {
        match (job.strategy, job.device) {
            (Strategy::Allreduce(_), Device::Cuda(_)) => Home::Device,
            (Strategy::Allreduce(_), Device::Cpu) | (Strategy::Strict, _) => Home::Host,
        }
    }
}

/// Why a step was not applied, or what it has destroyed.
#[derive(Debug)]
pub(super) enum UpdateError {
    Engine(EngineError),
    Optim(OptimError),
    /// The gradient has no mean.
    Gradient(FixedError),
    /// A weight is not finite any more.
    Weight {
        index: usize,
        value: f32,
    },
    /// An element of a slot is not finite any more.
    Slot {
        index: usize,
    },
}

impl From<EngineError> for UpdateError {
    fn from(error: EngineError) -> UpdateError {
        UpdateError::Engine(error)
    }
}

impl From<OptimError> for UpdateError {
    fn from(error: OptimError) -> UpdateError {
        UpdateError::Optim(error)
    }
}

impl From<StepError> for UpdateError {
    fn from(error: StepError) -> UpdateError {
        match error {
            StepError::Engine(error) => UpdateError::Engine(error),
            StepError::Gradient { index, value } => {
                UpdateError::Gradient(FixedError::NonFinite { index, value })
            }
            StepError::Weight { index, value } => UpdateError::Weight { index, value },
            StepError::Slot { index } => UpdateError::Slot { index },
        }
    }
}

/// An optimizer and the average of the weights, wherever their values are.
pub(super) enum Updater {
    /// Flat vectors.
    Host {
        optimizer: Optimizer,
        average: Option<Average>,
        /// The mean gradient of the last step, whose memory the next one frees.
        mean: Vec<f32>,
    },
    /// Tensors of the engine.
    Device { course: Course, ema: Option<EmaConfig>, mean: Vec<f32> },
}

impl Updater {
    /// Before the first step. On the device, the engine begins to keep the state.
    pub(super) fn new(
        (optimizer, ema): (&OptimizerConfig, Option<EmaConfig>),
        engine: &mut Engine,
        groups: &Groups,
        home: Home,
    ) -> Result<Updater, Error> {
        Ok(match home {
            Home::Host => Updater::Host {
                optimizer: Optimizer::with_groups(optimizer, groups)?,
                average: ema.map(Average::new),
                mean: Vec::new(),
            },
            Home::Device => {
                let course = Course::new(optimizer, groups)?;
                let slots = course.slot_names().len();
                engine.keep_state(|range| groups.decays(range), slots, course.first_value())?;
                Updater::Device { course, ema, mean: Vec::new() }
            }
        })
    }

    /// Whether gradients stay on the device in a ring of `world` ranks.
    pub(super) fn keeps_gradients(&self, world: usize) -> bool {
        world == 1 && matches!(self, Updater::Device { .. })
    }

    /// Sets the learning rate that follows from the losses of all evaluations so far.
    pub(super) fn follow(&mut self, losses: impl IntoIterator<Item = f64>) {
        match self {
            Updater::Host { optimizer, .. } => optimizer.follow(losses),
            Updater::Device { course, .. } => course.follow(losses),
        }
    }

    /// Exchanges the engine's weights and their average, if there is one.
    pub(super) fn exchange_average(&mut self, engine: &mut Engine) -> Result<(), EngineError> {
        match self {
            Updater::Host { average, .. } => {
                let Some(values) = average.as_mut().and_then(Average::values_mut) else { return Ok(()) };
                engine.update(|weights| {
                    weights.swap_with_slice(values);
                    Ok::<_, EngineError>(())
                })
            }
            Updater::Device { .. } => engine.exchange_average(),
        }
    }

    /// A copy of the average; none if there is none.
    pub(super) fn average(&self, engine: &Engine) -> Result<Option<Vec<f32>>, EngineError> {
        match self {
            Updater::Host { average, .. } => Ok(average.as_ref().and_then(Average::values).cloned()),
            Updater::Device { .. } => engine.average(),
        }
    }

    /// A copy of the optimizer's state.
    pub(super) fn state(&self, engine: &Engine) -> Result<OptimizerState, EngineError> {
        match self {
            Updater::Host { optimizer, .. } => Ok(optimizer.state()),
            Updater::Device { course, .. } => Ok(course.state(engine.slots()?)),
        }
    }

    /// Takes over an optimizer's state, and the average of the weights.
    pub(super) fn restore(
        &mut self,
        engine: &mut Engine,
        groups: &Groups,
        (state, values): (OptimizerState, Option<Vec<f32>>),
    ) -> Result<(), UpdateError> {
        match self {
            Updater::Host { optimizer, average, .. } => {
                optimizer.load_state(state)?;
                if let Some(index) = optimizer.not_finite() {
                    return Err(UpdateError::Slot { index });
                }
                if let Some(average) = average {
                    average.restore(values, groups, optimizer.step())?;
                }
            }
            Updater::Device { course, ema, .. } => {
                let slots = course.load_state(state)?;
                if let Some(index) = not_finite(&slots) {
                    return Err(UpdateError::Slot { index });
                }
                engine.set_slots(&slots)?;
                if ema.is_some() {
                    Average::check(values.as_deref(), groups, course.step())?;
                    engine.set_average(values.as_deref())?;
                }
            }
        }
        Ok(())
    }

    /// Applies a step to the weights, for rows of the positive weight `weight` whose gradients `world` ranks have summed:
    /// on the device if it has kept them, by `reduction` otherwise.
    ///
    /// On the device, a step that fails changes nothing.
    pub(super) fn apply(
        &mut self,
        engine: &mut Engine,
        groups: &Groups,
        reduction: &mut dyn Reduction,
        (weight, world): (f64, usize),
    ) -> Result<(), UpdateError> {
        let keeps = self.keeps_gradients(world);
        match self {
            Updater::Host { optimizer, average, mean } => {
                reduction.mean(weight, mean).map_err(UpdateError::Gradient)?;
                engine.update(|weights| optimizer.apply(weights, mean).map_err(UpdateError::from))?;
                let weights = engine.weights()?;
                if let Some((index, value)) = first_not_finite(weights) {
                    return Err(UpdateError::Weight { index, value });
                }
                if let Some(index) = optimizer.not_finite() {
                    return Err(UpdateError::Slot { index });
                }
                if let Some(average) = average {
                    average.add(groups, weights, optimizer.step());
                }
            }
            Updater::Device { course, ema, mean } => {
                let mut update = course.update();
                update.average = ema.map(|ema| ema.share(course.step() + 1));
                let gradient = match keeps {
                    true => Gradient::Kept(weight),
                    false => {
                        reduction.mean(weight, mean).map_err(UpdateError::Gradient)?;
                        // GPUs of several workers may sum a norm in different orders.
                        course.clip(mean);
                        update.clip_norm = None;
                        Gradient::Mean(mean)
                    }
                };
                engine.step(gradient, &update)?;
                course.advance();
            }
        }
        Ok(())
    }
}

/// The place and the value of the first element that is infinite or NaN.
pub(super) fn first_not_finite(values: &[f32]) -> Option<(usize, f32)> {
    // No early exit, so that the loop vectorizes.
    if values.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return None;
    }
    let index = values.iter().position(|value| !value.is_finite())?;
    Some((index, values[index]))
}
