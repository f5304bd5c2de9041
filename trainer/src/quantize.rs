//! Dynamic quantization: rewrites the matrix products of an ONNX graph to compute with 8-bit integers.
//!
//! A `MatMul` or `Gemm` with constant float32 weights of rank 2 that no other node reads becomes
//!
//! ```text
//! x ── DynamicQuantizeLinear ── MatMulInteger ── Cast ── Mul ── [Add] ── y
//! ```
//!
//! as ONNX Runtime's own tool does: symmetric weights, and inputs with the range of each run (8 bits,
//! unsigned). All these operators are in operator set 11, so every library that reads ONNX runs them. The
//! rest of the graph, including convolutions and the names of its inputs and outputs, stays unchanged.
//!
//! Weights have one scale per output and use 7 of their 8 bits. Processors without byte dot products add two
//! products in 16 bits, which 8-bit weights would overflow. So every processor computes the same sums.
//!
//! The range of an input covers all rows of a run, so rows that run together change each other's last digits.

mod error;
mod names;
mod rewrite;
#[cfg(test)]
mod tests;
mod weights;

use std::collections::HashMap;

use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto, TensorProto, tensor_proto};
use millrace_leaf::quoting;
use serde::Serialize;

pub use error::QuantizeError;
use rewrite::Rewrite;
use weights::Weights;

/// Oldest operator set: it introduced `DynamicQuantizeLinear`.
const OPSET_MIN: i64 = 11;
/// Newest operator set whose definitions of these operators were compared.
const OPSET_MAX: i64 = 25;
/// From this version of the file format on, weights need not be inputs.
const IR_MIN: i64 = 4;
/// Longest part of a model's name that is shown, in characters.
const SHOWN_MAX: usize = 160;

/// Operators that occur in quantized graphs only.
const QUANTIZED: [&str; 12] = [
    "ConvInteger",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "QLinearConv",
    "QLinearMatMul",
    "QuantizeLinear",
];
/// Other operators with weights, which are not quantized.
const OTHERS: [&str; 5] = ["Conv", "ConvTranspose", "GRU", "LSTM", "RNN"];

/// A matrix product that computes with integers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// Name of the node, or of its output when it has none.
    pub node: String,
    /// Its former operator: `MatMul` or `Gemm`.
    pub operator: String,
    /// Rows of its weights: elements per sum.
    pub inputs: usize,
    /// Columns of its weights: elements of its output.
    pub outputs: usize,
}

/// A node with weights that was not changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kept {
    /// Name of the node, or of its output when it has none.
    pub node: String,
    /// Its operator.
    pub operator: String,
    /// Why it was not quantized.
    pub reason: String,
}

/// A quantized model, with a report on its nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The model.
    pub model: ModelProto,
    /// The quantized products, in the graph's order; at least one.
    pub layers: Vec<Layer>,
    /// Nodes with weights that were not changed.
    pub kept: Vec<Kept>,
}

/// Quantizes a model. Never panics, whatever bytes the model was decoded from.
///
/// # Errors
/// A property that prevents the quantization of the whole model, or [`QuantizeError::Nothing`] when no node
/// could be quantized.
pub fn quantize(mut model: ModelProto) -> Result<Quantized, QuantizeError> {
    check(&model)?;
    let Some(graph) = model.graph.as_mut() else { return Err(QuantizeError::NoGraph) };
    let mut readers = HashMap::new();
    count_readers(graph, &mut readers);
    let places: HashMap<String, usize> = graph
        .initializer
        .iter()
        .enumerate()
        .map(|(place, tensor)| (tensor.name().to_owned(), place))
        .collect();
    let (mut layers, mut kept) = (Vec::new(), Vec::new());
    let nodes = std::mem::take(&mut graph.node);
    let mut rewrite = Rewrite::new(graph, &nodes);
    for node in nodes {
        for inner in subgraphs(&node) {
            record_inner_nodes(inner, &mut kept);
        }
        let operator = onnx_operator(&node);
        let found = match operator {
            Some("MatMul" | "Gemm") => weights_of(&node, rewrite.graph(), &readers, &places),
            Some(other) if OTHERS.contains(&other) => Err("only matrix products are quantized".to_owned()),
            _ => {
                rewrite.keep(node);
                continue;
            }
        };
        match found {
            Ok((place, weights)) => {
                layers.push(Layer {
                    node: shown(&node),
                    operator: node.op_type().to_owned(),
                    inputs: weights.rows,
                    outputs: weights.columns,
                });
                rewrite.replace(node, place, weights);
            }
            Err(reason) => {
                kept.push(Kept { node: shown(&node), operator: node.op_type().to_owned(), reason });
                rewrite.keep(node);
            }
        }
    }
    rewrite.finish();
    if layers.is_empty() {
        return Err(QuantizeError::no_layers(&kept));
    }
    Ok(Quantized { model, layers, kept })
}

