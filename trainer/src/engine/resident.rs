//! Training state that stays on the device between steps: weights, the optimizer's slots, the average of the weights, and
//! the sum of gradients.
//!
//! [`Engine::keep_state`] begins it. From then on, the device owns these values. The host gets copies when it asks:
//! [`Engine::weights`], [`Engine::slots`] and [`Engine::average`]. A step comes as constants ([`Update`]), so this module
//! knows no settings of optimizers.
//!
//! The tensors and their arithmetic are in `stepping`.
//!
//! Running statistics are not among these values: their merged moments are computed on the host ([`super::states`]).

use std::ops::Range;

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::loss::{self, Truth};
use super::{ChannelMoments, Engine, EngineError, Objective, ShardBatch, ShardGradients, ShardKey};
use crate::graph::ValueId;

/// The constants of a step of an optimizer, in f32.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Update {
    /// The step of parameters with weight decay.
    pub(crate) decaying: Rule,
    /// The step of other parameters.
    pub(crate) plain: Rule,
    /// Scales the mean gradient down to this norm when it is longer.
    pub(crate) clip_norm: Option<f64>,
    /// The share of the new weights in their average; none if there is no average.
    pub(crate) average: Option<f32>,
}

/// The arithmetic of an optimizer for each element: `g` is the mean gradient, `w` the weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    /// With or without a slot for the momentum.
    Sgd { rate: f32, decay: f32, momentum: Option<f32>, nesterov: bool },
    /// Moments of `g + decay · w`.
    Adam { moments: Moments, decay: f32 },
    /// Moments of `g`; the weight shrinks to `keep · w` first.
    AdamW { moments: Moments, keep: f32 },
    /// One slot: the sum of squares.
    AdaGrad { rate: f32, decay: f32, epsilon: f32 },
    /// Slots: the mean square, the mean if `centered`, the momentum if there is one. `square` are the shares of the old
    /// mean and of the new value.
    RmsProp { rate: f32, decay: f32, square: [f32; 2], epsilon: f32, centered: bool, momentum: Option<f32> },
}

/// The constants of both moments of Adam: the shares of the old value and of the new one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Moments {
    pub(crate) first: [f32; 2],
    pub(crate) second: [f32; 2],
    pub(crate) step_size: f32,
    pub(crate) root_correction: f32,
    pub(crate) epsilon: f32,
}

/// The gradient of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gradient<'a> {
    /// The sum that the device has, for rows of this positive weight.
    Kept(f64),
    /// A mean in the host's memory, laid out by [`super::ParamLayout`].
    Mean(&'a [f32]),
}

/// Why a step on the device changed nothing.
#[derive(Debug)]
pub(crate) enum StepError {
    /// The device failed.
    Engine(EngineError),
    /// An element of the summed gradient is not finite.
    Gradient { index: usize, value: f32 },
    /// A weight would not be finite.
    Weight { index: usize, value: f32 },
    /// An element of a slot would not be finite.
    Slot { index: usize },
}

impl From<EngineError> for StepError {
    fn from(error: EngineError) -> StepError {
        StepError::Engine(error)
    }
}

/// The rows of a shard, checked.
#[derive(Clone, Copy)]
pub(super) struct Checked<'a> {
    pub(super) inputs: &'a [f32],
    pub(super) rows: usize,
    pub(super) key: ShardKey,
    pub(super) objective: &'a Objective,
    pub(super) truth: Truth<'a>,
    /// Factor of the loss, a power of two.
    pub(super) scale: f32,
    /// Whether the gradient may overflow: only then its elements are looked at.
    pub(super) may_overflow: bool,
}

/// The loss of a shard.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Judged {
    pub(super) loss_sum: f64,
    pub(super) weight: f64,
    pub(super) correct: u64,
    pub(super) ignored: u64,
}

/// What a shard leaves beside its gradient.
pub(super) struct Added {
    pub(super) judged: Judged,
    pub(super) moments: Vec<[f32; 2]>,
    /// Whether all elements of the gradient are finite, as far as that was looked at.
    pub(super) is_finite: bool,
}

