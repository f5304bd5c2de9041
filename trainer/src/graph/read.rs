//! Model reader: turns an ONNX model into a checked graph; resolves names, order and operators.

use std::collections::HashSet;

use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto, TensorProto, attribute_proto::AttributeType};

use super::builder::{Builder, Call, NamedValue, NodeRef, VALUES_MAX};
use super::{
    Binary, Dim, Graph, GraphError, Node, Op, ParamSpec, Source, Unary, ValueId, arithmetic, linear, shape,
    sizes, spatial, tensor,
    wiring::{input, order, output, producers},
};

/// Operators whose derivatives tests check by finite differences and whose results they compare with ONNX
/// Runtime. Shape and Gather are supported only where they compute the shape of another tensor.
pub const SUPPORTED_OPERATORS: &[&str] = &[
    "Add",
    "AveragePool",
    "Concat",
    "Constant",
    "Conv",
    "Div",
    "Erf",
    "Exp",
    "Flatten",
    "Gather",
    "Gelu",
    "Gemm",
    "GlobalAveragePool",
    "Identity",
    "LayerNormalization",
    "LeakyRelu",
    "Log",
    "LogSoftmax",
    "MatMul",
    "MaxPool",
    "Mul",
    "Neg",
    "ReduceMean",
    "ReduceSum",
    "Relu",
    "Reshape",
    "Shape",
    "Sigmoid",
    "Softmax",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Tanh",
    "Transpose",
    "Unsqueeze",
];

/// Oldest operator set: from 7 on, broadcasting is implicit.
const OPSET_MIN: i64 = 7;

/// Newest operator set whose definitions were compared with this reader.
const OPSET_MAX: i64 = 25;

pub(super) fn malformed(reason: impl Into<String>) -> GraphError {
    GraphError::Malformed { reason: reason.into() }
}

pub(super) fn read(model: &ModelProto) -> Result<Graph, GraphError> {
    let opset = opset(model)?;
    let proto = model.graph.as_ref().ok_or_else(|| malformed("it holds no graph"))?;
    if !proto.sparse_initializer.is_empty() {
        return Err(malformed("sparse initializers are not supported"));
    }
    if proto.node.len() > VALUES_MAX {
        return Err(GraphError::Limit { what: "nodes", found: proto.node.len(), limit: VALUES_MAX });
    }
    let initializers = initializers(proto)?;
    let (input, input_dims) = input(proto, &initializers)?;
    let output = output(proto)?;
    let producers = producers(proto, input, &initializers)?;
    let order = order(proto, output, &producers, input, &initializers)?;

    let mut b = Builder { opset, ..Builder::default() };
    let site = NodeRef { op: "input".to_owned(), node: input.to_owned() };
    let input_id = b.value(input_dims, Source::Input, false, &site)?;
    b.names.insert(input.to_owned(), NamedValue::Float(input_id));
    let read_names: HashSet<&str> = order.iter().flat_map(|node| &node.input).map(String::as_str).collect();
    for tensor in &proto.initializer {
        if read_names.contains(tensor.name()) {
            let named = initializer(&mut b, tensor)?;
            b.names.insert(tensor.name().to_owned(), named);
        }
    }
    for node in &order {
        let named = lower(&mut b, node)?;
        let name = node.output.first().cloned().unwrap_or_default();
        b.names.insert(name, named);
    }
    let output_id = match b.names.get(output) {
        Some(NamedValue::Float(value)) => *value,
        _ => {
            return Err(malformed(format!("output {output:?} is not a float tensor")));
        }
    };
    finish(b, input_id, output_id, input, output)
}

