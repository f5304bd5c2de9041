//! An optimizer's settings and progress, without its slots.

use super::config::validate;
use super::groups::Stretch;
use super::steps::rule;
use super::{Groups, OptimError, OptimizerConfig, OptimizerState, Schedule, clip_factor};
use crate::engine::{Rule, Update};

/// The settings of an optimizer and the steps that it has applied. Its slots are with the weights: on the host, or on a
/// device.
#[derive(Debug, Clone)]
pub(crate) struct Course {
    pub(super) config: OptimizerConfig,
    pub(super) parameters: usize,
    /// The elements that train, in order.
    pub(super) stretches: Vec<Stretch>,
    pub(super) step: u64,
    /// The learning rate after the evaluations so far, for [`Schedule::Plateau`].
    plateau_rate: Option<f64>,
}

impl Course {
    /// Before the first step.
    pub(crate) fn new(config: &OptimizerConfig, groups: &Groups) -> Result<Course, OptimError> {
        validate(config)?;
        Ok(Course {
            config: config.clone(),
            parameters: groups.elements(),
            stretches: groups.stretches().to_vec(),
            step: 0,
            plateau_rate: None,
        })
    }

    /// Sets the learning rate that follows from the losses of all evaluations so far.
    pub(crate) fn follow(&mut self, losses: impl IntoIterator<Item = f64>) {
        let common = self.config.common();
        if let Schedule::Plateau(plateau) = common.schedule {
            self.plateau_rate = Some(plateau.rate(common.learning_rate, losses));
        }
    }

    /// Steps applied so far.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// The learning rate of the next step.
    pub(crate) fn learning_rate(&self) -> f64 {
        let common = self.config.common();
        self.plateau_rate.unwrap_or_else(|| common.learning_rate * common.schedule.factor(self.step))
    }

    /// Names of the slots, in their order.
    pub(crate) fn slot_names(&self) -> &'static [&'static str] {
        match &self.config {
            OptimizerConfig::Sgd(c) if c.momentum == 0.0 => &[],
            OptimizerConfig::Sgd(_) => &["momentum"],
            OptimizerConfig::AdamW(_) | OptimizerConfig::Adam(_) => &["first_moment", "second_moment"],
            OptimizerConfig::AdaGrad(_) => &["sum_of_squares"],
            OptimizerConfig::RmsProp(config) => match (config.centered, config.momentum > 0.0) {
                (false, false) => &["mean_square"],
                (true, false) => &["mean_square", "mean_gradient"],
                (false, true) => &["mean_square", "momentum"],
                (true, true) => &["mean_square", "mean_gradient", "momentum"],
            },
        }
    }

    /// The value of each element of the slots before the first step.
    pub(crate) fn first_value(&self) -> f32 {
        match &self.config {
            OptimizerConfig::AdaGrad(config) => config.initial_accumulator as f32,
            _ => 0.0,
        }
    }

    /// The next step, for weights and slots on a device, which also clips the gradient.
    pub(crate) fn update(&self) -> Update {
        let (rate, common) = (self.learning_rate(), self.config.common());
        let of = |decay| -> Rule { rule(&self.config, (rate, decay, self.step)) };
        Update {
            decaying: of(common.weight_decay),
            plain: of(0.0),
            clip_norm: common.clip_norm,
            average: None,
        }
    }

    /// Scales the mean gradient down to the norm of the settings. All workers get the same bits: the host sums the norm.
    pub(crate) fn clip(&self, mean: &mut [f32]) {
        let factor = clip_factor(mean, &self.stretches, self.config.common().clip_norm);
        if factor != 1.0 {
            mean.iter_mut().for_each(|slope| *slope *= factor);
        }
    }

    /// A step was applied.
    pub(crate) fn advance(&mut self) {
        self.step += 1;
    }

    /// The state with these slots.
    pub(crate) fn state(&self, slots: impl IntoIterator<Item = Vec<f32>>) -> OptimizerState {
        let named = self.slot_names().iter().zip(slots).map(|(name, slot)| ((*name).to_owned(), slot));
        OptimizerState { step: self.step, slots: named.collect() }
    }

    /// Goes on after the steps of `state`, a state of an optimizer with the same settings. Returns its slots.
    ///
    /// Fails, changing nothing, when slots are missing, unknown or of the wrong length.
    pub(crate) fn load_state(&mut self, state: OptimizerState) -> Result<Vec<Vec<f32>>, OptimError> {
        let expected = self.slot_names();
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
        Ok(state.slots.into_iter().map(|(_, slot)| slot).collect())
    }
}

/// The first element of the slots that is infinite or NaN.
pub(crate) fn not_finite(slots: &[Vec<f32>]) -> Option<usize> {
    let is_finite = |slot: &[f32]| slot.iter().fold(true, |finite, value| finite & value.is_finite());
    let of_slot = |slot: &Vec<f32>| slot.iter().position(|value| !value.is_finite());
    slots.iter().filter(|slot| !is_finite(slot)).find_map(of_slot)
}
