//! The engine: a loaded ONNX graph, its loss and its device; forward, backward and export.
//!
//! Weights are on the host and on the device. After `Engine::keep_state` the device owns them, with the optimizer's slots,
//! and steps there (module `resident`); copies on the host are made when they are read.
//!
//! An [`Engine`] interprets the checked [`Graph`] over Burn's backend primitives (CPU: `burn-flex`;
//! with the `cuda` feature: `burn-cuda`) and differentiates it with its own reverse pass. All
//! parameters live in ONE flat f32 vector, described by [`ParamLayout`], so that optimizers,
//! all-reduces and checkpoints never see a tensor.
//!
//! [`Engine::gradients_at`] is a pure function of the weights, the shard and its key: the same bits for any number of
//! threads on one kind of processor. The backend chooses matrix kernels by vector instructions, so machines
//! need the same kind of processor, or the same device, for equal bits. It sums over the rows of the shard, hence
//! shards can be computed on any worker and summed by [`crate::fixed`].
//!
//! In training, rows of one shard may mix: a batch normalisation takes its statistics over them. Rows of two shards
//! never mix. Evaluation ([`Engine::logits`]) mixes no rows. The running statistics are in a second flat vector, the
//! states, which steps move by the statistics of all shards ([`Engine::move_states`]).

mod backward;
mod buckets;
mod channels;
mod convolution;
mod device;
mod device_loss;
mod export;
mod forward;
mod host_copy;
mod kernels;
mod loss;
mod matrices;
mod objective;
mod order;
mod outputs;
mod products;
mod resident;
mod run;
mod states;
mod stepping;
mod tensor;
#[cfg(test)]
mod tests;
mod training;

use std::ops::Range;

use millrace_bundle::onnx::ModelProto;
use thiserror::Error;

use crate::graph::{Dim, Graph, GraphError, ParamSpec};
use crate::precision::Precision;
use crate::validation::Scores;

pub(crate) use buckets::{BucketFn, Buckets};
pub use device::{Device, UnknownDevice};
use host_copy::HostCopy;
pub(crate) use loss::Measures;
use loss::Truth;
pub use objective::{CrossEntropy, Distillation, Huber, Loss, Objective};
pub(crate) use products::Product;
pub(crate) use resident::{Gradient, Moments, Rule, StepError, Update};
use run::Compute;
pub use states::ChannelMoments;

/// Most elements a single value of the graph may have for one batch (4 GiB of f32).
const ELEMENTS_MAX: usize = 1 << 30;

/// What a loss that is not finite means, and the way out.
pub(crate) const NOT_FINITE: &str = "training diverged or the inputs are not finite (lower the learning rate, scale the \
                                     inputs, or check the data)";

