//! Errors of reading a model: every variant names the node or tensor and the remedy.

use thiserror::Error;

/// Why a model cannot be trained. Nothing was computed yet.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum GraphError {
    /// The trainer has no exact derivative for an operator.
    #[error(
        "node {node:?} uses operator {op}, which cannot be trained: cut the graph before it (millrace model edit), or export the model without it; docs/reference/operators.md lists the operators"
    )]
    UnsupportedOperator {
        /// Operator, with its domain when it is not ONNX's own.
        op: String,
        /// Name of the node, or of its output when it has none.
        node: String,
    },
    /// An operator is supported, but not with this attribute or input.
    #[error("node {node:?} ({op}): {reason}")]
    UnsupportedForm {
        /// Operator.
        op: String,
        /// Name of the node, or of its output when it has none.
        node: String,
        /// The unsupported form and the remedy.
        reason: String,
    },
    /// Two shapes do not match.
    #[error("node {node:?} ({op}): {reason}")]
    Shape {
        /// Operator.
        op: String,
        /// Name of the node, or of its output when it has none.
        node: String,
        /// The mismatch.
        reason: String,
    },
    /// An operation combines rows of the batch, so that gradients of shards would not add up.
    #[error(
        "node {node:?} ({op}) mixes rows of the batch ({reason}): the trainer needs every output row to depend on its own input row only"
    )]
    MixesRows {
        /// Operator.
        op: String,
        /// Name of the node, or of its output when it has none.
        node: String,
        /// The operation's effect.
        reason: String,
    },
    /// A node reads a tensor that does not exist.
    #[error(
        "node {node:?} reads {input:?}, which is neither an input, nor an initializer, nor produced by a node"
    )]
    MissingInput {
        /// Name of the node.
        node: String,
        /// Name of the tensor.
        input: String,
    },
    /// Nodes form a cycle.
    #[error("node {node:?} depends on its own output")]
    Cycle {
        /// A node of the cycle.
        node: String,
    },
    /// An initializer's data does not match its dimensions or type.
    #[error("tensor {name:?}: {reason}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// The problem and the remedy.
        reason: String,
    },
    /// The model as a whole does not have the form the trainer needs.
    #[error("the model cannot be trained: {reason}")]
    Malformed {
        /// The problem and the remedy.
        reason: String,
    },
    /// The model exceeds a limit of the trainer.
    #[error("the model has {found} {what}, the limit is {limit}")]
    Limit {
        /// The counted item.
        what: &'static str,
        /// The count.
        found: usize,
        /// The allowed maximum.
        limit: usize,
    },
}