fn finish(
    mut b: Builder,
    input_id: usize,
    output_id: usize,
    input: &str,
    output: &str,
) -> Result<Graph, GraphError> {
    let dims = b.dims(output_id);
    let leading = dims.first() == Some(&Dim::Rows(1));
    if !leading || shape::rows_axis(&dims[1..]).is_some() {
        return Err(malformed(format!(
            "its output {output:?} has the shape {}, [rows, …] is needed",
            shape::display(dims)
        )));
    }
    if !b.values[output_id].trained {
        return Err(malformed(
            "its output depends on no float initializer of rank 1 or more: there is nothing to train",
        ));
    }
    let ends_in_softmax = ends_in_softmax(&b, output_id);
    // Parameters are numbered in the order of the initializers.
    Ok(Graph {
        values: std::mem::take(&mut b.values),
        nodes: b.nodes,
        params: b.params,
        input: input_id,
        output: output_id,
        input_name: input.to_owned(),
        output_name: output.to_owned(),
        ends_in_softmax,
    })
}

/// Whether a Softmax over the classes produces the output, also through nodes that only move elements.
fn ends_in_softmax(b: &Builder, output: ValueId) -> bool {
    let classes = Dim::Fixed(shape::elements_at(b.dims(output), 1));
    let mut value = output;
    loop {
        match b.nodes.iter().find(|node| node.output == value) {
            Some(Node { op: Op::Softmax(axis), .. }) => return b.dims(value)[*axis] == classes,
            Some(Node { op: Op::Reshape | Op::Permute(_), inputs, .. }) => value = inputs[0],
            Some(Node { op: Op::Concat(_), inputs, .. }) if inputs.len() == 1 => value = inputs[0],
            _ => return false,
        }
    }
}

fn opset(model: &ModelProto) -> Result<i64, GraphError> {
    let version = model
        .opset_import
        .iter()
        .find(|set| matches!(set.domain(), "" | "ai.onnx"))
        .map(|set| set.version())
        .ok_or_else(|| malformed("it names no version of the ONNX operator set"))?;
    if (OPSET_MIN..=OPSET_MAX).contains(&version) {
        Ok(version)
    } else {
        Err(malformed(format!("it uses operator set {version}, {OPSET_MIN} to {OPSET_MAX} are supported")))
    }
}

fn initializers(proto: &GraphProto) -> Result<HashSet<&str>, GraphError> {
    let mut names = HashSet::new();
    for tensor in &proto.initializer {
        if tensor.name().is_empty() || !names.insert(tensor.name()) {
            return Err(malformed(format!("initializer {:?} has no name or appears twice", tensor.name())));
        }
    }
    Ok(names)
}

fn initializer(b: &mut Builder, tensor: &TensorProto) -> Result<NamedValue, GraphError> {
    let site = NodeRef { op: "initializer".to_owned(), node: tensor.name().to_owned() };
    if tensor::is_int(tensor) {
        return Ok(NamedValue::ints(&tensor::ints(tensor)?));
    }
    let elements = tensor::floats(tensor)?;
    let shape = tensor::dims(tensor)?;
    let dims = shape.iter().map(|size| Dim::Fixed(*size)).collect();
    let value = if shape.is_empty() {
        b.value(dims, Source::Constant(elements), false, &site)?
    } else {
        let value = b.value(dims, Source::Param(b.params.len()), true, &site)?;
        b.params.push(ParamSpec { name: tensor.name().to_owned(), shape });
        value
    };
    Ok(NamedValue::Float(value))
}

fn constant(b: &mut Builder, node: &NodeProto) -> Result<NamedValue, GraphError> {
    let site = NodeRef::of(node);
    let [attribute] = &node.attribute[..] else {
        return Err(site.form("a constant has exactly one attribute"));
    };
    let (shape, elements) = match (attribute.name(), attribute.r#type()) {
        ("value", AttributeType::Tensor) => {
            let tensor = attribute.t.as_ref().ok_or_else(|| site.form("its tensor is missing"))?;
            if tensor::is_int(tensor) {
                return Ok(NamedValue::ints(&tensor::ints(tensor)?));
            }
            (tensor::dims(tensor)?, tensor::floats(tensor)?)
        }
        ("value_float", AttributeType::Float) => (vec![], vec![attribute.f()]),
        ("value_floats", AttributeType::Floats) => (vec![attribute.floats.len()], attribute.floats.clone()),
        ("value_int", AttributeType::Int) => return Ok(NamedValue::ints(&[attribute.i()])),
        ("value_ints", AttributeType::Ints) => return Ok(NamedValue::ints(&attribute.ints)),
        (name, _) => return Err(site.form(format!("attribute {name:?} is not supported"))),
    };
    if elements.iter().any(|value| !value.is_finite()) {
        return Err(site.form("its value is not finite"));
    }
    let dims = shape.into_iter().map(Dim::Fixed).collect();
    let value = b.value(dims, Source::Constant(elements), false, &site)?;
    Ok(NamedValue::Float(value))
}