/// Why a model cannot be loaded or a batch cannot be computed.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The model is rejected; nothing was computed.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// This machine or this build cannot use the device.
    #[error("device {device} cannot be used: {reason}")]
    Device {
        /// The requested device.
        device: Device,
        /// The reason and the remedy.
        reason: String,
    },
    /// The model has several outputs, of which the loss could read none, or any.
    #[error("the model has several outputs: {reason}")]
    Outputs {
        /// What each of them is, and the remedy.
        reason: String,
    },
    /// The graph does not fit the loss.
    #[error("the model does not fit loss {loss}: {reason}")]
    Loss {
        /// The requested loss.
        loss: Loss,
        /// The problem with the output.
        reason: String,
    },
    /// The teacher of the loss does not fit the model.
    #[error("the teacher of loss kl cannot be used: {reason}")]
    Teacher {
        /// The mismatch, or why the teacher cannot be loaded.
        reason: String,
    },
    /// The weights do not fit the model.
    #[error("the model has {expected} weights, {found} were given")]
    Weights {
        /// Elements of the flat vector.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// The batch does not fit the model.
    #[error("the batch does not fit the model: {reason}")]
    Batch {
        /// The mismatch.
        reason: String,
    },
    /// A label is not a class of the model.
    #[error("label {label} in row {row} of the batch is not a class of the model, which has {classes} (labels are 0 to {})", classes.saturating_sub(1))]
    Label {
        /// Row within the batch.
        row: usize,
        /// The label found.
        label: i64,
        /// Classes of the model.
        classes: usize,
    },
    /// The loss of a row is not finite.
    #[error("the loss of row {row} of the batch is {value}: {}", NOT_FINITE)]
    NonFinite {
        /// Row within the batch.
        row: usize,
        /// The loss of that row.
        value: f64,
    },
    /// Shards are too small for a batch normalisation in training mode.
    #[error(
        "node {node:?} (BatchNormalization) trains with the statistics of a virtual shard, and a shard of {rows} row{} \
         has one value for each channel, whose variance is 0: use fewer virtual_shards or more batch_rows; 16 rows or \
         more for each shard are advised", if *rows == 1 { "" } else { "s" }
    )]
    ShardTooSmall {
        /// The node.
        node: String,
        /// Rows of the shard.
        rows: usize,
    },
    /// A running statistic is not finite.
    #[error(
        "running statistic {name:?} became {value}: training diverged or the inputs are not finite (lower the learning rate, scale the inputs, or check the data)"
    )]
    State {
        /// The initializer.
        name: String,
        /// The value.
        value: f64,
    },
    /// Patterns freeze one of two running statistics.
    #[error(
        "freeze matches {frozen:?} but not {other:?}, the other running statistic of node {node:?}: match both or neither"
    )]
    FrozenHalf {
        /// The node.
        node: String,
        /// The initializer that a pattern matches.
        frozen: String,
        /// The other one.
        other: String,
    },
    /// The device failed while computing.
    #[error("device {device} failed: {reason}")]
    Execution {
        /// The device.
        device: Device,
        /// The backend's message.
        reason: String,
    },
    /// The computation of a gradient ended early, because the sum over the workers had failed.
    #[error("the gradient was not computed to its end: its sum over the workers had failed")]
    Abandoned,
}

/// The labels of a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum Labels {
    /// One class per row, 0 to classes − 1 or the ignored label; for [`Loss::CrossEntropy`] and [`Loss::Kl`].
    Class(Vec<i64>),
    /// `output_width` values per row, row-major; for the other losses.
    Value(Vec<f32>),
}

/// The rows of one virtual shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardBatch {
    /// Rows; 0 is allowed and yields zeros.
    pub rows: usize,
    /// `rows · input_width` values, row-major: in each row those of all inputs, in the model's order.
    pub inputs: Vec<f32>,
    /// One label per row.
    pub labels: Labels,
}

/// The key of a shard's random numbers: the same key gives the same dropout, on every worker and device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShardKey {
    /// Seed of the job.
    pub seed: u64,
    /// Steps before this one.
    pub step: u64,
    /// The virtual shard.
    pub shard: u64,
}

/// A virtual shard's contribution to a step.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardGradients {
    /// Sum of the rows' losses at the current weights.
    pub loss_sum: f64,
    /// Sum of the weights of the rows' labels: the number of rows, unless classes have weights or rows are
    /// ignored.
    pub weight: f64,
    /// Rows whose largest logit is the label's (the first one on ties). For [`Loss::Bce`], rows whose outputs
    /// are all on the right side of 0. 0 for regression.
    pub correct: u64,
    /// Rows with the ignored label.
    pub ignored: u64,
    /// Rows of the shard.
    pub rows: usize,
    /// SUM over rows of the loss gradient, laid out by [`ParamLayout`].
    pub grad: Vec<f32>,
    /// The gradients of weight matrices that are not in `grad`.
    pub(crate) products: Vec<Product<f32>>,
    /// Statistics of each channel whose running statistics move, in the order of the nodes.
    pub moments: Vec<ChannelMoments>,
}

impl ShardGradients {
    /// Those of no rows, without a gradient.
    fn empty(channels: usize) -> ShardGradients {
        ShardGradients {
            loss_sum: 0.0,
            weight: 0.0,
            correct: 0,
            ignored: 0,
            rows: 0,
            grad: Vec::new(),
            products: Vec::new(),
            moments: vec![ChannelMoments::default(); channels],
        }
    }
}

/// One parameter of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Name of the ONNX initializer.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its place in the flat vector, row-major.
    pub range: Range<usize>,
}

/// The place of each parameter in the flat vector, in the order of the model's initializers, and of each state in
/// another one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParamLayout {
    /// The parameters; ranges are contiguous and start at 0.
    pub params: Vec<Param>,
    /// The running statistics that steps move; ranges are contiguous and start at 0.
    pub states: Vec<Param>,
}

