//! Wiring of a model's tensors: its inputs, its output, and the order of its nodes.

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{GraphProto, NodeProto, ValueInfoProto, tensor_shape_proto, type_proto};

use super::builder::NodeRef;
use super::read::malformed;
use super::{Dim, GraphError, shape, tensor};

/// Most inputs of a model.
const INPUTS_MAX: usize = 256;

/// An input as the model declares it.
pub(super) struct Declared<'a> {
    pub(super) name: &'a str,
    pub(super) dims: Vec<Dim>,
    pub(super) element: DataType,
}

/// The inputs that are not initializers.
pub(super) fn inputs<'a>(
    proto: &'a GraphProto,
    initializers: &HashSet<&str>,
) -> Result<Vec<Declared<'a>>, GraphError> {
    let found: Vec<&ValueInfoProto> =
        proto.input.iter().filter(|info| !initializers.contains(info.name())).collect();
    if found.is_empty() {
        return Err(malformed("it has no input"));
    }
    if found.len() > INPUTS_MAX {
        return Err(GraphError::Limit { what: "inputs", found: found.len(), limit: INPUTS_MAX });
    }
    let mut names = HashSet::new();
    if let Some(twice) = found.iter().find(|info| !names.insert(info.name())) {
        return Err(malformed(format!("input {:?} is defined twice", twice.name())));
    }
    found.into_iter().map(declared).collect()
}

fn declared(info: &ValueInfoProto) -> Result<Declared<'_>, GraphError> {
    let name = info.name();
    let Some(type_proto::Value::TensorType(tensor)) = info.r#type.as_ref().and_then(|t| t.value.as_ref())
    else {
        return Err(malformed(format!("input {name:?} is not a tensor")));
    };
    let element = match DataType::try_from(tensor.elem_type()) {
        Ok(element @ (DataType::Float | DataType::Int64 | DataType::Int32 | DataType::Bool)) => element,
        _ => {
            return Err(malformed(format!(
                "input {name:?} holds {}, FLOAT, INT64, INT32 or BOOL is needed",
                tensor::type_name(tensor.elem_type())
            )));
        }
    };
    let shape = tensor.shape.as_ref().ok_or_else(|| malformed(format!("input {name:?} has no shape")))?;
    let mut dims = Vec::with_capacity(shape.dim.len().min(shape::RANK_MAX + 1));
    for (axis, dim) in shape.dim.iter().enumerate().take(shape::RANK_MAX + 1) {
        use tensor_shape_proto::dimension::Value;
        dims.push(match (axis, &dim.value) {
            (0, None | Some(Value::DimParam(_))) => Dim::Rows(1),
            (0, Some(Value::DimValue(size))) => {
                return Err(malformed(format!(
                    "input {name:?} has a fixed batch of {size}; export it with a dynamic first dimension"
                )));
            }
            (_, Some(Value::DimValue(size))) => match usize::try_from(*size) {
                Ok(size) if size > 0 => Dim::Fixed(size),
                _ => {
                    return Err(malformed(format!("input {name:?} has a dimension of {size}")));
                }
            },
            (axis, value) => {
                let remedy = match value {
                    Some(Value::DimParam(size)) if !size.is_empty() => {
                        format!("millrace model edit --dim {size}=SIZE gives it a size")
                    }
                    _ => "export it with a fixed size".to_owned(),
                };
                return Err(malformed(format!(
                    "dimension {axis} of input {name:?} is dynamic; only the first may be ({remedy})"
                )));
            }
        });
    }
    if dims.is_empty() {
        return Err(malformed(format!("input {name:?} has no batch dimension")));
    }
    Ok(Declared { name, dims, element })
}

/// The output of the name `wanted`, or the only one.
pub(super) fn output<'a>(proto: &'a GraphProto, wanted: Option<&str>) -> Result<&'a str, GraphError> {
    let mut names = proto.output.iter().map(|info| info.name());
    let all = || proto.output.iter().map(|info| format!("{:?}", info.name())).collect::<Vec<_>>().join(", ");
    match (wanted, proto.output.len()) {
        (_, 0) => Err(malformed("it has no output")),
        (Some(wanted), _) => names
            .find(|name| *name == wanted)
            .ok_or_else(|| malformed(format!("it has no output {wanted:?}; its outputs are {}", all()))),
        (None, 1) => Ok(names.next().unwrap_or_default()),
        (None, count) => Err(malformed(format!(
            "it has {count} outputs, {}: a job names the one that its loss reads (loss_output = \"NAME\"), millrace \
             model edit the one to keep (--cut NAME)",
            all()
        ))),
    }
}

