//! Roles of initializers: trained parameters and buffers.
//!
//! - PyTorch's exporter says of each tensor whether it is a parameter or a buffer (`InputSpec.kind` in the
//!   metadata of its value). A tensor that the exporter folded from others is trained if a parameter is among
//!   their names. A batch normalisation that it folded into the weights of a convolution takes their marks away.
//!   In a marked model, a tensor without marks is therefore trained if an operator reads it as weight or bias.
//! - In every other model a float32 initializer is trained if it has a dimension. PyTorch's earlier exporter also
//!   keeps parameters without one under their own names.
//! - Running statistics, bounds, factors and other operands that an operator needs as constants are buffers, and
//!   so are tensors with infinite elements (attention masks).

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::tensor_shape_proto::{Dimension, dimension};
use millrace_bundle::onnx::{
    GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, tensor_proto, type_proto,
};

use super::ahead;
use super::builder::{Builder, NamedValue, NodeRef};
use super::folded::{self, Stand};
use super::ints::Ints;
use super::{Dim, GraphError, ParamSpec, Source, tensor, wiring};

const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";
const PARAMETER: &str = "PARAMETER";
const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";
pub(super) const FOLDED_FROM: &str = "pkg.onnxscript.optimizer.folded_from";

/// The inputs that an operator needs as constants.
fn constant_inputs(op: &str) -> &'static [usize] {
    match op {
        "BatchNormalization" => &[3, 4],
        "Resize" => &[1, 2, 3],
        "Upsample" => &[1],
        "Clip" => &[1, 2],
        "Pad" => &[2],
        "Dropout" => &[1, 2],
        "Range" => &[0, 1, 2],
        _ => &[],
    }
}

/// The inputs that an operator reads as weight or bias.
fn weight_inputs(op: &str) -> &'static [usize] {
    match op {
        "MatMul" => &[0, 1],
        "Conv" | "ConvTranspose" | "Gemm" => &[1, 2],
        "BatchNormalization" | "InstanceNormalization" | "GroupNormalization" | "LayerNormalization" => {
            &[1, 2]
        }
        "RMSNormalization" => &[1],
        "LSTM" | "GRU" | "RNN" => &[1, 2, 3],
        _ => &[],
    }
}

/// Whether PyTorch's exporter says of a tensor of the graph what it is.
pub(crate) fn has_marks(graph: &GraphProto) -> bool {
    described(graph).any(|info| entry(&info.metadata_props, KIND).is_some())
}

/// The description of a float tensor, marked as a parameter as PyTorch's exporter does.
pub(crate) fn parameter_info(name: &str, shape: &[usize]) -> ValueInfoProto {
    let dims = shape.iter().map(|size| dimension::Value::DimValue(*size as i64)).collect();
    let kind = StringStringEntryProto { key: Some(KIND.to_owned()), value: Some(PARAMETER.to_owned()) };
    ValueInfoProto { metadata_props: vec![kind], ..float_info(name, dims) }
}

/// The description of a float tensor.
pub(crate) fn float_info(name: &str, dims: Vec<dimension::Value>) -> ValueInfoProto {
    let dim = |value| Dimension { value: Some(value), ..Dimension::default() };
    ValueInfoProto {
        name: Some(name.to_owned()),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(type_proto::Tensor {
                elem_type: Some(tensor_proto::DataType::Float as i32),
                shape: Some(TensorShapeProto { dim: dims.into_iter().map(dim).collect() }),
            })),
            ..TypeProto::default()
        }),
        ..ValueInfoProto::default()
    }
}

/// The values whose metadata count.
fn described(graph: &GraphProto) -> impl Iterator<Item = &ValueInfoProto> {
    graph.value_info.iter().chain(&graph.input)
}

/// What a model says about its initializers.
pub(super) struct Roles<'a> {
    /// Operands that must be constant.
    constants: HashSet<&'a str>,
    /// Operands that are weights or biases.
    weights: HashSet<&'a str>,
    /// Tensors that nodes compute; the exporter may fold their shapes.
    computed: HashSet<&'a str>,
    /// Metadata by name, if PyTorch's exporter wrote any kind.
    exported: Option<HashMap<&'a str, &'a ValueInfoProto>>,
    /// Whether a tensor of the model in PyTorch is a parameter, by name; empty if the model does not say.
    targets: HashMap<&'a str, bool>,
    /// The nodes that read a tensor, with the place of the operand; only of tensors without a name of their own.
    readers: HashMap<&'a str, Vec<(&'a NodeProto, usize)>>,
    /// Whether PyTorch's earlier exporter wrote the model.
    keeps_scalars: bool,
}