impl ParamLayout {
    fn of(graph: &Graph) -> ParamLayout {
        let place = |specs: &[ParamSpec]| {
            let mut start = 0;
            let placed = specs.iter().map(|spec| {
                let range = start..start + spec.elements();
                start = range.end;
                Param { name: spec.name.clone(), shape: spec.shape.clone(), range }
            });
            placed.collect()
        };
        ParamLayout { params: place(graph.params()), states: place(graph.states()) }
    }

    /// Elements of the flat vector.
    pub fn elements(&self) -> usize {
        self.params.last().map_or(0, |p| p.range.end)
    }

    /// Elements of the flat vector of states.
    pub fn state_elements(&self) -> usize {
        self.states.last().map_or(0, |state| state.range.end)
    }

    /// The parameter that holds element `index` of the flat vector.
    pub fn name_of(&self, index: usize) -> Option<&str> {
        self.params.iter().find(|p| p.range.contains(&index)).map(|p| p.name.as_str())
    }
}

/// A model ready to train: graph, weights, loss, device.
pub struct Engine {
    model: ModelProto,
    graph: Graph,
    layout: ParamLayout,
    loss: Objective,
    device: Device,
    weights: HostCopy,
    states: Vec<f32>,
    /// For each batch normalisation, whether training leaves its running statistics alone.
    frozen: Vec<bool>,
    compute: Box<dyn Compute>,
    /// The whole gradient as one bucket.
    whole: Buckets,
    /// The model whose outputs the loss asks for.
    teacher: Option<Teacher>,
}

/// A model from which another one learns.
struct Teacher {
    engine: Box<Engine>,
    /// Where a row of the learner has the inputs of the teacher, in its order. `None` if their rows are the same.
    inputs: Option<Vec<Range<usize>>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("parameters", &self.layout.elements())
            .field("loss", &self.loss)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Checks the model and loads it onto the device.
    ///
    /// Rejects unsupported operators, shapes that do not match, an output that does not suit the loss, and a
    /// device that is missing. Of several outputs, the loss reads the only one that suits it.
    pub fn load(
        model: &ModelProto,
        loss: impl Into<Objective>,
        device: Device,
    ) -> Result<Engine, EngineError> {
        Engine::load_output(model, None, loss, device)
    }

    /// [`Engine::load`] of a model whose loss reads `output`, if that is named. Other outputs stay in the model; only
    /// what `output` depends on is trained.
    pub fn load_output(
        model: &ModelProto,
        output: Option<&str>,
        loss: impl Into<Objective>,
        device: Device,
    ) -> Result<Engine, EngineError> {
        let loss = loss.into();
        let graph = outputs::read(model, output, &loss)?;
        let layout = ParamLayout::of(&graph);
        let weights = graph.initial_weights(model)?;
        let mut compute = device::open(device, &graph)?;
        compute.set_weights(&weights)?;
        let states = graph.initial_states(model)?;
        compute.set_states(&states)?;
        let frozen = vec![false; graph.normalizations().len()];
        let whole = Buckets::whole(&graph);
        Ok(Engine {
            model: model.clone(),
            graph,
            layout,
            loss,
            device,
            weights: HostCopy::of(weights),
            states,
            frozen,
            compute,
            whole,
            teacher: None,
        })
    }

    /// Loads the model from which [`Loss::Kl`] learns, onto the same device. Its weights stay.
    ///
    /// Rejects a model that this one cannot learn from. Of several inputs, the teacher takes those of the same names.
    /// Of several outputs, it gives the one that this model trains, if it has that name, or the only one that suits the
    /// loss.
    pub fn set_teacher(&mut self, model: &ModelProto) -> Result<(), EngineError> {
        let own = self.graph.output_name();
        let mut outputs = model.graph.iter().flat_map(|graph| &graph.output);
        let output = outputs.find(|info| info.name() == own).map(|_| own);
        let teacher = Engine::load_output(model, output, self.loss.clone(), self.device).map_err(
            |error| match error {
                EngineError::Device { .. } | EngineError::Execution { .. } => error,
                other => EngineError::Teacher { reason: other.to_string() },
            },
        )?;
        let inputs = self.inputs_of(&teacher)?;
        let (found, own) = (teacher.output_width(), self.output_width());
        if found != own {
            let reason = format!("it gives {found} outputs per row, the trained model {own}");
            return Err(EngineError::Teacher { reason });
        }
        self.teacher = Some(Teacher { engine: Box::new(teacher), inputs });
        Ok(())
    }

