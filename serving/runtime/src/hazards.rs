//! Hazard checks: detects graphs that would end the process in ONNX Runtime, or return uninitialized memory.
//!
//! The server refuses these graphs before it creates a session: one request could end the process with all other
//! models, or reveal earlier contents of memory. The rules use only the graph, its subgraphs and its functions:
//!
//! - No integer division of the smallest integer by -1, for which the processor raises a signal. Constants, extents
//!   and bounds derived from them (`bounds`) must exclude it. Nor a division by 0 if ONNX Runtime is older than 1.25.
//! - Attributes that ONNX Runtime divides by, for example strides, are 1 or more.
//! - Outputs that an operator writes have a name.
//! - `post_transform` of `ai.onnx.ml` is not one that ONNX Runtime treats as `PROBIT`, of which it writes only one of
//!   two scores.
//!
//! Empty tensors depend on requests: `session::nothing` decides which graphs may get them.

mod bounds;
mod external;
mod known;
mod types;

use std::cell::Cell;
use std::collections::HashMap;
use std::iter;

use millrace_bundle::Bundle;
use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::type_proto::Value as Type;
use millrace_bundle::onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto,
};
use prost::Message;

use known::ValueFacts;

use crate::runtime;

/// Maximum nesting depth of function calls.
const CALLS_MAX: usize = 16;
/// Maximum number of nodes to walk; nodes of a function count once for each call.
const NODES_MAX: usize = 1 << 20;
/// Maximum number of characters of a name in messages.
const NAME_CHARS_MAX: usize = 80;

/// Attributes that ONNX Runtime divides by.
const DIVISORS: [&str; 6] = ["strides", "dilations", "group", "blocksize", "num_groups", "num_outputs"];
/// Score transforms that ONNX Runtime knows, except `PROBIT`; it treats every other word as `PROBIT`.
const TRANSFORMS: [&str; 4] = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"];
/// Operators that may omit any of their outputs.
const OPTIONAL: [&str; 5] = ["LSTM", "GRU", "RNN", "DynamicQuantizeLSTM", "AttnLSTM"];
/// Operators that write each of their outputs, and crash on an output without a name.
const VARIADIC: [&str; 5] = ["If", "Loop", "Scan", "SequenceMap", "Split"];

const BY_MINUS_1: &str = "it divides integers, and ONNX Runtime ends the process where -1 divides the smallest one. The \
    graph does not rule that out: keep the divisor at 0 or above, or the dividend above the smallest integer, in it (Max \
    or Clip with a constant), divide floats, or, where it never happens, set trusted_divisors = true in \
    [serving.models.NAME]";
const BY_ZERO: &str = "it divides integers, and ONNX Runtime before 1.25 ends the process where a divisor is 0, or is -1 \
    and divides the smallest integer. The graph does not rule that out: update ONNX Runtime, keep the divisor at 1 or \
    above in the graph (Max or Clip with a constant), divide floats, or, where it never happens, set trusted_divisors = \
    true in [serving.models.NAME]";
const NO_TYPE: &str = "it is not known whether it divides integers, for which ONNX Runtime ends the process with some \
    divisors: write the types of its values into the file, as onnx.shape_inference.infer_shapes does, or, where -1 never \
    divides the smallest integer, set trusted_divisors = true in [serving.models.NAME]";

/// A hazard in a graph, and its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operator} {node:?} that gives {value:?}: {reason}")]
pub struct Hazard {
    /// The operator, with its domain unless that is ONNX's own.
    pub operator: String,
    /// Name of the node.
    pub node: String,
    /// The first of its outputs that has a name.
    pub value: String,
    /// Description of the problem, and how to fix it.
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

/// Allowed divisors of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisors {
    /// Only divisors that the graph proves safe.
    Shown,
    /// All divisors: the user vouches for them.
    Trusted,
}

/// Checks that the ONNX Runtime of this process can safely run a graph on tensors that are not empty.
///
/// # Errors
/// The first node that may end the process, or return uninitialized memory.
pub fn check(model: &ModelProto, divisors: Divisors) -> Result<(), Hazard> {
    Rules::of(divisors).check(model)
}

/// Checks the graph of a bundle as [`check`] does.
///
/// # Errors
/// As [`check`].
pub fn check_bundle(bundle: &Bundle, divisors: Divisors) -> Result<(), Hazard> {
    check(bundle.graph(), divisors).or_else(|hazard| {
        // The outline omits long constants, which may be the divisors.
        let Ok(mut model) = ModelProto::decode(bundle.model_onnx().as_ref()) else { return Err(hazard) };
        if let Some(graph) = &mut model.graph {
            external::read(graph, &bundle.files());
        }
        check(&model, divisors)
    })
}

