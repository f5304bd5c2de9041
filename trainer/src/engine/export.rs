//! Export of the loaded model with new weights in its initializers; everything else stays unchanged.

use millrace_bundle::onnx::ModelProto;

use super::ParamLayout;

/// Weights go to `raw_data` (little-endian), so that equal weights encode to equal bytes.
pub(super) fn with_weights(model: &ModelProto, layout: &ParamLayout, weights: &[f32]) -> ModelProto {
    let mut model = model.clone();
    let mut params = layout.params.iter().peekable();
    for tensor in model.graph.iter_mut().flat_map(|g| &mut g.initializer) {
        if let Some(param) = params.next_if(|p| p.name == tensor.name()) {
            let part = &weights[param.range.clone()];
            tensor.raw_data = Some(part.iter().flat_map(|w| w.to_le_bytes()).collect());
            tensor.float_data.clear();
        }
    }
    model
}
