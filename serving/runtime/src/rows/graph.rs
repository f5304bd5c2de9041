//! Graph walk: applies the row rules node by node, including the nodes of the model's functions.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use millrace_bundle::onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto,
    ValueInfoProto, attribute_proto::AttributeType, tensor_shape_proto::dimension::Value as Dim,
    type_proto::Value as Type,
};

use super::Dependence;
use super::call::{Call, Outcome};
use super::constants;
use super::extent::{BATCH, Extent, Symbol};
use super::table::{self, Domain};
use super::value::{Kind, Value, extents_of};

/// Maximum nesting depth of function calls.
const CALLS_MAX: usize = 16;
/// Maximum number of nodes to walk; nodes of a function count once for each call.
const NODES_MAX: usize = 1 << 20;

/// Reason why rows are not followed into the subgraphs of `If`, `Loop` and `Scan`.
const OWN_GRAPH: &str = "it runs a graph of its own";

/// Values by name.
type Scope<'a> = HashMap<&'a str, Value>;

/// State of the whole walk.
struct Walk<'a> {
    functions: &'a [FunctionProto],
    symbols: Cell<Symbol>,
    nodes: Cell<usize>,
}

/// The graph or function body that nodes belong to.
#[derive(Clone, Copy)]
struct Body<'a> {
    opsets: &'a [OperatorSetIdProto],
    bound: [&'a [AttributeProto]; 2],
    depth: usize,
}

/// The values of the model's graph by name.
pub(super) struct Outputs<'a> {
    scope: Scope<'a>,
    /// Reason why no result for the graph is reliable.
    refused: Option<Arc<Dependence>>,
}

impl Outputs<'_> {
    /// Checks that an output consists of one row for each row of the inputs, in their order.
    pub(super) fn check(&self, name: &str) -> Result<(), Arc<Dependence>> {
        let refuse = |reason: &str| Err(Arc::new(Dependence::of_output(name, reason)));
        if let Some(why) = &self.refused {
            return Err(Arc::clone(why));
        }
        let Some(value) = self.scope.get(name) else { return refuse("no node gives it") };
        match &value.kind {
            Kind::Mixed(why) => Err(Arc::clone(why)),
            Kind::Free => refuse("it does not depend on the rows"),
            Kind::Sized => refuse("it depends on the number of rows alone"),
            Kind::Rows { axis: 0, outer } if outer.is_one() => {
                match value.dims.as_ref().and_then(|dims| dims.first()) {
                    Some(extent) if *extent == Extent::symbol(BATCH) => Ok(()),
                    _ => refuse("it is not known to have one row for each row of the inputs"),
                }
            }
            Kind::Rows { .. } => refuse("its rows are not along the first axis"),
        }
    }
}

/// Walks a model's graph, whose inputs have rows along their first axes.
pub(super) fn walk(model: &ModelProto) -> Outputs<'_> {
    let walk = Walk { functions: &model.functions, symbols: Cell::new(BATCH + 1), nodes: Cell::new(0) };
    let mut scope = Scope::new();
    let mut refused = None;
    if let Some(graph) = &model.graph {
        walk.inputs(graph, &mut scope);
        constants_of(graph, &mut scope);
        let body = Body { opsets: &model.opset_import, bound: [&[], &[]], depth: 0 };
        walk.nodes(&graph.node, body, &mut scope);
        refused = given_twice(graph).or_else(|| contradicted(graph, &scope)).map(Arc::new);
    }
    Outputs { scope, refused }
}

/// The first name that has two values: ONNX Runtime may use either.
fn given_twice(graph: &GraphProto) -> Option<Dependence> {
    let sparse = graph.sparse_initializer.iter().filter_map(|sparse| sparse.values.as_ref());
    let constants: Vec<&str> = graph.initializer.iter().chain(sparse).map(|tensor| tensor.name()).collect();
    // An input with the name of a constant has the constant's value.
    let initialized: HashSet<&str> = constants.iter().copied().collect();
    let inputs = graph.input.iter().map(ValueInfoProto::name).filter(|name| !initialized.contains(name));
    let made = graph.node.iter().flat_map(|node| &node.output).map(String::as_str);
    let all = constants.iter().copied().chain(inputs).chain(made);
    repeated(all).map(|name| Dependence::of_output(name, "two values have this name"))
}

