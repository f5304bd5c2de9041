//! Sessions of one model version: a pool in which each session runs one request at a time.
//!
//! A request takes a free session and runs on the thread that it came in on: a hop to another thread
//! costs more than a small model takes. Only when every session is busy does it wait, in order.

mod values;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use millrace_bundle::{Bundle, Signature, TensorSpec};
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::ValueType;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::config::{Config, Device};
use crate::error::{Error, InferError, Result};
use crate::runtime::Runtime;
use crate::statistics::Times;
use crate::tensor::{Data, Tensor};
use values::{datatype, run};

/// Models up to this size get one session per thread, each with its own copy of the weights.
const REPLICATED_BYTES_MAX: usize = 64 << 20;
/// Runs that take longer give their worker thread's other tasks away first.
const INLINE_MICROS_MAX: usize = 500;

/// Sessions of one model version.
#[derive(Debug)]
pub(crate) struct Pool {
    device: Device,
    sessions: usize,
    free: Mutex<Vec<Session>>,
    permits: Semaphore,
    waiting: AtomicUsize,
    waiting_max: usize,
    /// Typical duration of a run, in microseconds.
    run_micros: AtomicUsize,
}

impl Pool {
    /// Builds the sessions and checks them against the manifest. Blocks while ONNX Runtime optimises
    /// the graph.
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
        let pool = Pool {
            device: config.device,
            sessions,
            permits: Semaphore::new(sessions),
            free: Mutex::new(free),
            waiting: AtomicUsize::new(0),
            waiting_max: config.limits.requests_waiting_max,
            run_micros: AtomicUsize::new(0),
        };
        pool.warm_up(&manifest.signature);
        Ok(pool)
    }

    /// Where the sessions run.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// How many requests run at once.
    pub(crate) fn sessions(&self) -> usize {
        self.sessions
    }

    /// Runs the model on checked inputs, which are in the signature's order; gives the wanted outputs
    /// and when each step was reached. Cancel safe while it waits for a session.
    pub(crate) async fn run(
        &self,
        inputs: &[&Tensor],
        outputs: &[&TensorSpec],
    ) -> Result<(Vec<Tensor>, Times), InferError> {
        let queued = Instant::now();
        let _permit = match self.permits.try_acquire() {
            Ok(permit) => permit,
            Err(_) => self.wait().await?,
        };
        let mut lease = Lease::take(self)?;
        let slow = self.run_micros.load(Ordering::Relaxed) > INLINE_MICROS_MAX;
        let many_threads = || {
            tokio::runtime::Handle::try_current()
                .is_ok_and(|handle| handle.runtime_flavor() == tokio::runtime::RuntimeFlavor::MultiThread)
        };
        if slow && many_threads() {
            tokio::task::block_in_place(|| self.run_timed(lease.session()?, inputs, outputs, queued))
        } else {
            self.run_timed(lease.session()?, inputs, outputs, queued)
        }
    }

    async fn wait(&self) -> Result<tokio::sync::SemaphorePermit<'_>, InferError> {
        struct Waiting<'a>(&'a AtomicUsize);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        if before >= self.waiting_max {
            return Err(InferError::Unavailable {
                reason: format!(
                    "{before} requests wait for this model already, the limit is {} (limits.requests_waiting_max)",
                    self.waiting_max
                ),
            });
        }
        self.permits.acquire().await.map_err(|_| InferError::internal("the sessions are gone"))
    }

    fn run_timed(
        &self,
        session: &mut Session,
        inputs: &[&Tensor],
        outputs: &[&TensorSpec],
        queued: Instant,
    ) -> Result<(Vec<Tensor>, Times), InferError> {
        let (tensors, times) = run(session, inputs, outputs, queued)?;
        let elapsed = times.end.saturating_duration_since(times.computing);
        let micros = usize::try_from(elapsed.as_micros()).unwrap_or(usize::MAX);
        let typical = self.run_micros.load(Ordering::Relaxed);
        self.run_micros.store(towards(typical, micros), Ordering::Relaxed);
        Ok((tensors, times))
    }

    /// One run per session on a row of zeros, so that the first request does not pay for lazily made
    /// buffers. A graph may well refuse zeros or a batch of one, which is no reason not to serve it.
    fn warm_up(&self, signature: &Signature) {
        let inputs: Option<Vec<Tensor>> = signature
            .inputs
            .iter()
            .map(|spec| {
                let shape: Vec<i64> =
                    spec.shape.iter().map(|extent| if *extent < 0 { 1 } else { *extent }).collect();
                let count = crate::tensor::element_count(&spec.name, &shape).ok()?;
                let small = count <= 1 << 24;
                small.then(|| Tensor {
                    name: spec.name.clone(),
                    shape,
                    data: Data::zeros(spec.datatype, count),
                })
            })
            .collect();
        let Some(inputs) = inputs else { return };
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let outputs: Vec<&TensorSpec> = signature.outputs.iter().collect();
        for session in self.free.lock().iter_mut() {
            if let Err(error) = self.run_timed(session, &inputs, &outputs, Instant::now()) {
                tracing::debug!(%error, "the warm-up run failed");
                return;
            }
        }
    }
}

/// The next estimate of a typical duration: a small step towards the newest one, whatever its distance,
/// so that a run during which the thread was off the processor hardly counts.
fn towards(typical: usize, newest: usize) -> usize {
    let step = typical / 16 + 1;
    match newest.cmp(&typical) {
        _ if typical == 0 => newest,
        std::cmp::Ordering::Greater => typical.saturating_add(step).min(newest),
        std::cmp::Ordering::Less => typical.saturating_sub(step).max(newest),
        std::cmp::Ordering::Equal => typical,
    }
}

/// A session taken out of the pool; goes back when dropped, also when the run panics.
struct Lease<'a> {
    pool: &'a Pool,
    session: Option<Session>,
}

impl<'a> Lease<'a> {
    fn take(pool: &'a Pool) -> Result<Lease<'a>, InferError> {
        let session = pool.free.lock().pop();
        Ok(Lease { pool, session })
    }

    fn session(&mut self) -> Result<&mut Session, InferError> {
        self.session.as_mut().ok_or_else(|| InferError::internal("the sessions are gone"))
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.pool.free.lock().push(session);
        }
    }
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
        if found != expected {
            return Err(format!("the graph has {side}s {found:?}, the manifest {expected:?}"));
        }
        for (spec, outlet) in specs.iter().zip(outlets) {
            let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else {
                return Err(format!("{side} {:?} of the graph is not a tensor", spec.name));
            };
            if datatype(*ty) != Some(spec.datatype) {
                return Err(format!(
                    "{side} {:?} is {ty} in the graph and {} in the manifest",
                    spec.name, spec.datatype
                ));
            }
            if shapes && **shape != *spec.shape {
                return Err(format!(
                    "{side} {:?} has shape {shape} in the graph and {:?} in the manifest",
                    spec.name, spec.shape
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::towards;

    #[test]
    fn the_typical_duration_follows_the_rule_not_the_exception() {
        let mut typical = towards(0, 5);
        for run in 0..1000 {
            typical = towards(typical, if run % 10 == 0 { 50_000 } else { 5 });
        }
        assert!(typical < 10, "{typical}");
        for _ in 0..200 {
            typical = towards(typical, 3_000);
        }
        assert_eq!(typical, 3_000);
    }
}
