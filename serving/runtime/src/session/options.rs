//! ONNX Runtime session options: device, threads, memory.

use ort::session::builder::SessionBuilder;

use crate::runtime::Runtime;
use millrace_serving_core::config::{Config, Device};
use millrace_serving_core::error::{Error, Result};

/// Session options for a device; the builder can commit any number of sessions. Unless `allow_fallback`, ONNX Runtime
/// refuses at commit a graph with a node that the device cannot run.
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
        // Forces the ONNX parser: a file that is also valid in another format runs as the graph that was checked.
        .with_config_entry("session.load_model_format", "ONNX")
        .map_err(options)?
        // Spinning threads take the processor from the other sessions and from the transports.
        .with_intra_op_spinning(false)
        .map_err(options)?;
    match device {
        // An arena keeps the memory of a load peak, for each session. Without an arena, runs of 1 and of 64 rows take
        // as long, and runs of 1024 rows 10 % longer.
        Device::Cpu => builder
            .with_execution_providers([ort::ep::CPU::default().with_arena_allocator(false).build()])
            .map_err(options),
        Device::Cuda(_) | Device::TensorRt(_) => {
            // Weights outside the arena do not keep arena regions from being released after a load peak.
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
    use ort::ep::cuda::ConvAlgorithmSearch;

    // The heuristic search plans a small network in 3 ms, the default one in 20 ms; runs take as long.
    let cuda = |ordinal: u8| {
        let cuda = ort::ep::CUDA::default().with_device_id(ordinal.into());
        cuda.with_conv_algorithm_search(ConvAlgorithmSearch::Heuristic).build().error_on_failure()
    };
    let tensorrt =
        |ordinal: u8| ort::ep::TensorRT::default().with_device_id(ordinal.into()).build().error_on_failure();
    let providers = match device {
        Device::Cpu => Vec::new(),
        Device::Cuda(ordinal) => vec![cuda(ordinal)],
        Device::TensorRt(ordinal) => vec![tensorrt(ordinal), cuda(ordinal)],
    };
    let unavailable = |error| Error::DeviceUnavailable {
        device: device.to_string(),
        reason: millrace_serving_core::error::one_line(&error),
    };
    builder.with_execution_providers(providers).map_err(unavailable)
}

#[cfg(not(feature = "cuda"))]
fn with_gpu(_builder: SessionBuilder, device: Device) -> Result<SessionBuilder> {
    let reason = "this build has no CUDA support (build with --features cuda)".into();
    Err(Error::DeviceUnavailable { device: device.to_string(), reason })
}

/// Fails, before any model is loaded, when a device configured for all models cannot be used.
pub fn check_device(config: &Config) -> Result<()> {
    let runtime = Runtime::load_from(config.onnxruntime.as_deref())?;
    if config.allow_fallback {
        return Ok(());
    }
    config.device.each().into_iter().try_for_each(|device| builder(runtime, device, 1, false).map(drop))
}
