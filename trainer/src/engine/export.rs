//! Export of the loaded model with new weights in its initializers, for inference; everything else stays unchanged.

use std::collections::HashSet;

use millrace_bundle::onnx::{ModelProto, TensorProto};

use super::ParamLayout;
use crate::graph::Graph;

/// Weights go to `raw_data` (little-endian), so that equal weights encode to equal bytes.
pub(super) fn with_weights(model: &ModelProto, layout: &ParamLayout, weights: &[f32]) -> ModelProto {
    let mut model = model.clone();
    let mut params = layout.params.iter().peekable();
    for tensor in model.graph.iter_mut().flat_map(|g| &mut g.initializer) {
        if let Some(param) = params.next_if(|p| p.name == tensor.name()) {
            fill(tensor, &weights[param.range.clone()]);
        }
    }
    model
}

fn fill(tensor: &mut TensorProto, elements: &[f32]) {
    tensor.raw_data = Some(elements.iter().flat_map(|element| element.to_le_bytes()).collect());
    tensor.float_data.clear();
}

/// Sets the running statistics, and gives nodes with a training mode the form of evaluation: batch normalisations use
/// their running statistics, dropouts become Identity. A model without such nodes stays as it is.
pub(super) fn for_inference(
    mut model: ModelProto,
    graph: &Graph,
    layout: &ParamLayout,
    states: &[f32],
) -> ModelProto {
    let Some(proto) = model.graph.as_mut().filter(|_| graph.has_training_mode()) else { return model };
    for state in &layout.states {
        if let Some(tensor) = proto.initializer.iter_mut().find(|tensor| tensor.name() == state.name) {
            fill(tensor, &states[state.range.clone()]);
        }
    }
    let moving: HashSet<&str> = layout.states.iter().map(|state| state.name.as_str()).collect();
    let dropping: HashSet<&str> = graph.dropouts().iter().map(|dropout| dropout.node.as_str()).collect();
    let mut removed: HashSet<String> = HashSet::new();
    for node in &mut proto.node {
        let name =
            if node.name().is_empty() { node.output.first().map_or("", String::as_str) } else { node.name() };
        match node.op_type() {
            "BatchNormalization" if node.input.get(3).is_some_and(|mean| moving.contains(mean.as_str())) => {
                for attribute in node.attribute.iter_mut().filter(|a| a.name() == "training_mode") {
                    attribute.i = Some(0);
                }
            }
            "Dropout" if dropping.contains(name) => {
                node.op_type = Some("Identity".to_owned());
                node.attribute.clear();
                node.input.truncate(1);
            }
            _ => continue,
        }
        removed.extend(node.output.drain(node.output.len().min(1)..));
    }
    proto.value_info.retain(|info| !removed.contains(info.name()));
    model
}
