//! The checked graph: an ONNX model in a small form that the engine can differentiate.
//!
//! Reading resolves names, orders nodes, infers every shape with a dynamic number of rows and folds shape
//! constants. It rejects, before any training, everything that the engine cannot differentiate exactly. An
//! accepted graph has one float input `[rows, …]`, one float output `[rows, …]`, and never mixes rows.
//! Gradients of row subsets therefore add up to the gradient of the batch.
//!
//! **Trained parameters**: every float32 initializer of rank 1 or more that the output depends on. Rank-0
//! initializers and `Constant` nodes are not changed.

mod arithmetic;
mod builder;
mod error;
mod linear;
mod read;
mod shape;
mod sizes;
mod spatial;
mod tensor;
#[cfg(test)]
mod tests;
mod wiring;

use millrace_bundle::onnx::ModelProto;

pub use error::GraphError;
pub use read::SUPPORTED_OPERATORS;
pub use shape::Dim;

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
    /// Softmax along an axis.
    Softmax(usize),
    /// Logarithm of softmax along an axis.
    LogSoftmax(usize),
    /// Input, weight and, optionally, bias.
    Conv(ConvSpec),
    /// Maximum of a window.
    MaxPool(PoolSpec),
    /// Mean of a window.
    AveragePool(PoolSpec),
    /// Zeros around height and width: `[top, left]`, `[bottom, right]`.
    Pad([usize; 2], [usize; 2]),
    /// The same elements in the output's shape.
    Reshape,
    /// Axes in a new order.
    Permute(Vec<usize>),
    /// Inputs one after another along an axis.
    Concat(usize),
    /// Sum over axes.
    Sum(Vec<usize>),
    /// Mean over axes.
    Mean(Vec<usize>),
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
    /// The batch.
    Input,
    /// A trained parameter, by index into [`Graph::params`].
    Param(usize),
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

/// A trained parameter.
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
    input: ValueId,
    output: ValueId,
    input_name: String,
    output_name: String,
    ends_in_softmax: bool,
}

impl Graph {
    /// Reads and checks a model.
    ///
    /// Never panics, whatever the bytes contain. Every error names the node or tensor.
    pub fn read(model: &ModelProto) -> Result<Graph, GraphError> {
        read::read(model)
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

    /// The value that holds the batch.
    pub fn input(&self) -> ValueId {
        self.input
    }

    /// The value that is the model's output.
    pub fn output(&self) -> ValueId {
        self.output
    }

    /// Name of the input tensor.
    pub fn input_name(&self) -> &str {
        &self.input_name
    }

    /// Name of the output tensor.
    pub fn output_name(&self) -> &str {
        &self.output_name
    }

    /// Whether Softmax produces the output; cross-entropy would apply it a second time.
    pub fn ends_in_softmax(&self) -> bool {
        self.ends_in_softmax
    }

    /// Elements of one row of the input.
    pub fn input_width(&self) -> usize {
        shape::elements_at(&self.values[self.input].dims, 1)
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
