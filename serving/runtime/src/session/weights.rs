//! Shared weights: one copy of the weights for all sessions of a version on the processor.
//!
//! By default each session holds the weights and the forms that its kernels make of them: matrix products pack
//! theirs. This module shares both by means of ONNX Runtime. It lets ONNX Runtime optimize the graph once. It then
//! removes the large weights from the graph and gives them to every session as initializers over the same memory.
//! Only for these initializers do sessions share the packed weights in a container. Optimization comes first because
//! it may change a weight but keep its name, and initializers are matched by name.
//!
//! ONNX Runtime keeps the initializers in memory beside the packed weights. Several sessions of a model of matrix
//! products therefore take twice the memory of its weights, regardless of their number.

use std::collections::HashSet;
use std::fmt::Debug;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use half::{bf16, f16};
use millrace_bundle::onnx::tensor_proto::{DataLocation, DataType};
use millrace_bundle::onnx::{GraphProto, ModelProto, StringStringEntryProto, TensorProto};
use nix::sys::memfd::{MFdFlags, memfd_create};
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, PrepackedWeights, SessionBuilder};
use ort::value::{DynValue, PrimitiveTensorElementType, Tensor};
use prost::Message;

use millrace_serving_core::error::one_line;

/// Smaller weights stay in the graph: sharing them is not worth a tensor each.
const SHARED_BYTES_MIN: usize = 16 << 10;
/// Largest optimized graph that can be read: the limit of protobuf.
const GRAPH_BYTES_MAX: u64 = (2 << 30) - 1;

/// Builds sessions that share their weights. The error is the reason why sharing fails; sessions with separate
/// weights may still be possible.
///
/// `with_files` contains the files in which the graph keeps weights; `builder` is the same without them.
pub(super) fn sessions(
    builder: &SessionBuilder,
    with_files: &SessionBuilder,
    onnx: &[u8],
    count: usize,
) -> Result<Vec<Session>, String> {
    let mut model = optimised(with_files.clone(), onnx)?;
    let mut weights = Weights::default();
    if let Some(graph) = &mut model.graph {
        take_weights(graph, &mut weights)?;
    }
    if weights.0.is_empty() {
        return Err("no weight of the optimised graph is large".into());
    }
    let graph = model.encode_to_vec();
    drop(model);
    let refused = |error: ort::Error<SessionBuilder>| one_line(&error);
    let mut builder = builder
        .clone()
        // A second optimization could change weights again.
        .with_optimization_level(GraphOptimizationLevel::Disable)
        .map_err(refused)?
        .with_prepacked_weights(&PrepackedWeights::new())
        .map_err(refused)?;
    for (name, value) in &weights.0 {
        let refused = |error: ort::Error<SessionBuilder>| format!("weight {name:?}: {}", one_line(&error));
        builder = builder
            // Resolves the weight in the graph, which refers to it by name only.
            .with_external_initializer(name, Arc::clone(value))
            .map_err(refused)?
            // Lets the sessions share the weight and its packed form.
            .with_initializer(name, Arc::clone(value))
            .map_err(refused)?;
    }
    // Each session keeps the weights alive.
    (0..count).map(|_| builder.commit_from_memory(&graph).map_err(|error| one_line(&error))).collect()
}

/// Weights by name.
#[derive(Debug, Default)]
struct Weights(Vec<(String, Arc<DynValue>)>);

impl Weights {
    fn add<T>(&mut self, name: &str, dims: &[i64], elements: Box<[T]>) -> ort::Result<()>
    where
        T: PrimitiveTensorElementType + Clone + Debug + 'static,
    {
        let value = Tensor::from_array((dims.to_vec(), elements))?.into_dyn();
        self.0.push((name.to_owned(), Arc::new(value)));
        Ok(())
    }
}

