//! External constants: reads short integer initializers from the other files of a bundle.

use bytes::Bytes;
use millrace_bundle::onnx::{GraphProto, TensorProto};

use super::known::ELEMENTS_MAX;

/// Puts the elements of short integer initializers into the graph, from the files of its bundle. Others stay out.
pub(super) fn read(graph: &mut GraphProto, files: &[(String, Bytes)]) {
    for tensor in &mut graph.initializer {
        if let Some(elements) = elements(tensor, files) {
            tensor.raw_data = Some(elements);
            tensor.external_data = Vec::new();
            tensor.data_location = None;
        }
    }
}

fn elements(tensor: &TensorProto, files: &[(String, Bytes)]) -> Option<Vec<u8>> {
    let entry = |key: &str| tensor.external_data.iter().find(|entry| entry.key() == key);
    let location = entry("location")?.value();
    let begin: usize = entry("offset").map_or(Some(0), |offset| offset.value().parse().ok())?;
    let end = begin.checked_add(bytes(tensor)?)?;
    let (_, content) = files.iter().find(|(path, _)| path == location)?;
    content.get(begin..end).map(<[u8]>::to_vec)
}

/// Size in bytes of a short tensor of integers.
fn bytes(tensor: &TensorProto) -> Option<usize> {
    use millrace_bundle::onnx::tensor_proto::DataType as T;
    let width = match T::try_from(tensor.data_type()).ok()? {
        T::Int8 | T::Uint8 => 1,
        T::Int16 | T::Uint16 => 2,
        T::Int32 | T::Uint32 => 4,
        T::Int64 | T::Uint64 => 8,
        _ => return None,
    };
    let count = tensor.dims.iter().try_fold(1usize, |count, extent| {
        usize::try_from(*extent).ok().and_then(|extent| count.checked_mul(extent))
    })?;
    (count <= ELEMENTS_MAX).then(|| count * width)
}
