//! The checked graph: an ONNX model in a small form that the engine can differentiate.
//!
//! Reading resolves names, orders nodes, infers every shape with a dynamic number of rows and folds shape
//! constants. It rejects, before any training, everything that the engine cannot differentiate exactly. An
//! accepted graph has inputs `[rows, …]` of floats, whole numbers or truth values, and one float output `[rows, …]` that
//! the loss reads; the model may have others. Only batch normalisations with moving statistics mix rows, and only in training ([`Graph::normalizations`]). In every other graph, gradients of row
//! subsets add up to the gradient of the batch.
//!
//! **Trained parameters**: the float32 initializers that the output depends on, apart from buffers, which keep
//! their values. `initializers.rs` says which are buffers. `Constant` nodes are not changed.
//!
//! **States**: the running statistics of batch normalisations in training mode. Steps move them ([`Graph::states`]).

mod absorbed;
mod affine;
mod ahead;
mod arithmetic;
mod attention;
mod branches;
mod budget;
mod builder;
mod determined;
mod einsum;
mod error;
mod folded;
mod foreseen;
mod gather;
mod initializers;
mod ints;
mod linear;
mod merged;
mod movement;
mod normalization;
mod positions;
mod ranges;
mod read;
mod recurrent;
mod reduction;
mod resize;
mod rows;
mod sampling;
mod sequences;
mod shape;
mod sizes;
mod spatial;
mod tensor;
#[cfg(test)]
mod tests;
mod training;
mod transposed;
mod types;
mod unpool;
mod wiring;

use std::collections::HashSet;
use std::ops::Range;

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{ModelProto, TensorProto};

use initializers::Roles;

pub(crate) use absorbed::absorbed;
use determined::Determined;
pub use error::GraphError;
pub(crate) use initializers::origin as initializer_origin;
pub(crate) use initializers::{float_info, has_marks, parameter_info};
pub(crate) use merged::{QUOTED_CALL, absent, quoted_name};
pub use read::SUPPORTED_OPERATORS;
pub use shape::Dim;
pub(crate) use tensor::float_elements;
pub use training::{Dropout, Normalization};
pub(crate) use wiring::reads as read_by;

/// Index of a value in a [`Graph`].
pub type ValueId = usize;

/// Element-wise operation on two values with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binary {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a · b
    Mul,
    /// a / b
    Div,
    /// The larger one; equal values share the gradient.
    Max,
    /// The smaller one; equal values share the gradient.
    Min,
    /// a raised to b
    Pow,
}

/// Comparison of two values: 1 where it holds, 0 elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// a = b
    Equal,
    /// a < b
    Less,
    /// a ≤ b
    LessOrEqual,
}

/// Element-wise operation on one value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unary {
    /// max(x, 0)
    Relu,
    /// x, or the slope times x if x is below 0.
    LeakyRelu(f32),
    /// 1 / (1 + e^−x)
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// x · Φ(x) with the normal distribution Φ.
    Gelu,
    /// The tanh approximation of Gelu.
    GeluTanh,
    /// The error function.
    Erf,
    /// e^x
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// −x
    Neg,
    /// c · x
    Scale(f32),
    /// x + c
    Shift(f32),
    /// Square root whose slope at 0 is 0, for norms.
    Root,
    /// |x|
    Abs,
    /// 1 / x
    Reciprocal,
    /// x raised to a constant
    Pow(f32),
    /// x within the two bounds, which may be infinite.
    Clip(f32, f32),
    /// x, or c · (e^x − 1) if x is below 0.
    Elu(f32),
    /// ln(1 + e^x)
    Softplus,
    /// Sine.
    Sin,
    /// Cosine.
    Cos,
    /// Tangent.
    Tan,
    /// Arc sine.
    Asin,
    /// Arc cosine.
    Acos,
    /// Arc tangent.
    Atan,
    /// Hyperbolic sine.
    Sinh,
    /// Hyperbolic cosine.
    Cosh,
    /// Inverse hyperbolic sine.
    Asinh,
    /// Inverse hyperbolic cosine.
    Acosh,
    /// Inverse hyperbolic tangent.
    Atanh,
    /// −1, 0 or 1; its slope is 0.
    Sign,
    /// The integer at or below x; its slope is 0.
    Floor,
    /// The integer at or above x; its slope is 0.
    Ceil,
    /// The nearest integer, the even one of two; its slope is 0.
    Round,
    /// The integer towards 0; its slope is 0.
    Trunc,
}

