//! Nodes that compute something else in training than in evaluation: batch normalisation and dropout.
//!
//! - A batch normalisation trains if its `training_mode` is 1, or, before operator set 14, if it has further outputs.
//!   Its running mean and variance become states of the graph. They must be float32 initializers that no other node
//!   reads, since steps move them.
//! - A dropout trains if its input `training_mode` is true. Before operator set 12 no such input exists. There it trains
//!   in models of PyTorch, whose exporter leaves dropouts out in evaluation mode. In models of other exporters it is the
//!   identity.

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto};

use super::builder::{Builder, Call, NamedValue, NodeRef};
use super::{Dim, GraphError, Op, ParamSpec, Source, ValueId, shape, wiring};

/// The remedy for statistics that are not a node's own.
const EXPORT: &str =
    "export with torch.onnx.export(..., dynamo=False, training=torch.onnx.TrainingMode.TRAINING)";

/// A batch normalisation whose running statistics training moves.
#[derive(Debug, Clone, PartialEq)]
pub struct Normalization {
    /// The node, for messages.
    pub node: String,
    /// The running mean, by index into the graph's states.
    pub mean: usize,
    /// The running variance, by index into the graph's states.
    pub variance: usize,
    /// Channels: elements of either statistic.
    pub channels: usize,
    /// The share of a running value that a step keeps.
    pub momentum: f32,
    /// The dimensions of its input without the channels.
    others: Vec<Dim>,
}

impl Normalization {
    /// Values of each channel in a batch of `rows`.
    pub fn values(&self, rows: usize) -> usize {
        shape::elements_at(&self.others, rows)
    }
}

/// A dropout that is active in training.
#[derive(Debug, Clone, PartialEq)]
pub struct Dropout {
    /// The node, for messages.
    pub node: String,
    /// The share of elements that become 0, above 0 and below 1.
    pub ratio: f32,
    /// Its attribute `seed`.
    pub seed: Option<i64>,
}

/// How often nodes and their branches read each tensor; an output of the graph counts as well.
pub(super) fn reads(proto: &GraphProto) -> HashMap<String, usize> {
    let mut reads = HashMap::new();
    let inputs = proto.node.iter().flat_map(wiring::reads);
    for name in inputs.chain(proto.output.iter().map(|info| info.name())) {
        *reads.entry(name.to_owned()).or_default() += 1;
    }
    reads
}

/// [`reads`] of a graph without branches and of the model that it was made from, whichever are more: the published
/// model keeps the branches that are not taken.
pub(super) fn reads_in_both(flat: &GraphProto, model: &ModelProto) -> HashMap<String, usize> {
    let mut found = reads(flat);
    for (name, count) in model.graph.as_ref().map(reads).into_iter().flatten() {
        let most = found.entry(name).or_default();
        *most = count.max(*most);
    }
    found
}

/// Refuses nodes in training mode on which the model's other outputs alone depend: the published model, which keeps
/// these outputs, would stay in training there. `order` are the nodes of `output`.
pub(super) fn check_others(
    model: &ModelProto,
    opset: i64,
    order: &[&NodeProto],
    output: &str,
) -> Result<(), GraphError> {
    let Some(proto) = model.graph.as_ref().filter(|graph| graph.output.len() > 1) else { return Ok(()) };
    let read: HashSet<*const NodeProto> = order.iter().map(|node| std::ptr::from_ref(*node)).collect();
    let is_given = |name: Option<&String>| name.is_some_and(|name| !name.is_empty());
    let trains = |node: &&NodeProto| match (node.op_type(), opset) {
        ("BatchNormalization", ..14) => node.output.iter().skip(1).any(|name| !name.is_empty()),
        ("BatchNormalization", _) => {
            node.attribute.iter().any(|attribute| attribute.name() == "training_mode" && attribute.i() != 0)
        }
        ("Dropout", ..12) => model.producer_name() == "pytorch",
        ("Dropout", _) => is_given(node.input.get(2)),
        _ => false,
    };
    let others = proto.node.iter().filter(|node| !read.contains(&std::ptr::from_ref(*node)));
    match others.flat_map(wiring::within).find(trains) {
        None => Ok(()),
        Some(node) => Err(NodeRef::of(node).form(format!(
            "it is in training mode, and output {output:?}, which the loss reads, does not depend on it: export the \
             model in evaluation mode, or keep that output alone (millrace model edit --cut {output})"
        ))),
    }
}

