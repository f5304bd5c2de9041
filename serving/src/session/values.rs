//! Runs of one session, from tensors to tensors.
//!
//! Inputs are read where they are. Outputs are copied into the processor's memory, or stay where the run leaves them:
//! on the processor without a copy, on a GPU by an I/O binding, without which ONNX Runtime would copy them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use millrace_bundle::TensorSpec;
use ort::ErrorCode;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::session::{RunOptions, SessionOutputs};
use ort::value::{DynTensorValueType, Value};

use super::Session;
use crate::config::Memory;
use crate::error::{InferError, Result, one_line};
use crate::statistics::Times;
use crate::tensor::onnx::extract;
use crate::tensor::{Held, Resident, Tensor, View, shown};

/// How the runtime begins to say which node failed.
const NODE_FAILED: &str = "while running";
/// Words for memory and devices in what it says then.
const DEVICE_FAILURES: [&str; 5] = ["alloc", "memory", "cuda", "cudnn", "cublas"];
/// Inputs that are named, at most.
const SHOWN_MAX: usize = 8;

/// An output that a run is to give.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) spec: &'a TensorSpec,
    /// Whether it stays in the memory of the session's device. Texts never do.
    pub(super) stays: bool,
}

impl Wanted<'_> {
    fn is_to_stay(self) -> bool {
        self.stays && self.spec.datatype.element_bytes().is_some()
    }
}

/// Runs a session on inputs in the signature's order, for a request that waits since `queued`, until `options` end the
/// run.
///
/// # Errors
/// [`InferError::Invalid`] when the graph cannot take the inputs; [`InferError::Internal`]; [`InferError`] of any kind
/// where the run was ended.
pub(super) fn run(
    session: &mut Session,
    inputs: &[View<'_>],
    outputs: &[Wanted<'_>],
    queued: Instant,
    options: Option<&RunOptions>,
) -> Result<(Vec<Held>, Times), InferError> {
    let memory = session.memory;
    if memory != Memory::Host && outputs.iter().any(|wanted| wanted.is_to_stay()) {
        return run_bound(session, inputs, outputs, queued, options);
    }
    let failed = |error: ort::Error| refused(&error, inputs);
    let computing = Instant::now();
    // At most one input and output are the rule, so the array form spares a map.
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

/// The same for tensors that are in the processor's memory, and stay nowhere.
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
    let outputs: Vec<Wanted<'_>> = outputs.iter().map(|spec| Wanted { spec, stays: false }).collect();
    let (outputs, times) = run(session, &inputs, &outputs, Instant::now(), options)?;
    Ok((outputs.into_iter().map(Held::into_tensor).collect::<Result<_, _>>()?, times))
}

/// The same with inputs and outputs bound, each to the memory where it is to be.
fn run_bound(
    session: &mut Session,
    inputs: &[View<'_>],
    outputs: &[Wanted<'_>],
    queued: Instant,
    options: Option<&RunOptions>,
) -> Result<(Vec<Held>, Times), InferError> {
    let failed = |error: ort::Error| refused(&error, inputs);
    let memory = session.memory;
    let computing = Instant::now();
    let (here, there) = (place(Memory::Host).map_err(failed)?, place(memory).map_err(failed)?);
    // One for each run: it has its outputs use the same memory again, which somebody may still have.
    let mut binding = session.create_binding().map_err(failed)?;
    let mut lent = Vec::new();
    for (outlet, input) in session.inputs().iter().zip(inputs) {
        let value = input.value_to_bind(memory)?;
        if let View::Here(tensor) = input {
            lent.extend(address(&value).map(|start| start..start + tensor.data.raw_len()));
        }
        binding.bind_input(outlet.name(), &*value).map_err(failed)?;
    }
    // What is on its way to the device has to be there; a run does not wait for it.
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

/// Where the elements of a tensor begin.
fn address(value: &Value) -> Option<usize> {
    let tensor = value.view().downcast::<DynTensorValueType>().ok()?;
    Some(tensor.data_ptr().addr())
}

/// A memory as ONNX Runtime knows it.
fn place(memory: Memory) -> ort::Result<MemoryInfo<'static>> {
    let (device, ordinal) = match memory {
        Memory::Host => (AllocationDevice::CPU, 0),
        Memory::Gpu(ordinal) => (AllocationDevice::CUDA, ordinal),
    };
    MemoryInfo::new(device, ordinal.into(), AllocatorType::Device, MemoryType::Default)
}

/// Runs a session on inputs in the signature's order, and has it give back what it has of a device's memory and does not
/// use after that. `arena` is the device as ONNX Runtime calls its memory.
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

/// What the runtime says of a request that was checked against the signature. Weights do not change, so
/// what a node cannot work on (extents that do not belong together, an index that is out of bounds) came
/// with the request, unless it is memory or the device that failed.
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

/// The outputs of a run that left in `memory` those that are to stay, and was lent inputs at those addresses.
fn held(
    mut values: SessionOutputs<'_>,
    outputs: &[Wanted<'_>],
    memory: Memory,
    lent: &[Range<usize>],
) -> Result<Vec<Held>, InferError> {
    outputs.iter().map(|wanted| output(&mut values, *wanted, memory, lent)).collect()
}

fn output(
    values: &mut SessionOutputs<'_>,
    wanted: Wanted<'_>,
    memory: Memory,
    lent: &[Range<usize>],
) -> Result<Held, InferError> {
    let spec = wanted.spec;
    let missing = || InferError::internal(format!("the model gave no output {:?}", spec.name));
    let unfit = |what: String| InferError::internal(format!("output {:?}: {what}", spec.name));
    if !wanted.is_to_stay() {
        let value = values.get(&spec.name).ok_or_else(missing)?;
        let (shape, data) = extract(value, spec.datatype).map_err(|error| unfit(one_line(&error)))?;
        return Ok(Held::Alone(Tensor { name: spec.name.clone(), shape, data }));
    }
    let value = values.remove(&spec.name).ok_or_else(missing)?;
    let left = Resident::new(value, memory).map_err(|error| unfit(error.to_string()))?;
    if left.datatype() != spec.datatype {
        return Err(unfit(format!("it is {}, the manifest has {}", left.datatype(), spec.datatype)));
    }
    // A run does not copy an input that is an output, too: it is not ONNX Runtime's to keep.
    let is_lent = lent.iter().any(|lent| lent.contains(&left.address()));
    let left = Held::Resident(spec.name.clone(), Arc::new(left));
    if is_lent { left.into_tensor().map(Held::Alone) } else { Ok(left) }
}

#[cfg(test)]
mod tests;