impl Unary {
    /// Whether the slope is 0 everywhere.
    pub(crate) fn is_step(self) -> bool {
        matches!(self, Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc)
    }
}

/// Parameters of a convolution over `[rows, channels, height, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvSpec {
    /// Step between windows.
    pub strides: [usize; 2],
    /// Zeros added on both sides.
    pub padding: [usize; 2],
    /// Step between kernel elements.
    pub dilations: [usize; 2],
    /// Channel groups.
    pub groups: usize,
}

/// Parameters of a convolution over `[rows, channels, depth, height, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv3Spec {
    /// Step between windows.
    pub strides: [usize; 3],
    /// Zeros added on both sides.
    pub padding: [usize; 3],
    /// Step between kernel elements.
    pub dilations: [usize; 3],
    /// Channel groups.
    pub groups: usize,
}

/// Parameters of a pooling window over `[rows, channels, height, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSpec {
    /// Window size.
    pub kernel: [usize; 2],
    /// Step between windows.
    pub strides: [usize; 2],
    /// Padding on both sides.
    pub padding: [usize; 2],
    /// Step between window elements (max pooling).
    pub dilations: [usize; 2],
    /// Whether padding counts in the divisor (average pooling).
    pub count_include_pad: bool,
}

/// A node's operation. Output shapes are those of the node's output value.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// Matrix product of equal rank with broadcasting leading dimensions.
    MatMul,
    /// Element-wise, two inputs.
    Binary(Binary),
    /// Element-wise, one input.
    Unary(Unary),
    /// 1 where a comparison of two inputs holds, 0 elsewhere.
    Compare(Compare),
    /// The second input where the first is not 0, the third elsewhere.
    Where,
    /// Softmax along an axis.
    Softmax(usize),
    /// Logarithm of softmax along an axis.
    LogSoftmax(usize),
    /// Input, weight and, optionally, bias.
    Conv(ConvSpec),
    /// Input and weight.
    Conv3(Conv3Spec),
    /// Input and weight; the transpose of a convolution without padding.
    ConvTranspose(ConvSpec),
    /// Maximum of a window.
    MaxPool(PoolSpec),
    /// Mean of a window.
    AveragePool(PoolSpec),
    /// A constant around the input, which begins at `before`.
    Pad {
        /// Added elements before each axis.
        before: Vec<usize>,
        /// Their value.
        value: f32,
    },
    /// The same elements in the output's shape.
    Reshape,
    /// Axes in a new order.
    Permute(Vec<usize>),
    /// Axes of size 1 repeated to the output's shape.
    Expand,
    /// Consecutive elements along an axis.
    Slice {
        /// The axis.
        axis: usize,
        /// The first element.
        start: usize,
    },
    /// Elements of an axis at constant positions.
    Select {
        /// The axis.
        axis: usize,
        /// The positions.
        positions: Vec<usize>,
    },
    /// Rows of the first input at the positions that the second one holds.
    Lookup {
        /// The row that gets no gradient, as `padding_idx` of an embedding.
        fixed: Option<u32>,
    },
    /// The positions of the largest or smallest elements along an axis, in order; as many as the output has. Equal
    /// elements are in the order of their positions. No gradient passes.
    Rank {
        /// The axis.
        axis: usize,
        /// Whether the largest elements are wanted.
        largest: bool,
        /// Whether the last one of equal elements comes first.
        last: bool,
    },
    /// The elements of the first input at the positions along an axis that the second one holds.
    Pick(usize),
    /// The first input plus the elements of the third at the positions along an axis that the second one holds.
    Put(usize),
    /// Inputs one after another along an axis.
    Concat(usize),
    /// Sum over axes.
    Sum(Vec<usize>),
    /// Mean over axes.
    Mean(Vec<usize>),
    /// Maximum over axes; equal maxima share the gradient.
    Max(Vec<usize>),
    /// Normalisation of each channel, the second axis of the first input. The others are scale, bias, running mean and
    /// running variance. Training uses the statistics of the shard, evaluation the running ones.
    BatchNorm {
        /// Its place in [`Graph::normalizations`].
        index: usize,
        /// Added to the variance.
        epsilon: f32,
    },
    /// The input; in training, random elements are 0 and the others are scaled up. Its place in [`Graph::dropouts`].
    Dropout(usize),
}