    /// Where a row of this model has the inputs of `teacher`. `None` if it is a row of the teacher as well.
    fn inputs_of(&self, teacher: &Engine) -> Result<Option<Vec<Range<usize>>>, EngineError> {
        let (own, theirs) = (self.graph.inputs(), teacher.graph.inputs());
        let bad = |reason: String| Err(EngineError::Teacher { reason });
        if let ([own], [theirs]) = (own, theirs) {
            let (own, found) = (own.range.len(), theirs.range.len());
            return match own == found {
                true => Ok(None),
                false => bad(format!("it takes {found} inputs per row, the trained model {own}")),
            };
        }
        let mut ranges = Vec::with_capacity(theirs.len());
        for input in theirs {
            match own.iter().find(|own| own.name == input.name) {
                Some(own) if own.range.len() == input.range.len() => ranges.push(own.range.clone()),
                Some(own) => {
                    let (name, found, own) = (&input.name, input.range.len(), own.range.len());
                    return bad(format!(
                        "its input {name:?} has {found} values per row, that of the trained model {own}"
                    ));
                }
                None => {
                    let names: Vec<&str> = own.iter().map(|own| own.name.as_str()).collect();
                    let (name, names) = (&input.name, names.join(", "));
                    return bad(format!("it takes input {name:?}, the trained model takes {names}"));
                }
            }
        }
        let is_same =
            own.len() == theirs.len() && ranges.iter().zip(theirs).all(|(own, theirs)| *own == theirs.range);
        Ok((!is_same).then_some(ranges))
    }

    /// The teacher's outputs for the rows of `shard`; empty without one.
    fn taught(&self, shard: &ShardBatch) -> Result<Vec<f32>, EngineError> {
        match &self.teacher {
            None if self.loss.teacher().is_some() => {
                Err(EngineError::Teacher { reason: "none was loaded".to_owned() })
            }
            None => Ok(Vec::new()),
            Some(Teacher { engine, inputs: None }) => engine.logits(&shard.inputs, shard.rows),
            Some(Teacher { engine, inputs: Some(ranges) }) => {
                let rows = shard.inputs.chunks_exact(self.input_width().max(1));
                let inputs: Vec<f32> = rows
                    .flat_map(|row| ranges.iter().flat_map(|range| &row[range.clone()]))
                    .copied()
                    .collect();
                engine.logits(&inputs, shard.rows)
            }
        }
    }

    /// Sets the format of products in training; 32 bits at first. Evaluations and the teacher keep 32 bits.
    pub fn set_precision(&mut self, precision: Precision) {
        self.compute.set_half(precision.half());
    }

    /// The place of each parameter in the flat vector.
    pub fn layout(&self) -> &ParamLayout {
        &self.layout
    }

    /// The checked graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The loss this engine was loaded with.
    pub fn loss(&self) -> Loss {
        self.loss.kind()
    }

    /// The device this engine computes on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Values per row of all inputs.
    pub fn input_width(&self) -> usize {
        self.graph.input_width()
    }

    /// Values per row of the output: the classes, for [`Loss::CrossEntropy`].
    pub fn output_width(&self) -> usize {
        self.graph.output_width()
    }

    /// The shape of one row of the output.
    pub(crate) fn output_row(&self) -> Vec<usize> {
        let dims = &self.graph.values()[self.graph.output()].dims;
        dims.iter().skip(1).map(|dim| dim.at(1)).collect()
    }

    /// The current weights, laid out by [`ParamLayout`]. Copies them if only the device has them.
    pub fn weights(&self) -> Result<&[f32], EngineError> {
        self.weights.get(|| self.compute.weights())
    }

    /// Replaces the weights.
    pub fn set_weights(&mut self, weights: &[f32]) -> Result<(), EngineError> {
        let expected = self.layout.elements();
        if weights.len() != expected {
            return Err(EngineError::Weights { expected, found: weights.len() });
        }
        let weights = self.weights.put(weights.to_vec());
        self.compute.set_weights(weights)
    }

