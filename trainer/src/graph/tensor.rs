//! Elements of ONNX tensors, checked against their dimensions.

use millrace_bundle::onnx::{TensorProto, tensor_proto};

use super::GraphError;
use super::shape::{ELEMENTS_MAX, RANK_MAX};

fn refuse(tensor: &TensorProto, reason: impl Into<String>) -> GraphError {
    GraphError::Tensor { name: tensor.name().to_owned(), reason: reason.into() }
}

/// The dimensions, with the number of elements bounded.
pub(super) fn dims(tensor: &TensorProto) -> Result<Vec<usize>, GraphError> {
    if tensor.dims.len() > RANK_MAX {
        return Err(refuse(tensor, format!("{} dimensions, the limit is {RANK_MAX}", tensor.dims.len())));
    }
    let mut total = 1usize;
    let mut dims = Vec::with_capacity(tensor.dims.len());
    for dim in &tensor.dims {
        let size =
            usize::try_from(*dim).map_err(|_| refuse(tensor, format!("dimension {dim} is negative")))?;
        total = total.checked_mul(size).filter(|total| *total <= ELEMENTS_MAX).ok_or_else(|| {
            refuse(tensor, format!("dimensions {:?} exceed {ELEMENTS_MAX} elements", tensor.dims))
        })?;
        dims.push(size);
    }
    Ok(dims)
}

/// Whether the tensor holds float32 elements.
pub(super) fn is_float(tensor: &TensorProto) -> bool {
    tensor.data_type() == tensor_proto::DataType::Float as i32
}

/// Whether the tensor holds int64 elements.
pub(super) fn is_int(tensor: &TensorProto) -> bool {
    tensor.data_type() == tensor_proto::DataType::Int64 as i32
}

/// The name of the element type.
pub(super) fn type_name(data_type: i32) -> String {
    tensor_proto::DataType::try_from(data_type)
        .map_or_else(|_| format!("type {data_type}"), |t| t.as_str_name().to_owned())
}

fn check_storage(tensor: &TensorProto) -> Result<(), GraphError> {
    if tensor.data_location() == tensor_proto::DataLocation::External || !tensor.external_data.is_empty() {
        return Err(refuse(
            tensor,
            "its data is in another file; save the model as one file (onnx.save without external data)",
        ));
    }
    if tensor.segment.is_some() {
        return Err(refuse(tensor, "its data is split into segments"));
    }
    Ok(())
}

fn sized<T>(tensor: &TensorProto, found: Vec<T>) -> Result<Vec<T>, GraphError> {
    let expected: usize = dims(tensor)?.iter().product();
    if found.len() != expected {
        return Err(refuse(
            tensor,
            format!("dimensions {:?} need {expected} elements, its data holds {}", tensor.dims, found.len()),
        ));
    }
    Ok(found)
}

fn raw<const N: usize, T>(
    tensor: &TensorProto,
    bytes: &[u8],
    decode: fn([u8; N]) -> T,
) -> Result<Vec<T>, GraphError> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    if !rest.is_empty() {
        return Err(refuse(
            tensor,
            format!("its data of {} bytes is not a whole number of elements", bytes.len()),
        ));
    }
    sized(tensor, chunks.iter().map(|chunk| decode(*chunk)).collect())
}

/// The elements of a float32 tensor; all finite.
pub(super) fn floats(tensor: &TensorProto) -> Result<Vec<f32>, GraphError> {
    check_storage(tensor)?;
    if !is_float(tensor) {
        return Err(refuse(
            tensor,
            format!("it holds {}, the trainer works on FLOAT", type_name(tensor.data_type())),
        ));
    }
    let found = match &tensor.raw_data {
        Some(bytes) if !bytes.is_empty() => raw(tensor, bytes, f32::from_le_bytes)?,
        _ => sized(tensor, tensor.float_data.clone())?,
    };
    match found.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(refuse(tensor, format!("element {index} is {}", found[index]))),
        None => Ok(found),
    }
}

/// The elements of an int64 tensor.
pub(super) fn ints(tensor: &TensorProto) -> Result<Vec<i64>, GraphError> {
    check_storage(tensor)?;
    match &tensor.raw_data {
        Some(bytes) if !bytes.is_empty() => raw(tensor, bytes, i64::from_le_bytes),
        _ => sized(tensor, tensor.int64_data.clone()),
    }
}
