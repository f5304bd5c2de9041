//! Computations that PyTorch's default exporter merged, so that training would tie separate parameters.
//!
//! The exporter writes equal tensors once, and then nodes with equal operands once: two new norms of one input become one
//! node. The nodes behind quote the call of PyTorch with the former operand (`%layer_norm_1`), which no node produces,
//! and the signature of the program names parameters of which the file holds no tensor.

use std::collections::HashSet;

use millrace_bundle::onnx::{GraphProto, NodeProto, StringStringEntryProto};

use super::GraphError;
use super::builder::NodeRef;
use super::initializers::{FOLDED_FROM, entry, origins, parameters, stem};

/// The key of the call in PyTorch that a node quotes.
pub(crate) const QUOTED_CALL: &str = "pkg.torch.onnx.fx_node";
/// The start of a parameter's name in a call.
const PARAMETER: &str = "%p_";

/// Names of values that move or keep elements: the exporter drops them one by one, whatever it merges.
const MOVES: &[&str] = &[
    "alias",
    "clone",
    "contiguous",
    "detach",
    "dropout",
    "expand",
    "flatten",
    "getitem",
    "permute",
    "reshape",
    "select",
    "slice",
    "squeeze",
    "t",
    "to",
    "_to_copy",
    "transpose",
    "unsqueeze",
    "view",
];

/// Parameters of the module in PyTorch that the file holds in no form, sorted: its output does not depend on them, or
/// the exporter folded or merged them.
pub(crate) fn absent(graph: &GraphProto) -> Vec<&str> {
    let tensors: HashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
    let infos = graph.value_info.iter().chain(&graph.input).filter(|info| tensors.contains(info.name()));
    let folded = infos.filter_map(|info| entry(&info.metadata_props, FOLDED_FROM)).flat_map(origins);
    let held: HashSet<&str> = tensors.iter().copied().chain(folded).collect();
    // Parameters that the file merged have names again in which PyTorch's dots may be underscores.
    let plain: HashSet<String> = held.iter().map(|name| quoted_name(name)).collect();
    let mut absent: Vec<&str> = parameters(graph)
        .filter(|name| !held.contains(name) && !plain.contains(&quoted_name(name)))
        .collect();
    absent.sort_unstable();
    absent
}

/// Refuses a graph in which `nodes` read a value that stands for two of PyTorch, if parameters went with the second one.
pub(super) fn check(graph: &GraphProto, nodes: &[&NodeProto]) -> Result<(), GraphError> {
    let absent = absent(graph);
    if absent.is_empty() {
        return Ok(());
    }
    let outputs = graph.node.iter().flat_map(|node| &node.output);
    let tensors = graph.initializer.iter().map(|tensor| tensor.name());
    let inputs = graph.input.iter().map(|input| input.name());
    let values: HashSet<&str> = outputs.map(String::as_str).chain(tensors).chain(inputs).collect();
    // Results that depend on parameters; `nodes` are in order.
    let mut trained: HashSet<&str> = HashSet::new();
    for node in nodes {
        let reads_parameter = || call(&node.metadata_props).is_some_and(|call| call.contains(PARAMETER));
        if node.input.iter().any(|input| trained.contains(input.as_str())) || reads_parameter() {
            trained.extend(node.output.iter().map(String::as_str));
        }
    }
    for node in nodes {
        let Some(call) = call(&node.metadata_props) else { continue };
        for input in node.input.iter().filter(|input| trained.contains(input.as_str())) {
            let kind = stem(input);
            // A value that the call names and that of the node are results of one function: they were equal.
            let former = operands(call).find(|operand| {
                *operand != input
                    && !values.contains(operand)
                    && stem(operand) == kind
                    && !MOVES.contains(&kind)
            });
            if let Some(former) = former
                && !operands(call).any(|operand| operand == input)
            {
                return Err(NodeRef::of(node).form(format!(
                    "the exporter merged its operand {former} of PyTorch with {input}, which is equal in the beginning; \
                     training would tie the parameters of both, {} among them (export with optimize=False)",
                    absent.join(", ")
                )));
            }
        }
    }
    Ok(())
}

/// The name of a parameter as calls quote it.
pub(crate) fn quoted_name(name: &str) -> String {
    name.replace('.', "_").to_lowercase()
}

/// The call in PyTorch that a node quotes.
fn call(metadata: &[StringStringEntryProto]) -> Option<&str> {
    entry(metadata, QUOTED_CALL)
}

/// The names of the values that a call reads: `%x` in `%y : [num_users=1] = call_function[target=…](args = (%x, 2), …)`.
fn operands(call: &str) -> impl Iterator<Item = &str> {
    let arguments = call.split_once("(args = ").map_or("", |(_, arguments)| arguments);
    arguments
        .split('%')
        .skip(1)
        .map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default())
}