    /// Changes the weights in place (an optimizer step), then hands them to the device.
    ///
    /// If `change` fails, its partial changes stay in [`Engine::weights`] and the device keeps the previous
    /// weights: give up, or set weights again.
    pub fn update<E: From<EngineError>>(
        &mut self,
        change: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut weights = match self.weights.take() {
            Some(weights) => weights,
            None => self.compute.weights()?,
        };
        let changed = change(&mut weights);
        let weights = self.weights.put(weights);
        changed?;
        Ok(self.compute.set_weights(weights)?)
    }

    /// [`Engine::gradients_at`] with the random numbers of the first shard of a job with seed 0.
    pub fn gradients(&self, shard: &ShardBatch) -> Result<ShardGradients, EngineError> {
        self.gradients_at(shard, ShardKey::default())
    }

    /// Loss and gradient of one shard at the current weights, in training mode, summed over its rows.
    ///
    /// Rows of the shard mix where a batch normalisation takes its statistics over them. The gradients of two shards
    /// are therefore not those of one larger shard. `key` decides what dropouts drop.
    ///
    /// Fails, naming the row, on labels out of range and on losses that are not finite.
    pub fn gradients_at(&self, shard: &ShardBatch, key: ShardKey) -> Result<ShardGradients, EngineError> {
        self.gradients_scaled(shard, key, 1.0)
    }

    /// [`Engine::gradients_at`] through a loss that is multiplied by `scale`, a power of two. The gradient is divided by
    /// it: a scale only decides which elements are too small or too large on their way.
    pub fn gradients_scaled(
        &self,
        shard: &ShardBatch,
        key: ShardKey,
        scale: f32,
    ) -> Result<ShardGradients, EngineError> {
        self.gradients_formed(shard, key, scale, &self.whole)
    }

    /// [`Engine::gradients_scaled`] in the form `single` of one bucket: the gradients of its parameters, one after another,
    /// and factors.
    pub(crate) fn gradients_formed(
        &self,
        shard: &ShardBatch,
        key: ShardKey,
        scale: f32,
        single: &Buckets,
    ) -> Result<ShardGradients, EngineError> {
        let mut grad = Vec::new();
        let found = self.gradients_in_buckets(shard, key, scale, single, &mut |bucket| {
            grad = bucket;
            Ok(())
        })?;
        Ok(ShardGradients { grad, ..found })
    }

    /// [`Engine::gradients_scaled`] whose gradient goes to `hand_over` in `buckets`, each as soon as it is complete. That
    /// of the result is empty. Gradients that leave as factors are in its products.
    pub(crate) fn gradients_in_buckets(
        &self,
        shard: &ShardBatch,
        key: ShardKey,
        scale: f32,
        buckets: &Buckets,
        hand_over: &mut BucketFn<'_, f32>,
    ) -> Result<ShardGradients, EngineError> {
        self.check_batch(&shard.inputs, shard.rows)?;
        loss::check_labels(&self.loss, &shard.labels, shard.rows, self.output_width())?;
        if shard.rows == 0 {
            for bucket in buckets.iter() {
                hand_over(vec![0.0; bucket.elements()])?;
            }
            return Ok(ShardGradients::empty(self.moving_channels()));
        }
        self.check_shard_rows(shard.rows)?;
        let taught = self.taught(shard)?;
        let mut judged = None;
        let mut unscaled = |mut values: Vec<f32>| {
            multiply(&mut values, 1.0 / scale);
            hand_over(values)
        };
        let (inputs, rows) = (&shard.inputs, shard.rows);
        let mut trained =
            self.compute.gradients(inputs, rows, key, buckets, &mut unscaled, &mut |logits| {
                let truth = Truth { labels: &shard.labels, taught: &taught };
                let mut found = loss::loss_and_gradient(&self.loss, logits, truth, rows)?;
                judged = Some((found.loss_sum, found.weight, found.correct, found.ignored));
                multiply(&mut found.slope, scale);
                Ok(found.slope)
            })?;
        let (loss_sum, weight, correct, ignored) = judged.unwrap_or_default();
        trained.products.iter_mut().for_each(|product| product.multiply(1.0 / scale));
        let moments = trained.moments.into_iter().map(|[mean, variance]| ChannelMoments { mean, variance });
        Ok(ShardGradients {
            loss_sum,
            weight,
            correct,
            ignored,
            rows,
            grad: Vec::new(),
            products: trained.products,
            moments: moments.collect(),
        })
    }

