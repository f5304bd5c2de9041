//! Tensors in and out of ONNX Runtime.

use std::time::Instant;

use millrace_bundle::{Datatype, TensorSpec};
use ort::ErrorCode;
use ort::session::{RunOptions, Session, SessionInputValue, SessionOutputs};
use ort::value::{DynValue, TensorElementType, TensorRef};

use super::one_line;
use crate::error::{InferError, Result};
use crate::statistics::Times;
use crate::tensor::{Data, Tensor, for_numbers, shown};

/// How the runtime begins to say which node failed.
const NODE_FAILED: &str = "while running";
/// Words for memory and devices in what it says then.
const DEVICE_FAILURES: [&str; 5] = ["alloc", "memory", "cuda", "cudnn", "cublas"];
/// Inputs that are named, at most.
const SHOWN_MAX: usize = 8;

/// The protocol's datatype of an element type; `None` for those that it cannot carry.
pub(super) fn datatype(ty: TensorElementType) -> Option<Datatype> {
    use TensorElementType as T;
    Some(match ty {
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
        T::Float32 => Datatype::Fp32,
        T::Float64 => Datatype::Fp64,
        T::String => Datatype::Bytes,
        _ => return None,
    })
}

/// Elements of all inputs of a run.
pub(super) fn elements(inputs: &[&Tensor]) -> usize {
    inputs.iter().map(|input| input.data.len()).sum()
}

/// Runs a session on inputs in the signature's order, for a request that waits since `queued`.
pub(super) fn run(
    session: &mut Session,
    inputs: &[&Tensor],
    outputs: &[&TensorSpec],
    queued: Instant,
) -> Result<(Vec<Tensor>, Times), InferError> {
    let failed = |error: ort::Error| refused(&error, inputs);
    let computing = Instant::now();
    // At most one input and output are the rule, so the array form spares a map.
    let (values, input_end) = match inputs {
        [input] => {
            let values = [value(input)?];
            let input_end = Instant::now();
            (session.run(values).map_err(failed)?, input_end)
        }
        _ => {
            let values = inputs.iter().map(|input| value(input)).collect::<Result<Vec<_>, _>>()?;
            let input_end = Instant::now();
            (session.run(values.as_slice()).map_err(failed)?, input_end)
        }
    };
    let output_start = Instant::now();
    let tensors = outputs.iter().map(|spec| output(&values, spec)).collect::<Result<_, _>>()?;
    let end = Instant::now();
    Ok((tensors, Times { queued, computing, input_end, output_start, end, cached: false }))
}

/// Runs a session on inputs in the signature's order, and has it give back what it has of a device's memory and does not
/// use after that. `arena` is the device as ONNX Runtime calls its memory.
pub(super) fn release(session: &mut Session, inputs: &[&Tensor], arena: &str) -> Result<(), InferError> {
    let failed = |error: ort::Error| refused(&error, inputs);
    let mut options = RunOptions::new().map_err(failed)?;
    options.set("memory.enable_memory_arena_shrinkage", arena).map_err(failed)?;
    let values = inputs.iter().map(|input| value(input)).collect::<Result<Vec<_>, _>>()?;
    session.run_with_options(values.as_slice(), &options).map_err(failed)?;
    Ok(())
}

/// What the runtime says of a request that was checked against the signature. Weights do not change, so
/// what a node cannot work on (extents that do not belong together, an index that is out of bounds) came
/// with the request, unless it is memory or the device that failed.
fn refused(error: &ort::Error, inputs: &[&Tensor]) -> InferError {
    let text = one_line(error);
    let of_node = text.contains(NODE_FAILED);
    let lower = text.to_ascii_lowercase();
    let of_device = DEVICE_FAILURES.iter().any(|word| lower.contains(word));
    match error.code() {
        ErrorCode::InvalidArgument => {}
        ErrorCode::GenericFailure | ErrorCode::RuntimeException if of_node && !of_device => {}
        _ => return InferError::internal(format!("ONNX Runtime: {text}")),
    }
    let shapes: Vec<String> = inputs
        .iter()
        .take(SHOWN_MAX)
        .map(|input| format!("{:?} of shape {}", input.name, shown(&input.shape)))
        .collect();
    InferError::invalid(format!("the model cannot run on input {}: {text}", shapes.join(", ")))
}

/// A view of the tensor's elements; only strings are copied.
fn value(tensor: &Tensor) -> Result<SessionInputValue<'_>, InferError> {
    let failed = |error: ort::Error| InferError::internal(format!("ONNX Runtime: {}", one_line(&error)));
    let shape = tensor.shape.as_slice();
    Ok(for_numbers!(
        &tensor.data,
        values => TensorRef::from_array_view((shape, values.as_slice())).map_err(failed)?.into(),
        bool => TensorRef::from_array_view((shape, values.as_slice())).map_err(failed)?.into(),
        bytes => {
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
            ort::value::Tensor::from_string_array((shape, texts.as_slice())).map_err(failed)?.into()
        }
    ))
}

fn output(values: &SessionOutputs<'_>, spec: &TensorSpec) -> Result<Tensor, InferError> {
    let value = values
        .get(&spec.name)
        .ok_or_else(|| InferError::internal(format!("the model gave no output {:?}", spec.name)))?;
    let (shape, data) = extract(value, spec.datatype)
        .map_err(|error| InferError::internal(format!("output {:?}: {}", spec.name, one_line(&error))))?;
    Ok(Tensor { name: spec.name.clone(), shape, data })
}

fn extract(value: &DynValue, datatype: Datatype) -> ort::Result<(Vec<i64>, Data)> {
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