/// Whether a graph divides integers safely even if its inputs are empty and their extents have any size.
pub(crate) fn allows_empty_inputs(model: &ModelProto) -> bool {
    Rules { may_be_empty: true, ..Rules::of(Divisors::Shown) }.check(model).is_ok()
}

/// Rules that a graph must follow.
#[derive(Debug, Clone, Copy)]
struct Rules {
    divisors: Divisors,
    /// Whether a divisor of 0 ends the process.
    zero_ends: bool,
    /// Whether inputs of the model may be empty.
    may_be_empty: bool,
}

impl Rules {
    fn of(divisors: Divisors) -> Rules {
        Rules { divisors, zero_ends: !runtime::refuses_zero_divisors(), may_be_empty: false }
    }

    fn check(self, model: &ModelProto) -> Result<(), Hazard> {
        let Some(graph) = &model.graph else { return Ok(()) };
        let walk = Walk { functions: &model.functions, nodes: Cell::new(0), rules: self };
        walk.graph(graph, None, Body { bound: [&[], &[]], depth: 0 }).map(drop)
    }
}

/// Values by name, including those of the enclosing graph.
struct Scope<'a, 'o> {
    own: HashMap<&'a str, ValueFacts>,
    outer: Option<&'o Scope<'o, 'o>>,
}

impl Scope<'_, '_> {
    fn get(&self, name: &str) -> Option<ValueFacts> {
        self.own.get(name).copied().or_else(|| self.outer?.get(name))
    }
}

/// Attributes of the function that encloses a node: those given by its caller, then the defaults.
#[derive(Clone, Copy)]
struct Body<'a> {
    bound: [&'a [AttributeProto]; 2],
    depth: usize,
}

/// A node with its inputs.
struct Call<'a> {
    node: &'a NodeProto,
    bound: [&'a [AttributeProto]; 2],
    /// Inputs by position; omitted ones are `None`.
    inputs: Vec<Option<ValueFacts>>,
}

impl Call<'_> {
    /// Whether the operator is a standard ONNX operator.
    fn is_onnx(&self) -> bool {
        matches!(self.node.domain(), "" | "ai.onnx")
    }

    fn input(&self, place: usize) -> Option<ValueFacts> {
        self.inputs.get(place).copied().flatten()
    }

    /// An attribute; a reference to an attribute of the enclosing function is resolved.
    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        // Of attributes with the same name, ONNX Runtime uses the last.
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
    rules: Rules,
}

