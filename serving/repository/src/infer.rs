//! Inference service, independent of any transport: finds the model version for a request, runs the request on it,
//! counts the outcome, and refuses new requests while the server drains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::model::{Model, Unfinished, infer_with};
pub use crate::model::{Request, Response};
use crate::outcome;
use crate::repository::{Repository, VersionSelector};
use crate::sequence::SequencePosition;
use crate::shadow::ShadowRequest;
use millrace_serving_core::error::InferError;
use millrace_serving_core::metrics::{IN_FLIGHT, REQUESTS};
use millrace_serving_core::parameters::Step;

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
}

impl Inference {
    /// Serves the models of a repository.
    pub fn new(repository: Repository) -> Inference {
        Inference { repository, gate: Arc::default() }
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
    pub fn enter(&self) -> Result<AdmittedRequest, InferError> {
        self.gate.in_flight.fetch_add(1, Ordering::SeqCst);
        IN_FLIGHT.inc();
        let entered = AdmittedRequest { gate: self.gate.clone() };
        if self.is_draining() { Err(InferError::stopping()) } else { Ok(entered) }
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
    pub async fn answer<X, R>(
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
    pub async fn answer_in<X, R>(
        &self,
        mut place: Option<Box<SequencePosition>>,
        model: &Model,
        decode: impl Future<Output = Result<(Request, X), InferError>>,
        encode: impl FnOnce(Response, X) -> Result<R, InferError>,
    ) -> Result<R, InferError> {
        let arrived = Instant::now();
        let unfinished = Unfinished::new(model, arrived);
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
                    outcome::answered(model.name(), model.version(), &times);
                    if let Some(copied) = copied {
                        copied.run();
                    }
                    Ok(reply)
                })
            }
            Err(error) => Err(error),
        };
        unfinished.end();
        outcome.inspect_err(|error| {
            model.failed(arrived, error);
            outcome::failed(Some((model.name(), model.version())), error);
        })
    }

    /// A copy of the request for the model's shadow version, if there is one and this request is selected for it.
    fn copied(&self, model: &Model, request: &Request) -> Option<ShadowRequest> {
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
    pub fn find_selected(&self, model: &str, asked: VersionSelector<'_>) -> Result<Arc<Model>, InferError> {
        self.repository.find(model, asked).inspect_err(count_unknown)
    }

    /// Like [`Inference::find_selected`]; also returns whether the id of the request selects the version after all, see
    /// [`Inference::route`].
    ///
    /// # Errors
    /// As [`Repository::find`].
    pub fn find_split(
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
    pub fn route(&self, model: &str, asked: VersionSelector<'_>, id: &str) -> Result<Arc<Model>, InferError> {
        self.repository.route(model, asked, id).inspect_err(count_unknown)
    }

    /// The version that answers a request with that id, and the request's place in its sequence, if it has one and
    /// the model keeps sequences. Requests of a sequence run in the order of these calls.
    ///
    /// # Errors
    /// As [`Inference::route`].
    pub fn admit(
        &self,
        model: &str,
        asked: VersionSelector<'_>,
        id: &str,
        step: Option<Step>,
    ) -> Result<(Arc<Model>, Option<Box<SequencePosition>>), InferError> {
        let Some(step) = step else { return Ok((self.route(model, asked, id)?, None)) };
        let routed = self.repository().route_step(model, asked, id, &step);
        let (model, others) = routed.inspect_err(count_unknown)?;
        let mut place = model.sequences.as_ref().map(|sequences| sequences.queue(step));
        if let Some(place) = &mut place {
            place.replaces(others);
        }
        Ok((model, place))
    }
}

/// An admitted request; counts as finished when dropped.
#[derive(Debug)]
pub struct AdmittedRequest {
    gate: Arc<Gate>,
}

impl Drop for AdmittedRequest {
    fn drop(&mut self) {
        IN_FLIGHT.dec();
        if self.gate.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.gate.idle.notify_waiters();
        }
    }
}

fn count_unknown(error: &InferError) {
    REQUESTS.with_label_values(&["", "", error.label()]).inc();
}
