//! Inference service, independent of any transport: checks a typed request against the model's signature, runs it,
//! and returns typed tensors.

mod checks;
mod step;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::blocking::in_place;
use crate::error::{InferError, quote};
use crate::metrics::{IN_FLIGHT, REQUESTS};
use crate::repository::{Model, Repository, VersionSelector};
use crate::sequence::Place;
use crate::session::Work;
use crate::shadow::Copied;
use crate::statistics::Times;
use crate::telemetry;
use crate::tensor::{Held, Tensor};
use crate::trace::Tracer;
use checks::{ordered, wanted};
pub(crate) use step::{Checked, step};

/// Maximum number of input or output tensors in a request.
pub(crate) const TENSORS_MAX: usize = 1024;
/// Hashing inputs of this size for the response cache takes about 1 ms.
const LONG_BYTES: usize = 1 << 20;

/// A request as transports pass it on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Request {
    /// Model name.
    pub model: String,
    /// Version; the latest ready one when absent.
    pub version: Option<u64>,
    /// The inputs, in any order, each exactly once.
    pub inputs: Vec<Tensor>,
    /// Names of the requested outputs; all when empty.
    pub outputs: Vec<String>,
    /// Priority level, 1 the highest; 0 and unknown levels mean the server's default.
    pub priority: u64,
    /// Maximum wait for a session, bounded by the server's limit.
    pub timeout: Option<Duration>,
    /// Time after which the client does not need the response. A waiting request that could not be answered by then
    /// does not run.
    pub deadline: Option<Instant>,
    /// Address of the client, so that clients take turns. Requests without one count as those of a single client.
    pub client: Option<SocketAddr>,
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// Model name.
    pub model: String,
    /// The version that answered.
    pub version: u64,
    /// The outputs, in the requested order, or else in the signature's.
    pub outputs: Vec<Tensor>,
}

impl Response {
    /// Bytes of the outputs.
    pub(crate) fn bytes(&self) -> usize {
        self.outputs.iter().map(|output| output.data.raw_len()).sum()
    }
}

#[derive(Debug, Default)]
struct Gate {
    draining: AtomicBool,
    /// Fires with `draining`, for tasks that wait for it; reading the flag takes no lock.
    drained: CancellationToken,
    in_flight: AtomicUsize,
    idle: Notify,
}

/// The inference service that all transports share. Cheap to clone; clones share their state.
#[derive(Debug, Clone)]
pub struct Inference {
    repository: Repository,
    gate: Arc<Gate>,
    tracer: Arc<Tracer>,
}

impl Inference {
    /// Serves the models of a repository.
    pub fn new(repository: Repository) -> Inference {
        let tracer = Arc::new(Tracer::new(repository.trace_directory()));
        Inference { repository, gate: Arc::default(), tracer }
    }

