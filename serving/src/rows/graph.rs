//! The walk through a graph, node by node, with the functions that its model brings along.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use millrace_bundle::onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    tensor_shape_proto::dimension::Value as Dim, type_proto::Value as Type,
};

use super::Dependence;
use super::call::{Call, Outcome};
use super::constants;
use super::extent::{BATCH, Extent, Symbol};
use super::table::{self, Domain};
use super::value::{Kind, Value, extents_of};

/// Functions that call others, at most.
const CALLS_MAX: usize = 16;
/// Nodes that are walked through, those of functions once for each call.
const NODES_MAX: usize = 1 << 20;

/// Values by name.
type Scope<'a> = HashMap<&'a str, Value>;

/// What stays the same on the way.
struct Walk<'a> {
    functions: &'a [FunctionProto],
    symbols: Cell<Symbol>,
    nodes: Cell<usize>,
}

/// Where nodes belong to: a graph or the body of a function.
#[derive(Clone, Copy)]
struct Body<'a> {
    opsets: &'a [OperatorSetIdProto],
    bound: [&'a [AttributeProto]; 2],
    depth: usize,
}

/// The value of an output of the model's graph, by name.
pub(super) struct Outputs<'a> {
    scope: Scope<'a>,
}

impl Outputs<'_> {
    /// Whether the output is rows, one for each row of the inputs, in their order.
    pub(super) fn check(&self, name: &str) -> Result<(), Arc<Dependence>> {
        let refuse = |reason: &str| Err(Arc::new(Dependence::of_output(name, reason)));
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

/// Walks through the graph of a model, whose inputs have rows along their first axes.
pub(super) fn walk(model: &ModelProto) -> Outputs<'_> {
    let walk = Walk { functions: &model.functions, symbols: Cell::new(BATCH + 1), nodes: Cell::new(0) };
    let mut scope = Scope::new();
    if let Some(graph) = &model.graph {
        walk.inputs(graph, &mut scope);
        constants_of(graph, &mut scope);
        let body = Body { opsets: &model.opset_import, bound: [&[], &[]], depth: 0 };
        walk.nodes(&graph.node, body, &mut scope);
    }
    Outputs { scope }
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

    /// Inputs as requests give them. Those with a constant's name keep the constant.
    fn inputs(&self, graph: &'a GraphProto, scope: &mut Scope<'a>) {
        for input in &graph.input {
            let shape = match input.r#type.as_ref().and_then(|of| of.value.as_ref()) {
                Some(Type::TensorType(tensor)) => tensor.shape.as_ref(),
                _ => None,
            };
            let dims = shape.map(|shape| {
                let extent = |(axis, dim): (usize, &millrace_bundle::onnx::tensor_shape_proto::Dimension)| {
                    match dim.value {
                        // Names of extents promise nothing that ONNX Runtime holds requests to.
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
                    Value::mixed(Arc::new(Dependence::of_node(node, name, "it is not known what it gives")))
                });
                if !name.is_empty() {
                    scope.insert(name, value);
                }
            }
        }
    }

    /// The outputs of a node, one for each of its names.
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
        let (name, overload) = (node.op_type(), node.overload());
        let function = self.functions.iter().find(|function| {
            function.name() == name && function.domain() == node.domain() && function.overload() == overload
        });
        let domain = Domain::of(node.domain());
        if let Some(function) = function {
            // ONNX Runtime may take its own operator of this name, or the function.
            if domain != Domain::Other {
                return failed("the model defines an operator of this name itself");
            }
            if body.depth >= CALLS_MAX {
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
                Domain::Other => format!("nothing is known of operators of {:?}", node.domain()),
                _ => format!("nothing is known of version {opset} of its operator set"),
            });
        }
        let free = inputs.iter().flatten().all(Value::is_free);
        if node.attribute.iter().any(|attribute| attribute.g.is_some() || !attribute.graphs.is_empty()) {
            let inner = free && node.attribute.iter().all(|attribute| is_free_inside(attribute, scope));
            return if inner && table::is_deterministic(domain, name) {
                each(&|_: &str| Value::free(None))
            } else {
                failed("it runs a graph of its own")
            };
        }
        if name == "Constant"
            && domain == Domain::Onnx
            && !node.attribute.iter().any(|it| !it.ref_attr_name().is_empty())
        {
            let call = Call { node, inputs, opset, bound: body.bound, symbols: &self.symbols };
            return vec![table::evaluate(&call).unwrap_or_else(|| constants::of_node(&node.attribute))];
        }
        let call = Call { node, inputs, opset, bound: body.bound, symbols: &self.symbols };
        if domain == Domain::Onnx
            && let Some(value) = table::evaluate(&call)
        {
            return vec![value];
        }
        let outcome: Outcome = match table::rule(domain, name) {
            Some(rule) => rule(&call),
            None => Err("it is not known to keep rows apart".into()),
        };
        match outcome {
            Ok(values) => values,
            Err(_) if free && table::is_deterministic(domain, name) => each(&|_: &str| Value::free(None)),
            Err(reason) => failed(&reason),
        }
    }

    /// The outputs of a function for these inputs.
    fn call(
        &self,
        function: &'a FunctionProto,
        node: &'a NodeProto,
        inputs: Vec<Option<Value>>,
        body: Body<'a>,
    ) -> Vec<Value> {
        let refers = |attribute: &AttributeProto| !attribute.ref_attr_name().is_empty();
        let missing = |name: &str| {
            Value::mixed(Arc::new(Dependence::of_node(node, name, "it is not known what its function gives")))
        };
        // Attributes that come from further out are not followed.
        if node.attribute.iter().any(refers) {
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

/// Whether the graphs inside an attribute use nothing from outside that depends on rows, and only operators that
/// give the same for the same.
fn is_free_inside(attribute: &AttributeProto, scope: &Scope<'_>) -> bool {
    attribute.g.iter().chain(&attribute.graphs).all(|graph| {
        let used = graph.node.iter().flat_map(|node| &node.input);
        let used = used.chain(graph.output.iter().filter_map(|output| output.name.as_ref()));
        // A name that is given inside may hide one from outside, which then is taken for used.
        used.filter_map(|name| scope.get(name.as_str())).all(Value::is_free)
            && graph.node.iter().all(|node| {
                table::is_deterministic(Domain::of(node.domain()), node.op_type())
                    && node.attribute.iter().all(|attribute| is_free_inside(attribute, scope))
            })
    })
}
