//! Conversion of tensors to and from ONNX Runtime. Strings use its C interface, which passes lengths: strings of the
//! Rust interface are UTF-8 without NUL, but BYTES elements may contain any bytes.
#![allow(unsafe_code)]

use std::ffi::c_char;
use std::ptr;

use bytes::Bytes;
use millrace_bundle::Datatype;
use ort::AsPointer;
use ort::memory::Allocator;
use ort::session::SessionInputValue;
use ort::value::{DynTensor, TensorElementType, TensorRef, TensorValueTypeMarker, Value, ValueType};

use super::{Data, Tensor, for_numbers};
use crate::error::{InferError, one_line};

/// The protocol's datatype for an element type; `None` if the protocol has none.
pub fn datatype(ty: TensorElementType) -> Option<Datatype> {
    // ONNX Runtime numbers element types as ONNX graphs do.
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
    let shape = tensor.shape.as_slice();
    let mut strings =
        DynTensor::new(&Allocator::default(), TensorElementType::String, shape).map_err(failed)?;
    for (index, value) in values.iter().enumerate() {
        fill(&mut strings, index, value).map_err(failed)?;
    }
    Ok(strings.into())
}

/// Sets an element of a string tensor to `bytes`.
fn fill(strings: &mut DynTensor, index: usize, bytes: &[u8]) -> ort::Result<()> {
    let mut place: *mut c_char = ptr::null_mut();
    // SAFETY: this function has exclusive access to the value, which is a string tensor, and the callee checks the
    // index. The callee resizes the element to the given length and sets `place` to its first byte, which is valid
    // until the next change of the tensor.
    unsafe {
        let resize = ort::api().GetResizedStringTensorElementBuffer;
        ort::Error::result_from_status(resize(strings.ptr_mut(), index, bytes.len(), &mut place))?;
        ptr::copy_nonoverlapping(bytes.as_ptr(), place.cast(), bytes.len());
    }
    Ok(())
}

/// The shape and elements of a string tensor in the processor's memory.
fn strings<Type: TensorValueTypeMarker + ?Sized>(value: &Value<Type>) -> ort::Result<(Vec<i64>, Vec<Bytes>)> {
    let ValueType::Tensor { ty: TensorElementType::String, shape, .. } = value.dtype() else {
        return Err(ort::Error::new(format!("{} is not a tensor of strings", value.dtype())));
    };
    let count = shape.num_elements();
    let mut length = 0;
    let (mut content, mut starts) = (Vec::new(), vec![0; count]);
    // SAFETY: the callees check that the value is a string tensor of that number of elements. They write as many
    // bytes and offsets as they are told, for which both vectors have space.
    unsafe {
        let api = ort::api();
        ort::Error::result_from_status((api.GetStringTensorDataLength)(value.ptr(), &mut length))?;
        content.resize(length, 0_u8);
        let place = content.as_mut_ptr().cast();
        let written = (api.GetStringTensorContent)(value.ptr(), place, length, starts.as_mut_ptr(), count);
        ort::Error::result_from_status(written)?;
    }
    let content = Bytes::from(content);
    let ends = starts.iter().skip(1).copied().chain([length]);
    let elements = starts.iter().zip(ends).map(|(start, end)| content.slice(*start..end)).collect();
    Ok((shape.to_vec(), elements))
}

fn failed(error: ort::Error) -> InferError {
    InferError::internal(format!("ONNX Runtime: {}", one_line(&error)))
}

/// Copies shape and elements out of a tensor in the processor's memory.
///
/// # Errors
/// For a value that is not a tensor, has another datatype, or is in the memory of a device.
pub fn extract<Type: TensorValueTypeMarker + ?Sized>(
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
            let (shape, elements) = strings(value)?;
            (shape, Data::Bytes(elements))
        }
    })
}