    /// The model's output in evaluation for `rows` rows of `input_width` values: `rows · output_width`, row-major.
    pub fn logits(&self, inputs: &[f32], rows: usize) -> Result<Vec<f32>, EngineError> {
        self.check_batch(inputs, rows)?;
        if rows == 0 {
            return Ok(Vec::new());
        }
        self.compute.logits(inputs, rows)
    }

    /// Loss sum and correct rows at the current weights, without a gradient.
    pub fn evaluate(&self, shard: &ShardBatch) -> Result<(f64, u64), EngineError> {
        loss::check_labels(&self.loss, &shard.labels, shard.rows, self.output_width())?;
        let logits = self.logits(&shard.inputs, shard.rows)?;
        let taught = self.taught(shard)?;
        let truth = Truth { labels: &shard.labels, taught: &taught };
        let found = loss::loss_and_gradient(&self.loss, &logits, truth, shard.rows)?;
        Ok((found.loss_sum, found.correct))
    }

    /// Judges the rows of `shard` at the current weights, without a gradient; see [`Measures`].
    /// `units` are the sizes of the outputs' errors of 1; all 1 if it is empty. `scores` gets the rows' scores
    /// for the area under the ROC curve; the outputs are of two classes.
    pub(crate) fn measure(
        &self,
        shard: &ShardBatch,
        top: usize,
        units: &[f64],
        scores: Option<&mut Scores>,
    ) -> Result<Measures, EngineError> {
        loss::check_labels(&self.loss, &shard.labels, shard.rows, self.output_width())?;
        let logits = self.logits(&shard.inputs, shard.rows)?;
        let taught = self.taught(shard)?;
        let truth = Truth { labels: &shard.labels, taught: &taught };
        loss::measure(&self.loss, &logits, truth, shard.rows, (top, units), scores)
    }

    /// The model as it was loaded, with the current weights and states, for inference: nodes with a training mode get
    /// the form of evaluation. Byte-deterministic when encoded.
    pub fn export(&self) -> Result<ModelProto, EngineError> {
        let model = export::with_weights(&self.model, &self.layout, self.weights()?);
        Ok(export::for_inference(model, &self.graph, &self.layout, &self.states))
    }

    fn check_batch(&self, inputs: &[f32], rows: usize) -> Result<(), EngineError> {
        let width = self.input_width();
        if rows.checked_mul(width) != Some(inputs.len()) {
            return Err(EngineError::Batch {
                reason: format!(
                    "{rows} rows of {width} values were expected, {} values were given",
                    inputs.len()
                ),
            });
        }
        let is_index =
            |(value, below): &(&f32, &u32)| value.fract() == 0.0 && (0.0..**below as f32).contains(*value);
        for input in self.graph.inputs() {
            let Some(bounds) = &input.below else { continue };
            for (row, values) in inputs.chunks_exact(width.max(1)).enumerate() {
                let mut pairs = values[input.range.clone()].iter().zip(bounds);
                if let Some((value, below)) = pairs.find(|pair| !is_index(pair)) {
                    return Err(EngineError::Batch {
                        reason: format!(
                            "row {row} holds {value} in input {:?}, which takes whole numbers from 0 to {} there",
                            input.name,
                            below - 1
                        ),
                    });
                }
            }
        }
        let fits = self.graph.elements_max(rows).is_some_and(|elements| elements <= ELEMENTS_MAX);
        if !fits {
            return Err(EngineError::Batch {
                reason: format!(
                    "{rows} rows need a value of more than {ELEMENTS_MAX} elements (use a smaller batch)"
                ),
            });
        }
        Ok(())
    }
}

/// Multiplies by a power of two.
fn multiply(values: &mut [f32], factor: f32) {
    if factor != 1.0 {
        values.iter_mut().for_each(|value| *value *= factor);
    }
}

/// The run-time shape of a value for a batch of `rows`.
fn shape_of(dims: &[Dim], rows: usize) -> Vec<usize> {
    dims.iter().map(|dim| dim.at(rows)).collect()
}
