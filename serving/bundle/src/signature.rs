//! The signature of a model: names, element types and shapes of its inputs and outputs, read from an ONNX
//! graph.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::manifest::shorten;
use crate::onnx;

const TENSORS_MAX: usize = 1024;
const RANK_MAX: usize = 32;
const TENSOR_NAME_BYTES_MAX: usize = 1024;

/// Element type of a tensor, under its name in the Open Inference Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[allow(missing_docs, reason = "the names say it: kind and width in bits")]
pub enum Datatype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Bf16,
    Fp32,
    Fp64,
    /// Variable-length byte strings (ONNX strings).
    Bytes,
}

impl Datatype {
    /// Every datatype.
    pub const ALL: [Datatype; 14] = [
        Datatype::Bool,
        Datatype::Uint8,
        Datatype::Uint16,
        Datatype::Uint32,
        Datatype::Uint64,
        Datatype::Int8,
        Datatype::Int16,
        Datatype::Int32,
        Datatype::Int64,
        Datatype::Fp16,
        Datatype::Bf16,
        Datatype::Fp32,
        Datatype::Fp64,
        Datatype::Bytes,
    ];

    /// Name in the Open Inference Protocol, `FP32`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Datatype::Bool => "BOOL",
            Datatype::Uint8 => "UINT8",
            Datatype::Uint16 => "UINT16",
            Datatype::Uint32 => "UINT32",
            Datatype::Uint64 => "UINT64",
            Datatype::Int8 => "INT8",
            Datatype::Int16 => "INT16",
            Datatype::Int32 => "INT32",
            Datatype::Int64 => "INT64",
            Datatype::Fp16 => "FP16",
            Datatype::Bf16 => "BF16",
            Datatype::Fp32 => "FP32",
            Datatype::Fp64 => "FP64",
            Datatype::Bytes => "BYTES",
        }
    }

    /// Bytes of one element; `None` for [`Datatype::Bytes`], whose elements vary.
    pub const fn element_bytes(self) -> Option<usize> {
        match self {
            Datatype::Bool | Datatype::Uint8 | Datatype::Int8 => Some(1),
            Datatype::Uint16 | Datatype::Int16 | Datatype::Fp16 | Datatype::Bf16 => Some(2),
            Datatype::Uint32 | Datatype::Int32 | Datatype::Fp32 => Some(4),
            Datatype::Uint64 | Datatype::Int64 | Datatype::Fp64 => Some(8),
            Datatype::Bytes => None,
        }
    }

    /// The datatype of an ONNX element type number; `None` for types that the protocol does not have.
    pub fn from_onnx(elem_type: i32) -> Option<Datatype> {
        use onnx::tensor_proto::DataType as T;
        Some(match T::try_from(elem_type).ok()? {
            T::Bool => Datatype::Bool,
            T::Uint8 => Datatype::Uint8,
            T::Uint16 => Datatype::Uint16,
            T::Uint32 => Datatype::Uint32,
            T::Uint64 => Datatype::Uint64,
            T::Int8 => Datatype::Int8,
            T::Int16 => Datatype::Int16,
            T::Int32 => Datatype::Int32,
            T::Int64 => Datatype::Int64,
            T::Float16 => Datatype::Fp16,
            T::Bfloat16 => Datatype::Bf16,
            T::Float => Datatype::Fp32,
            T::Double => Datatype::Fp64,
            T::String => Datatype::Bytes,
            _ => return None,
        })
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Datatype {
    type Err = UnknownDatatype;

    fn from_str(text: &str) -> std::result::Result<Self, UnknownDatatype> {
        Datatype::ALL
            .into_iter()
            .find(|datatype| datatype.as_str() == text)
            .ok_or_else(|| UnknownDatatype(shorten(text)))
    }
}

/// Error: a datatype name that the protocol does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a datatype (BOOL, UINT8 to UINT64, INT8 to INT64, FP16, BF16, FP32, FP64, BYTES)")]
pub struct UnknownDatatype(String);

/// One input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name of the value in the graph.
    pub name: String,
    /// Element type.
    pub datatype: Datatype,
    /// Extent of every dimension; -1 for a dynamic one (the batch).
    pub shape: Vec<i64>,
}

