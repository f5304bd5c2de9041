//! Single runs of a session: passes input tensors to ONNX Runtime and extracts the outputs.
//!
//! ONNX Runtime reads inputs in place. Outputs are copied into the processor's memory, or stay where the run leaves
//! them. On the processor that takes no copy; on a GPU it takes an I/O binding, without which ONNX Runtime would copy
//! them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use millrace_bundle::TensorSpec;
use ort::ErrorCode;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{RunOptions, SessionOutputs};
use ort::value::{DynTensorValueType, Value};

use super::Session;
use millrace_serving_core::config::Memory;
use millrace_serving_core::error::{InferError, Result, one_line};
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::onnx::extract;
use millrace_serving_core::tensor::{Resident, Tensor, TensorHandle, View, shown};

/// Marker in ONNX Runtime's message for the failure of a node.
const NODE_FAILED: &str = "while running";
/// Words in these messages that point to memory or the device.
const DEVICE_FAILURES: [&str; 5] = ["alloc", "memory", "cuda", "cudnn", "cublas"];
/// Maximum number of inputs named in an error.
const SHOWN_MAX: usize = 8;

/// An output that a run must return.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestedOutput<'a> {
    pub(super) spec: &'a TensorSpec,
    /// Whether it stays in the memory of the session's device. String outputs never do.
    pub(super) stays: bool,
}

impl RequestedOutput<'_> {
    fn is_to_stay(self) -> bool {
        self.stays && self.spec.datatype.element_bytes().is_some()
    }
}