impl Op {
    /// Whether the output holds elements of the first input, unchanged.
    fn moves(&self) -> bool {
        matches!(self, Op::Reshape | Op::Permute(_) | Op::Expand | Op::Slice { .. } | Op::Select { .. })
    }

    /// Whether the output holds sums of products of two inputs' elements.
    pub(crate) fn is_product(&self) -> bool {
        matches!(self, Op::MatMul | Op::Conv(_) | Op::Conv3(_) | Op::ConvTranspose(_))
    }
}

/// One operation of the graph.
#[derive(Debug, Clone)]
pub struct Node {
    /// Its operation.
    pub op: Op,
    /// Values it reads.
    pub inputs: Vec<ValueId>,
    /// The value that it produces.
    pub output: ValueId,
}

/// The origin of a value.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A part of the batch: see [`Graph::inputs`].
    Input,
    /// A trained parameter, by index into [`Graph::params`].
    Param(usize),
    /// A running statistic, by index into [`Graph::states`].
    State(usize),
    /// Fixed elements, row-major.
    Constant(Vec<f32>),
    /// A node.
    Node,
}

/// A value of the graph.
#[derive(Debug, Clone)]
pub struct Value {
    /// Its shape.
    pub dims: Vec<Dim>,
    /// Its origin.
    pub source: Source,
    /// Whether it depends on a parameter.
    pub trained: bool,
}

/// An input of the model. A row of the batch has the elements of all inputs, one input after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Name of the tensor.
    pub name: String,
    /// The value that holds it.
    pub value: ValueId,
    /// Its elements in a row of the batch.
    pub range: Range<usize>,
    /// For whole numbers, as token ids, and for truth values: the number that each of its elements stays below; all are
    /// at least 0. `None` for floats.
    pub below: Option<Vec<u32>>,
    /// Its shape, as `[rows, 8]`, behind the type of its elements, for messages.
    pub form: String,
}

/// A trained parameter, or a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name of the initializer.
    pub name: String,
    /// Its dimensions, all above 0.
    pub shape: Vec<usize>,
}

impl ParamSpec {
    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A checked graph; its nodes are in topological order.
#[derive(Debug, Clone)]
pub struct Graph {
    values: Vec<Value>,
    nodes: Vec<Node>,
    params: Vec<ParamSpec>,
    states: Vec<ParamSpec>,
    normalizations: Vec<Normalization>,
    dropouts: Vec<Dropout>,
    inputs: Vec<Input>,
    output: ValueId,
    output_name: String,
    ends_in_softmax: bool,
    determined: Determined,
}

impl Graph {
    /// Reads and checks a model.
    ///
    /// Never panics, whatever the bytes contain. Every error names the node or tensor.
    pub fn read(model: &ModelProto) -> Result<Graph, GraphError> {
        read::read(model, None)
    }

    /// [`Graph::read`] of the part of a model that gives `output`, one of its outputs; of its only output if that is
    /// not named.
    pub fn read_output(model: &ModelProto, output: Option<&str>) -> Result<Graph, GraphError> {
        read::read(model, output)
    }

    /// [`Graph::read`], but also accepts a model without a trained parameter.
    pub(crate) fn infer(model: &ModelProto) -> Result<Graph, GraphError> {
        read::infer(model, None)
    }

    /// Values, indexed by [`ValueId`].
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Operations in order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Trained parameters, in the order of the model's initializers.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// Running statistics that training moves, in the order of the nodes that own them.
    pub fn states(&self) -> &[ParamSpec] {
        &self.states
    }

    /// The batch normalisations with moving statistics, in order.
    pub fn normalizations(&self) -> &[Normalization] {
        &self.normalizations
    }

    /// The dropouts that are active in training, in order.
    pub fn dropouts(&self) -> &[Dropout] {
        &self.dropouts
    }

    /// Whether the graph computes something else in training than in evaluation.
    pub fn has_training_mode(&self) -> bool {
        !self.normalizations.is_empty() || !self.dropouts.is_empty()
    }

    /// The model's inputs, in its order, whether or not the output depends on them.
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// The value that the loss reads.
    pub fn output(&self) -> ValueId {
        self.output
    }

    /// Name of the output tensor.
    pub fn output_name(&self) -> &str {
        &self.output_name
    }

    /// Shape of the output, as `[rows, 10]`.
    pub(crate) fn output_form(&self) -> String {
        shape::display(&self.values[self.output].dims)
    }