/// The first name that occurs more than once.
fn repeated<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    let mut names = names.filter(|name| !name.is_empty());
    names.find(|name| !seen.insert(*name))
}

fn shape_of(value: &ValueInfoProto) -> Option<&TensorShapeProto> {
    match value.r#type.as_ref()?.value.as_ref()? {
        Type::TensorType(tensor) => tensor.shape.as_ref(),
        _ => None,
    }
}

/// The first value whose declared shape differs from the shape derived from the inputs. ONNX Runtime trusts declared
/// shapes: it replaces nodes that compute with them by constants.
fn contradicted(graph: &GraphProto, scope: &Scope<'_>) -> Option<Dependence> {
    let measured = graph.node.iter().filter(|node| matches!(node.op_type(), "Shape" | "Size"));
    let measured: HashSet<&str> = measured.flat_map(|node| &node.input).map(String::as_str).collect();
    let outputs: HashSet<&str> = graph.output.iter().map(ValueInfoProto::name).collect();
    let differs = |value: &&ValueInfoProto| {
        let name = value.name();
        let found = scope.get(name).and_then(|value| value.dims.as_ref());
        let (Some(found), Some(said)) = (found, shape_of(value)) else { return false };
        // Sessions get declared shapes only of outputs. If a node measures an output, its shape must be confirmed.
        let is_used = outputs.contains(name) && measured.contains(name);
        let extent_differs = |(said, found): (&Option<Dim>, &Extent)| match said {
            Some(Dim::DimValue(said)) => match found.as_known() {
                Some(found) => found != *said,
                None => found.batches() > 0 || is_used,
            },
            _ => false,
        };
        said.dim.len() != found.len() || said.dim.iter().map(|dim| &dim.value).zip(found).any(extent_differs)
    };
    let value = graph.value_info.iter().chain(&graph.output).find(differs)?;
    let reason = "its declared shape is not the one that follows from the inputs";
    Some(Dependence::of_output(value.name(), reason))
}

fn constants_of<'a>(graph: &'a GraphProto, scope: &mut Scope<'a>) {
    for tensor in &graph.initializer {
        scope.insert(tensor.name(), constants::value(tensor));
    }
    for sparse in &graph.sparse_initializer {
        if let Some(values) = &sparse.values {
            scope.insert(values.name(), Value::free(Some(extents_of(&sparse.dims))));
        }
    }
}

impl<'a> Walk<'a> {
    fn fresh(&self) -> Extent {
        let symbol = self.symbols.get();
        self.symbols.set(symbol + 1);
        Extent::symbol(symbol)
    }

    /// Inputs as requests provide them. An input with the name of a constant keeps the constant.
    fn inputs(&self, graph: &'a GraphProto, scope: &mut Scope<'a>) {
        for input in &graph.input {
            let dims = shape_of(input).map(|shape| {
                let extent = |(axis, dim): (usize, &millrace_bundle::onnx::tensor_shape_proto::Dimension)| {
                    match dim.value {
                        // ONNX Runtime does not enforce equality of extents with the same name.
                        _ if axis == 0 => Extent::symbol(BATCH),
                        Some(Dim::DimValue(extent)) if extent >= 0 => Extent::known(extent),
                        _ => self.fresh(),
                    }
                };
                shape.dim.iter().enumerate().map(extent).collect::<Vec<_>>()
            });
            let value = match dims {
                Some(dims) if !dims.is_empty() => Value::rows(0, Extent::known(1), dims),
                _ => Value::mixed(Arc::new(Dependence::of_input(input.name()))),
            };
            scope.insert(input.name(), value);
        }
    }