impl<'a> Roles<'a> {
    pub(super) fn of(model: &'a ModelProto, graph: &'a GraphProto) -> Roles<'a> {
        // Exporters write equal tensors once and give the second one a name by Identity.
        let nodes: Vec<&'a NodeProto> = graph.node.iter().flat_map(wiring::within).collect();
        let aliases: HashMap<&str, &str> = nodes
            .iter()
            .copied()
            .filter(|node| node.op_type() == "Identity")
            .filter_map(|node| Some((node.output.first()?.as_str(), node.input.first()?.as_str())))
            .collect();
        let operands = |inputs: fn(&str) -> &'static [usize]| -> HashSet<&'a str> {
            let read = |node: &'a NodeProto| {
                inputs(node.op_type()).iter().filter_map(|index| node.input.get(*index)).map(String::as_str)
            };
            let names = nodes.iter().copied().flat_map(read);
            names.flat_map(|name| [name, aliases.get(name).copied().unwrap_or(name)]).collect()
        };
        let exported = has_marks(graph);
        Roles {
            constants: operands(constant_inputs),
            weights: operands(weight_inputs),
            computed: graph.node.iter().flat_map(|node| &node.output).map(String::as_str).collect(),
            targets: targets(graph).collect(),
            readers: ahead::readers(graph),
            keeps_scalars: !exported && model.producer_name() == "pytorch",
            exported: exported.then(|| described(graph).map(|info| (info.name(), info)).collect()),
        }
    }

    /// Whether an initializer of this shape is a trained parameter.
    fn is_trained(&self, name: &str, shape: &[usize], elements: &[f32]) -> bool {
        if self.constants.contains(name) || elements.iter().any(|value| value.is_infinite()) {
            return false;
        }
        let Some(infos) = &self.exported else {
            return !shape.is_empty() || self.keeps_scalars && !name.contains([':', '/']);
        };
        let metadata = infos.get(name).map(|info| info.metadata_props.as_slice()).unwrap_or_default();
        match (entry(metadata, KIND), entry(metadata, FOLDED_FROM)) {
            (Some(kind), _) => kind == PARAMETER,
            // A number of an operation in the type of its operand.
            (None, Some(_)) if name.ends_with("_cast") && !name.contains('.') => false,
            (None, Some(origins)) => self::origins(origins).any(|origin| self.is_parameter(origin)),
            (None, None) => !shape.is_empty() && self.weights.contains(name),
        }
    }

    /// Whether a tensor from which another one was folded is a parameter.
    fn is_parameter(&self, origin: &str) -> bool {
        match self.targets.get(origin) {
            Some(is_parameter) => *is_parameter,
            None => self.targets.is_empty() && names_parameter(origin) && !self.computed.contains(origin),
        }
    }

    /// The parameters from which the exporter computed a trained tensor, so that training would move a stand-in.
    fn computed_from(&self, name: &str) -> Option<String> {
        let metadata =
            self.exported.as_ref()?.get(name).map(|info| info.metadata_props.as_slice()).unwrap_or_default();
        if entry(metadata, KIND).is_some() {
            return None;
        }
        let readers = self.readers.get(name).map(Vec::as_slice).unwrap_or_default();
        let Some(origins) = entry(metadata, FOLDED_FROM) else {
            // Former exporters of PyTorch do not say what they folded. Most other names are those of parameters.
            let is_other = ahead::is_computed(name) || ahead::is_unnamed(name);
            let is_ahead = is_other && !name.contains('.') && !ahead::is_rearranged(name, 1, readers);
            return is_ahead.then(|| "of the module".to_owned());
        };
        // Of a value that nodes compute from the batch, only the shape was known ahead.
        let origins: Vec<&str> =
            self::origins(origins).filter(|origin| !self.computed.contains(origin)).collect();
        let (computed, rest): (Vec<&str>, Vec<&str>) =
            origins.iter().copied().partition(|origin| match self.targets.is_empty() {
                true => !origin.contains('.') && ahead::is_computed(origin),
                false => !self.targets.contains_key(origin) && !ahead::keeps_elements(origin),
            });
        let parameters = rest.into_iter().filter(|origin| self.is_parameter(origin));
        let parameters: Vec<&str> = parameters.collect();
        // Positions of an embedding may be sums, as GPT-2's are. Weights that a constant was added to move alike.
        let is_shifted = stem(name) == "embedding"
            && parameters.len() == 1
            && computed.iter().all(|origin| matches!(stem(origin), "add" | "sub"));
        if (computed.is_empty() || is_shifted) && ahead::is_rearranged(name, origins.len(), readers) {
            return None;
        }
        // A parameter may have the name of a function.
        (!parameters.is_empty()).then(|| parameters.join(", "))
    }

    /// The parameters and functions from which the exporter made a trained tensor, which has the name of a function.
    fn made_of(&self, name: &str) -> (Vec<&'a str>, Vec<&'a str>) {
        let metadata =
            self.exported.as_ref().and_then(|infos| infos.get(name)).map(|info| &info.metadata_props);
        let origins = metadata
            .filter(|metadata| entry(metadata, KIND).is_none() && !name.contains('.'))
            .and_then(|metadata| entry(metadata, FOLDED_FROM))
            .unwrap_or_default();
        self::origins(origins).partition(|origin| *origin != name && self.is_parameter(origin))
    }

    /// Whether a trained parameter has no mark, in a model with marks.
    pub(super) fn has_unmarked(&self, params: &[ParamSpec]) -> bool {
        let unmarked = |infos: &HashMap<&str, &ValueInfoProto>, name: &str| {
            let marks = infos.get(name).map(|info| info.metadata_props.as_slice()).unwrap_or_default();
            entry(marks, KIND).or(entry(marks, FOLDED_FROM)).is_none()
        };
        self.exported.as_ref().is_some_and(|infos| params.iter().any(|param| unmarked(infos, &param.name)))
    }
}

