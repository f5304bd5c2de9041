//! Typed tensors, used by transports and sessions, and their raw little-endian form.

mod handle;
pub mod onnx;
mod resident;

use std::ops::Range;

use bytes::Bytes;
use half::{bf16, f16};
use millrace_bundle::Datatype;

use crate::error::{InferError, quote};
pub use handle::{TensorHandle, View};
pub use resident::Resident;

/// Maximum number of input or output tensors in a request.
pub const TENSORS_MAX: usize = 1024;

/// Elements of a tensor, row major.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names are the protocol's datatypes")]
pub enum Data {
    Bool(Vec<bool>),
    Uint8(Vec<u8>),
    Uint16(Vec<u16>),
    Uint32(Vec<u32>),
    Uint64(Vec<u64>),
    Int8(Vec<i8>),
    Int16(Vec<i16>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Fp16(Vec<f16>),
    Bf16(Vec<bf16>),
    Fp32(Vec<f32>),
    Fp64(Vec<f64>),
    Bytes(Vec<Bytes>),
}

/// A named tensor: `data` holds exactly the product of `shape` elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Name of the model's input or output.
    pub name: String,
    /// Extent of every dimension, none negative.
    pub shape: Vec<i64>,
    /// The elements.
    pub data: Data,
}

/// Evaluates an expression with the vector of a [`Data`], by kind of element: numbers, booleans or byte strings.
#[macro_export]
macro_rules! for_numbers {
    ($data:expr, $values:ident => $numbers:expr, bool => $bools:expr, bytes => $bytes:expr) => {
        match $data {
            $crate::tensor::Data::Bool($values) => $bools,
            $crate::tensor::Data::Uint8($values) => $numbers,
            $crate::tensor::Data::Uint16($values) => $numbers,
            $crate::tensor::Data::Uint32($values) => $numbers,
            $crate::tensor::Data::Uint64($values) => $numbers,
            $crate::tensor::Data::Int8($values) => $numbers,
            $crate::tensor::Data::Int16($values) => $numbers,
            $crate::tensor::Data::Int32($values) => $numbers,
            $crate::tensor::Data::Int64($values) => $numbers,
            $crate::tensor::Data::Fp16($values) => $numbers,
            $crate::tensor::Data::Bf16($values) => $numbers,
            $crate::tensor::Data::Fp32($values) => $numbers,
            $crate::tensor::Data::Fp64($values) => $numbers,
            $crate::tensor::Data::Bytes($values) => $bytes,
        }
    };
}
pub use crate::for_numbers;

impl Tensor {
    /// A tensor of 32-bit floats.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the shape does not fit the number of values.
    pub fn fp32(name: &str, shape: Vec<i64>, values: Vec<f32>) -> Result<Tensor, InferError> {
        Tensor::new(name, shape, Data::Fp32(values))
    }

    /// A tensor of any datatype.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the shape does not fit the number of elements.
    pub fn new(name: &str, shape: Vec<i64>, data: Data) -> Result<Tensor, InferError> {
        let count = element_count(name, &shape)?;
        if count != data.len() {
            return Err(wrong_count(name, &shape, count, data.len()));
        }
        Ok(Tensor { name: name.to_owned(), shape, data })
    }

    /// A tensor from its raw form: little-endian elements, for BYTES a 4-byte length before each.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the bytes are not exactly the elements of the shape.
    pub fn from_raw(
        name: String,
        datatype: Datatype,
        shape: Vec<i64>,
        raw: &Bytes,
    ) -> Result<Tensor, InferError> {
        let count = element_count(&name, &shape)?;
        if let Some(width) = datatype.element_bytes()
            && count.checked_mul(width) != Some(raw.len())
        {
            return Err(InferError::invalid(format!(
                "input {}: {} bytes of raw data, shape {} of {datatype} takes {}",
                quote(&name),
                raw.len(),
                shown(&shape),
                count.saturating_mul(width)
            )));
        }
        let data = Data::from_raw(&name, datatype, count, raw)?;
        Ok(Tensor { name, shape, data })
    }
}

/// Number of elements of a shape.
///
/// # Errors
/// [`InferError::Invalid`] for a negative extent and for a product beyond the address space.
pub fn element_count(name: &str, shape: &[i64]) -> Result<usize, InferError> {
    let product = shape.iter().try_fold(1usize, |product, extent| {
        usize::try_from(*extent).ok().and_then(|extent| product.checked_mul(extent))
    });
    product.filter(|count| *count <= isize::MAX as usize).ok_or_else(|| {
        InferError::invalid(format!(
            "input {}: shape {} is negative or too large (every extent from 0 on, their product below 2^63)",
            quote(name),
            shown(shape)
        ))
    })
}