/// The node that produces each tensor.
pub(super) fn producers<'a>(
    proto: &'a GraphProto,
    inputs: &[Declared<'_>],
    initializers: &HashSet<&str>,
) -> Result<HashMap<&'a str, usize>, GraphError> {
    let given: HashSet<&str> = inputs.iter().map(|input| input.name).collect();
    let mut producers = HashMap::new();
    for (index, node) in proto.node.iter().enumerate() {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            let taken = given.contains(name.as_str()) || initializers.contains(name.as_str());
            if taken || producers.insert(name.as_str(), index).is_some() {
                return Err(malformed(format!("tensor {name:?} is defined twice")));
            }
        }
    }
    Ok(producers)
}

/// The tensors that a node reads, those that its branches read from outside among them.
pub(crate) fn reads(node: &NodeProto) -> Vec<&str> {
    let mut found: Vec<&str> = node.input.iter().map(String::as_str).collect();
    found.extend(branches(node).flat_map(free));
    found
}

/// The branches of a node.
pub(super) fn branches(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().filter_map(|attribute| attribute.g.as_ref())
}

/// A node and those of its branches.
pub(super) fn within(node: &NodeProto) -> Vec<&NodeProto> {
    let mut found = vec![node];
    for branch in branches(node) {
        found.extend(branch.node.iter().flat_map(within));
    }
    found
}

/// The names that a branch defines.
pub(super) fn defined(branch: &GraphProto) -> HashSet<&str> {
    let nodes = branch.node.iter().flat_map(|node| &node.output).map(String::as_str);
    let tensors = branch.initializer.iter().map(|tensor| tensor.name());
    nodes.chain(tensors).chain(branch.input.iter().map(|info| info.name())).collect()
}

/// The names that a branch reads from outside. Branches nest as deep as a message of the model may.
fn free(branch: &GraphProto) -> Vec<&str> {
    let own = defined(branch);
    let given = branch.node.iter().flat_map(reads).chain(branch.output.iter().map(|info| info.name()));
    given.filter(|name| !name.is_empty() && !own.contains(name)).collect()
}

/// The nodes that the output depends on, each after the nodes that it reads from.
pub(super) fn order<'a>(
    proto: &'a GraphProto,
    output: &str,
    producers: &HashMap<&str, usize>,
    inputs: &[Declared<'_>],
    initializers: &HashSet<&str>,
) -> Result<Vec<&'a NodeProto>, GraphError> {
    let given: HashSet<&str> = inputs.iter().map(|input| input.name).collect();
    #[derive(Clone, Copy, PartialEq)]
    enum Mark {
        New,
        Open,
        Done,
    }
    let Some(last) = producers.get(output) else {
        return Err(malformed(format!("no node produces its output {output:?}")));
    };
    let read: Vec<Vec<&str>> = proto.node.iter().map(reads).collect();
    let mut marks = vec![Mark::New; proto.node.len()];
    let mut ordered = Vec::new();
    // Pairs of a node and the next input to visit: an explicit stack, so the depth of the graph is not
    // limited.
    let mut stack = vec![(*last, 0usize)];
    marks[*last] = Mark::Open;
    while let Some((index, position)) = stack.pop() {
        let node = &proto.node[index];
        let Some(&name) = read[index].get(position) else {
            marks[index] = Mark::Done;
            ordered.push(node);
            continue;
        };
        stack.push((index, position + 1));
        if name.is_empty() || given.contains(name) || initializers.contains(name) {
            continue;
        }
        let site = || NodeRef::of(node).node;
        let Some(maker) = producers.get(name) else {
            return Err(GraphError::MissingInput { node: site(), input: name.to_owned() });
        };
        match marks[*maker] {
            Mark::Done => {}
            Mark::Open => return Err(GraphError::Cycle { node: site() }),
            Mark::New => {
                marks[*maker] = Mark::Open;
                stack.push((*maker, 0));
            }
        }
    }
    Ok(ordered)
}
