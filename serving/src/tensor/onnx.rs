//! Tensors in and out of ONNX Runtime.

use bytes::Bytes;
use millrace_bundle::Datatype;
use ort::session::SessionInputValue;
use ort::value::{TensorElementType, TensorRef, TensorValueTypeMarker, Value};

use super::{Data, Tensor, for_numbers};
use crate::error::{InferError, one_line};

/// The protocol's datatype of an element type; `None` for those that it cannot carry.
pub(crate) fn datatype(ty: TensorElementType) -> Option<Datatype> {
    // ONNX Runtime numbers them as graphs do.
    Datatype::from_onnx(ort::sys::ONNXTensorElementDataType::from(ty) as i32)
}

/// A view of the tensor's elements; only strings are copied.
pub(super) fn value(tensor: &Tensor) -> Result<SessionInputValue<'_>, InferError> {
    let shape = tensor.shape.as_slice();
    Ok(for_numbers!(
        &tensor.data,
        values => TensorRef::from_array_view((shape, values.as_slice())).map_err(failed)?.into(),
        bool => TensorRef::from_array_view((shape, values.as_slice())).map_err(failed)?.into(),
        bytes => texts(tensor, values)?
    ))
}

/// A copy of the tensor.
pub(super) fn copy(tensor: &Tensor) -> Result<SessionInputValue<'_>, InferError> {
    let shape = tensor.shape.as_slice();
    Ok(for_numbers!(
        &tensor.data,
        values => ort::value::Tensor::from_array((shape, values.clone())).map_err(failed)?.into(),
        bool => ort::value::Tensor::from_array((shape, values.clone())).map_err(failed)?.into(),
        bytes => texts(tensor, values)?
    ))
}

fn texts(tensor: &Tensor, values: &[Bytes]) -> Result<SessionInputValue<'static>, InferError> {
    let texts = values
        .iter()
        .map(|value| match std::str::from_utf8(value) {
            Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
            _ => Err(InferError::invalid(format!(
                "input {:?}: a BYTES element is not UTF-8 text without NUL, which ONNX strings are",
                tensor.name
            ))),
        })
        .collect::<Result<Vec<String>, _>>()?;
    let shape = tensor.shape.as_slice();
    Ok(ort::value::Tensor::from_string_array((shape, texts.as_slice())).map_err(failed)?.into())
}

fn failed(error: ort::Error) -> InferError {
    InferError::internal(format!("ONNX Runtime: {}", one_line(&error)))
}

/// Copies shape and elements out of a tensor in the processor's memory.
///
/// # Errors
/// For what is no tensor, of another datatype, or in the memory of a device.
pub(crate) fn extract<Type: TensorValueTypeMarker + ?Sized>(
    value: &Value<Type>,
    datatype: Datatype,
) -> ort::Result<(Vec<i64>, Data)> {
    macro_rules! numbers {
        ($variant:ident, $number:ty) => {{
            let (shape, values) = value.try_extract_tensor::<$number>()?;
            (shape.to_vec(), Data::$variant(values.to_vec()))
        }};
    }
    Ok(match datatype {
        Datatype::Bool => numbers!(Bool, bool),
        Datatype::Uint8 => numbers!(Uint8, u8),
        Datatype::Uint16 => numbers!(Uint16, u16),
        Datatype::Uint32 => numbers!(Uint32, u32),
        Datatype::Uint64 => numbers!(Uint64, u64),
        Datatype::Int8 => numbers!(Int8, i8),
        Datatype::Int16 => numbers!(Int16, i16),
        Datatype::Int32 => numbers!(Int32, i32),
        Datatype::Int64 => numbers!(Int64, i64),
        Datatype::Fp16 => numbers!(Fp16, half::f16),
        Datatype::Bf16 => numbers!(Bf16, half::bf16),
        Datatype::Fp32 => numbers!(Fp32, f32),
        Datatype::Fp64 => numbers!(Fp64, f64),
        Datatype::Bytes => {
            let (shape, texts) = value.try_extract_strings()?;
            (shape.to_vec(), Data::Bytes(texts.into_iter().map(Into::into).collect()))
        }
    })
}