    /// Whether Softmax produces the output; cross-entropy would apply it a second time.
    pub fn ends_in_softmax(&self) -> bool {
        self.ends_in_softmax
    }

    /// The values that constants alone determine.
    pub(crate) fn determined(&self) -> &Determined {
        &self.determined
    }

    /// Elements of one row of the batch: those of all inputs.
    pub fn input_width(&self) -> usize {
        self.inputs.last().map_or(0, |input| input.range.end)
    }

    /// The dimensions of an input behind the rows.
    pub(crate) fn row_of(&self, input: &Input) -> Vec<usize> {
        self.values[input.value].dims.iter().skip(1).map(|dim| dim.at(1)).collect()
    }

    /// Elements of one row of the output.
    pub fn output_width(&self) -> usize {
        shape::elements_at(&self.values[self.output].dims, 1)
    }

    /// Elements of the largest value for a batch of `rows`; `None` if the number overflows.
    pub fn elements_max(&self, rows: usize) -> Option<usize> {
        let elements = |value: &Value| {
            let factor = if shape::rows_axis(&value.dims).is_some() { rows } else { 1 };
            shape::elements_at(&value.dims, 1).checked_mul(factor)
        };
        self.values.iter().try_fold(0, |most, value| Some(elements(value)?.max(most)))
    }

    /// Whether the trained parameters of `model`, which this graph was read from, are not just its float32
    /// initializers of rank 1 or more that nodes read.
    pub fn tells_buffers(&self, model: &ModelProto) -> bool {
        self.params.iter().any(|param| param.shape.is_empty())
            || self.fixed(model).iter().any(|tensor| !tensor.dims.is_empty())
    }

    /// Whether a parameter of `model`, which this graph was read from, is one by its use alone: PyTorch's exporter
    /// marked others, but not this one.
    pub(crate) fn has_unmarked_params(&self, model: &ModelProto) -> bool {
        model.graph.as_ref().is_some_and(|graph| Roles::of(model, graph).has_unmarked(&self.params))
    }

    /// The float32 initializers of `model`, which this graph was read from, that nodes read and training does not
    /// change.
    pub(crate) fn fixed<'m>(&self, model: &'m ModelProto) -> Vec<&'m TensorProto> {
        let graph = model.graph.as_ref();
        let read: HashSet<&str> = graph
            .iter()
            .flat_map(|graph| &graph.node)
            .flat_map(|node| &node.input)
            .map(String::as_str)
            .collect();
        let trained: HashSet<&str> = self.params.iter().map(|param| param.name.as_str()).collect();
        let initializers = graph.into_iter().flat_map(|graph| &graph.initializer);
        initializers
            .filter(|tensor| {
                tensor.data_type == Some(DataType::Float as i32)
                    && read.contains(tensor.name())
                    && !trained.contains(tensor.name())
            })
            .collect()
    }

    /// The states of `model`, which this graph was read from, as one flat vector.
    pub fn initial_states(&self, model: &ModelProto) -> Result<Vec<f32>, GraphError> {
        let mut flat = Vec::with_capacity(self.states.iter().map(ParamSpec::elements).sum());
        for state in &self.states {
            let mut initializers = model.graph.iter().flat_map(|graph| &graph.initializer);
            let tensor = initializers.find(|tensor| tensor.name() == state.name).ok_or_else(|| {
                GraphError::Malformed { reason: format!("initializer {:?} is not in the model", state.name) }
            })?;
            flat.extend(tensor::floats(tensor)?);
        }
        Ok(flat)
    }

    /// The parameters of `model`, which this graph was read from, as one flat vector.
    pub fn initial_weights(&self, model: &ModelProto) -> Result<Vec<f32>, GraphError> {
        let mut flat = Vec::with_capacity(self.params.iter().map(ParamSpec::elements).sum());
        let initializers = model.graph.iter().flat_map(|graph| &graph.initializer);
        let mut wanted = self.params.iter().peekable();
        for tensor in initializers {
            if wanted.next_if(|p| p.name == tensor.name()).is_some() {
                flat.extend(tensor::floats(tensor)?);
            }
        }
        match wanted.next() {
            None => Ok(flat),
            Some(missing) => Err(GraphError::Malformed {
                reason: format!("initializer {:?} is not in the model", missing.name),
            }),
        }
    }
}
