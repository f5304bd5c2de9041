//! Constants of a graph for the row proof: their extents, and the elements of small ones.

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::{DataLocation, DataType};
use millrace_bundle::onnx::{AttributeProto, TensorProto};

use super::extent::{Entry, Extent};
use super::value::{CONTENT_MAX, Content, Value, extents_of};

/// The value of a constant.
pub(super) fn value(tensor: &TensorProto) -> Value {
    if tensor.dims.iter().any(|extent| *extent < 0) {
        return Value::free(None);
    }
    let mut value = Value::free(Some(extents_of(&tensor.dims)));
    if tensor.dims.len() > 1 {
        return value;
    }
    if let Some(entries) = integers(tensor) {
        let value = Value::integers(entries, tensor.dims.len());
        return if tensor.data_type() == DataType::Int32 as i32 { value.narrowed() } else { value };
    }
    if let Some(floats) = floats(tensor) {
        value.content = Content::Floats(floats);
    }
    value
}

/// The value of a `Constant` node with this attribute, as far as known.
pub(super) fn of_node(attribute: &AttributeProto) -> Value {
    use AttributeType as Is;
    let list = |len: usize| Value::free(Some(vec![Extent::known(i64::try_from(len).unwrap_or(i64::MAX))]));
    // ONNX Runtime decides by the type, the operator's specification by the name: both must match.
    let found = match (attribute.name(), attribute.r#type()) {
        ("value", Is::Tensor) => attribute.t.as_ref().map(value),
        ("sparse_value", Is::SparseTensor) => {
            attribute.sparse_tensor.as_ref().map(|sparse| Value::free(Some(extents_of(&sparse.dims))))
        }
        ("value_float", Is::Float) | ("value_string", Is::String) => Some(Value::free(Some(Vec::new()))),
        ("value_int", Is::Int) => Some(Value::integers(vec![Entry::number(attribute.i())], 0)),
        ("value_floats", Is::Floats) => Some(list(attribute.floats.len())),
        ("value_strings", Is::Strings) => Some(list(attribute.strings.len())),
        ("value_ints", Is::Ints) if attribute.ints.len() <= CONTENT_MAX => {
            Some(Value::integers(attribute.ints.iter().map(|number| Entry::number(*number)).collect(), 1))
        }
        ("value_ints", Is::Ints) => Some(list(attribute.ints.len())),
        _ => None,
    };
    found.unwrap_or_else(|| Value::free(None))
}

/// Number of elements of a tensor of rank 0 or 1, if they are stored in the graph and at most [`CONTENT_MAX`].
fn count(tensor: &TensorProto) -> Option<usize> {
    let inside = tensor.external_data.is_empty() && tensor.data_location() != DataLocation::External;
    let count = tensor
        .dims
        .iter()
        .try_fold(1usize, |count, extent| count.checked_mul(usize::try_from(*extent).ok()?))?;
    (inside && tensor.dims.len() <= 1 && count <= CONTENT_MAX).then_some(count)
}

/// The elements of a small tensor of integers.
fn integers(tensor: &TensorProto) -> Option<Vec<Entry>> {
    let count = count(tensor)?;
    let raw = tensor.raw_data.as_deref().unwrap_or_default();
    let numbers: Vec<i64> = match DataType::try_from(tensor.data_type()).ok()? {
        DataType::Int64 if raw.is_empty() => tensor.int64_data.clone(),
        DataType::Int64 => raw.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        DataType::Int32 if raw.is_empty() => tensor.int32_data.iter().copied().map(i64::from).collect(),
        DataType::Int32 => {
            raw.as_chunks().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect()
        }
        DataType::Bool if raw.is_empty() => {
            tensor.int32_data.iter().map(|number| i64::from(*number != 0)).collect()
        }
        DataType::Bool => raw.iter().map(|byte| i64::from(*byte != 0)).collect(),
        _ => return None,
    };
    (numbers.len() == count).then(|| numbers.into_iter().map(Entry::number).collect())
}

/// The elements of a small tensor of 32-bit floats.
fn floats(tensor: &TensorProto) -> Option<Vec<f32>> {
    let count = count(tensor)?;
    if DataType::try_from(tensor.data_type()) != Ok(DataType::Float) {
        return None;
    }
    let raw = tensor.raw_data.as_deref().unwrap_or_default();
    let numbers: Vec<f32> = if raw.is_empty() {
        tensor.float_data.clone()
    } else {
        raw.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    (numbers.len() == count).then_some(numbers)
}
