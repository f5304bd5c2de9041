//! Sessions of one model version: construction and checks against the manifest. [`Pool`] runs requests on them.

mod admission;
mod batch;
mod batch_sizer;
mod empty_inputs;
mod executor;
mod fixed_cost;
mod idle_sessions;
mod limited;
mod options;
mod peak;
mod placement;
mod pool;
mod queue;
mod row_join;
mod run_end;
mod run_time;
mod scheduler;
mod steady_rows;
mod trial;
mod trial_rows;
mod values;
mod weights;
mod work;

use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use millrace_bundle::{Bundle, Manifest, Signature};
use ort::value::ValueType;

use crate::hazards::{self, Divisors};
use crate::rows::{Dependence, Rows};
use crate::runtime::Runtime;
use executor::Executor;
use millrace_serving_core::config::{Config, Device, Devices, Memory};
use millrace_serving_core::error::{Error, InferError, Result, one_line};
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::onnx::datatype;
use millrace_serving_core::tensor::{TensorHandle, View};
use peak::Peak;
use placement::Placement;
use run_end::RunEnd;
use steady_rows::SteadyRows;
use values::RequestedOutput;

pub use options::check_device;
pub use pool::Pool;
pub use trial::Trial;
pub use work::{Output, Work};

/// By default, models up to this size get one session per thread; a larger model gets one session with all threads.
const PER_THREAD_BYTES_MAX: usize = 64 << 20;
/// For smaller models, sharing weights is not worth its second pass over the graph.
const SHARED_BYTES_MIN: usize = 1 << 20;

/// Stops the start of new runs on the inference threads of this process and waits up to `patience` for runs in
/// progress. Returns whether all runs have finished. Blocks the thread.
///
/// Call it last, after all servers have stopped: at process exit ONNX Runtime releases memory that runs use. Requests
/// that are still queued never get a response.
pub fn finish_runs(patience: Duration) -> bool {
    Executor::shared().close(patience)
}

