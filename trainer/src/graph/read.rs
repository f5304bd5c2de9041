//! Model reader: turns an ONNX model into a checked graph; resolves names, order and operators.

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto, attribute_proto::AttributeType};

use super::budget::Budget;
use super::builder::{Builder, Call, NamedValue, NodeRef, VALUES_MAX};
use super::determined::Determined;
use super::initializers::{Roles, check_folded, initializer};
use super::ints::Ints;
use super::reduction::Reduction;
use super::spatial::Pool;
use super::types::Kind;
use super::{
    Binary, Compare, Dim, Graph, GraphError, Input, Node, Op, Source, Unary, ValueId, affine, arithmetic,
    attention, branches, einsum, gather, linear, merged, movement, normalization, positions, recurrent,
    reduction, resize, rows, sampling, sequences, shape, sizes, spatial, tensor, training, transposed, types,
    unpool,
    wiring::{Declared, inputs, order, output, producers, reads},
};

/// Bound of an input's integers, also where no table bounds them: float32 holds all numbers below it exactly.
pub(super) const INDEX_BELOW: u32 = 1 << 24;

/// Operators whose derivatives tests check by finite differences and whose results they compare with ONNX
/// Runtime.
pub const SUPPORTED_OPERATORS: &[&str] = &[
    "Abs",
    "Acos",
    "Acosh",
    "Add",
    "AffineGrid",
    "And",
    "ArgMax",
    "ArgMin",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Attention",
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "CastLike",
    "Ceil",
    "Celu",
    "Clip",
    "Col2Im",
    "Concat",
    "Constant",
    "ConstantOfShape",
    "Conv",
    "ConvTranspose",
    "Cos",
    "Cosh",
    "CumSum",
    "DepthToSpace",
    "Div",
    "Dropout",
    "Einsum",
    "Elu",
    "Equal",
    "Erf",
    "Exp",
    "Expand",
    "EyeLike",
    "Flatten",
    "Floor",
    "GRU",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gelu",
    "Gemm",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Greater",
    "GreaterOrEqual",
    "GridSample",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "If",
    "InstanceNormalization",
    "IsInf",
    "IsNaN",
    "LRN",
    "LSTM",
    "LayerNormalization",
    "LeakyRelu",
    "Less",
    "LessOrEqual",
    "Log",
    "LogSoftmax",
    "Loop",
    "LpNormalization",
    "MatMul",
    "Max",
    "MaxPool",
    "MaxUnpool",
    "Mean",
    "Min",
    "Mish",
    "Mod",
    "Mul",
    "Neg",
    "Not",
    "OneHot",
    "Or",
    "PRelu",
    "Pad",
    "Pow",
    "RMSNormalization",
    "RNN",
    "Range",
    "Reciprocal",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    "Relu",
    "Reshape",
    "Resize",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Selu",
    "SequenceAt",
    "Shape",
    "Shrink",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Size",
    "Slice",
    "Softmax",
    "Softplus",
    "Softsign",
    "SpaceToDepth",
    "Split",
    "SplitToSequence",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "Swish",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Tile",
    "TopK",
    "Transpose",
    "Trilu",
    "Unsqueeze",
    "Upsample",
    "Where",
    "Xor",
];

/// Oldest operator set: from 7 on, broadcasting is implicit.
const OPSET_MIN: i64 = 7;

/// Newest operator set whose definitions were compared with this reader.
const OPSET_MAX: i64 = 25;

pub(super) fn malformed(reason: impl Into<String>) -> GraphError {
    GraphError::Malformed { reason: reason.into() }
}

pub(super) fn read(model: &ModelProto, wanted: Option<&str>) -> Result<Graph, GraphError> {
    let graph = lowered(model, wanted, true)?;
    if graph.values[graph.output].trained {
        return Ok(graph);
    }
    Err(malformed(
        "its output depends on no trained parameter (a float initializer of rank 1 or more): there is nothing to train",
    ))
}

