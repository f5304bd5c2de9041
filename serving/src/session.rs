//! Sessions of one model version: how they are built and checked. [`Pool`] runs requests on them.

mod background;
mod handover;
mod joined;
mod lease;
mod line;
mod pool;
mod probe;
mod values;

use millrace_bundle::{Bundle, Signature};
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::ValueType;

use crate::config::{Config, Device};
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use values::datatype;

pub(crate) use line::Work;
pub(crate) use pool::Pool;

/// Models up to this size get one session per thread, each with its own copy of the weights.
const REPLICATED_BYTES_MAX: usize = 64 << 20;

/// Builds the sessions of a version and checks them against the manifest. Blocks while ONNX Runtime
/// optimises the graph.
pub(crate) fn build(bundle: &Bundle, config: &Config) -> Result<Pool> {
    let manifest = bundle.manifest();
    let failed =
        |reason: String| Error::Model { model: manifest.name.clone(), version: manifest.version, reason };
    let runtime = Runtime::load()?;
    let threads = config.threads().max(1);
    let replicated = bundle.model_onnx().len() <= REPLICATED_BYTES_MAX;
    let sessions = match config.sessions_max {
        0 if replicated && config.device == Device::Cpu => threads,
        0 => 1,
        sessions => sessions,
    };
    let mut builder = builder(runtime, config.device, (threads / sessions).max(1))?;
    let mut free = Vec::with_capacity(sessions);
    for _ in 0..sessions {
        let session = builder
            .commit_from_memory(bundle.model_onnx())
            .map_err(|error| failed(format!("ONNX Runtime refuses it: {}", one_line(&error))))?;
        check_signature(&manifest.signature, &session).map_err(&failed)?;
        free.push(session);
    }
    let mut rows_max = config.batching.rows_max;
    if rows_max > 1
        && let Some(session) = free.first_mut()
        && let Err(reason) = probe::check(session, &manifest.signature)
    {
        tracing::info!(model = manifest.name, version = manifest.version, reason, "requests run one by one");
        rows_max = 0;
    }
    Ok(Pool::new(free, &manifest.signature, config, rows_max))
}

/// Session options for a device; the builder can commit any number of sessions.
fn builder(runtime: &Runtime, device: Device, intra_threads: usize) -> Result<SessionBuilder> {
    let options = |error: ort::Error<SessionBuilder>| Error::Config {
        reason: format!("ONNX Runtime refuses a session option: {error}"),
    };
    let builder = SessionBuilder::new(runtime.environment())
        .map_err(|error| Error::Config { reason: format!("ONNX Runtime gives no options: {error}") })?
        .with_log_level(ort::logging::LogLevel::Warning)
        .map_err(options)?
        .with_intra_threads(intra_threads)
        .map_err(options)?
        .with_inter_threads(1)
        .map_err(options)?
        // Spinning threads take the processor from the other sessions and from the transports.
        .with_intra_op_spinning(false)
        .map_err(options)?;
    match device {
        Device::Cpu => Ok(builder),
        Device::Cuda(ordinal) => with_cuda(builder, ordinal),
    }
}

#[cfg(feature = "cuda")]
fn with_cuda(builder: SessionBuilder, ordinal: i32) -> Result<SessionBuilder> {
    let provider = ort::ep::CUDA::default().with_device_id(ordinal).build().error_on_failure();
    builder
        .with_execution_providers([provider])
        .map_err(|error| Error::DeviceUnavailable { device: Device::Cuda(ordinal), reason: one_line(&error) })
}

#[cfg(not(feature = "cuda"))]
fn with_cuda(_builder: SessionBuilder, ordinal: i32) -> Result<SessionBuilder> {
    Err(Error::DeviceUnavailable {
        device: Device::Cuda(ordinal),
        reason: "this build has no CUDA support (build with --features cuda)".into(),
    })
}

/// Fails when the device cannot be used, before any model is loaded.
pub(crate) fn check_device(device: Device) -> Result<()> {
    builder(Runtime::load()?, device, 1).map(drop)
}

fn one_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((cut, _)) = line.char_indices().nth(600) {
        line.truncate(cut);
    }
    line
}

/// Compares names, datatypes and input shapes of a session with the manifest.
fn check_signature(signature: &Signature, session: &Session) -> std::result::Result<(), String> {
    let sides = [
        ("input", &signature.inputs, session.inputs(), true),
        ("output", &signature.outputs, session.outputs(), false),
    ];
    for (side, specs, outlets, shapes) in sides {
        let found: Vec<&str> = outlets.iter().map(|outlet| outlet.name()).collect();
        let expected: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        // Outputs may be left out, in which case nobody can ask for them.
        let kept: Vec<_> =
            outlets.iter().filter(|outlet| shapes || expected.contains(&outlet.name())).collect();
        if !kept.iter().map(|outlet| outlet.name()).eq(expected.iter().copied()) {
            return Err(format!("the graph has {side}s {found:?}, the manifest {expected:?}"));
        }
        for (spec, outlet) in specs.iter().zip(kept) {
            let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else {
                return Err(format!("{side} {:?} of the graph is not a tensor", spec.name));
            };
            if datatype(*ty) != Some(spec.datatype) {
                return Err(format!(
                    "{side} {:?} is {ty} in the graph and {} in the manifest",
                    spec.name, spec.datatype
                ));
            }
            // A configuration may allow less than the graph does.
            let fits = shape.len() == spec.shape.len()
                && shape.iter().zip(&spec.shape).all(|(graph, spec)| *graph == -1 || graph == spec);
            if shapes && !fits {
                return Err(format!(
                    "{side} {:?} has shape {shape} in the graph and {:?} in the manifest or config.pbtxt",
                    spec.name, spec.shape
                ));
            }
        }
    }
    Ok(())
}
