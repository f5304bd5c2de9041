//! Fixed-cost graphs: graphs whose run time depends only on the shapes of the inputs.
//!
//! Only runs of these graphs can be known to be short before they start. Graphs in doubt count as dependent on
//! values: their runs take place on inference threads, which costs only a thread hop.

use std::collections::HashSet;

use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto};
use millrace_bundle::{Datatype, Signature};

/// Operators whose cost depends on values: they loop, branch, or produce output of data-dependent size.
const BY_VALUE: [&str; 17] = [
    "Compress",
    "If",
    "ImageDecoder",
    "Loop",
    "NonMaxSuppression",
    "NonZero",
    "RegexFullMatch",
    "Scan",
    "SequenceMap",
    "SplitToSequence",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
    "Unique",
    "Optional",
    "ConcatFromSequence",
];

/// Operators whose output size is given by the values of inputs, and the index of the first of these inputs.
const BY_SIZE: [(&str, usize); 11] = [
    ("CenterCropPad", 1),
    ("ConstantOfShape", 0),
    ("Expand", 1),
    ("MaxUnpool", 2),
    ("OneHot", 1),
    ("Pad", 1),
    ("Range", 0),
    ("Resize", 1),
    ("Tile", 1),
    ("TopK", 1),
    ("Upsample", 1),
];

/// True if the run time of a graph depends only on the shapes of its inputs. Requires that no input has strings, or
/// more than one open extent after the first. Estimates are by element count, and several open extents may give the
/// same count at very different cost.
pub(super) fn has_fixed_cost(model: &ModelProto, signature: &Signature) -> bool {
    let is_plain = signature.inputs.iter().all(|spec| {
        let open = spec.shape.iter().skip(1).filter(|extent| **extent < 0).count();
        open <= 1 && spec.datatype != Datatype::Bytes
    });
    // A function of the model may have the name of an operator.
    is_plain && model.functions.is_empty() && model.graph.as_ref().is_some_and(is_fixed)
}

fn is_fixed(graph: &GraphProto) -> bool {
    let constants =
        graph.node.iter().filter(|node| node.op_type() == "Constant").flat_map(|node| &node.output);
    let inputs: HashSet<&str> = graph.input.iter().map(|input| input.name()).collect();
    let initializers = graph.initializer.iter().map(|tensor| tensor.name());
    // A request may also provide an initializer that is an input.
    let initializers = initializers.filter(|name| !inputs.contains(name));
    let constants: HashSet<&str> = constants.map(String::as_str).chain(initializers).collect();
    graph.node.iter().all(|node| is_fixed_node(node, &constants))
}

fn is_fixed_node(node: &NodeProto, constants: &HashSet<&str>) -> bool {
    let operator = node.op_type();
    let is_known = matches!(node.domain(), "" | "ai.onnx" | "ai.onnx.ml") && !BY_VALUE.contains(&operator);
    let sizes = BY_SIZE.iter().find(|(name, _)| *name == operator);
    let is_sized = sizes.is_none_or(|(_, first)| {
        let sizes = node.input.iter().skip(*first);
        sizes.filter(|name| !name.is_empty()).all(|name| constants.contains(name.as_str()))
    });
    is_known && is_sized
}

#[cfg(test)]
mod tests {
    use millrace_bundle::TensorSpec;
    use millrace_bundle::onnx::{FunctionProto, TensorProto, ValueInfoProto};

    use super::*;

    fn node(operator: &str, inputs: &[&str], output: &str) -> NodeProto {
        NodeProto {
            op_type: Some(operator.to_owned()),
            input: inputs.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![output.to_owned()],
            ..Default::default()
        }
    }

    fn model(node: Vec<NodeProto>) -> ModelProto {
        let initializer = vec![TensorProto { name: Some("w".into()), ..Default::default() }];
        let input = vec![ValueInfoProto { name: Some("x".into()), ..Default::default() }];
        let graph = GraphProto { node, initializer, input, ..Default::default() };
        ModelProto { graph: Some(graph), ..Default::default() }
    }

    fn signature(shape: &[i64], datatype: Datatype) -> Signature {
        let input = TensorSpec { name: "x".into(), datatype, shape: shape.to_vec() };
        Signature { inputs: vec![input], outputs: Vec::new() }
    }

    fn is_fixed_cost(node: Vec<NodeProto>) -> bool {
        has_fixed_cost(&model(node), &signature(&[-1, 4], Datatype::Fp32))
    }

    #[test]
    fn operators_that_loop_branch_or_search_have_no_fixed_cost() {
        assert!(is_fixed_cost(vec![node("MatMul", &["x", "w"], "m"), node("Relu", &["m"], "y")]));
        for operator in ["Loop", "If", "Scan", "NonZero", "Unique"] {
            assert!(!is_fixed_cost(vec![node(operator, &["x"], "y")]), "{operator}");
        }
        let custom = NodeProto { domain: Some("com.microsoft".into()), ..node("Relu", &["x"], "y") };
        assert!(!is_fixed_cost(vec![custom]));
        let mut with_function = model(vec![node("Relu", &["x"], "y")]);
        with_function.functions.push(FunctionProto::default());
        assert!(!has_fixed_cost(&with_function, &signature(&[-1, 4], Datatype::Fp32)));
        assert!(!has_fixed_cost(&ModelProto::default(), &signature(&[-1, 4], Datatype::Fp32)));
    }

    #[test]
    fn sizes_are_fixed_only_where_they_are_constants() {
        assert!(is_fixed_cost(vec![node("Tile", &["x", "w"], "y")]));
        assert!(is_fixed_cost(vec![node("Resize", &["x", "", "w"], "y")]));
        assert!(is_fixed_cost(vec![node("Constant", &[], "c"), node("Expand", &["x", "c"], "y")]));
        assert!(!is_fixed_cost(vec![node("Tile", &["x", "x"], "y")]), "the request decides");
        assert!(!is_fixed_cost(vec![node("Resize", &["x", "", "w", "x"], "y")]));
        assert!(!is_fixed_cost(vec![node("Shape", &["x"], "s"), node("Expand", &["x", "s"], "y")]));
    }

    #[test]
    fn inputs_of_texts_or_several_open_extents_have_no_fixed_cost() {
        let relu = model(vec![node("Relu", &["x"], "y")]);
        assert!(has_fixed_cost(&relu, &signature(&[-1, -1, 3], Datatype::Fp32)));
        assert!(!has_fixed_cost(&relu, &signature(&[-1, 3, -1, -1], Datatype::Fp32)));
        assert!(!has_fixed_cost(&relu, &signature(&[-1], Datatype::Bytes)));
    }
}
