//! Options of sessions: device, threads, memory.

use ort::session::builder::SessionBuilder;

use crate::config::{Config, Device};
use crate::error::{Error, Result};
use crate::runtime::Runtime;

/// Session options for a device; the builder can commit any number of sessions. Unless `allow_fallback`, a
/// graph of which the device cannot run every node is refused when it is committed.
pub(super) fn builder(
    runtime: &Runtime,
    device: Device,
    intra_threads: usize,
    allow_fallback: bool,
) -> Result<SessionBuilder> {
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
        // A file that is a graph and something else as well runs as what was read of it.
        .with_config_entry("session.load_model_format", "ONNX")
        .map_err(options)?
        // Spinning threads take the processor from the other sessions and from the transports.
        .with_intra_op_spinning(false)
        .map_err(options)?;
    match device {
        // An arena keeps what a peak of load took, for each session. Without one, runs of one row and of 64
        // take as long, and those of 1024 rows a tenth longer.
        Device::Cpu => builder
            .with_execution_providers([ort::ep::CPU::default().with_arena_allocator(false).build()])
            .map_err(options),
        Device::Cuda(_) | Device::TensorRt(_) => {
            // Weights keep no part of the arena from being given back after a peak of load.
            let builder = with_gpu(builder, device)?.with_device_allocated_initializers().map_err(options)?;
            if allow_fallback {
                return Ok(builder);
            }
            builder.with_disable_cpu_fallback().map_err(options)
        }
    }
}

#[cfg(feature = "cuda")]
fn with_gpu(builder: SessionBuilder, device: Device) -> Result<SessionBuilder> {
    let cuda =
        |ordinal: u8| ort::ep::CUDA::default().with_device_id(ordinal.into()).build().error_on_failure();
    let tensorrt =
        |ordinal: u8| ort::ep::TensorRT::default().with_device_id(ordinal.into()).build().error_on_failure();
    let providers = match device {
        Device::Cpu => Vec::new(),
        Device::Cuda(ordinal) => vec![cuda(ordinal)],
        Device::TensorRt(ordinal) => vec![tensorrt(ordinal), cuda(ordinal)],
    };
    let unavailable = |error| Error::DeviceUnavailable { device, reason: crate::error::one_line(&error) };
    builder.with_execution_providers(providers).map_err(unavailable)
}

#[cfg(not(feature = "cuda"))]
fn with_gpu(_builder: SessionBuilder, device: Device) -> Result<SessionBuilder> {
    let reason = "this build has no CUDA support (build with --features cuda)".into();
    Err(Error::DeviceUnavailable { device, reason })
}

/// Fails when a device of all models cannot be used, before any is loaded.
pub(crate) fn check_device(config: &Config) -> Result<()> {
    let runtime = Runtime::load_from(config.onnxruntime.as_deref())?;
    if config.allow_fallback {
        return Ok(());
    }
    config.device.each().into_iter().try_for_each(|device| builder(runtime, device, 1, false).map(drop))
}
