//! Empty tensors: the check whether a graph may get tensors without elements.
//!
//! Some operators of ONNX Runtime end the process on empty tensors (LSTM, GRU, `Unique`, attention). Therefore only
//! graphs made of operators known to accept them get empty tensors, and only if they divide no integers by the
//! extents of these tensors.

use millrace_bundle::onnx::ModelProto;

use crate::hazards;

/// Standard ONNX operators that were tested with empty tensors along each axis.
const OPERATORS: [&str; 48] = [
    "Abs",
    "Add",
    "And",
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "Ceil",
    "Clip",
    "Concat",
    "Constant",
    "Conv",
    "Div",
    "Dropout",
    "Elu",
    "Equal",
    "Erf",
    "Exp",
    "Flatten",
    "Floor",
    "Gather",
    "Gemm",
    "GlobalAveragePool",
    "Greater",
    "Identity",
    "LayerNormalization",
    "LeakyRelu",
    "Less",
    "Log",
    "LogSoftmax",
    "MatMul",
    "MaxPool",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "Pow",
    "ReduceMean",
    "ReduceSum",
    "Relu",
    "Reshape",
    "Shape",
    "Sigmoid",
    "Softmax",
    "Sqrt",
    "Sub",
    "Tanh",
    "Transpose",
    "Unsqueeze",
];

/// Whether a graph may get empty tensors.
pub(super) fn are_accepted_by(model: &ModelProto) -> bool {
    let known = |node: &millrace_bundle::onnx::NodeProto| {
        matches!(node.domain(), "" | "ai.onnx") && OPERATORS.contains(&node.op_type())
    };
    // A function of the model may have the name of an operator.
    model.functions.is_empty()
        && model.graph.as_ref().is_some_and(|graph| graph.node.iter().all(known))
        && hazards::allows_empty_inputs(model)
}

#[cfg(test)]
mod tests {
    use millrace_bundle::onnx::{FunctionProto, GraphProto, NodeProto};

    use super::*;

    fn graph(domain: &str, operators: &[&str]) -> ModelProto {
        let node = |operator: &&str| NodeProto {
            domain: Some(domain.to_owned()),
            op_type: Some((*operator).to_owned()),
            ..Default::default()
        };
        let node = operators.iter().map(node).collect();
        ModelProto { graph: Some(GraphProto { node, ..Default::default() }), ..Default::default() }
    }

    #[test]
    fn unknown_operators_get_no_inputs_without_elements() {
        let mut known = graph("", &["MatMul", "Add", "Relu"]);
        assert!(are_accepted_by(&known));
        for unknown in ["LSTM", "GRU", "Unique", "Loop"] {
            assert!(!are_accepted_by(&graph("", &["Add", unknown])), "{unknown}");
        }
        assert!(!are_accepted_by(&graph("com.microsoft", &["Add"])));
        known.functions.push(FunctionProto::default());
        assert!(!are_accepted_by(&known) && !are_accepted_by(&ModelProto::default()));
    }
}