/// The graph after ONNX Runtime's optimizations.
fn optimised(builder: SessionBuilder, onnx: &[u8]) -> Result<ModelProto, String> {
    // ONNX Runtime writes the graph to a path; this path leads to memory.
    let file = memfd_create(c"optimised.onnx", MFdFlags::MFD_CLOEXEC)
        .map_err(|error| format!("no memory for the optimised graph: {error}"))?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let refused = |error: ort::Error<SessionBuilder>| one_line(&error);
    let mut builder = builder
        // Hides the warning that the file is only valid for this processor, which is intended.
        .with_log_level(ort::logging::LogLevel::Error)
        .map_err(refused)?
        .with_config_entry("session.save_model_format", "ONNX")
        .map_err(refused)?
        .with_prepacking(false)
        .map_err(refused)?
        .with_optimized_model_path(&path)
        .map_err(refused)?;
    drop(builder.commit_from_memory(onnx).map_err(|error| one_line(&error))?);
    let unread = |error: std::io::Error| format!("the optimised graph cannot be read: {error}");
    let mut file = File::from(file);
    let bytes = file.metadata().map_err(unread)?.len();
    if bytes > GRAPH_BYTES_MAX {
        return Err(format!("the optimised graph has {bytes} bytes, at most {GRAPH_BYTES_MAX} are possible"));
    }
    let mut graph = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
    file.read_to_end(&mut graph).map_err(unread)?;
    ModelProto::decode(graph.as_slice()).map_err(|error| format!("the optimised graph: {error}"))
}

/// Takes the large weights out of a graph, which keeps their names, types and shapes.
fn take_weights(graph: &mut GraphProto, weights: &mut Weights) -> Result<(), String> {
    // A request may provide an input of the graph; a name in a subgraph may mean another tensor.
    let mut others: HashSet<String> = graph.input.iter().map(|input| input.name().to_owned()).collect();
    add_inner_names(graph, &mut others);
    for tensor in graph.initializer.iter_mut().filter(|tensor| !others.contains(tensor.name())) {
        if take(tensor, weights)? {
            let location =
                StringStringEntryProto { key: Some("location".into()), value: Some("shared".into()) };
            tensor.external_data = vec![location];
            tensor.data_location = Some(DataLocation::External as i32);
        }
    }
    Ok(())
}

/// Collects the names of the initializers of subgraphs; decoding has bounded their nesting depth.
fn add_inner_names(graph: &GraphProto, names: &mut HashSet<String>) {
    for attribute in graph.node.iter().flat_map(|node| &node.attribute) {
        for inner in attribute.g.iter().chain(&attribute.graphs) {
            names.extend(inner.initializer.iter().map(|tensor| tensor.name().to_owned()));
            add_inner_names(inner, names);
        }
    }
}

/// Takes the elements out of an initializer. A small initializer, or one whose data does not match its shape or type,
/// stays for ONNX Runtime to use or refuse.
fn take(tensor: &mut TensorProto, weights: &mut Weights) -> Result<bool, String> {
    let raw = tensor.raw_data.as_deref().unwrap_or_default();
    if raw.len() < SHARED_BYTES_MIN || !tensor.external_data.is_empty() {
        return Ok(false);
    }
    let count = tensor.dims.iter().try_fold(1usize, |count, extent| {
        usize::try_from(*extent).ok().and_then(|extent| count.checked_mul(extent))
    });
    macro_rules! numbers {
        ($number:ty) => {{
            let (elements, rest) = raw.as_chunks::<{ size_of::<$number>() }>();
            if !rest.is_empty() || count != Some(elements.len()) {
                return Ok(false);
            }
            let elements: Box<[$number]> =
                elements.iter().map(|bytes| <$number>::from_le_bytes(*bytes)).collect();
            weights.add(tensor.name(), &tensor.dims, elements)
        }};
    }
    match DataType::try_from(tensor.data_type()) {
        Ok(DataType::Float) => numbers!(f32),
        Ok(DataType::Double) => numbers!(f64),
        Ok(DataType::Float16) => numbers!(f16),
        Ok(DataType::Bfloat16) => numbers!(bf16),
        Ok(DataType::Int8) => numbers!(i8),
        Ok(DataType::Int16) => numbers!(i16),
        Ok(DataType::Int32) => numbers!(i32),
        Ok(DataType::Int64) => numbers!(i64),
        Ok(DataType::Uint8) => numbers!(u8),
        Ok(DataType::Uint16) => numbers!(u16),
        Ok(DataType::Uint32) => numbers!(u32),
        Ok(DataType::Uint64) => numbers!(u64),
        _ => return Ok(false),
    }
    .map_err(|error| format!("weight {:?}: {}", tensor.name(), one_line(&error)))?;
    tensor.raw_data = None;
    Ok(true)
}

#[cfg(test)]
mod tests;
