//! Quantization errors, with the remedy.

use thiserror::Error;

use super::Kept;

/// Different reasons listed in one message.
const REASONS_MAX: usize = 3;

/// Why a model cannot be quantized. Nothing was changed.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The file holds no graph.
    #[error("the model holds no graph")]
    NoGraph,
    /// The operators may be missing in this operator set, or mean something else.
    #[error(
        "the model uses ONNX operator set {}, {oldest} to {newest} can be quantized: export it again with one of these",
        found.map_or_else(|| "none".to_owned(), |found| found.to_string())
    )]
    Opset {
        /// The operator set of the model.
        found: Option<i64>,
        /// The oldest supported one.
        oldest: i64,
        /// The newest supported one.
        newest: i64,
    },
    /// In old file formats weights are inputs.
    #[error("the model has IR version {found}, from {oldest} on models can be quantized: export it again")]
    Format {
        /// The version of the file format.
        found: i64,
        /// The oldest supported one.
        oldest: i64,
    },
    /// The model holds training graphs, which quantization would invalidate.
    #[error("the model holds the state of a training: export it for inference")]
    Training,
    /// The weights are in another file.
    #[error(
        "initializer {tensor:?} keeps its data in another file: save the model as one file (onnx.save without external data)"
    )]
    External {
        /// The initializer.
        tensor: String,
    },
    /// The model is quantized already.
    #[error(
        "the model is quantized already: node {node:?} is {operator}; quantize the version it was made from"
    )]
    Already {
        /// The node.
        node: String,
        /// Its operator.
        operator: String,
    },
    /// No node has weights that can be quantized.
    #[error("the model has no node to quantize: {reason}")]
    Nothing {
        /// Why the nodes with weights were not changed.
        reason: String,
    },
}

impl QuantizeError {
    /// The error when no node was quantized.
    pub(super) fn no_layers(kept: &[Kept]) -> QuantizeError {
        let mut reasons: Vec<String> = Vec::new();
        for Kept { node, operator, reason } in kept {
            if reasons.len() < REASONS_MAX {
                reasons.push(format!("{operator} {node:?} stays: {reason}"));
            }
        }
        if kept.len() > REASONS_MAX {
            reasons.push(format!("and {} more", kept.len() - REASONS_MAX));
        }
        let none = || "the graph has no MatMul and no Gemm".to_owned();
        let reason = if reasons.is_empty() { none() } else { reasons.join("; ") };
        QuantizeError::Nothing { reason }
    }
}