/// Reads a model that need not have a trained parameter: what its output `wanted`, or its only one, depends on.
pub(super) fn infer(model: &ModelProto, wanted: Option<&str>) -> Result<Graph, GraphError> {
    lowered(model, wanted, false)
}

fn lowered(model: &ModelProto, wanted: Option<&str>, for_training: bool) -> Result<Graph, GraphError> {
    let flat = branches::flattened(model, wanted)?;
    let given = model;
    let model = flat.as_ref().unwrap_or(given);
    let opset = opset(model)?;
    let proto = model.graph.as_ref().ok_or_else(|| malformed("it holds no graph"))?;
    if !proto.sparse_initializer.is_empty() {
        return Err(malformed("sparse initializers are not supported"));
    }
    if proto.node.len() > VALUES_MAX {
        return Err(GraphError::Limit { what: "nodes", found: proto.node.len(), limit: VALUES_MAX });
    }
    let initializers = initializers(proto)?;
    let roles = Roles::of(model, proto);
    let declared = inputs(proto, &initializers)?;
    let output = output(proto, wanted)?;
    let producers = producers(proto, &declared, &initializers)?;
    let order = order(proto, output, &producers, &declared, &initializers)?;
    training::check_others(model, opset, &order, output)?;
    if for_training {
        merged::check(proto, &order)?;
    }

    let mut b = Builder {
        opset,
        is_from_pytorch: model.producer_name() == "pytorch",
        reads: training::reads_in_both(proto, given),
        budget: Budget::of(proto),
        ..Builder::default()
    };
    let inputs = begin(&mut b, proto, &roles, &declared, &order, for_training)?;
    if for_training {
        check_folded(&roles, proto, &b.params)?;
    }
    let mut reads: HashMap<&str, usize> = HashMap::from([(output, 1)]);
    for name in order.iter().flat_map(|node| &node.input) {
        *reads.entry(name).or_default() += 1;
    }
    for node in &order {
        let (element, found) = lower(&mut b, node)?;
        name_outputs(&mut b, node, element, found)?;
        // Known integers go once all nodes that read them were lowered.
        for name in node.input.iter().map(String::as_str) {
            let left = reads.entry(name).or_default();
            *left = left.saturating_sub(1);
            if *left == 0
                && let Some(NamedValue::Ints(ints)) = b.names.get(name)
            {
                if producers.contains_key(name) {
                    b.budget.release_integers(ints.elements.len());
                }
                b.names.remove(name);
            }
        }
    }
    let output_id = match b.names.get(output) {
        Some(NamedValue::Float(value)) if b.row_numbers.contains_key(value) => {
            return Err(malformed(format!(
                "its output {output:?} holds numbers of rows, or places of a MaxPool"
            )));
        }
        Some(NamedValue::Float(value)) => *value,
        _ => {
            return Err(malformed(format!("output {output:?} is not a float tensor")));
        }
    };
    finish(b, inputs, output_id, output)
}