    /// The tracer of requests.
    pub(crate) fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// The repository of models.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// Whether the service accepts new requests, and each configured model has had a version that can answer.
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.repository.is_ready()
    }

    /// Whether the service refuses new requests because the server stops.
    pub fn is_draining(&self) -> bool {
        self.gate.draining.load(Ordering::SeqCst)
    }

    /// From now on refuses new requests with [`InferError::Unavailable`]; running ones finish.
    pub fn drain(&self) {
        self.gate.draining.store(true, Ordering::SeqCst);
        self.gate.drained.cancel();
    }

    /// Waits until the service refuses new requests. Cancel safe.
    pub async fn draining(&self) {
        self.gate.drained.cancelled().await;
    }

    /// Number of requests in progress.
    pub fn in_flight(&self) -> usize {
        self.gate.in_flight.load(Ordering::SeqCst)
    }

    /// Waits until no request runs. Cancel safe.
    pub async fn idle(&self) {
        loop {
            let idle = self.gate.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.gate.in_flight.load(Ordering::SeqCst) == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Admits a request and counts it until the guard is dropped. Transports call this before they read a request, so
    /// that a draining server refuses every request with the same error.
    ///
    /// # Errors
    /// [`InferError::Unavailable`] while draining.
    pub fn enter(&self) -> Result<Entered, InferError> {
        self.gate.in_flight.fetch_add(1, Ordering::SeqCst);
        IN_FLIGHT.inc();
        let entered = Entered { gate: self.gate.clone() };
        if self.is_draining() { Err(stopping()) } else { Ok(entered) }
    }

    /// Answers a request. Cancel safe: dropping the call has no lasting effect.
    ///
    /// # Errors
    /// Every [`InferError`] except those for message sizes.
    pub async fn infer(&self, request: Request) -> Result<Response, InferError> {
        let model = self.find(&request.model, request.version)?;
        self.answer(&model, || Ok((request, ())), |response, ()| Ok(response)).await
    }

    /// Answers a request outside of sequences, as [`Inference::answer_in`] does.
    pub(crate) async fn answer<X, R>(
        &self,
        model: &Model,
        decode: impl FnOnce() -> Result<(Request, X), InferError>,
        encode: impl FnOnce(Response, X) -> Result<R, InferError>,
    ) -> Result<R, InferError> {
        self.answer_in(None, model, async move { decode() }, encode).await
    }

    /// Decodes a request for a version, runs it and encodes the reply; `decode` passes a value through to `encode`.
    /// If any of the three fails, the request has failed and its sequence is unchanged. Decoding may wait for its
    /// turn.
    pub(crate) async fn answer_in<X, R>(
        &self,
        mut place: Option<Box<Place>>,
        model: &Model,
        decode: impl Future<Output = Result<(Request, X), InferError>>,
        encode: impl FnOnce(Response, X) -> Result<R, InferError>,
    ) -> Result<R, InferError> {
        let arrived = Instant::now();
        let abandoned = Abandoned { model, arrived };
        let outcome = match decode.await {
            Ok((request, extra)) => {
                // A copy of a single request of a sequence would run without the requests before it.
                let is_copied = model.is_shadowed() && place.is_none();
                let copied = if is_copied { self.copied(model, &request) } else { None };
                let ran = infer_with(model, place.as_deref_mut(), request).await;
                ran.and_then(|(response, rows, times)| {
                    let copied = copied.map(|copied| copied.answered(&response.outputs));
                    let reply = encode(response, extra)?;
                    if let Some(place) = &mut place {
                        place.commit();
                    }
                    model.statistics.succeeded(rows, arrived, &times);
                    self.tracer.answered(model, arrived, &times);
                    telemetry::answered(model, &times);
                    if let Some(copied) = copied {
                        copied.run();
                    }
                    Ok(reply)
                })
            }
            Err(error) => Err(error),
        };
        // The request has an outcome, so it was not abandoned.
        std::mem::forget(abandoned);
        outcome.inspect_err(|error| {
            model.statistics.failed(arrived);
            telemetry::failed(Some(model), error);
            count_failure(model, error);
        })
    }

    /// A copy of the request for the model's shadow version, if there is one and this request is selected for it.
    fn copied(&self, model: &Model, request: &Request) -> Option<Copied> {
        self.repository.shadow(model.name())?.copy(request)
    }

    /// A ready version; counts the failure when there is none.
    ///
    /// # Errors
    /// As [`Repository::get`].
    pub fn find(&self, model: &str, version: Option<u64>) -> Result<Arc<Model>, InferError> {
        self.repository.get(model, version).inspect_err(count_unknown)
    }

    /// Like [`Inference::find`], for a version that may be a label.
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub(crate) fn find_selected(
        &self,
        model: &str,
        asked: VersionSelector<'_>,
    ) -> Result<Arc<Model>, InferError> {
        self.repository.find(model, asked).inspect_err(count_unknown)
    }

    /// Like [`Inference::find_selected`]; also returns whether the id of the request selects the version after all, see
    /// [`Inference::route`].
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub(crate) fn find_split(
        &self,
        model: &str,
        asked: VersionSelector<'_>,
    ) -> Result<(Arc<Model>, bool), InferError> {
        self.repository.find_split(model, asked).inspect_err(count_unknown)
    }

    /// The version that answers a request with this id; counts the failure when there is none.
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub(crate) fn route(
        &self,
        model: &str,
        asked: VersionSelector<'_>,
        id: &str,
    ) -> Result<Arc<Model>, InferError> {
        self.repository.route(model, asked, id).inspect_err(count_unknown)
    }
}

/// The error for requests that arrive while the server drains.
pub(crate) fn stopping() -> InferError {
    InferError::Unavailable { reason: "the server is stopping: send the request to another one".into() }
}

/// An admitted request; counts as finished when dropped.
#[derive(Debug)]
pub struct Entered {
    gate: Arc<Gate>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        IN_FLIGHT.dec();
        if self.gate.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.gate.idle.notify_waiters();
        }
    }
}

pub(crate) fn count_unknown(error: &InferError) {
    REQUESTS.with_label_values(&["", "", error.label()]).inc();
}

fn count_failure(model: &Model, error: &InferError) {
    count_outcome(model, error.label());
}

fn count_outcome(model: &Model, outcome: &str) {
    let version = model.version().to_string();
    REQUESTS.with_label_values(&[model.name(), &version, outcome]).inc();
}

/// Guard for a request without an outcome yet: counts it as cancelled when its caller drops it.
struct Abandoned<'a> {
    model: &'a Model,
    arrived: Instant,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.model.statistics.failed(self.arrived);
        count_outcome(self.model, "cancelled");
    }
}

