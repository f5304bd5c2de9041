//! The JSON encoder for tensor elements, and the check for values that JSON cannot represent.

use serde::{Serialize, Serializer};

use crate::error::InferError;
use crate::tensor::Data;

/// Elements as a flat JSON list. [`check_representable`] must have passed before.
#[derive(Debug)]
pub struct JsonData<'a>(pub &'a Data);

impl Serialize for JsonData<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Data::Fp16(values) => serializer.collect_seq(values.iter().map(|value| value.to_f32())),
            Data::Bf16(values) => serializer.collect_seq(values.iter().map(|value| value.to_f32())),
            Data::Bytes(values) => {
                serializer.collect_seq(values.iter().map(|value| String::from_utf8_lossy(value)))
            }
            Data::Bool(values) => serializer.collect_seq(values),
            Data::Uint8(values) => serializer.collect_seq(values),
            Data::Uint16(values) => serializer.collect_seq(values),
            Data::Uint32(values) => serializer.collect_seq(values),
            Data::Uint64(values) => serializer.collect_seq(values),
            Data::Int8(values) => serializer.collect_seq(values),
            Data::Int16(values) => serializer.collect_seq(values),
            Data::Int32(values) => serializer.collect_seq(values),
            Data::Int64(values) => serializer.collect_seq(values),
            Data::Fp32(values) => serializer.collect_seq(values),
            Data::Fp64(values) => serializer.collect_seq(values),
        }
    }
}

/// Checks that JSON can represent the elements: numbers must be finite, byte strings UTF-8.
///
/// # Errors
/// [`InferError::NotRepresentable`], which tells the client to ask for binary data.
pub fn check_representable(output: &str, data: &Data) -> Result<(), InferError> {
    let fits = match data {
        Data::Fp16(values) => values.iter().all(|value| value.is_finite()),
        Data::Bf16(values) => values.iter().all(|value| value.is_finite()),
        Data::Fp32(values) => values.iter().all(|value| value.is_finite()),
        Data::Fp64(values) => values.iter().all(|value| value.is_finite()),
        Data::Bytes(values) => values.iter().all(|value| std::str::from_utf8(value).is_ok()),
        _ => true,
    };
    if fits {
        return Ok(());
    }
    Err(InferError::NotRepresentable {
        reason: format!(
            "output {output:?} has elements that JSON cannot carry (NaN, infinity or bytes that are not UTF-8): ask for binary_data"
        ),
    })
}