/// Adds the inputs of a graph, and those of its initializers that the nodes `order` read.
pub(super) fn begin(
    b: &mut Builder,
    proto: &GraphProto,
    roles: &Roles<'_>,
    declared: &[Declared<'_>],
    order: &[&NodeProto],
    for_training: bool,
) -> Result<Vec<Input>, GraphError> {
    let mut inputs = Vec::with_capacity(declared.len());
    for input in declared {
        inputs.push(add_input(b, &inputs, input)?);
    }
    let read_names: HashSet<&str> = order.iter().flat_map(|node| reads(node)).collect();
    for tensor in &proto.initializer {
        if read_names.contains(tensor.name()) {
            let named = initializer(b, roles, tensor, for_training)?;
            if tensor::is_float(tensor) {
                b.float_initializers.insert(tensor.name().to_owned());
            }
            b.names.insert(tensor.name().to_owned(), named);
            let element = DataType::try_from(tensor.data_type()).unwrap_or(DataType::Undefined);
            b.elements.insert(tensor.name().to_owned(), element);
        }
    }
    Ok(inputs)
}

/// Gives the outputs of a node that was lowered their names.
pub(super) fn name_outputs(
    b: &mut Builder,
    node: &NodeProto,
    element: DataType,
    found: Vec<NamedValue>,
) -> Result<(), GraphError> {
    let rounds = rounds(b, node, element);
    for (at, (name, named)) in node.output.iter().zip(found).enumerate() {
        let element = types::of_output(node.op_type(), at, element);
        if let NamedValue::Float(value) = &named
            && rounds
        {
            b.other_floats.insert(*value);
        }
        if let NamedValue::Ints(ints) = &named {
            let site = NodeRef::of(node);
            ints.fit(element, &site)?;
            b.budget.charge_integers(ints.elements.len(), &site)?;
        }
        b.elements.insert(name.clone(), element);
        b.names.insert(name.clone(), named);
    }
    Ok(())
}

/// Whether a node computes in a float type other than FLOAT, whose numbers float32 may not hold.
fn rounds(b: &Builder, node: &NodeProto, element: DataType) -> bool {
    let is_other = |element: DataType| types::kind(element) == Kind::Float && element != DataType::Float;
    match node.op_type() {
        // They move numbers. Constants of DOUBLE are rounded as a cast to FLOAT does.
        "Constant" | "ConstantOfShape" | "Identity" | "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze"
        | "Expand" | "Transpose" | "Slice" | "Concat" | "Where" => false,
        "Cast" | "CastLike" => matches!(element, DataType::Float16 | DataType::Bfloat16),
        _ => {
            let given = node.input.iter().filter_map(|name| b.elements.get(name));
            given.copied().chain([element]).any(is_other)
        }
    }
}

/// Adds an input behind the ones `before` it.
fn add_input(b: &mut Builder, before: &[Input], declared: &Declared<'_>) -> Result<Input, GraphError> {
    let Declared { name, dims, element } = declared;
    let site = NodeRef { op: "input".to_owned(), node: (*name).to_owned() };
    let form = format!("{} {}", element.as_str_name(), shape::display(dims));
    let value = b.value(dims.clone(), Source::Input, false, &site)?;
    b.names.insert((*name).to_owned(), NamedValue::Float(value));
    b.elements.insert((*name).to_owned(), *element);
    let width = shape::elements_at(b.dims(value), 1);
    let start = before.last().map_or(0, |last| last.range.end);
    if start + width > shape::ELEMENTS_MAX {
        return Err(site.shape(format!("the inputs have more than {} elements per row", shape::ELEMENTS_MAX)));
    }
    let below = match types::kind(*element) {
        Kind::Integer => Some(INDEX_BELOW),
        Kind::Bool => Some(2),
        Kind::Float | Kind::Other => None,
    };
    if let Some(below) = below {
        b.budget.charge(width.saturating_mul(2), &site)?;
        let first = b.index_bounds.len();
        b.index_bounds.resize(first + width, below);
        b.origins.insert(value, (first as u32..(first + width) as u32).collect());
    }
    // Filled in once all tables are known.
    let below = below.map(|_| Vec::new());
    Ok(Input { name: (*name).to_owned(), value, range: start..start + width, below, form })
}

fn finish(
    mut b: Builder,
    mut inputs: Vec<Input>,
    output_id: usize,
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
    let ends_in_softmax = ends_in_softmax(&b, output_id);
    let mut bounds = std::mem::take(&mut b.index_bounds).into_iter();
    for input in &mut inputs {
        if let Some(below) = &mut input.below {
            below.extend(bounds.by_ref().take(input.range.len()));
        }
    }
    let determined = Determined::of(&mut b, output_id)?;
    // Parameters are numbered in the order of the initializers.
    Ok(Graph {
        values: std::mem::take(&mut b.values),
        nodes: b.nodes,
        params: b.params,
        states: b.states,
        normalizations: b.normalizations,
        dropouts: b.dropouts,
        determined,
        inputs,
        output: output_id,
        output_name: output.to_owned(),
        ends_in_softmax,
    })
}

/// Whether a Softmax over the classes produces the output, also through nodes that only move elements.
fn ends_in_softmax(b: &Builder, output: ValueId) -> bool {
    let classes = Dim::Fixed(shape::elements_at(b.dims(output), 1));
    let mut value = output;
    loop {
        match b.node_of(value) {
            Some(Node { op: Op::Softmax(axis), .. }) => return b.dims(value)[*axis] == classes,
            Some(Node { op: Op::Reshape | Op::Permute(_), inputs, .. }) => value = inputs[0],
            Some(Node { op: Op::Concat(_), inputs, .. }) if inputs.len() == 1 => value = inputs[0],
            _ => return false,
        }
    }
}

pub(super) fn opset(model: &ModelProto) -> Result<i64, GraphError> {
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

pub(super) fn initializers(proto: &GraphProto) -> Result<HashSet<&str>, GraphError> {
    let mut names = HashSet::new();
    for tensor in &proto.initializer {
        if tensor.name().is_empty() || !names.insert(tensor.name()) {
            return Err(malformed(format!("initializer {:?} has no name or appears twice", tensor.name())));
        }
    }
    Ok(names)
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
                return Ok(NamedValue::Ints(Ints::of(tensor::dims(tensor)?, &tensor::ints(tensor)?)));
            }
            (tensor::dims(tensor)?, tensor::constants(tensor)?)
        }
        ("value_float", AttributeType::Float) => (vec![], vec![attribute.f()]),
        ("value_floats", AttributeType::Floats) => (vec![attribute.floats.len()], attribute.floats.clone()),
        ("value_int", AttributeType::Int) => return Ok(NamedValue::Ints(Ints::of(vec![], &[attribute.i()]))),
        ("value_ints", AttributeType::Ints) => {
            return Ok(NamedValue::Ints(Ints::of(vec![attribute.ints.len()], &attribute.ints)));
        }
        (name, _) => return Err(site.form(format!("attribute {name:?} is not supported"))),
    };
    if elements.iter().any(|value| value.is_nan()) {
        return Err(site.form("its value is not a number"));
    }
    // An empty tensor stands for an operand that is missing.
    if elements.is_empty() {
        return Ok(NamedValue::Ints(Ints::of(shape, &[])));
    }
    b.constant(&shape, elements, &site).map(NamedValue::Float)
}