/// The state of a training on a device, independent of the backend.
pub(super) trait Resident {
    /// Begins the state: for each parameter whether it decays, none if it does not train. Each has `slots` slots, which
    /// begin with `first`.
    fn keep(&mut self, decays: Vec<Option<bool>>, slots: usize, first: f32) -> Result<(), EngineError>;
    /// Forgets the sum of gradients.
    fn clear_sum(&mut self) -> Result<(), EngineError>;
    /// Adds the gradient of a shard to the sum.
    fn add(&mut self, shard: &Checked<'_>) -> Result<Added, EngineError>;
    /// Moves weights, slots and average, or fails without a change.
    fn step(&mut self, gradient: Gradient<'_>, update: &Update) -> Result<(), StepError>;
    /// A copy of the weights.
    fn weights(&self) -> Result<Vec<f32>, EngineError>;
    /// Copies of the slots.
    fn slots(&self) -> Result<Vec<Vec<f32>>, EngineError>;
    /// Replaces the slots; each is as long as the weights.
    fn set_slots(&mut self, slots: &[Vec<f32>]) -> Result<(), EngineError>;
    /// A copy of the average; none before the first step.
    fn average(&self) -> Result<Option<Vec<f32>>, EngineError>;
    /// Replaces the average, which is as long as the weights.
    fn set_average(&mut self, average: Option<&[f32]>) -> Result<(), EngineError>;
    /// Exchanges the weights and their average, if there is one.
    fn exchange_average(&mut self) -> Result<(), EngineError>;
}

/// A parameter: its value in the graph, its place in the flat vector and its shape.
pub(super) struct Place {
    pub(super) value: ValueId,
    pub(super) range: Range<usize>,
    pub(super) shape: Vec<usize>,
    /// Whether it decays; none if it does not train or has no elements.
    pub(super) decays: Option<bool>,
}

/// What an interpreter keeps between steps beside the weights. All tensors have one axis.
pub(super) struct State<B: Backend> {
    pub(super) places: Vec<Place>,
    /// For each slot, those of all parameters.
    pub(super) slots: Vec<Vec<FloatTensor<B>>>,
    pub(super) average: Option<Vec<FloatTensor<B>>>,
    /// The gradient of each parameter that trains; none as long as it is 0.
    pub(super) sum: Vec<Option<FloatTensor<B>>>,
}

impl Engine {
    /// Keeps the state of the training on the device from now on. `decays` says of each parameter whether it decays; none
    /// if it does not train. Each has `slots` slots of the optimizer, which begin with `first`.
    pub(crate) fn keep_state(
        &mut self,
        decays: impl Fn(&Range<usize>) -> Option<bool>,
        slots: usize,
        first: f32,
    ) -> Result<(), EngineError> {
        let decays = self.layout.params.iter().map(|param| decays(&param.range)).collect();
        self.compute.keep(decays, slots, first)
    }

    /// Forgets the sum of gradients on the device.
    pub(crate) fn clear_gradients(&mut self) -> Result<(), EngineError> {
        self.compute.clear_sum()
    }

    /// [`Engine::gradients_scaled`] whose gradient is added to the sum on the device; that of the result is empty. Also
    /// returns whether all elements of the gradient are finite, if it `may_overflow`.
    pub(crate) fn add_gradients(
        &mut self,
        shard: &ShardBatch,
        key: ShardKey,
        (scale, may_overflow): (f32, bool),
    ) -> Result<(ShardGradients, bool), EngineError> {
        self.check_batch(&shard.inputs, shard.rows)?;
        loss::check_labels(&self.loss, &shard.labels, shard.rows, self.output_width())?;
        if shard.rows == 0 {
            return Ok((ShardGradients::empty(self.moving_channels()), true));
        }
        self.check_shard_rows(shard.rows)?;
        let taught = self.taught(shard)?;
        let checked = Checked {
            inputs: &shard.inputs,
            rows: shard.rows,
            key,
            objective: &self.loss,
            truth: Truth { labels: &shard.labels, taught: &taught },
            scale,
            may_overflow,
        };
        let Added { judged, moments, is_finite } = self.compute.add(&checked)?;
        let moments = moments.into_iter().map(|[mean, variance]| ChannelMoments { mean, variance });
        let found = ShardGradients {
            loss_sum: judged.loss_sum,
            weight: judged.weight,
            correct: judged.correct,
            ignored: judged.ignored,
            rows: shard.rows,
            grad: Vec::new(),
            products: Vec::new(),
            moments: moments.collect(),
        };
        Ok((found, is_finite))
    }

    /// Moves weights, slots and average on the device by one step. A step that fails changes nothing.
    pub(crate) fn step(&mut self, gradient: Gradient<'_>, update: &Update) -> Result<(), StepError> {
        self.compute.step(gradient, update)?;
        self.weights.take();
        Ok(())
    }

    /// Copies of the optimizer's slots on the device.
    pub(crate) fn slots(&self) -> Result<Vec<Vec<f32>>, EngineError> {
        self.compute.slots()
    }

    /// Replaces the optimizer's slots on the device.
    pub(crate) fn set_slots(&mut self, slots: &[Vec<f32>]) -> Result<(), EngineError> {
        self.compute.set_slots(slots)
    }

    /// A copy of the average of the weights on the device; none before the first step.
    pub(crate) fn average(&self) -> Result<Option<Vec<f32>>, EngineError> {
        self.compute.average()
    }

    /// Replaces the average of the weights on the device.
    pub(crate) fn set_average(&mut self, average: Option<&[f32]>) -> Result<(), EngineError> {
        self.compute.set_average(average)
    }

    /// Exchanges the weights on the device and their average, if there is one.
    pub(crate) fn exchange_average(&mut self) -> Result<(), EngineError> {
        self.compute.exchange_average()?;
        self.weights.take();
        Ok(())
    }
}