/// Inference on one session, one batch at a time. The scheduler uses sessions only through this trait.
trait Runner: Debug + Send + 'static {
    /// Index of the session's device among the devices of the version.
    fn device(&self) -> usize;

    /// Rows of the next run, which has to hold `rows` of one request, or of several if `is_joined`; the rest is filled
    /// with copies of the last row.
    fn steady_rows(&mut self, rows: usize, is_joined: bool) -> usize;

    /// Runs inputs, in the signature's order, for a request queued at `queued`; `end` can end the run early.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the graph cannot take the inputs; [`InferError::Internal`]; any error when the
    /// run was ended.
    fn run(
        &mut self,
        inputs: &[View<'_>],
        outputs: &[RequestedOutput<'_>],
        queued: Instant,
        end: Option<&RunEnd>,
    ) -> std::result::Result<(Vec<TensorHandle>, Times), InferError>;
}

/// A session of ONNX Runtime.
#[derive(Debug)]
pub(crate) struct Session {
    session: ort::session::Session,
    /// Index of the session's device among the devices of the version.
    place: usize,
    /// Where its inputs and outputs reside.
    memory: Memory,
    peak: Peak,
    /// For a graph that ONNX Runtime plans for the number of rows.
    steady_rows: Option<SteadyRows>,
}

impl Session {
    fn new(session: ort::session::Session, place: usize, memory: Memory) -> Session {
        Session { session, place, memory, peak: Peak::default(), steady_rows: None }
    }
}

impl Runner for Session {
    fn device(&self) -> usize {
        self.place
    }

    fn steady_rows(&mut self, rows: usize, is_joined: bool) -> usize {
        self.steady_rows.as_mut().map_or(rows, |steady| steady.next(rows, is_joined))
    }

    fn run(
        &mut self,
        inputs: &[View<'_>],
        outputs: &[RequestedOutput<'_>],
        queued: Instant,
        end: Option<&RunEnd>,
    ) -> std::result::Result<(Vec<TensorHandle>, Times), InferError> {
        let options = end.map(RunEnd::options).transpose()?;
        // Noted before the run: a run that fails may have allocated memory as well.
        self.peak.runs(inputs.iter().map(|input| input.elements()).sum());
        values::run(self, inputs, outputs, queued, options.as_deref())
    }
}

impl Deref for Session {
    type Target = ort::session::Session;

    fn deref(&self) -> &ort::session::Session {
        &self.session
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut ort::session::Session {
        &mut self.session
    }
}

/// Builds the sessions of a version and checks them against the manifest. Blocks while ONNX Runtime optimizes the
/// graph.
///
/// Requests share a batch where the graph proves that rows are independent, or where `declared` says so.
pub fn build(bundle: &Bundle, config: &Config, declared: Option<bool>) -> Result<(Pool, Rows)> {
    let manifest = bundle.manifest();
    let (devices, mut free) = match sessions(bundle, config, &config.device) {
        Err(error) if !config.device.is_cpu() && config.allow_fallback => {
            let (model, version, device) = (&manifest.name, manifest.version, config.device.to_string());
            let free = sessions(bundle, config, &Devices::CPU)?;
            tracing::warn!(model, version, device, %error, "a model version runs on the processor instead");
            (Devices::CPU, free)
        }
        built => (config.device.clone(), built?),
    };
    let rows = rows_of(bundle, declared);
    // Where the user, not the graph, vouches for divisors, warm-up inputs might end the process.
    let may_try = hazards::check_bundle(bundle, Divisors::Shown).is_ok();
    let (model, version) = (&manifest.name, manifest.version);
    let mut rows_max = config.batching.rows_max;
    match &rows {
        Rows::Dependent(reason) => {
            if rows_max > 1 {
                tracing::info!(model, version, %reason, "requests run one by one: rows may depend on each other");
            }
            rows_max = 0;
        }
        Rows::Declared(reason) if rows_max > 1 && may_try => {
            let tried = free.first_mut().map(|session| trial_rows::check(session, &manifest.signature));
            if let Some(Err(found)) = tried {
                tracing::warn!(model, version, %reason, found, "requests run together as configured, but a trial run gave different results");
            }
        }
        _ => {}
    }
    let of_each = free.len() / devices.each().len();
    let placement = Placement::new(manifest, &config.device, devices, of_each);
    let has_fixed_cost = fixed_cost::has_fixed_cost(bundle.graph(), &manifest.signature);
    let pool = Pool::new(free, placement, &manifest.signature, config, rows_max, has_fixed_cost);
    let pool = pool.accepting_empty_inputs(empty_inputs::are_accepted_by(bundle.graph()));
    Ok((if may_try { pool.warmed_up(manifest)? } else { pool }, rows))
}

/// Row independence of a version: as the configuration declares, else as the graph proves.
fn rows_of(bundle: &Bundle, declared: Option<bool>) -> Rows {
    let signature = &bundle.manifest().signature;
    match (declared, signature.inputs.first()) {
        (Some(false), Some(input)) => Rows::Dependent(Dependence::of_output(
            &input.name,
            "independent_rows of the configuration is false",
        )),
        _ => Rows::of(bundle.graph(), signature).declared(declared == Some(true) && signature.has_rows()),
    }
}

/// The pool of a version without sessions: its requests run on the sessions of other versions.
pub fn none(manifest: &Manifest, config: &Config) -> Pool {
    let mut config = config.clone();
    // The limit applies to each wait for a session: the pools that own the sessions enforce theirs.
    config.batching.timeout_us_max = 0;
    let placement = Placement::new(manifest, &Devices::CPU, Devices::CPU, 0);
    let nothing = Signature { inputs: Vec::new(), outputs: Vec::new() };
    // The models of the steps decide whether they accept empty tensors.
    Pool::new(Vec::new(), placement, &nothing, &config, 0, false).accepting_empty_inputs(true)
}

/// Sessions of a version, the same number on each device.
fn sessions(bundle: &Bundle, config: &Config, devices: &Devices) -> Result<Vec<Session>> {
    let mut sessions = Vec::new();
    for (place, device) in devices.each().into_iter().enumerate() {
        sessions.extend(sessions_on(bundle, config, (place, device))?);
    }
    let manifest = bundle.manifest();
    for session in &sessions {
        check_signature(&manifest.signature, session).map_err(|reason| failed(manifest, reason))?;
    }
    Ok(sessions)
}

/// Sessions of a version on one device; `place` is the index of the device among those of the version.
fn sessions_on(bundle: &Bundle, config: &Config, (place, device): (usize, Device)) -> Result<Vec<Session>> {
    let manifest = bundle.manifest();
    let (model, version) = (&manifest.name, manifest.version);
    let (onnx, weights) = match device {
        Device::TensorRt(_) => bundle.runnable_with_shapes()?,
        Device::Cpu | Device::Cuda(_) => bundle.runnable()?,
    };
    let bytes = usize::try_from(bundle.model_bytes()).unwrap_or(usize::MAX);
    let threads = config.threads().max(1);
    let count = match config.sessions_max {
        0 if device == Device::Cpu && bytes <= PER_THREAD_BYTES_MAX => threads,
        0 => 1,
        sessions => sessions,
    };
    let intra_threads = intra_threads(threads, count);
    let runtime = Runtime::load_from(config.onnxruntime.as_deref())?;
    let mut builder = options::builder(runtime, device, intra_threads, config.allow_fallback)?;
    // Sessions that share weights have none of their own any more.
    let plain = builder.clone();
    for (file, content) in weights {
        let refused =
            |error: ort::Error<_>| failed(manifest, format!("weights in {file:?}: {}", one_line(&error)));
        builder = builder
            .with_external_initializer_file_in_memory(file, content.to_vec().into())
            .map_err(refused)?;
    }
    if count > 1 && device == Device::Cpu && bytes >= SHARED_BYTES_MIN {
        let on_processor = |session| Session::new(session, place, Memory::Host);
        match weights::sessions(&plain, &builder, &onnx, count) {
            Ok(sessions) => return Ok(sessions.into_iter().map(on_processor).collect()),
            Err(reason) => {
                tracing::info!(model, version, reason, "each session has its own copy of the weights")
            }
        }
    }
    let refused = |error: ort::Error<_>| {
        failed(manifest, format!("ONNX Runtime cannot load the model on {device}: {}", one_line(&error)))
    };
    let memory = device.memory();
    let is_planned = memory != Memory::Host && steady_rows::has_planned(bundle.graph());
    let session = |_| {
        let session = Session::new(builder.commit_from_memory(&onnx).map_err(refused)?, place, memory);
        Ok(Session { steady_rows: is_planned.then(SteadyRows::default), ..session })
    };
    (0..count).map(session).collect()
}

/// Threads for each run on the processor, when `sessions` sessions share `threads` threads.
fn intra_threads(threads: usize, sessions: usize) -> usize {
    (threads / sessions.max(1)).max(1)
}

fn failed(manifest: &Manifest, reason: String) -> Error {
    Error::Model { model: manifest.name.clone(), version: manifest.version, reason }
}

/// Compares names, datatypes and input shapes of a session with the manifest.
fn check_signature(
    signature: &Signature,
    session: &ort::session::Session,
) -> std::result::Result<(), String> {
    let sides = [
        ("input", &signature.inputs, session.inputs(), true),
        ("output", &signature.outputs, session.outputs(), false),
    ];
    for (side, specs, outlets, shapes) in sides {
        let found: Vec<&str> = outlets.iter().map(|outlet| outlet.name()).collect();
        let expected: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        // The manifest may leave outputs out; clients cannot request those.
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
            // The configuration may allow fewer shapes than the graph.
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