/// Lowers a node to the element type and the values of its outputs.
pub(super) fn lower(b: &mut Builder, node: &NodeProto) -> Result<(DataType, Vec<NamedValue>), GraphError> {
    let call = Call::new(node);
    if !matches!(node.domain(), "" | "ai.onnx") || !SUPPORTED_OPERATORS.contains(&node.op_type()) {
        return Err(call.site.unsupported());
    }
    match node.op_type() {
        "SplitToSequence" => return sequences::split(b, node),
        "SequenceAt" => return sequences::at(b, node),
        _ => {}
    }
    let element = types::infer(b, &mut Call::new(node))?;
    if let Some(found) = rows::lower(b, node, element)? {
        return Ok((element, vec![found]));
    }
    let floats = |values: Vec<ValueId>| (element, values.into_iter().map(NamedValue::Float).collect());
    match node.op_type() {
        "LSTM" | "GRU" | "RNN" => return recurrent::recurrent(b, call).map(floats),
        "Split" => return movement::split(b, call).map(floats),
        "TopK" => return positions::top(b, call).map(floats),
        "MaxPool" => return spatial::max_pool(b, call).map(floats),
        _ => {}
    }
    if call.input_count() > 0
        && call.all_ints(b)
        && let Some(folded) = sizes::fold(b, Call::new(node), node.op_type())
    {
        return Ok((element, vec![folded?]));
    }
    let named = match node.op_type() {
        "Constant" => constant(b, node)?,
        "Shape" => sizes::shape_of(b, call)?,
        "Size" => sizes::size_of(b, call)?,
        "ConstantOfShape" => sizes::constant_of_shape(b, call)?,
        "Cast" | "CastLike" => sizes::cast(b, call, element)?,
        "Expand" => sizes::expand(b, call)?,
        "EyeLike" => movement::eye_like(b, call, element)?,
        "Identity" => identity(b, &call)?,
        "Dropout" => training::dropout(b, call)?,
        op => NamedValue::Float(lower_float(b, call, op)?),
    };
    Ok((element, vec![named]))
}