/// Rejects a model that cannot be quantized as a whole.
fn check(model: &ModelProto) -> Result<(), QuantizeError> {
    let graph = model.graph.as_ref().ok_or(QuantizeError::NoGraph)?;
    let opset = model.opset_import.iter().find(|set| matches!(set.domain(), "" | "ai.onnx"));
    let opset = opset.map(|set| set.version());
    if !opset.is_some_and(|version| (OPSET_MIN..=OPSET_MAX).contains(&version)) {
        return Err(QuantizeError::Opset { found: opset, oldest: OPSET_MIN, newest: OPSET_MAX });
    }
    if model.ir_version() < IR_MIN {
        return Err(QuantizeError::Format { found: model.ir_version(), oldest: IR_MIN });
    }
    if !model.training_info.is_empty() {
        return Err(QuantizeError::Training);
    }
    let external = |tensor: &&TensorProto| {
        !tensor.external_data.is_empty() || tensor.data_location() == tensor_proto::DataLocation::External
    };
    if let Some(tensor) = graph.initializer.iter().find(external) {
        return Err(QuantizeError::External { tensor: quoting::shorten(tensor.name(), SHOWN_MAX) });
    }
    match quantized(graph) {
        Some(node) => Err(QuantizeError::Already {
            node: shown(node),
            operator: quoting::shorten(node.op_type(), SHOWN_MAX),
        }),
        None => Ok(()),
    }
}

/// Finds a node that occurs in quantized graphs only.
fn quantized(graph: &GraphProto) -> Option<&NodeProto> {
    graph.node.iter().find_map(|node| {
        if QUANTIZED.contains(&node.op_type()) { Some(node) } else { subgraphs(node).find_map(quantized) }
    })
}

/// The index of a node's weights among the initializers and their integers, or why the node has none.
fn weights_of(
    node: &NodeProto,
    graph: &GraphProto,
    readers: &HashMap<String, usize>,
    places: &HashMap<String, usize>,
) -> Result<(usize, Weights), String> {
    let name = match (node.op_type(), &node.input[..]) {
        (_, [_, name]) | ("Gemm", [_, name, _]) => name,
        (_, inputs) => return Err(format!("it has {} inputs", inputs.len())),
    };
    if node.output.len() != 1 {
        return Err(format!("it has {} outputs", node.output.len()));
    }
    let transposed = form(node)?;
    let place = *places.get(name).ok_or("its second input is not an initializer of the graph")?;
    let tensor = graph.initializer.get(place).ok_or("its weights are missing")?;
    match readers.get(name).copied().unwrap_or_default() {
        1 => {}
        others => return Err(format!("its weights are read in {others} places")),
    }
    Ok((place, Weights::of(tensor, transposed)?))
}

/// Whether the weights are transposed; an error when the node computes anything but `x · w [+ c]`.
fn form(node: &NodeProto) -> Result<bool, String> {
    let mut transposed = false;
    for attribute in &node.attribute {
        match (node.op_type(), attribute.name()) {
            ("Gemm", "transB") => transposed = attribute.i() != 0,
            ("Gemm", "transA") if attribute.i() == 0 => {}
            ("Gemm", "alpha" | "beta") if attribute.f() == 1.0 => {}
            ("Gemm", name @ ("transA" | "alpha" | "beta")) => {
                return Err(format!("its {name} is not the default"));
            }
            (_, name) => return Err(format!("it has the attribute {:?}", quoting::shorten(name, SHOWN_MAX))),
        }
    }
    Ok(transposed)
}

/// The operator of a node of ONNX's own domain.
fn onnx_operator(node: &NodeProto) -> Option<&str> {
    matches!(node.domain(), "" | "ai.onnx").then(|| node.op_type())
}

/// Graphs inside a control-flow node. Decoding bounds the depth.
fn subgraphs(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs))
}

/// Counts how often each value is read: by nodes, including those of inner graphs, and as an output.
fn count_readers(graph: &GraphProto, readers: &mut HashMap<String, usize>) {
    for node in &graph.node {
        for name in &node.input {
            *readers.entry(name.clone()).or_default() += 1;
        }
        for inner in subgraphs(node) {
            count_readers(inner, readers);
        }
    }
    for output in &graph.output {
        *readers.entry(output.name().to_owned()).or_default() += 1;
    }
}

/// Records nodes with weights inside control-flow nodes as unchanged.
fn record_inner_nodes(graph: &GraphProto, kept: &mut Vec<Kept>) {
    for node in &graph.node {
        let has_weights =
            |operator: &str| ["MatMul", "Gemm"].contains(&operator) || OTHERS.contains(&operator);
        if onnx_operator(node).is_some_and(has_weights) {
            let reason = "it is inside a control-flow node".to_owned();
            kept.push(Kept { node: shown(node), operator: node.op_type().to_owned(), reason });
        }
        for inner in subgraphs(node) {
            record_inner_nodes(inner, kept);
        }
    }
}

/// The name of a node, or of its output when it has none.
fn shown(node: &NodeProto) -> String {
    let output = node.output.first().map_or("", String::as_str);
    quoting::shorten(if node.name().is_empty() { output } else { node.name() }, SHOWN_MAX)
}