impl<'a> Walk<'a> {
    /// The known facts about the outputs of a graph.
    fn graph(
        &self,
        graph: &'a GraphProto,
        outer: Option<&Scope<'_, '_>>,
        body: Body<'a>,
    ) -> Result<Vec<ValueFacts>, Hazard> {
        let mut scope = Scope { own: HashMap::new(), outer };
        let small = outer.is_none() && !self.rules.may_be_empty;
        for input in &graph.input {
            scope.own.insert(input.name(), ValueFacts::of_type(element_type(input.r#type.as_ref()), small));
        }
        for tensor in &graph.initializer {
            scope.own.insert(tensor.name(), ValueFacts::of_tensor(tensor));
        }
        for sparse in &graph.sparse_initializer {
            if let Some(values) = &sparse.values {
                scope.own.insert(values.name(), ValueFacts::of_type(values.data_type(), false));
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
                    result =
                        ValueFacts::of_type(declared.get(name.as_str()).copied().unwrap_or(0), result.small);
                }
                scope.own.insert(name, result);
            }
        }
        Ok(())
    }

    /// The known facts about the outputs of a node.
    fn node(
        &self,
        node: &'a NodeProto,
        declared: &HashMap<&str, i32>,
        scope: &Scope<'_, '_>,
        body: Body<'a>,
    ) -> Result<Vec<ValueFacts>, Hazard> {
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
            // In a graph passed by the caller, references do not mean the caller's attributes and could mean that
            // graph.
            let is_own = attribute.ref_attr_name().is_empty();
            let inner = Body { bound: if is_own { body.bound } else { [&[], &[]] }, ..body };
            for graph in followed.g.iter().chain(&followed.graphs) {
                inside.push(self.graph(graph, Some(scope), inner)?);
            }
        }
        if self.rules.divisors == Divisors::Shown {
            check_division(&call, declared, self.rules.zero_ends)?;
        }
        let mut functions = self.functions.iter().filter(|function| may_be(function, node)).peekable();
        // ONNX Runtime prefers its own operators to functions, where it has them.
        let own = is_of_runtime(node.domain()) || functions.peek().is_none();
        let mut results = own.then(|| bounds::results(&call, &inside));
        for function in functions {
            let given = self.function(function, &call, body)?;
            results = Some(match results {
                None => given,
                Some(results) => {
                    let others = given.into_iter().chain(iter::repeat(ValueFacts::default()));
                    results.into_iter().zip(others).map(|(one, other)| one.or(other)).collect()
                }
            });
        }
        Ok(results.unwrap_or_default())
    }

    /// The known facts about the outputs of a function.
    fn function(
        &self,
        function: &'a FunctionProto,
        call: &Call<'a>,
        body: Body<'a>,
    ) -> Result<Vec<ValueFacts>, Hazard> {
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

/// Whether ONNX Runtime has operators of its own in a domain.
fn is_of_runtime(domain: &str) -> bool {
    matches!(domain, "" | "ai.onnx" | "ai.onnx.ml" | "com.microsoft")
}

/// Whether a node may call a function of the model. Overloads count only outside the domains of ONNX Runtime.
fn may_be(function: &FunctionProto, node: &NodeProto) -> bool {
    let plain = |domain: &str| matches!(domain, "" | "ai.onnx");
    let (ours, theirs) = (function.domain(), node.domain());
    function.name() == node.op_type()
        && (ours == theirs || (plain(ours) && plain(theirs)))
        && (is_of_runtime(theirs) || function.overload() == node.overload())
}

fn declared_types<'b>(values: impl Iterator<Item = &'b ValueInfoProto>) -> HashMap<&'b str, i32> {
    values.map(|value| (value.name(), element_type(value.r#type.as_ref()))).collect()
}

/// The element type of a tensor, or of the tensors in a sequence; 0 if unknown.
fn element_type(declared: Option<&TypeProto>) -> i32 {
    match declared.and_then(|declared| declared.value.as_ref()) {
        Some(Type::TensorType(tensor)) => tensor.elem_type(),
        Some(Type::SparseTensorType(tensor)) => tensor.elem_type(),
        Some(Type::SequenceType(sequence)) => element_type(sequence.elem_type.as_deref()),
        Some(Type::OptionalType(optional)) => element_type(optional.elem_type.as_deref()),
        Some(Type::MapType(_) | Type::OpaqueType(_)) | None => 0,
    }
}

/// Refuses unnamed outputs, which have no memory. Operators that may omit an output by specification check for that.
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
        return Err(Hazard::of(node, "an output of its subgraph has no name: give it one"));
    }
    Ok(())
}

fn check_attributes(call: &Call<'_>) -> Result<(), Hazard> {
    for attribute in &call.node.attribute {
        let name = attribute.name();
        let Some(given) = call.followed(attribute) else { continue };
        if DIVISORS.contains(&name) {
            // An outline leaves out a list of hundreds of numbers.
            if given.r#type() == AttributeType::Undefined {
                let reason = format!("its {name} has no type: export the model again");
                return Err(Hazard::of(call.node, reason));
            }
            let one = (given.r#type() == AttributeType::Int).then(|| given.i());
            if one.iter().chain(&given.i).chain(&given.ints).any(|number| *number < 1) {
                let reason = format!(
                    "its {name} is below 1, and ONNX Runtime divides by it: export it with 1 or more"
                );
                return Err(Hazard::of(call.node, reason));
            }
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

/// Refuses an integer division that may end the process.
fn check_division(call: &Call<'_>, declared: &HashMap<&str, i32>, zero_ends: bool) -> Result<(), Hazard> {
    let divides = call.is_onnx() && matches!(call.node.op_type(), "Div" | "Mod");
    // With `fmod`, Mod computes in floats, for integers, too.
    if !divides || (call.node.op_type() == "Mod" && call.int("fmod").is_some_and(|fmod| fmod != 0)) {
        return Ok(());
    }
    let (dividend, divisor) = (call.input(0).unwrap_or_default(), call.input(1).unwrap_or_default());
    let said = call.node.output.first().and_then(|name| declared.get(name.as_str())).copied();
    let result = ValueFacts::of_type(said.unwrap_or(0), false);
    // Dividend, divisor and result have the same type.
    let Some(known) = [divisor, dividend, result].into_iter().find(|known| known.is_integer().is_some())
    else {
        return Err(Hazard::of(call.node, NO_TYPE));
    };
    if known.is_integer() == Some(false) || divisor.may_divide(&dividend, known.datatype, zero_ends) {
        return Ok(());
    }
    Err(Hazard::of(call.node, if zero_ends { BY_ZERO } else { BY_MINUS_1 }))
}

#[cfg(test)]
mod tests;