/// The input itself.
fn identity(b: &Builder, call: &Call<'_>) -> Result<NamedValue, GraphError> {
    call.finish_with(1, 1)?;
    b.names.get(call.input_name(0)).cloned().ok_or_else(|| call.site.form("input 0 is missing"))
}

fn lower_float(b: &mut Builder, call: Call<'_>, op: &str) -> Result<ValueId, GraphError> {
    match op {
        "Add" => arithmetic::binary(b, call, Binary::Add),
        "Sub" => arithmetic::binary(b, call, Binary::Sub),
        "Mul" => arithmetic::binary(b, call, Binary::Mul),
        "Div" => arithmetic::divide(b, call),
        "Mod" => arithmetic::modulo(b, call),
        "Pow" => arithmetic::pow(b, call),
        "Max" => arithmetic::several(b, call, Binary::Max, false),
        "Min" => arithmetic::several(b, call, Binary::Min, false),
        "Sum" => arithmetic::several(b, call, Binary::Add, false),
        "Mean" => arithmetic::several(b, call, Binary::Add, true),
        "Equal" => arithmetic::compare(b, call, Compare::Equal, false),
        "Less" => arithmetic::compare(b, call, Compare::Less, false),
        "LessOrEqual" => arithmetic::compare(b, call, Compare::LessOrEqual, false),
        "Greater" => arithmetic::compare(b, call, Compare::Less, true),
        "GreaterOrEqual" => arithmetic::compare(b, call, Compare::LessOrEqual, true),
        "And" | "Or" | "Xor" | "Not" => arithmetic::logic(b, call, op),
        "Where" => arithmetic::where_(b, call),
        "IsNaN" => arithmetic::is_nan(b, call),
        "IsInf" => arithmetic::is_infinite(b, call),
        "Clip" => arithmetic::clip(b, call),
        "LeakyRelu" => arithmetic::leaky_relu(b, call),
        "Gelu" => arithmetic::gelu(b, call),
        "Elu" | "Selu" | "Celu" | "HardSigmoid" | "HardSwish" | "Mish" | "Swish" | "Softsign"
        | "ThresholdedRelu" | "Shrink" | "PRelu" => arithmetic::activation(b, call, op),
        "Softmax" => arithmetic::softmax(b, call, Op::Softmax),
        "LogSoftmax" => arithmetic::softmax(b, call, Op::LogSoftmax),
        "ReduceSum" => reduction::reduce(b, call, Reduction::Sum),
        "ReduceMean" => reduction::reduce(b, call, Reduction::Mean),
        "ReduceMax" => reduction::reduce(b, call, Reduction::Max),
        "ReduceMin" => reduction::reduce(b, call, Reduction::Min),
        "ReduceProd" => reduction::reduce(b, call, Reduction::Prod),
        "ReduceL1" => reduction::reduce(b, call, Reduction::L1),
        "ReduceL2" => reduction::reduce(b, call, Reduction::L2),
        "ReduceLogSum" => reduction::reduce(b, call, Reduction::LogSum),
        "ReduceLogSumExp" => reduction::reduce(b, call, Reduction::LogSumExp),
        "ReduceSumSquare" => reduction::reduce(b, call, Reduction::SumSquare),
        "GlobalAveragePool" => reduction::global_pool(b, call, Reduction::Mean),
        "GlobalMaxPool" => reduction::global_pool(b, call, Reduction::Max),
        "LayerNormalization" => normalization::layer(b, call),
        "RMSNormalization" => normalization::root_mean_square(b, call),
        "InstanceNormalization" => normalization::instance(b, call),
        "GroupNormalization" => normalization::group(b, call),
        "BatchNormalization" => normalization::batch(b, call),
        "LpNormalization" => normalization::norm(b, call),
        "MatMul" => linear::matmul(b, call),
        "Gemm" => linear::gemm(b, call),
        "Einsum" => einsum::einsum(b, call),
        "Attention" => attention::attention(b, call),
        "Reshape" => linear::reshape(b, call),
        "Flatten" => linear::flatten(b, call),
        "Squeeze" => linear::squeeze(b, call),
        "Unsqueeze" => linear::unsqueeze(b, call),
        "Transpose" => linear::transpose(b, call),
        "Concat" => linear::concat(b, call),
        "Gather" => gather::gather(b, call),
        "GatherND" => gather::gather_nd(b, call),
        "GatherElements" => positions::gather_elements(b, call),
        "ScatterElements" => positions::scatter_elements(b, call),
        "ScatterND" => positions::scatter_nd(b, call),
        "ArgMax" => positions::extreme(b, call, true),
        "ArgMin" => positions::extreme(b, call, false),
        "OneHot" => positions::one_hot(b, call),
        "AffineGrid" => affine::affine_grid(b, call),
        "GridSample" => sampling::grid_sample(b, call),
        "Slice" => movement::slice(b, call),
        "Pad" => movement::pad(b, call),
        "Tile" => movement::tile(b, call),
        "Trilu" => movement::trilu(b, call),
        "CumSum" => movement::cumulative_sum(b, call),
        "Range" => sizes::range_of_floats(b, &call),
        "DepthToSpace" => movement::depth_to_space(b, call),
        "SpaceToDepth" => movement::space_to_depth(b, call),
        "Resize" | "Upsample" => resize::resize(b, call),
        "Conv" => spatial::conv(b, call),
        "ConvTranspose" => transposed::conv_transpose(b, call),
        "Col2Im" => transposed::col2im(b, call),
        "MaxUnpool" => unpool::max_unpool(b, call),
        "LRN" => spatial::local_response(b, call),
        "AveragePool" => spatial::pool(b, call, Pool::Average),
        _ => match unary_operator(op) {
            Some(kind) => arithmetic::unary(b, call, kind),
            None => {
                Err(call.site.form("its operands must be integers that are known when the model is read"))
            }
        },
    }
}

