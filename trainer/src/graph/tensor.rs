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
        // An empty dimension does not hide the size of another one.
        total = total.checked_mul(size.max(1)).filter(|total| *total <= ELEMENTS_MAX).ok_or_else(|| {
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

/// Whether the tensor holds integers or truth values that are read as integers.
pub(super) fn is_int(tensor: &TensorProto) -> bool {
    use tensor_proto::DataType;
    [DataType::Int64, DataType::Int32, DataType::Uint8, DataType::Int8, DataType::Bool]
        .iter()
        .any(|kind| tensor.data_type() == *kind as i32)
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
    let found = floats_or_infinite(tensor)?;
    match found.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(refuse(tensor, format!("element {index} is {}", found[index]))),
        None => Ok(found),
    }
}

/// The elements of a float32 tensor; none is NaN.
pub(super) fn floats_or_infinite(tensor: &TensorProto) -> Result<Vec<f32>, GraphError> {
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
    match found.iter().position(|value| value.is_nan()) {
        Some(index) => Err(refuse(tensor, format!("element {index} is {}", found[index]))),
        None => Ok(found),
    }
}

/// The elements of a complete float32 tensor without NaN.
pub(crate) fn float_elements(tensor: &TensorProto) -> Option<Vec<f32>> {
    is_float(tensor).then(|| floats_or_infinite(tensor).ok()).flatten()
}

/// The elements of a constant of type FLOAT or DOUBLE; none is NaN.
pub(super) fn constants(tensor: &TensorProto) -> Result<Vec<f32>, GraphError> {
    if tensor.data_type() != tensor_proto::DataType::Double as i32 {
        return floats_or_infinite(tensor);
    }
    check_storage(tensor)?;
    let found = match &tensor.raw_data {
        Some(bytes) if !bytes.is_empty() => raw(tensor, bytes, f64::from_le_bytes)?,
        _ => sized(tensor, tensor.double_data.clone())?,
    };
    match found.iter().position(|value| value.is_nan()) {
        Some(index) => Err(refuse(tensor, format!("element {index} is NaN"))),
        None => Ok(found.into_iter().map(|value| value as f32).collect()),
    }
}

/// The elements of a tensor of integers or truth values.
pub(super) fn ints(tensor: &TensorProto) -> Result<Vec<i64>, GraphError> {
    use tensor_proto::DataType;
    check_storage(tensor)?;
    let bytes = tensor.raw_data.as_deref().filter(|bytes| !bytes.is_empty());
    match (DataType::try_from(tensor.data_type()), bytes) {
        (Ok(DataType::Int64), Some(bytes)) => raw(tensor, bytes, i64::from_le_bytes),
        (Ok(DataType::Int64), None) => sized(tensor, tensor.int64_data.clone()),
        (Ok(DataType::Int32), Some(bytes)) => {
            raw(tensor, bytes, |bytes| i64::from(i32::from_le_bytes(bytes)))
        }
        (Ok(DataType::Bool), Some(bytes)) => raw(tensor, bytes, |[byte]: [u8; 1]| i64::from(byte != 0)),
        (Ok(DataType::Bool), None) => {
            sized(tensor, tensor.int32_data.iter().map(|value| i64::from(*value != 0)).collect())
        }
        (Ok(DataType::Int8), Some(bytes)) => raw(tensor, bytes, |bytes| i64::from(i8::from_le_bytes(bytes))),
        (_, Some(bytes)) => raw(tensor, bytes, |[byte]: [u8; 1]| i64::from(byte)),
        (_, None) => sized(tensor, tensor.int32_data.iter().copied().map(i64::from).collect()),
    }
}