/// Checks that the running statistics of a node in training mode are its own.
pub(super) fn check_statistics(b: &Builder, call: &Call<'_>) -> Result<(), GraphError> {
    for index in [3, 4] {
        let name = call.input_name(index);
        if !b.float_initializers.contains(name) {
            return Err(call.site.form(format!(
                "its running statistic {name:?} is no float32 initializer, which training could move; {EXPORT}"
            )));
        }
        if b.reads.get(name).copied().unwrap_or_default() > 1 {
            return Err(call.site.form(format!(
                "its running statistic {name:?} is also read elsewhere, and training would change it there; {EXPORT}"
            )));
        }
    }
    check_outputs(b, call)
}

/// Refuses a node in training mode with a further output that is read: the published model has the first one alone.
fn check_outputs(b: &Builder, call: &Call<'_>) -> Result<(), GraphError> {
    match call.more_outputs().find(|name| b.reads.contains_key(*name)) {
        Some(name) => Err(call.site.form(format!(
            "its output {name:?} is read by another node or is an output of the graph; only its first output may be used"
        ))),
        None => Ok(()),
    }
}

/// Appends a batch normalisation of `input`, `scale` and `bias` in training mode. The caller has checked the
/// elements of its statistics.
pub(super) fn normalization(
    b: &mut Builder,
    call: &Call<'_>,
    [input, scale, bias]: [ValueId; 3],
    [epsilon, momentum]: [f32; 2],
) -> Result<ValueId, GraphError> {
    let site = &call.site;
    if epsilon <= 0.0 {
        return Err(site.form(format!("epsilon = {epsilon}: a number above 0 is needed in training mode")));
    }
    if !(0.0..=1.0).contains(&momentum) {
        return Err(site.form(format!("momentum = {momentum}: allowed are 0 to 1")));
    }
    let dims = b.dims(input).to_vec();
    let (mean, variance) = (call.float(b, 3)?, call.float(b, 4)?);
    for factor in [scale, bias, mean, variance] {
        if b.dims(factor) != &dims[1..2] {
            return Err(site.shape(format!("{} for {} channels", shape::display(b.dims(factor)), dims[1])));
        }
    }
    let channels = dims[1].at(1);
    let first = b.states.len();
    for (at, (index, value)) in [(3, mean), (4, variance)].into_iter().enumerate() {
        if let Source::Constant(elements) = &b.values[value].source
            && let Some(element) = elements.iter().find(|element| !element.is_finite())
        {
            return Err(
                site.form(format!("its running statistic {:?} holds {element}", call.input_name(index)))
            );
        }
        b.values[value].source = Source::State(first + at);
        b.states.push(ParamSpec { name: call.input_name(index).to_owned(), shape: vec![channels] });
    }
    let index = b.normalizations.len();
    b.normalizations.push(Normalization {
        node: site.node.clone(),
        mean: first,
        variance: first + 1,
        channels,
        momentum,
        others: dims.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, dim)| *dim).collect(),
    });
    b.push(Op::BatchNorm { index, epsilon }, &[input, scale, bias, mean, variance], dims, site)
}

/// The input, with random zeros in training if the node trains.
pub(super) fn dropout(b: &mut Builder, mut call: Call<'_>) -> Result<NamedValue, GraphError> {
    let ratio = call.float_attribute("ratio", 0.5)?;
    let seed = call.has_attribute("seed").then(|| call.int("seed", 0)).transpose()?;
    let mode = call.int_input(b, 2)?;
    call.finish_with(3, 2)?;
    let (trains, ratio) = match b.opset {
        ..12 => (b.is_from_pytorch, ratio),
        _ if mode.unwrap_or(0) == 0 => (false, ratio),
        _ => (true, call.constant_scalar(b, 1)?.unwrap_or(ratio)),
    };
    if !trains || ratio == 0.0 {
        let named = b.names.get(call.input_name(0)).cloned();
        return named.ok_or_else(|| call.site.form("input 0 is missing"));
    }
    if !(0.0..1.0).contains(&ratio) {
        return Err(call.site.form(format!("ratio = {ratio}: allowed are 0 to below 1")));
    }
    check_outputs(b, &call)?;
    let (input, is_merged) = call.merged(b, 0)?;
    let index = b.dropouts.len();
    b.dropouts.push(Dropout { node: call.site.node.clone(), ratio, seed });
    let dims = b.dims(input).to_vec();
    let output = b.push(Op::Dropout(index), &[input], dims, &call.site)?;
    Ok(NamedValue::Float(b.mark(output, is_merged)))
}

#[cfg(test)]
mod tests;