/// The operation of an element-wise operator with one input and no attributes.
fn unary_operator(op: &str) -> Option<Unary> {
    Some(match op {
        "Relu" => Unary::Relu,
        "Sigmoid" => Unary::Sigmoid,
        "Tanh" => Unary::Tanh,
        "Erf" => Unary::Erf,
        "Exp" => Unary::Exp,
        "Log" => Unary::Log,
        "Sqrt" => Unary::Sqrt,
        "Neg" => Unary::Neg,
        "Abs" => Unary::Abs,
        "Reciprocal" => Unary::Reciprocal,
        "Softplus" => Unary::Softplus,
        "Sin" => Unary::Sin,
        "Cos" => Unary::Cos,
        "Tan" => Unary::Tan,
        "Asin" => Unary::Asin,
        "Acos" => Unary::Acos,
        "Atan" => Unary::Atan,
        "Sinh" => Unary::Sinh,
        "Cosh" => Unary::Cosh,
        "Asinh" => Unary::Asinh,
        "Acosh" => Unary::Acosh,
        "Atanh" => Unary::Atanh,
        "Sign" => Unary::Sign,
        "Floor" => Unary::Floor,
        "Ceil" => Unary::Ceil,
        "Round" => Unary::Round,
        _ => return None,
    })
}