/// What the signature of the exported program says of each tensor: `p_weight: PARAMETER target='weight'`.
fn targets(graph: &GraphProto) -> impl Iterator<Item = (&str, bool)> {
    let signature = entry(&graph.metadata_props, SIGNATURE).unwrap_or_default();
    signature.lines().filter_map(|line| {
        let (kind, rest) = line.split_once(": ")?.1.split_once(" target='")?;
        let is_parameter = match kind {
            PARAMETER => true,
            "BUFFER" | "CONSTANT_TENSOR" => false,
            _ => return None,
        };
        Some((rest.split_once('\'')?.0, is_parameter))
    })
}

/// The parameters of the module in PyTorch; none if the model does not say.
pub(super) fn parameters(graph: &GraphProto) -> impl Iterator<Item = &str> {
    targets(graph).filter(|(_, is_parameter)| *is_parameter).map(|(name, _)| name)
}

/// The names in a list of tensors that another one was folded from: `['cat', 'encoder.weight']`.
pub(super) fn origins(list: &str) -> impl Iterator<Item = &str> {
    list.split(['[', ']', ',', '\'', ' ']).filter(|origin| !origin.is_empty())
}

/// Names of tensors that PyTorch computes and its exporter may fold: a parameter has another name, or a path as
/// `encoder.weight`.
const FUNCTIONS: &[&str] = &[
    "add",
    "arange",
    "cat",
    "clone",
    "cos",
    "detach",
    "div",
    "embedding",
    "empty",
    "eq",
    "exp",
    "expand",
    "eye",
    "full",
    "full_like",
    "ge",
    "gt",
    "index",
    "le",
    "lifted_tensor",
    "linspace",
    "logical_not",
    "lt",
    "mul",
    "ne",
    "neg",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "permute",
    "pow",
    "repeat",
    "reshape",
    "rsqrt",
    "scalar_tensor",
    "scalar_tensor_default",
    "select",
    "sin",
    "slice",
    "sqrt",
    "squeeze",
    "stack",
    "sub",
    "t",
    "to",
    "transpose",
    "tril",
    "triu",
    "unsqueeze",
    "val",
    "view",
    "where",
    "zeros",
    "zeros_like",
];

