//! Batch normalisations that PyTorch's exporters folded into the weights in front of them.
//!
//! Both exporters do so for a model in evaluation mode, which predicts the same. Training then moves weights that hold
//! the scale and the statistics, and no statistics follow the data. The default exporter gives the convolution the call
//! and the module of the normalisation. The earlier one gives the weights names such as `onnx::Conv_55`.

use std::collections::HashSet;

use millrace_bundle::onnx::{ModelProto, NodeProto};

use super::ahead::function;
use super::initializers::{entry, has_marks, origins};

/// The modules around a call, from the whole model to the call itself.
const SCOPES: &str = "pkg.torch.onnx.name_scopes";

/// The layers whose tensors of `trained` hold a batch normalisation: the normalisations by their modules, where the
/// exporter names these, or else the nodes that read the weights. In the order of the nodes, each once.
pub(crate) fn absorbed(model: &ModelProto, trained: &HashSet<&str>) -> Vec<String> {
    let Some(graph) = &model.graph else { return Vec::new() };
    let is_earlier = model.producer_name() == "pytorch" && !has_marks(graph);
    let mut seen = HashSet::new();
    let nodes = graph.node.iter().filter(|node| {
        matches!(node.op_type(), "Conv" | "ConvTranspose" | "Gemm" | "MatMul")
            && node.input.iter().any(|input| trained.contains(input.as_str()))
    });
    let layers = nodes.filter_map(|node| match is_earlier {
        true => is_unnamed(node, trained).then(|| node_name(node)),
        false => normalisation(node),
    });
    layers.filter(|layer| seen.insert(layer.clone())).collect()
}

/// Whether the earlier exporter computed the weight of a convolution: other weights have the names of parameters. The
/// transposed weight of a linear layer has such a name too.
fn is_unnamed(node: &NodeProto, trained: &HashSet<&str>) -> bool {
    let made = format!("onnx::{}_", node.op_type());
    let weight = node.input.get(1).map(String::as_str).unwrap_or_default();
    matches!(node.op_type(), "Conv" | "ConvTranspose")
        && weight.starts_with(&made)
        && trained.contains(weight)
}

/// The module of a normalisation, if a node computes its call: the scope before the last one, which is the call.
fn normalisation(node: &NodeProto) -> Option<String> {
    let scopes: Vec<&str> = origins(entry(&node.metadata_props, SCOPES).unwrap_or_default()).collect();
    let call = function(node).or(scopes.last().copied())?;
    if !call.contains("batch_norm") {
        return None;
    }
    Some(match scopes[..] {
        [.., module, _] => module.to_owned(),
        _ => node_name(node),
    })
}

fn node_name(node: &NodeProto) -> String {
    match node.name() {
        "" => node.output.first().cloned().unwrap_or_default(),
        name => name.to_owned(),
    }
}