/// Runs a session on inputs in the signature's order, for a request that waits since `queued`; `options` may end the
/// run.
///
/// # Errors
/// [`InferError::Invalid`] when the graph cannot take the inputs; [`InferError::Internal`]; [`InferError`] of any
/// kind when the run was ended.
pub(super) fn run(
    session: &mut Session,
    inputs: &[View<'_>],
    outputs: &[RequestedOutput<'_>],
    queued: Instant,
    options: Option<&RunOptions>,
) -> Result<(Vec<TensorHandle>, Times), InferError> {
    let memory = session.memory;
    if memory != Memory::Host && outputs.iter().any(|wanted| wanted.is_to_stay()) {
        return run_bound(session, inputs, outputs, queued, options);
    }
    let failed = |error: ort::Error| refused(&error, inputs);
    let computing = Instant::now();
    // Typical models have one input, and the array form avoids a map.
    let (values, input_end) = match inputs {
        [input] => {
            let values = [input.value(memory)?];
            let input_end = Instant::now();
            let ran = match options {
                Some(options) => session.run_with_options(values, options),
                None => session.run(values),
            };
            (ran.map_err(failed)?, input_end)
        }
        _ => {
            let values = inputs.iter().map(|input| input.value(memory)).collect::<Result<Vec<_>, _>>()?;
            let input_end = Instant::now();
            let ran = match options {
                Some(options) => session.run_with_options(values.as_slice(), options),
                None => session.run(values.as_slice()),
            };
            (ran.map_err(failed)?, input_end)
        }
    };
    let output_start = Instant::now();
    let stays = outputs.iter().any(|wanted| wanted.is_to_stay());
    let lent = inputs.iter().filter(|_| stays).filter_map(|input| input.lent()).collect::<Vec<_>>();
    let outputs = held(values, outputs, memory, &lent)?;
    let end = Instant::now();
    Ok((outputs, Times { queued, computing, input_end, output_start, end, cached: false }))
}

/// Runs a session on tensors in the processor's memory; no output stays on the device.
///
/// # Errors
/// As [`run`].
pub(super) fn run_tensors(
    session: &mut Session,
    inputs: &[Tensor],
    outputs: &[TensorSpec],
    options: Option<&RunOptions>,
) -> Result<(Vec<Tensor>, Times), InferError> {
    let inputs: Vec<View<'_>> = inputs.iter().map(View::Here).collect();
    let outputs: Vec<RequestedOutput<'_>> =
        outputs.iter().map(|spec| RequestedOutput { spec, stays: false }).collect();
    let (outputs, times) = run(session, &inputs, &outputs, Instant::now(), options)?;
    Ok((outputs.into_iter().map(TensorHandle::into_tensor).collect::<Result<_, _>>()?, times))
}

/// Like [`run`], with inputs and outputs bound to the memory in which each must be.
fn run_bound(
    session: &mut Session,
    inputs: &[View<'_>],
    outputs: &[RequestedOutput<'_>],
    queued: Instant,
    options: Option<&RunOptions>,
) -> Result<(Vec<TensorHandle>, Times), InferError> {
    let failed = |error: ort::Error| refused(&error, inputs);
    let memory = session.memory;
    let computing = Instant::now();
    let (here, there) = (place(Memory::Host).map_err(failed)?, place(memory).map_err(failed)?);
    // A new binding for each run: a binding reuses the memory of its outputs, which an earlier caller may still hold.
    let mut binding = session.create_binding().map_err(failed)?;
    let mut lent = Vec::new();
    for (outlet, input) in session.inputs().iter().zip(inputs) {
        let value = input.value_to_bind(memory)?;
        if let View::Here(tensor) = input {
            lent.extend(address(&value).map(|start| start..start + tensor.data.raw_len()));
        }
        binding.bind_input(outlet.name(), &*value).map_err(failed)?;
    }
    // Copies of inputs to the device must have finished; a run does not wait for them.
    binding.synchronize_inputs().map_err(failed)?;
    for wanted in outputs {
        let at = if wanted.is_to_stay() { &there } else { &here };
        binding.bind_output_to_device(&*wanted.spec.name, at).map_err(failed)?;
    }
    let input_end = Instant::now();
    let ran = match options {
        Some(options) => session.run_binding_with_options(&binding, options),
        None => session.run_binding(&binding),
    };
    let values = ran.map_err(failed)?;
    let output_start = Instant::now();
    let outputs = held(values, outputs, memory, &lent)?;
    let end = Instant::now();
    Ok((outputs, Times { queued, computing, input_end, output_start, end, cached: false }))
}

/// Address of a tensor's first element.
fn address(value: &Value) -> Option<usize> {
    let tensor = value.view().downcast::<DynTensorValueType>().ok()?;
    Some(tensor.data_ptr().addr())
}

/// ONNX Runtime's description of a memory.
fn place(memory: Memory) -> ort::Result<MemoryInfo<'static>> {
    let (device, ordinal) = match memory {
        Memory::Host => (AllocationDevice::CPU, 0),
        Memory::Gpu(ordinal) => (AllocationDevice::CUDA, ordinal),
    };
    MemoryInfo::new(device, ordinal.into(), AllocatorType::Device, MemoryType::Default)
}

/// Runs a session on inputs in the signature's order and lets its arena release device memory that is free after the
/// run. `arena` is ONNX Runtime's name of the device memory.
pub(super) fn release(session: &mut Session, inputs: &[Tensor], arena: &str) -> Result<(), InferError> {
    let inputs: Vec<View<'_>> = inputs.iter().map(View::Here).collect();
    let failed = |error: ort::Error| refused(&error, &inputs);
    let mut options = RunOptions::new().map_err(failed)?;
    options.set("memory.enable_memory_arena_shrinkage", arena).map_err(failed)?;
    let memory = session.memory;
    let values = inputs.iter().map(|input| input.value(memory)).collect::<Result<Vec<_>, _>>()?;
    session.run_with_options(values.as_slice(), &options).map_err(failed)?;
    Ok(())
}

/// Converts ONNX Runtime's error for a request that was checked against the signature. Weights do not change. If a
/// node fails on its inputs (mismatched extents, an index out of bounds), the request is the cause, unless memory or
/// the device failed.
fn refused(error: &ort::Error, inputs: &[View<'_>]) -> InferError {
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
        .map(|input| format!("{:?} of shape {}", input.name(), shown(input.shape())))
        .collect();
    InferError::invalid(format!("the model cannot run on input {}: {text}", shapes.join(", ")))
}

/// Extracts the outputs of a run. Outputs that stay are in `memory`; `lent` are the address ranges of caller-owned
/// inputs.
fn held(
    mut values: SessionOutputs<'_>,
    outputs: &[RequestedOutput<'_>],
    memory: Memory,
    lent: &[Range<usize>],
) -> Result<Vec<TensorHandle>, InferError> {
    outputs.iter().map(|wanted| output(&mut values, *wanted, memory, lent)).collect()
}

fn output(
    values: &mut SessionOutputs<'_>,
    wanted: RequestedOutput<'_>,
    memory: Memory,
    lent: &[Range<usize>],
) -> Result<TensorHandle, InferError> {
    let spec = wanted.spec;
    let missing = || InferError::internal(format!("the model gave no output {:?}", spec.name));
    let unfit = |what: String| InferError::internal(format!("output {:?}: {what}", spec.name));
    if !wanted.is_to_stay() {
        let value = values.get(&spec.name).ok_or_else(missing)?;
        let (shape, data) = extract(value, spec.datatype).map_err(|error| unfit(one_line(&error)))?;
        return Ok(TensorHandle::Alone(Tensor { name: spec.name.clone(), shape, data }));
    }
    let value = values.remove(&spec.name).ok_or_else(missing)?;
    let left = Resident::new(value, memory).map_err(|error| unfit(error.to_string()))?;
    if left.datatype() != spec.datatype {
        return Err(unfit(format!("it is {}, the manifest has {}", left.datatype(), spec.datatype)));
    }
    // A run does not copy an input that is also an output: its memory is the caller's, so the output cannot stay.
    let is_lent = lent.iter().any(|lent| lent.contains(&left.address()));
    let left = TensorHandle::Resident(spec.name.clone(), Arc::new(left));
    if is_lent { left.into_tensor().map(TensorHandle::Alone) } else { Ok(left) }
}

#[cfg(test)]
mod tests;