/// The name of a tensor without its number.
pub(super) fn stem(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('_')
}

/// Whether the name of a folded tensor is that of a parameter.
fn names_parameter(name: &str) -> bool {
    let leaf = name.rsplit_once('.').map_or(name, |(_, leaf)| leaf);
    let is_buffer = leaf.contains("mask")
        || matches!(
            leaf,
            "running_mean" | "running_var" | "num_batches_tracked" | "inv_freq" | "position_ids"
        );
    let is_function = !name.contains('.') && FUNCTIONS.contains(&stem(leaf));
    !name.is_empty() && !is_buffer && !is_function
}

pub(super) fn entry<'a>(metadata: &'a [StringStringEntryProto], key: &str) -> Option<&'a str> {
    metadata.iter().find(|entry| entry.key() == key).map(StringStringEntryProto::value)
}

/// The name of the parameter that the initializer `name` holds or was folded from, if PyTorch's exporter says so.
pub(crate) fn origin(graph: &GraphProto, name: &str) -> Option<String> {
    let info = graph.value_info.iter().chain(&graph.input).find(|info| info.name() == name)?;
    match (entry(&info.metadata_props, KIND), entry(&info.metadata_props, FOLDED_FROM)) {
        (Some(kind), _) => (kind == "PARAMETER").then(|| name.to_owned()),
        (None, Some(origins)) => {
            let mut parameters = self::origins(origins).filter(|name| names_parameter(name));
            let first = parameters.next()?;
            parameters.next().is_none().then(|| first.to_owned())
        }
        (None, None) => None,
    }
}

/// Refuses parameters of which the graph would train elements twice.
pub(super) fn check_folded(
    roles: &Roles<'_>,
    graph: &GraphProto,
    params: &[ParamSpec],
) -> Result<(), GraphError> {
    let tensors: HashMap<&str, &TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).collect();
    let made = params.iter().map(|param| (param, roles.made_of(&param.name)));
    let stands: Vec<Stand<'_>> = made
        .map(|(param, (parameters, functions))| {
            let tensor = tensors.get(param.name.as_str()).filter(|_| !parameters.is_empty());
            let elements = tensor.and_then(|tensor| tensor::float_elements(tensor)).unwrap_or_default();
            Stand { name: &param.name, shape: &param.shape, elements, parameters, functions }
        })
        .collect();
    folded::check(&stands)
}

/// The value of an initializer; registers it if it is a parameter. One that training could not move is refused
/// `for_training` only.
pub(super) fn initializer(
    b: &mut Builder,
    roles: &Roles<'_>,
    tensor: &TensorProto,
    for_training: bool,
) -> Result<NamedValue, GraphError> {
    let site = NodeRef { op: "initializer".to_owned(), node: tensor.name().to_owned() };
    if tensor::is_int(tensor) {
        return Ok(NamedValue::Ints(Ints::of(tensor::dims(tensor)?, &tensor::ints(tensor)?)));
    }
    let shape = tensor::dims(tensor)?;
    let elements = if shape.is_empty() || roles.constants.contains(tensor.name()) {
        tensor::constants(tensor)?
    } else {
        tensor::floats_or_infinite(tensor)?
    };
    let dims: Vec<Dim> = shape.iter().map(|size| Dim::Fixed(*size)).collect();
    // Empty operands stand for missing ones.
    if elements.is_empty() && roles.constants.contains(tensor.name()) {
        return Ok(NamedValue::Ints(Ints::of(shape, &[])));
    }
    let trained = tensor::is_float(tensor) && roles.is_trained(tensor.name(), &shape, &elements);
    if trained
        && for_training
        && let Some(parameters) = roles.computed_from(tensor.name())
    {
        return Err(site.form(format!(
            "the exporter computed it ahead from the parameters {parameters}, which training could not move (export \
             with optimize=False)"
        )));
    }
    let value = if trained {
        let value = b.value(dims, Source::Param(b.params.len()), true, &site)?;
        b.params.push(ParamSpec { name: tensor.name().to_owned(), shape });
        value
    } else {
        b.value(dims, Source::Constant(elements), false, &site)?
    };
    Ok(NamedValue::Float(value))
}
