//! Restoration of biases of zeros that PyTorch's default exporter removes.
//!
//! The exporter drops a bias whose elements are all 0 from convolutions and matrix products, although training moves
//! it, and names the rule in the node's metadata. The node also quotes the call in PyTorch: a bias that is no parameter
//! there stays away. A module that is called twice has one bias.

use std::collections::HashMap;

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{GraphProto, NodeProto, TensorProto};

use super::Names;
use super::calls::{Call, Operand};
use crate::graph::{float_elements, has_marks, initializer_origin, parameter_info};

const RULES: &str = "pkg.onnxscript.rewriter.rule_name";

/// Gives each node its bias of zeros again, and returns the names of the new tensors.
pub(super) fn restore(graph: &mut GraphProto, names: &mut Names) -> Vec<String> {
    let mut biases: HashMap<String, String> = HashMap::new();
    let mut found = Vec::new();
    for index in 0..graph.node.len() {
        let Some((weight, channels)) = without_bias(graph, &graph.node[index]) else { continue };
        let (bias, is_named) = match Call::of(&graph.node[index]) {
            None => (weight.to_owned(), false),
            Some(call) => match call.bias() {
                Some(Operand::Parameter(bias)) => (bias.to_owned(), true),
                _ => continue,
            },
        };
        let key = format!("{bias} {channels}");
        if !biases.contains_key(&key) {
            let parameter = initializer_origin(graph, weight).unwrap_or_else(|| weight.to_owned());
            let wanted = match parameter.strip_suffix("weight") {
                Some(module) => format!("{module}bias"),
                None => format!("{parameter}_bias"),
            };
            // Another node may have kept the bias.
            if is_named && is_zeros(graph, &wanted, channels) {
                biases.insert(key.clone(), wanted);
            } else {
                let Some(name) = names.take(&wanted, 4 * channels) else { continue };
                found.push((name.clone(), channels));
                biases.insert(key.clone(), name);
            }
        }
        let name = biases[&key].clone();
        let node = &mut graph.node[index];
        node.input.truncate(2);
        node.input.push(name);
    }
    let marks = has_marks(graph);
    for (name, channels) in &found {
        graph.initializer.push(TensorProto {
            name: Some(name.clone()),
            data_type: Some(DataType::Float as i32),
            dims: vec![*channels as i64],
            raw_data: Some(vec![0; 4 * channels]),
            ..TensorProto::default()
        });
        if marks {
            graph.value_info.push(parameter_info(name, &[*channels]));
        }
    }
    found.into_iter().map(|(name, _)| name).collect()
}

/// Whether the model has a bias of zeros with this name.
fn is_zeros(graph: &GraphProto, name: &str, channels: usize) -> bool {
    let tensor = graph.initializer.iter().find(|tensor| tensor.name() == name);
    let elements = tensor.filter(|tensor| tensor.dims.len() == 1).and_then(float_elements);
    elements.is_some_and(|elements| elements.len() == channels && elements.iter().all(|value| *value == 0.0))
}

/// The weight of a node whose bias was removed, and the elements of that bias.
fn without_bias<'a>(graph: &'a GraphProto, node: &'a NodeProto) -> Option<(&'a str, usize)> {
    let rules = entry(node, RULES)?;
    let rule = format!("RemoveOptionalBiasFrom{}", node.op_type());
    if !rules.split([',', ' ']).any(|found| found == rule)
        || node.input.get(2).is_some_and(|bias| !bias.is_empty())
    {
        return None;
    }
    let weight = node.input.get(1)?;
    let tensor = graph.initializer.iter().find(|tensor| tensor.name() == weight)?;
    let number = |name: &str| node.attribute.iter().find(|attribute| attribute.name() == name);
    let channels = match (node.op_type(), &tensor.dims[..]) {
        ("Conv", [filters, ..]) => *filters,
        ("ConvTranspose", [_, filters, ..]) => {
            filters.checked_mul(number("group").map_or(1, |group| group.i()))?
        }
        ("Gemm", [rows, columns]) => {
            // The bias of another factor is none of PyTorch's.
            number("beta").is_none_or(|beta| beta.f() == 1.0).then_some(())?;
            if number("transB").is_some_and(|flag| flag.i() != 0) { *rows } else { *columns }
        }
        _ => return None,
    };
    // A damaged model may claim any size.
    let elements = float_elements(tensor)?.len();
    let channels = usize::try_from(channels).ok()?;
    (1..=elements).contains(&channels).then_some((weight.as_str(), channels))
}

fn entry<'a>(node: &'a NodeProto, key: &str) -> Option<&'a str> {
    Some(node.metadata_props.iter().find(|entry| entry.key() == key)?.value())
}
