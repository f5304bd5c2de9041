//! Modules of PyTorch models: the nodes that each module became, by their names or their metadata.
//!
//! - The earlier exporter names a node by its path, `/layer1/layer1.0/conv1/Conv`.
//! - The default exporter lists the modules of a node in its metadata, with the function at the end:
//!   `['', 'layer1', 'layer1.0', 'layer1.0.conv1', 'conv2d']`.

use std::collections::HashSet;

use millrace_bundle::onnx::{GraphProto, NodeProto};

use crate::graph::read_by;

const SCOPES: &str = "pkg.torch.onnx.name_scopes";

/// The values that a module gives: those of its nodes that others read, or that the graph gives. `name` is the path
/// of the module in either form, as `layer1.0` or `/layer1/layer1.0`.
pub(super) fn results(graph: &GraphProto, name: &str) -> Vec<String> {
    let Some(path) = paths(name.split('/')).pop() else { return Vec::new() };
    let (inside, outside): (Vec<&NodeProto>, Vec<&NodeProto>) =
        graph.node.iter().partition(|node| modules(node).contains(&path));
    let read: HashSet<&str> = outside
        .iter()
        .flat_map(|node| read_by(node))
        .chain(graph.output.iter().map(|output| output.name()))
        .filter(|value| !value.is_empty())
        .collect();
    let values = inside.iter().flat_map(|node| &node.output);
    values.filter(|value| read.contains(value.as_str())).cloned().collect()
}

/// The paths of the modules that a node is in.
fn modules(node: &NodeProto) -> Vec<String> {
    match node.metadata_props.iter().find(|entry| entry.key() == SCOPES) {
        Some(scopes) => {
            // A list as Python writes it.
            let mut quoted: Vec<&str> = scopes.value().split(['\'', '"']).skip(1).step_by(2).collect();
            quoted.pop();
            quoted.into_iter().map(str::to_owned).collect()
        }
        None => {
            let mut names: Vec<&str> = node.name().split('/').collect();
            names.pop();
            paths(names.into_iter())
        }
    }
}

/// The paths of nested modules by their names. In a container, a name begins with that of the container.
fn paths<'n>(names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    let mut last = "";
    for name in names.filter(|name| !name.is_empty()) {
        let within = name.strip_prefix(last).and_then(|rest| rest.strip_prefix('.')).unwrap_or(name);
        paths.push(match paths.last() {
            Some(path) => format!("{path}.{within}"),
            None => within.to_owned(),
        });
        last = name;
    }
    paths
}