fn lower(b: &mut Builder, node: &NodeProto) -> Result<NamedValue, GraphError> {
    let call = Call::new(node);
    if !matches!(node.domain(), "" | "ai.onnx") {
        return Err(call.site.unsupported());
    }
    let value = match node.op_type() {
        "Constant" => return constant(b, node),
        "Shape" => return sizes::shape_of(b, call),
        "Gather" => return sizes::gather(b, call),
        "Concat" if call.on_ints(b) => return sizes::concat(b, call),
        "Squeeze" | "Unsqueeze" if call.on_ints(b) => return sizes::sizes_unchanged(b, call),
        "Identity" => {
            call.finish(1)?;
            let name = node.input.first().map(String::as_str).unwrap_or_default();
            return b.names.get(name).cloned().ok_or_else(|| call.site.form("input 0 is missing"));
        }
        "Add" => arithmetic::binary(b, call, Binary::Add)?,
        "Sub" => arithmetic::binary(b, call, Binary::Sub)?,
        "Mul" => arithmetic::binary(b, call, Binary::Mul)?,
        "Div" => arithmetic::binary(b, call, Binary::Div)?,
        "Relu" => arithmetic::unary(b, call, Unary::Relu)?,
        "Sigmoid" => arithmetic::unary(b, call, Unary::Sigmoid)?,
        "Tanh" => arithmetic::unary(b, call, Unary::Tanh)?,
        "Erf" => arithmetic::unary(b, call, Unary::Erf)?,
        "Exp" => arithmetic::unary(b, call, Unary::Exp)?,
        "Log" => arithmetic::unary(b, call, Unary::Log)?,
        "Sqrt" => arithmetic::unary(b, call, Unary::Sqrt)?,
        "Neg" => arithmetic::unary(b, call, Unary::Neg)?,
        "LeakyRelu" => arithmetic::leaky_relu(b, call)?,
        "Gelu" => arithmetic::gelu(b, call)?,
        "Softmax" => arithmetic::softmax(b, call, Op::Softmax)?,
        "LogSoftmax" => arithmetic::softmax(b, call, Op::LogSoftmax)?,
        "ReduceSum" => arithmetic::reduce(b, call, Op::Sum, 13)?,
        "ReduceMean" => arithmetic::reduce(b, call, Op::Mean, 18)?,
        "GlobalAveragePool" => arithmetic::global_average_pool(b, call)?,
        "LayerNormalization" => arithmetic::layer_normalization(b, call)?,
        "MatMul" => linear::matmul(b, call)?,
        "Gemm" => linear::gemm(b, call)?,
        "Reshape" => linear::reshape(b, call)?,
        "Flatten" => linear::flatten(b, call)?,
        "Squeeze" => linear::squeeze(b, call)?,
        "Unsqueeze" => linear::unsqueeze(b, call)?,
        "Transpose" => linear::transpose(b, call)?,
        "Concat" => linear::concat(b, call)?,
        "Conv" => spatial::conv(b, call)?,
        "MaxPool" => spatial::pool(b, call, Op::MaxPool)?,
        "AveragePool" => spatial::pool(b, call, Op::AveragePool)?,
        _ => return Err(call.site.unsupported()),
    };
    Ok(NamedValue::Float(value))
}
