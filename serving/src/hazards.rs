//! Graphs that end the process in ONNX Runtime, or answer with memory that nobody has written.
//!
//! Such a graph is refused before a session is made of it: one request to it would take all other models down, or tell
//! what was in memory before. The rules go by the graph alone, with the graphs inside of it and its functions:
//!
//! - integers are divided by values that cannot be 0, nor -1 where the smallest integer may be divided (the processor
//!   raises a signal): by constants, extents, and what follows from them (`bounds`);
//! - attributes that ONNX Runtime divides by, as strides, are 1 or more;
//! - outputs that an operator writes have a name;
//! - `post_transform` of `ai.onnx.ml` is none that ONNX Runtime takes for `PROBIT`, of which it writes one of two scores.
//!
//! Tensors without elements are a matter of requests: `session::nothing` says which graphs get them.

mod bounds;
mod known;
mod types;

use std::cell::Cell;
use std::collections::HashMap;

use millrace_bundle::Bundle;
use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::type_proto::Value as Type;
use millrace_bundle::onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto,
};
use prost::Message;

use known::Known;

/// Functions that call others, at most.
const CALLS_MAX: usize = 16;
/// Nodes that are walked through, those of functions once for each call.
const NODES_MAX: usize = 1 << 20;
/// Characters of a name that are shown.
const NAME_CHARS_MAX: usize = 80;

/// Attributes that ONNX Runtime divides by.
const DIVISORS: [&str; 6] = ["strides", "dilations", "group", "blocksize", "num_groups", "num_outputs"];
/// Transforms of scores that ONNX Runtime knows, but for `PROBIT`; it takes every other word for that.
const TRANSFORMS: [&str; 4] = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"];
/// Operators that may leave out any of their outputs.
const OPTIONAL: [&str; 5] = ["LSTM", "GRU", "RNN", "DynamicQuantizeLSTM", "AttnLSTM"];
/// Operators that write each of their outputs, and crash over one without a name.
const VARIADIC: [&str; 5] = ["If", "Loop", "Scan", "SequenceMap", "Split"];

const BY_ZERO: &str = "it divides integers, and ONNX Runtime ends the process where a divisor is 0, or is -1 and \
    divides the smallest integer. The graph does not rule that out: keep the divisor at 1 or above in it (Max or Clip with \
    a constant), divide floats, or, where it never happens, set nonzero_divisors = true in [serving.models.NAME]";
const NO_TYPE: &str = "it is not known whether it divides integers, for which ONNX Runtime ends the process where a \
    divisor is 0: write the types of its values into the file, as onnx.shape_inference.infer_shapes does, or, where no \
    divisor is ever 0, set nonzero_divisors = true in [serving.models.NAME]";

/// What is wrong with a graph, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operator} {node:?} that gives {value:?}: {reason}")]
pub struct Hazard {
    /// The operator, with its domain unless that is ONNX's own.
    pub operator: String,
    /// Name of the node.
    pub node: String,
    /// The first of its outputs that has a name.
    pub value: String,
    /// What is wrong, and the way out.
    pub reason: String,
}

impl Hazard {
    fn of(node: &NodeProto, reason: impl Into<String>) -> Hazard {
        let shown = |name: &str| name.chars().take(NAME_CHARS_MAX).collect::<String>();
        let operator = match node.domain() {
            "" | "ai.onnx" => node.op_type().to_owned(),
            domain => format!("{domain}.{}", node.op_type()),
        };
        let value = node.output.iter().find(|name| !name.is_empty());
        Hazard {
            operator: shown(&operator),
            node: shown(node.name()),
            value: shown(value.map_or("", String::as_str)),
            reason: reason.into(),
        }
    }
}

/// What integers may be divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisors {
    /// What cannot be 0, by the graph.
    Shown,
    /// Anything: the user vouches for it.
    Trusted,
}

/// Whether a graph can be run without harm on tensors that have elements.
///
/// # Errors
/// The first node that may end the process, or give what nobody has written.
pub fn check(model: &ModelProto, divisors: Divisors) -> Result<(), Hazard> {
    walk(model, divisors, false)
}

