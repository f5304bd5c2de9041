//! Roles of initializers: trained parameters and buffers.
//!
//! - PyTorch's exporter says of each tensor whether it is a parameter or a buffer (`InputSpec.kind` in the
//!   metadata of its value). A tensor that the exporter folded from others is trained if a parameter is among
//!   their names.
//! - In every other model a float32 initializer is trained if it has a dimension. PyTorch's earlier exporter also
//!   keeps parameters without one under their own names.
//! - Running statistics, bounds, factors and other operands that an operator needs as constants are buffers, and
//!   so are tensors with infinite elements (attention masks).

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::{GraphProto, ModelProto, StringStringEntryProto, TensorProto, ValueInfoProto};

use super::builder::{Builder, NamedValue, NodeRef};
use super::ints::Ints;
use super::{Dim, GraphError, ParamSpec, Source, tensor};

const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";
const FOLDED_FROM: &str = "pkg.onnxscript.optimizer.folded_from";

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

/// What a model says about its initializers.
pub(super) struct Roles<'a> {
    /// Operands that must be constant.
    constants: HashSet<&'a str>,
    /// Tensors that nodes compute; the exporter may fold their shapes.
    computed: HashSet<&'a str>,
    /// Metadata by name, if PyTorch's exporter wrote any kind.
    exported: Option<HashMap<&'a str, &'a ValueInfoProto>>,
    /// Whether PyTorch's earlier exporter wrote the model.
    keeps_scalars: bool,
}

impl<'a> Roles<'a> {
    pub(super) fn of(model: &'a ModelProto, graph: &'a GraphProto) -> Roles<'a> {
        let mut constants = HashSet::new();
        // Exporters write equal tensors once and give the second one a name by Identity.
        let aliases: HashMap<&str, &str> = graph
            .node
            .iter()
            .filter(|node| node.op_type() == "Identity")
            .filter_map(|node| Some((node.output.first()?.as_str(), node.input.first()?.as_str())))
            .collect();
        for node in &graph.node {
            let needed = constant_inputs(node.op_type()).iter().filter_map(|index| node.input.get(*index));
            constants.extend(needed.flat_map(|name| {
                let name = name.as_str();
                [name, aliases.get(name).copied().unwrap_or(name)]
            }));
        }
        let infos: HashMap<&str, &ValueInfoProto> =
            graph.value_info.iter().chain(&graph.input).map(|info| (info.name(), info)).collect();
        let exported = infos.values().any(|info| entry(&info.metadata_props, KIND).is_some());
        Roles {
            constants,
            computed: graph.node.iter().flat_map(|node| &node.output).map(String::as_str).collect(),
            keeps_scalars: !exported && model.producer_name() == "pytorch",
            exported: exported.then_some(infos),
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
            (Some(kind), _) => kind == "PARAMETER",
            (None, Some(origins)) => origins
                .split(['[', ']', ',', '\'', ' '])
                .any(|origin| names_parameter(origin) && !self.computed.contains(origin)),
            (None, None) => false,
        }
    }
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

/// Whether the name of a folded tensor is that of a parameter.
fn names_parameter(name: &str) -> bool {
    let leaf = name.rsplit_once('.').map_or(name, |(_, leaf)| leaf);
    let is_buffer = leaf.contains("mask")
        || matches!(
            leaf,
            "running_mean" | "running_var" | "num_batches_tracked" | "inv_freq" | "position_ids"
        );
    let stem = leaf.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('_');
    let is_function = !name.contains('.') && FUNCTIONS.contains(&stem);
    !name.is_empty() && !is_buffer && !is_function
}

fn entry<'a>(metadata: &'a [StringStringEntryProto], key: &str) -> Option<&'a str> {
    metadata.iter().find(|entry| entry.key() == key).map(StringStringEntryProto::value)
}

/// The name of the parameter that the initializer `name` holds or was folded from, if PyTorch's exporter says so.
pub(crate) fn origin(graph: &GraphProto, name: &str) -> Option<String> {
    let info = graph.value_info.iter().chain(&graph.input).find(|info| info.name() == name)?;
    match (entry(&info.metadata_props, KIND), entry(&info.metadata_props, FOLDED_FROM)) {
        (Some(kind), _) => (kind == "PARAMETER").then(|| name.to_owned()),
        (None, Some(origins)) => {
            let mut parameters =
                origins.split(['[', ']', ',', '\'', ' ']).filter(|name| names_parameter(name));
            let first = parameters.next()?;
            parameters.next().is_none().then(|| first.to_owned())
        }
        (None, None) => None,
    }
}

/// The value of an initializer; registers it if it is a parameter.
pub(super) fn initializer(
    b: &mut Builder,
    roles: &Roles<'_>,
    tensor: &TensorProto,
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
    let value = if trained {
        let value = b.value(dims, Source::Param(b.params.len()), true, &site)?;
        b.params.push(ParamSpec { name: tensor.name().to_owned(), shape });
        value
    } else {
        b.value(dims, Source::Constant(elements), false, &site)?
    };
    Ok(NamedValue::Float(value))
}
