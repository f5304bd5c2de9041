//! Model outlines: the graph without the elements of its large tensors, which is what the loader needs.

use crate::onnx::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto,
};

/// Tensors with more bytes of elements lose them.
const BYTES_MAX: usize = 4096;

/// Position of a tensor in a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TensorPosition {
    /// Among the initializers of the model's graph.
    Initializer,
    /// In an attribute, a subgraph, a function, or part of a sparse tensor.
    Inside,
}

/// Removes the elements of large tensors.
pub(crate) fn without_elements(model: &mut ModelProto) {
    each_tensor(model, &mut |tensor, _| strip(tensor));
    let graphs = model.graph.iter_mut().flat_map(|graph| &mut graph.node);
    let functions = model.functions.iter_mut().flat_map(|function| &mut function.node);
    // Tree models store their nodes in attributes.
    for attribute in graphs.chain(functions).flat_map(|node| &mut node.attribute) {
        let numbers = 4 * attribute.floats.len() + 8 * attribute.ints.len();
        let texts = attribute.strings.iter().map(|text| text.len() + size_of::<Vec<u8>>()).sum::<usize>();
        if numbers + texts > BYTES_MAX && !attribute.name().starts_with("value_") {
            attribute.floats = Vec::new();
            attribute.ints = Vec::new();
            attribute.strings = Vec::new();
            // Without a type, no reader mistakes it for an empty list.
            attribute.r#type = None;
        }
    }
}

fn strip(tensor: &mut TensorProto) {
    let raw = tensor.raw_data.as_ref().map_or(0, Vec::len);
    let typed = 4 * (tensor.float_data.len() + tensor.int32_data.len())
        + 8 * (tensor.int64_data.len() + tensor.uint64_data.len() + tensor.double_data.len())
        + tensor.string_data.iter().map(|text| text.len() + size_of::<Vec<u8>>()).sum::<usize>();
    if raw + typed > BYTES_MAX {
        tensor.raw_data = None;
        tensor.float_data = Vec::new();
        tensor.int32_data = Vec::new();
        tensor.int64_data = Vec::new();
        tensor.uint64_data = Vec::new();
        tensor.double_data = Vec::new();
        tensor.string_data = Vec::new();
    }
}

/// Calls `visit` with every tensor of a model. The recursion is bounded, because decoding bounds the nesting.
pub(crate) fn each_tensor(model: &mut ModelProto, visit: &mut dyn FnMut(&mut TensorProto, TensorPosition)) {
    if let Some(graph) = &mut model.graph {
        graph.initializer.iter_mut().for_each(|tensor| visit(tensor, TensorPosition::Initializer));
        of_graph(graph, visit);
    }
    for training in &mut model.training_info {
        for graph in training.initialization.iter_mut().chain(&mut training.algorithm) {
            graph.initializer.iter_mut().for_each(|tensor| visit(tensor, TensorPosition::Inside));
            of_graph(graph, visit);
        }
    }
    model.functions.iter_mut().for_each(|function| of_function(function, visit));
}

/// All tensors of a graph except its initializers.
fn of_graph(graph: &mut GraphProto, visit: &mut dyn FnMut(&mut TensorProto, TensorPosition)) {
    graph.sparse_initializer.iter_mut().for_each(|sparse| of_sparse(sparse, visit));
    of_nodes(&mut graph.node, visit);
}

fn of_function(function: &mut FunctionProto, visit: &mut dyn FnMut(&mut TensorProto, TensorPosition)) {
    function.attribute_proto.iter_mut().for_each(|attribute| of_attribute(attribute, visit));
    of_nodes(&mut function.node, visit);
}

fn of_nodes(nodes: &mut [NodeProto], visit: &mut dyn FnMut(&mut TensorProto, TensorPosition)) {
    nodes
        .iter_mut()
        .flat_map(|node| &mut node.attribute)
        .for_each(|attribute| of_attribute(attribute, visit));
}

fn of_attribute(attribute: &mut AttributeProto, visit: &mut dyn FnMut(&mut TensorProto, TensorPosition)) {
    let tensors = attribute.t.iter_mut().chain(&mut attribute.tensors);
    tensors.for_each(|tensor| visit(tensor, TensorPosition::Inside));
    let sparse = attribute.sparse_tensor.iter_mut().chain(&mut attribute.sparse_tensors);
    sparse.for_each(|sparse| of_sparse(sparse, visit));
    for graph in attribute.g.iter_mut().chain(&mut attribute.graphs) {
        graph.initializer.iter_mut().for_each(|tensor| visit(tensor, TensorPosition::Inside));
        of_graph(graph, visit);
    }
}

fn of_sparse(sparse: &mut SparseTensorProto, visit: &mut dyn FnMut(&mut TensorProto, TensorPosition)) {
    sparse
        .values
        .iter_mut()
        .chain(&mut sparse.indices)
        .for_each(|tensor| visit(tensor, TensorPosition::Inside));
}