/// The same of a bundle.
///
/// # Errors
/// As [`check`].
pub fn check_bundle(bundle: &Bundle, divisors: Divisors) -> Result<(), Hazard> {
    check(bundle.graph(), divisors).or_else(|hazard| {
        // The outline has no long constants, and those may be what is divided by.
        let model = ModelProto::decode(bundle.model_onnx().as_ref());
        model.map_or(Err(hazard), |model| check(&model, divisors))
    })
}

/// Whether a graph divides integers by nothing that is 0 where its inputs have no elements.
pub(crate) fn allows_empty_inputs(model: &ModelProto) -> bool {
    walk(model, Divisors::Shown, true).is_ok()
}

fn walk(model: &ModelProto, divisors: Divisors, may_be_empty: bool) -> Result<(), Hazard> {
    let Some(graph) = &model.graph else { return Ok(()) };
    let walk = Walk { functions: &model.functions, nodes: Cell::new(0), divisors, may_be_empty };
    walk.graph(graph, None, Body { bound: [&[], &[]], depth: 0 }).map(drop)
}

/// Values by name, those of the graph around included.
struct Scope<'a, 'o> {
    own: HashMap<&'a str, Known>,
    outer: Option<&'o Scope<'o, 'o>>,
}

impl Scope<'_, '_> {
    fn get(&self, name: &str) -> Option<Known> {
        self.own.get(name).copied().or_else(|| self.outer?.get(name))
    }
}

/// Attributes of the function around a node, as its caller gives them and by default.
#[derive(Clone, Copy)]
struct Body<'a> {
    bound: [&'a [AttributeProto]; 2],
    depth: usize,
}

/// A node as the rules see it.
struct Call<'a> {
    node: &'a NodeProto,
    bound: [&'a [AttributeProto]; 2],
    /// Those that are left out are `None`.
    inputs: Vec<Option<Known>>,
}

impl Call<'_> {
    /// Whether the operator is one of ONNX's own.
    fn is_onnx(&self) -> bool {
        matches!(self.node.domain(), "" | "ai.onnx")
    }

    fn input(&self, place: usize) -> Option<Known> {
        self.inputs.get(place).copied().flatten()
    }

    /// An attribute; one that refers to an attribute of the function around the node is that one.
    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        // Of attributes with one name, ONNX Runtime has the last.
        self.followed(self.node.attribute.iter().rfind(|attribute| attribute.name() == name)?)
    }

    fn followed<'b>(&'b self, attribute: &'b AttributeProto) -> Option<&'b AttributeProto> {
        followed(attribute, self.bound)
    }

    fn int(&self, name: &str) -> Option<i64> {
        self.attribute(name).map(AttributeProto::i)
    }
}

struct Walk<'a> {
    functions: &'a [FunctionProto],
    nodes: Cell<usize>,
    divisors: Divisors,
    /// Whether inputs of the model may have no elements.
    may_be_empty: bool,
}