    fn nodes(&self, nodes: &'a [NodeProto], body: Body<'a>, scope: &mut Scope<'a>) {
        for node in nodes {
            self.nodes.set(self.nodes.get() + 1);
            let values = self.outputs(node, body, scope);
            let mut values = values.into_iter();
            for name in &node.output {
                let value = values.next().unwrap_or_else(|| {
                    Value::mixed(Arc::new(Dependence::of_node(node, name, "its result is not known")))
                });
                if !name.is_empty() {
                    scope.insert(name, value);
                }
            }
        }
    }

    /// The outputs of a node, one for each output name.
    fn outputs(&self, node: &'a NodeProto, body: Body<'a>, scope: &Scope<'a>) -> Vec<Value> {
        let each = |value: &dyn Fn(&str) -> Value| -> Vec<Value> {
            node.output.iter().map(|name| value(name)).collect()
        };
        let failed = |reason: &str| {
            each(&|name: &str| Value::mixed(Arc::new(Dependence::of_node(node, name, reason))))
        };
        if self.nodes.get() > NODES_MAX {
            return failed("the graph is too large");
        }
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            match scope.get(name.as_str()) {
                _ if name.is_empty() => inputs.push(None),
                None => return failed(&format!("no node gives its input {name:?}")),
                Some(Value { kind: Kind::Mixed(why), .. }) => {
                    return each(&|_: &str| Value::mixed(Arc::clone(why)));
                }
                Some(value) => inputs.push(Some(value.clone())),
            }
        }
        let name = node.op_type();
        let domain = Domain::of(node.domain());
        if repeated(node.attribute.iter().map(AttributeProto::name)).is_some() {
            return failed("it has an attribute twice");
        }
        // For domains other than ONNX's own, overloads of a function have separate names.
        let is_meant = |function: &&FunctionProto| {
            is_named(function, node) && (domain != Domain::Other || function.overload() == node.overload())
        };
        let mut functions = self.functions.iter().filter(is_meant);
        if let Some(function) = functions.next() {
            // ONNX Runtime may use its own operator of this name, or the function.
            if domain != Domain::Other {
                return failed("the model defines an operator of this name itself");
            }
            if functions.next().is_some() {
                return failed("the model has several functions of this name");
            }
            if body.depth >= CALLS_MAX {
                // Each caller may call once more, and again: the walk ends.
                self.nodes.set(NODES_MAX + 1);
                return failed("its functions call each other too often");
            }
            return self.call(function, node, inputs, body);
        }
        let sets = body.opsets.iter().filter(|set| Domain::of(set.domain()) == domain);
        let mut versions = sets.map(OperatorSetIdProto::version);
        let opset = versions.next().unwrap_or(i64::from(domain == Domain::Microsoft));
        if domain != Domain::Other && versions.any(|other| other != opset) {
            return failed("the model has two versions of its operator set");
        }
        if !domain.has_rules_for(opset) {
            return failed(&match domain {
                Domain::Other => format!("the operators of domain {:?} are unknown", node.domain()),
                _ => format!("version {opset} of its operator set is unknown"),
            });
        }
        let free = inputs.iter().flatten().all(Value::is_free);
        if node.attribute.iter().any(|attribute| attribute.g.is_some() || !attribute.graphs.is_empty()) {
            let inner = free && node.attribute.iter().all(|attribute| self.is_free_inside(attribute, scope));
            return if inner && table::is_deterministic(domain, name) {
                each(&|_: &str| Value::free(None))
            } else {
                failed(OWN_GRAPH)
            };
        }
        if name == "Constant" && domain == Domain::Onnx {
            let [attribute] = node.attribute.as_slice() else { return failed("it does not have one value") };
            let known = attribute.ref_attr_name().is_empty();
            return vec![if known { constants::of_node(attribute) } else { Value::free(None) }];
        }
        let (bound, symbols, misread) = (body.bound, &self.symbols, Cell::new(false));
        let call = Call { node, inputs, opset, bound, symbols, misread };
        if call.refers_to_graph() {
            return failed(OWN_GRAPH);
        }
        let evaluated = if domain == Domain::Onnx { table::evaluate(&call) } else { None };
        let outcome: Outcome = match (evaluated, table::rule(domain, name)) {
            (Some(value), _) => Ok(vec![value]),
            (None, Some(rule)) => rule(&call),
            (None, None) => Err("it is not known to keep rows apart".into()),
        };
        if call.misread.get() {
            return failed("one of its attributes has another type than the operator takes");
        }
        match outcome {
            Ok(values) => values,
            Err(_) if free && table::is_deterministic(domain, name) => each(&|_: &str| Value::free(None)),
            Err(reason) => failed(&reason),
        }
    }

    /// Whether the graphs in an attribute use no outer value that depends on rows, and only deterministic operators.
    fn is_free_inside(&self, attribute: &AttributeProto, scope: &Scope<'_>) -> bool {
        use AttributeType as Is;
        // A reference to an attribute of an outer function may be a graph, unless its type excludes it.
        let is_known = attribute.ref_attr_name().is_empty()
            || matches!(
                attribute.r#type(),
                Is::Float | Is::Int | Is::String | Is::Tensor | Is::Floats | Is::Ints | Is::Strings
            );
        let is_same = |node: &NodeProto| {
            table::is_deterministic(Domain::of(node.domain()), node.op_type())
                && !self.functions.iter().any(|function| is_named(function, node))
                && node.attribute.iter().all(|attribute| self.is_free_inside(attribute, scope))
        };
        is_known
            && attribute.g.iter().chain(&attribute.graphs).all(|graph| {
                let used = graph.node.iter().flat_map(|node| &node.input);
                let used = used.chain(graph.output.iter().filter_map(|output| output.name.as_ref()));
                // A name that is defined inside may hide an outer one, which then counts as used.
                used.filter_map(|name| scope.get(name.as_str())).all(Value::is_free)
                    && graph.node.iter().all(is_same)
            })
    }

    /// The outputs of a function call with these inputs.
    fn call(
        &self,
        function: &'a FunctionProto,
        node: &'a NodeProto,
        inputs: Vec<Option<Value>>,
        body: Body<'a>,
    ) -> Vec<Value> {
        let refers = |attribute: &AttributeProto| !attribute.ref_attr_name().is_empty();
        let missing = |name: &str| {
            Value::mixed(Arc::new(Dependence::of_node(node, name, "the result of its function is not known")))
        };
        let names = function.input.iter().chain(function.node.iter().flat_map(|node| &node.output));
        let is_clear = repeated(names.map(String::as_str)).is_none()
            && repeated(function.attribute_proto.iter().map(AttributeProto::name)).is_none();
        // Attributes that refer to outer attributes are not resolved.
        if !is_clear || node.attribute.iter().any(refers) {
            return node.output.iter().map(|name| missing(name)).collect();
        }
        let mut scope = Scope::new();
        for (name, value) in function.input.iter().zip(inputs) {
            if let Some(value) = value {
                scope.insert(name, value);
            }
        }
        let bound = [node.attribute.as_slice(), function.attribute_proto.as_slice()];
        let inner = Body { opsets: &function.opset_import, bound, depth: body.depth + 1 };
        self.nodes(&function.node, inner, &mut scope);
        let outputs = function.output.iter().zip(&node.output);
        outputs
            .map(|(inside, name)| scope.get(inside.as_str()).cloned().unwrap_or_else(|| missing(name)))
            .collect()
    }
}

/// Whether a node may call a function of the model, judging by domain and name.
fn is_named(function: &FunctionProto, node: &NodeProto) -> bool {
    let same_domain = match Domain::of(node.domain()) {
        Domain::Other => function.domain() == node.domain(),
        domain => Domain::of(function.domain()) == domain,
    };
    same_domain && function.name() == node.op_type()
}