/// Inputs and outputs of a model, in the graph's order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The inputs that a request must have.
    pub inputs: Vec<TensorSpec>,
    /// The outputs of a response.
    pub outputs: Vec<TensorSpec>,
}

impl Signature {
    /// Whether the first extent of every input and output is dynamic, as the row dimension is.
    pub fn has_rows(&self) -> bool {
        self.inputs.iter().chain(&self.outputs).all(|spec| spec.shape.first() == Some(&-1))
    }

    /// Reads the signature of a graph: initializers are not inputs, and symbolic dimensions are -1.
    ///
    /// # Errors
    /// [`Error::InvalidModel`] if an input or output is not a dense tensor of a known datatype and rank, has
    /// no name or a duplicate one, or if there are none.
    pub fn of_graph(graph: &onnx::GraphProto) -> Result<Signature> {
        let initializers: BTreeSet<&str> = graph.initializer.iter().map(onnx::TensorProto::name).collect();
        let inputs = graph
            .input
            .iter()
            .filter(|value| !initializers.contains(value.name()))
            .map(tensor_spec)
            .collect::<Result<Vec<_>>>()?;
        let outputs = graph.output.iter().map(tensor_spec).collect::<Result<Vec<_>>>()?;
        let signature = Signature { inputs, outputs };
        signature.check().map_err(|reason| Error::InvalidModel { reason })?;
        Ok(signature)
    }

    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        for (side, specs) in [("input", &self.inputs), ("output", &self.outputs)] {
            if specs.is_empty() || specs.len() > TENSORS_MAX {
                return Err(format!("{} {side}s, allowed are 1 to {TENSORS_MAX}", specs.len()));
            }
            let mut names = BTreeSet::new();
            for spec in specs {
                let name = shorten(&spec.name);
                if spec.name.is_empty() || spec.name.len() > TENSOR_NAME_BYTES_MAX {
                    return Err(format!(
                        "{side} name {name:?} has {} bytes, allowed are 1 to {TENSOR_NAME_BYTES_MAX}",
                        spec.name.len()
                    ));
                }
                if !names.insert(spec.name.as_str()) {
                    return Err(format!("{side} {name:?} appears twice"));
                }
                if spec.shape.len() > RANK_MAX {
                    return Err(format!(
                        "{side} {name:?} has {} dimensions, the limit is {RANK_MAX}",
                        spec.shape.len()
                    ));
                }
                if let Some(dim) = spec.shape.iter().find(|dim| **dim < -1) {
                    return Err(format!("{side} {name:?} has dimension {dim}"));
                }
            }
        }
        Ok(())
    }
}

fn tensor_spec(value: &onnx::ValueInfoProto) -> Result<TensorSpec> {
    use onnx::tensor_shape_proto::dimension::Value as Dim;
    use onnx::type_proto::Value as Kind;

    let name = shorten(value.name());
    let invalid = |reason: &str| Error::InvalidModel { reason: format!("{name:?} {reason}") };
    let Some(Kind::TensorType(tensor)) = value.r#type.as_ref().and_then(|t| t.value.as_ref()) else {
        return Err(invalid("is not a dense tensor"));
    };
    let datatype = Datatype::from_onnx(tensor.elem_type())
        .ok_or_else(|| invalid("has an element type that the inference protocol cannot carry"))?;
    let shape = tensor.shape.as_ref().ok_or_else(|| invalid("has no declared rank"))?;
    let shape = shape
        .dim
        .iter()
        .map(|dim| match dim.value {
            Some(Dim::DimValue(extent)) if extent >= 0 => Ok(extent),
            Some(Dim::DimValue(_)) => Err(invalid("has a negative dimension")),
            Some(Dim::DimParam(_)) | None => Ok(-1),
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(TensorSpec { name: value.name().to_owned(), datatype, shape })
}