/// Checks a request against one version and runs it, in its place if it belongs to a sequence. Returns the response,
/// the number of inferences, and the timestamps of the stages.
pub(crate) async fn infer_with(
    model: &Model,
    place: Option<&mut Place>,
    request: Request,
) -> Result<(Response, u64, Times), InferError> {
    let signature = model.signature();
    let checked = Checked {
        outputs: wanted(&signature.outputs, &request.outputs)?,
        inputs: ordered(&signature.inputs, request.inputs)?,
        stays: Vec::new(),
        priority: request.priority,
        timeout: request.timeout,
        deadline: request.deadline,
        client: request.client,
    };
    let (outputs, inferences, times) = perform(model, place, checked).await?;
    let outputs = outputs.into_iter().map(Held::into_tensor).collect::<Result<_, _>>()?;
    let response = Response { model: model.name().to_owned(), version: model.version(), outputs };
    Ok((response, inferences, times))
}

/// Runs a request on a version's sessions, in its place if it belongs to a sequence, or through the steps of an
/// ensemble. Returns the requested outputs, the number of inferences, and the timestamps of the stages.
async fn perform(
    model: &Model,
    place: Option<&mut Place>,
    request: Checked,
) -> Result<(Vec<Held>, u64, Times), InferError> {
    let Checked { inputs, outputs, stays, .. } = request;
    let empty = inputs.iter().position(|input| input.view().elements() == 0);
    if let Some(place) = empty.filter(|_| !model.pool.takes_nothing()) {
        let name = model.signature().inputs.get(place).map_or("", |spec| spec.name.as_str());
        return Err(InferError::invalid(format!(
            "input {name:?} has no elements; the graph has operators that are not known to take that"
        )));
    }
    let extent = inputs.first().and_then(|input| input.view().shape().first()).copied().unwrap_or(1);
    let extent = usize::try_from(extent).unwrap_or(0);
    // A request with empty inputs runs alone: its rows cannot be separated from those of others.
    let has_rows = |input: &Held| has_rows(input, extent) && input.view().elements() > 0;
    let rows = if model.max_batch_size() > 0 && inputs.iter().all(has_rows) { extent } else { 0 };
    if let Some(rows_max) = model.rows_max()
        && rows > rows_max
    {
        return Err(InferError::invalid(format!(
            "the request has {rows} rows, the model takes at most {rows_max} (max_batch_size of its config.pbtxt)"
        )));
    }
    let queued = Instant::now();
    if let Some(drift) = &model.drift {
        drift.observe(&inputs.iter().map(Held::read).collect::<Result<Vec<_>, _>>()?, queued);
    }
    let timeout = request.timeout.into_iter().chain(model.pool.timeout()).min();
    // A timeout beyond the range of the clock is no limit.
    let expires = timeout.and_then(|timeout| queued.checked_add(timeout));
    let answer_by = request.deadline;
    let deadline = answer_by.into_iter().chain(expires).min();
    let level = model.pool.level(request.priority);
    let client = request.client;
    let work = Work { inputs, outputs, stays, rows, queued, deadline, answer_by, level, client };
    // A request to a model without batches counts as one inference.
    let inferences = |rows: usize| rows.max(1) as u64;
    let mut missed = None;
    if let Some(answers) = &model.answers {
        let key = in_place(work.bytes() >= LONG_BYTES, || answers.key(&work))?;
        if let Some(outputs) = answers.get(&key) {
            let outputs = outputs.into_iter().map(Held::Alone).collect();
            let times = Times::found(queued);
            let took = times.end.saturating_duration_since(queued);
            model.statistics.hit(took);
            return Ok((outputs, inferences(rows), times));
        }
        missed = Some((answers, key, queued.elapsed()));
    }
    let ran = match (place, &model.sequences, model.ensemble()) {
        (None, None, None) => model.pool.run(work).await?,
        (None, None, Some(ensemble)) => ensemble.run(model, work).await?,
        // Boxed, so that the futures of other requests stay small.
        (Some(place), ..) => Box::pin(place.run(&model.pool, work)).await?,
        (None, Some(sequences), _) => return Err(sequences.outside()),
    };
    if let Some((answers, key, looked)) = missed {
        let start = Instant::now();
        answers.put(key, &ran.outputs.iter().map(Held::read).collect::<Result<Vec<_>, _>>()?);
        model.statistics.missed(looked + start.elapsed());
    }
    let times = ran.times;
    model.statistics.gave(extent as u64, ran.run_rows.map(inferences), &times);
    Ok((ran.outputs, inferences(rows), times))
}

fn has_rows(input: &Held, rows: usize) -> bool {
    input.view().shape().first().is_some_and(|extent| usize::try_from(*extent) == Ok(rows))
}

/// Parses a version in the protocols' form; empty means the latest.
///
/// # Errors
/// [`InferError::Invalid`] for text that is not a positive integer.
pub(crate) fn parse_version(text: &str) -> Result<Option<u64>, InferError> {
    if text.is_empty() {
        return Ok(None);
    }
    // Each version has one spelling, as in the repository: no sign, no leading zeros.
    text.parse()
        .ok()
        .filter(|version: &u64| *version > 0 && version.to_string() == text)
        .map(Some)
        .ok_or_else(|| {
            InferError::invalid(format!("model version {} is not a positive integer", quote(text)))
        })
}