impl<'a> Walk<'a> {
    /// What the outputs of a graph are.
    fn graph(
        &self,
        graph: &'a GraphProto,
        outer: Option<&Scope<'_, '_>>,
        body: Body<'a>,
    ) -> Result<Vec<Known>, Hazard> {
        let mut scope = Scope { own: HashMap::new(), outer };
        for input in &graph.input {
            let full = outer.is_none() && !self.may_be_empty && !has_no_elements(input);
            scope.own.insert(input.name(), Known::of_type(element_type(input.r#type.as_ref()), full));
        }
        for tensor in &graph.initializer {
            scope.own.insert(tensor.name(), Known::of_tensor(tensor));
        }
        for sparse in &graph.sparse_initializer {
            if let Some(values) = &sparse.values {
                scope.own.insert(values.name(), Known::of_type(values.data_type(), false));
            }
        }
        let declared = graph.value_info.iter().chain(&graph.output);
        self.nodes(&graph.node, &declared_types(declared), &mut scope, body)?;
        let outputs = graph.output.iter().map(|output| scope.get(output.name()));
        Ok(outputs.map(Option::unwrap_or_default).collect())
    }

    fn nodes(
        &self,
        nodes: &'a [NodeProto],
        declared: &HashMap<&str, i32>,
        scope: &mut Scope<'a, '_>,
        body: Body<'a>,
    ) -> Result<(), Hazard> {
        for node in nodes {
            self.nodes.set(self.nodes.get() + 1);
            if self.nodes.get() > NODES_MAX {
                return Err(Hazard::of(node, format!("the graph has more than {NODES_MAX} nodes")));
            }
            let mut results = self.node(node, declared, scope, body)?.into_iter();
            for name in &node.output {
                let mut result = results.next().unwrap_or_default();
                if result.has_no_type() {
                    result = Known::of_type(declared.get(name.as_str()).copied().unwrap_or(0), result.full);
                }
                scope.own.insert(name, result);
            }
        }
        Ok(())
    }

    /// What the outputs of a node are.
    fn node(
        &self,
        node: &'a NodeProto,
        declared: &HashMap<&str, i32>,
        scope: &Scope<'_, '_>,
        body: Body<'a>,
    ) -> Result<Vec<Known>, Hazard> {
        let input = |name: &String| match name.as_str() {
            "" => None,
            name => Some(scope.get(name).unwrap_or_default()),
        };
        let inputs = node.input.iter().map(input).collect();
        let call = Call { node, bound: body.bound, inputs };
        check_outputs(&call)?;
        check_attributes(&call)?;
        let mut inside = Vec::new();
        for attribute in &node.attribute {
            let Some(followed) = followed(attribute, body.bound) else { continue };
            // What a graph of the caller refers to is not the caller's own, and could be that graph.
            let is_own = attribute.ref_attr_name().is_empty();
            let inner = Body { bound: if is_own { body.bound } else { [&[], &[]] }, ..body };
            for graph in followed.g.iter().chain(&followed.graphs) {
                inside.push(self.graph(graph, Some(scope), inner)?);
            }
        }
        if self.divisors == Divisors::Shown {
            check_division(&call, declared)?;
        }
        let functions = self.functions.iter().filter(|function| is_named(function, node));
        let results = functions.map(|function| self.function(function, &call, body));
        if let Some(results) = results.collect::<Result<Vec<_>, _>>()?.into_iter().next() {
            return Ok(results);
        }
        Ok(bounds::results(&call, &inside))
    }

    /// What the outputs of a function are.
    fn function(
        &self,
        function: &'a FunctionProto,
        call: &Call<'a>,
        body: Body<'a>,
    ) -> Result<Vec<Known>, Hazard> {
        if body.depth >= CALLS_MAX {
            return Err(Hazard::of(call.node, "its functions call each other too often"));
        }
        let mut scope = Scope { own: HashMap::new(), outer: None };
        for (name, input) in function.input.iter().zip(&call.inputs) {
            if let Some(input) = input {
                scope.own.insert(name, *input);
            }
        }
        let bound = [call.node.attribute.as_slice(), function.attribute_proto.as_slice()];
        let inner = Body { bound, depth: body.depth + 1 };
        self.nodes(&function.node, &declared_types(function.value_info.iter()), &mut scope, inner)?;
        Ok(function.output.iter().map(|name| scope.get(name).unwrap_or_default()).collect())
    }
}

fn followed<'a>(
    attribute: &'a AttributeProto,
    bound: [&'a [AttributeProto]; 2],
) -> Option<&'a AttributeProto> {
    match attribute.ref_attr_name() {
        "" => Some(attribute),
        outer => bound.into_iter().flatten().find(|attribute| attribute.name() == outer),
    }
}

/// Whether a function of the model may be what a node runs.
fn is_named(function: &FunctionProto, node: &NodeProto) -> bool {
    let plain = |domain: &str| matches!(domain, "" | "ai.onnx");
    let (ours, theirs) = (function.domain(), node.domain());
    function.name() == node.op_type() && (ours == theirs || (plain(ours) && plain(theirs)))
}

fn declared_types<'b>(values: impl Iterator<Item = &'b ValueInfoProto>) -> HashMap<&'b str, i32> {
    values.map(|value| (value.name(), element_type(value.r#type.as_ref()))).collect()
}

/// The type of the elements of a tensor, or of those in a sequence; 0 where it is not known.
fn element_type(declared: Option<&TypeProto>) -> i32 {
    match declared.and_then(|declared| declared.value.as_ref()) {
        Some(Type::TensorType(tensor)) => tensor.elem_type(),
        Some(Type::SparseTensorType(tensor)) => tensor.elem_type(),
        Some(Type::SequenceType(sequence)) => element_type(sequence.elem_type.as_deref()),
        Some(Type::OptionalType(optional)) => element_type(optional.elem_type.as_deref()),
        Some(Type::MapType(_) | Type::OpaqueType(_)) | None => 0,
    }
}

/// Whether a tensor of the declared shape has no elements, whatever its other extents are.
fn has_no_elements(input: &ValueInfoProto) -> bool {
    use millrace_bundle::onnx::tensor_shape_proto::dimension::Value as Dim;
    let Some(Type::TensorType(tensor)) = input.r#type.as_ref().and_then(|declared| declared.value.as_ref())
    else {
        return true;
    };
    let dims = tensor.shape.iter().flat_map(|shape| &shape.dim);
    dims.into_iter().any(|dim| matches!(dim.value, Some(Dim::DimValue(0))))
}

/// Outputs without a name have no memory. Operators whose specification lets an output be left out look for that.
fn check_outputs(call: &Call<'_>) -> Result<(), Hazard> {
    let node = call.node;
    let operator = node.op_type();
    let writes_all = call.is_onnx() && VARIADIC.contains(&operator);
    let misses = |(place, name): (usize, &String)| name.is_empty() && (place == 0 || writes_all);
    if !OPTIONAL.contains(&operator) && node.output.iter().enumerate().any(misses) {
        let reason =
            "an output of it has no name, and ONNX Runtime has no memory to write that to: give it a name";
        return Err(Hazard::of(node, reason));
    }
    let graphs = node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs));
    if graphs.flat_map(|graph| &graph.output).any(|output| output.name().is_empty()) {
        return Err(Hazard::of(node, "an output of the graph inside of it has no name: give it one"));
    }
    Ok(())
}

fn check_attributes(call: &Call<'_>) -> Result<(), Hazard> {
    for attribute in &call.node.attribute {
        let name = attribute.name();
        let Some(given) = call.followed(attribute) else { continue };
        let numbers = match given.r#type() {
            AttributeType::Int => vec![given.i()],
            AttributeType::Ints => given.ints.clone(),
            _ => Vec::new(),
        };
        if DIVISORS.contains(&name) && numbers.iter().any(|number| *number < 1) {
            let reason =
                format!("its {name} is below 1, and ONNX Runtime divides by it: export it with 1 or more");
            return Err(Hazard::of(call.node, reason));
        }
        let is_known = match given.r#type() {
            AttributeType::String => TRANSFORMS.iter().any(|known| known.as_bytes() == given.s()),
            AttributeType::Int => (0..TRANSFORMS.len() as i64).contains(&given.i()),
            _ => true,
        };
        if name == "post_transform" && call.node.domain() == "ai.onnx.ml" && !is_known {
            let reason = "its post_transform is PROBIT or unknown, of which ONNX Runtime leaves scores unwritten: \
                export it with NONE, and apply the transform to what it gives";
            return Err(Hazard::of(call.node, reason));
        }
    }
    Ok(())
}

/// Integers are divided by nothing that may be 0, nor by -1 where the smallest may be divided.
fn check_division(call: &Call<'_>, declared: &HashMap<&str, i32>) -> Result<(), Hazard> {
    let divides = call.is_onnx() && matches!(call.node.op_type(), "Div" | "Mod");
    // That of floats, for integers, too.
    if !divides || (call.node.op_type() == "Mod" && call.int("fmod").is_some_and(|fmod| fmod != 0)) {
        return Ok(());
    }
    let (dividend, divisor) = (call.input(0).unwrap_or_default(), call.input(1).unwrap_or_default());
    let said = call.node.output.first().and_then(|name| declared.get(name.as_str())).copied();
    let result = Known::of_type(said.unwrap_or(0), false);
    match [divisor, dividend, result].iter().find_map(Known::is_integer) {
        Some(false) => Ok(()),
        Some(true) if divisor.may_divide(&dividend) => Ok(()),
        Some(true) => Err(Hazard::of(call.node, BY_ZERO)),
        None => Err(Hazard::of(call.node, NO_TYPE)),
    }
}

#[cfg(test)]
mod tests;