/// A shape for messages, shortened: a hostile request may have millions of extents.
pub fn shown(shape: &[i64]) -> String {
    match shape.get(..16) {
        Some(first) if shape.len() > 16 => format!("{first:?} and {} more extents", shape.len() - 16),
        _ => format!("{shape:?}"),
    }
}

/// The error for a tensor with another number of elements than its shape has.
pub fn wrong_count(name: &str, shape: &[i64], expected: usize, found: usize) -> InferError {
    InferError::invalid(format!(
        "input {}: {found} elements, shape {} takes {expected}",
        quote(name),
        shown(shape)
    ))
}

impl Data {
    /// The datatype of the elements.
    pub fn datatype(&self) -> Datatype {
        match self {
            Data::Bool(_) => Datatype::Bool,
            Data::Uint8(_) => Datatype::Uint8,
            Data::Uint16(_) => Datatype::Uint16,
            Data::Uint32(_) => Datatype::Uint32,
            Data::Uint64(_) => Datatype::Uint64,
            Data::Int8(_) => Datatype::Int8,
            Data::Int16(_) => Datatype::Int16,
            Data::Int32(_) => Datatype::Int32,
            Data::Int64(_) => Datatype::Int64,
            Data::Fp16(_) => Datatype::Fp16,
            Data::Bf16(_) => Datatype::Bf16,
            Data::Fp32(_) => Datatype::Fp32,
            Data::Fp64(_) => Datatype::Fp64,
            Data::Bytes(_) => Datatype::Bytes,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        for_numbers!(self, values => values.len(), bool => values.len(), bytes => values.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as floats, rounded where they do not fit; `None` for strings.
    pub fn to_floats(&self) -> Option<Vec<f64>> {
        trait Number: Copy {
            fn float(self) -> f64;
        }
        macro_rules! number {
            ($($number:ty => |$value:ident| $float:expr),* $(,)?) => {
                $(impl Number for $number {
                    fn float(self) -> f64 {
                        let $value = self;
                        $float
                    }
                })*
            };
        }
        number! {
            u8 => |v| f64::from(v), u16 => |v| f64::from(v), u32 => |v| f64::from(v), u64 => |v| v as f64,
            i8 => |v| f64::from(v), i16 => |v| f64::from(v), i32 => |v| f64::from(v), i64 => |v| v as f64,
            f16 => |v| v.to_f64(), bf16 => |v| v.to_f64(), f32 => |v| f64::from(v), f64 => |v| v,
        }
        for_numbers!(
            self,
            values => Some(values.iter().map(|value| value.float()).collect()),
            bool => Some(values.iter().map(|value| f64::from(u8::from(*value))).collect()),
            bytes => { let _ = values; None }
        )
    }

    /// The address range of the elements.
    pub fn range(&self) -> Range<usize> {
        fn of<T>(values: &[T]) -> Range<usize> {
            let Range { start, end } = values.as_ptr_range();
            start.addr()..end.addr()
        }
        for_numbers!(self, values => of(values), bool => of(values), bytes => of(values))
    }

    /// `count` zeros (empty byte strings for BYTES).
    pub fn zeros(datatype: Datatype, count: usize) -> Data {
        match datatype {
            Datatype::Bool => Data::Bool(vec![false; count]),
            Datatype::Uint8 => Data::Uint8(vec![0; count]),
            Datatype::Uint16 => Data::Uint16(vec![0; count]),
            Datatype::Uint32 => Data::Uint32(vec![0; count]),
            Datatype::Uint64 => Data::Uint64(vec![0; count]),
            Datatype::Int8 => Data::Int8(vec![0; count]),
            Datatype::Int16 => Data::Int16(vec![0; count]),
            Datatype::Int32 => Data::Int32(vec![0; count]),
            Datatype::Int64 => Data::Int64(vec![0; count]),
            Datatype::Fp16 => Data::Fp16(vec![f16::ZERO; count]),
            Datatype::Bf16 => Data::Bf16(vec![bf16::ZERO; count]),
            Datatype::Fp32 => Data::Fp32(vec![0.0; count]),
            Datatype::Fp64 => Data::Fp64(vec![0.0; count]),
            Datatype::Bytes => Data::Bytes(vec![Bytes::new(); count]),
        }
    }

    /// The raw form: little-endian elements, for BYTES a 4-byte length before each.
    pub fn to_raw(&self) -> Bytes {
        let raw = for_numbers!(
            self,
            values => little_endian(values, |value| value.to_le_bytes()),
            bool => values.iter().map(|value| u8::from(*value)).collect(),
            bytes => {
                let mut raw = Vec::with_capacity(self.raw_len());
                for value in values {
                    // Elements arrived with a 32-bit prefix or from a string tensor, so their size fits.
                    raw.extend_from_slice(&(value.len() as u32).to_le_bytes());
                    raw.extend_from_slice(value);
                }
                raw
            }
        );
        raw.into()
    }

    /// Size of the raw form in bytes.
    pub fn raw_len(&self) -> usize {
        match (self, self.datatype().element_bytes()) {
            (Data::Bytes(values), _) => values.iter().map(|value| value.len() + 4).sum(),
            (_, width) => self.len() * width.unwrap_or(0),
        }
    }

    fn from_raw(name: &str, datatype: Datatype, count: usize, raw: &Bytes) -> Result<Data, InferError> {
        macro_rules! numbers {
            ($number:ty) => {
                raw.as_chunks::<{ size_of::<$number>() }>()
                    .0
                    .iter()
                    .map(|bytes| <$number>::from_le_bytes(*bytes))
                    .collect()
            };
        }
        Ok(match datatype {
            Datatype::Bool => {
                if raw.iter().any(|byte| *byte > 1) {
                    return Err(InferError::invalid(format!(
                        "input {}: a BOOL element is neither 0 nor 1",
                        quote(name)
                    )));
                }
                Data::Bool(raw.iter().map(|byte| *byte == 1).collect())
            }
            Datatype::Uint8 => Data::Uint8(raw.to_vec()),
            Datatype::Int8 => Data::Int8(raw.iter().map(|byte| *byte as i8).collect()),
            Datatype::Uint16 => Data::Uint16(numbers!(u16)),
            Datatype::Uint32 => Data::Uint32(numbers!(u32)),
            Datatype::Uint64 => Data::Uint64(numbers!(u64)),
            Datatype::Int16 => Data::Int16(numbers!(i16)),
            Datatype::Int32 => Data::Int32(numbers!(i32)),
            Datatype::Int64 => Data::Int64(numbers!(i64)),
            Datatype::Fp16 => Data::Fp16(numbers!(f16)),
            Datatype::Bf16 => Data::Bf16(numbers!(bf16)),
            Datatype::Fp32 => Data::Fp32(numbers!(f32)),
            Datatype::Fp64 => Data::Fp64(numbers!(f64)),
            Datatype::Bytes => Data::Bytes(split_bytes(name, count, raw)?),
        })
    }
}

/// Splits length-prefixed elements without copying them.
fn split_bytes(name: &str, count: usize, raw: &Bytes) -> Result<Vec<Bytes>, InferError> {
    // Every element takes at least its prefix, so the raw size bounds the allocation.
    if count > raw.len() / 4 {
        return Err(InferError::invalid(format!(
            "input {}: {} bytes of raw data cannot hold {count} BYTES elements",
            quote(name),
            raw.len()
        )));
    }
    let mut elements = Vec::with_capacity(count);
    let mut rest = raw.clone();
    while !rest.is_empty() {
        if elements.len() == count {
            return Err(InferError::invalid(format!(
                "input {}: more than {count} BYTES elements, {} bytes of raw data are left over",
                quote(name),
                rest.len()
            )));
        }
        let torn = |expected: usize, left: usize, what: &str| {
            InferError::invalid(format!(
                "input {}: BYTES element {} is cut off: its {what} {expected} bytes, but {left} are left",
                quote(name),
                elements.len()
            ))
        };
        let Some(prefix) = rest.first_chunk::<4>() else {
            return Err(torn(4, rest.len(), "length takes"));
        };
        let len = u32::from_le_bytes(*prefix) as usize;
        if rest.len() - 4 < len {
            return Err(torn(len, rest.len() - 4, "length says"));
        }
        elements.push(rest.slice(4..4 + len));
        rest = rest.slice(4 + len..);
    }
    if elements.len() != count {
        return Err(InferError::invalid(format!(
            "input {}: {} BYTES elements, the shape takes {count}",
            quote(name),
            elements.len()
        )));
    }
    Ok(elements)
}

/// Concatenates the bytes of all numbers; writes into an allocated buffer, which is as fast as copying memory.
fn little_endian<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut raw = vec![0; values.len() * N];
    for (place, value) in raw.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *place = bytes(*value);
    }
    raw
}

#[cfg(test)]
mod tests;
