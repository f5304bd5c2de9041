//! Spans of running requests: the kind of call, its parent, and the outcome that the inference service reports.
//! A task-local variable holds the span.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::http;
use futures::future::Either;

use super::Telemetry;
use super::context::{self, Parent, SpanId, TraceId};
use millrace_serving_repository::outcome::{Outcome, Record};

/// The inference service in gRPC paths.
pub(super) const SERVICE: &str = "inference.GRPCInferenceService";
/// Longest recorded path, in characters.
const PATH_MAX: usize = 200;
/// The gRPC status and the HTTP status of calls without a valid token.
const UNAUTHENTICATED: u16 = 16;
const UNAUTHORIZED: u16 = 401;

tokio::task_local! {
    /// The span of the current request, if it is sampled.
    static CURRENT: Arc<ActiveSpan>;
}

/// The span of a running, sampled request.
#[derive(Debug)]
pub(crate) struct ActiveSpan {
    telemetry: Arc<Telemetry>,
    trace: TraceId,
    span: SpanId,
    /// The unchanged `tracestate`.
    state: String,
    outcome: Record,
}

/// Kind of call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Call {
    /// A method of the inference service.
    Grpc(&'static str),
    /// A path of REST, with a version or without.
    Http { path: String, versioned: bool },
    /// One request of a stream.
    InStream,
}

impl Call {
    /// The call of a request; `None` unless it asks for inference.
    fn of(method: &http::Method, path: &str) -> Option<Call> {
        if let Some(target) = path.strip_prefix("/v2/models/").and_then(|rest| rest.strip_suffix("/infer")) {
            let versioned = target.contains("/versions/");
            let post = method == http::Method::POST;
            return post.then(|| Call::Http { path: path.chars().take(PATH_MAX).collect(), versioned });
        }
        match path.strip_prefix('/')?.strip_prefix(SERVICE)? {
            "/ModelInfer" => Some(Call::Grpc("ModelInfer")),
            "/ModelStreamInfer" => Some(Call::Grpc("ModelStreamInfer")),
            _ => None,
        }
    }
}

/// An ended span with all that is exported.
#[derive(Debug)]
pub(super) struct FinishedSpan {
    pub(super) call: Call,
    pub(super) trace: TraceId,
    pub(super) span: SpanId,
    pub(super) parent: Option<SpanId>,
    pub(super) state: String,
    /// Start by both clocks, and end.
    pub(super) start: (Instant, SystemTime),
    pub(super) end: Instant,
    pub(super) peer: Option<SocketAddr>,
    pub(super) request_id: Option<String>,
    /// The gRPC status, else the HTTP status; `None` if the client disconnected before the answer.
    pub(super) status: Option<u16>,
    pub(super) outcome: Outcome,
}

impl FinishedSpan {
    /// Number of exported spans: its own and those of its steps.
    pub(super) fn spans(&self) -> u64 {
        1 + match self.outcome.times {
            None => 0,
            Some(times) if times.cached => 1,
            Some(_) => 4,
        }
    }
}

/// A running span, which ends when dropped.
#[derive(Debug)]
pub(crate) struct OpenSpan {
    active: Arc<ActiveSpan>,
    finished: Option<Box<FinishedSpan>>,
}

impl Telemetry {
    /// Begins the span of a request, if it asks for inference and is sampled. The parent decides on sampling;
    /// without one the sample rate does.
    pub(crate) fn begin<B>(
        self: &Arc<Self>,
        request: &http::Request<B>,
        peer: impl FnOnce() -> Option<SocketAddr>,
        request_id: Option<&http::HeaderValue>,
    ) -> Option<OpenSpan> {
        let call = Call::of(request.method(), request.uri().path())?;
        let parent = Parent::of(request.headers());
        if !parent.map_or_else(|| self.is_sampled(), |parent| parent.sampled) {
            return None;
        }
        let trace = match parent {
            Some(parent) => parent.trace,
            None => self.id()?,
        };
        // Without a parent there is no trace to which the `tracestate` could refer.
        let state = parent.map(|_| context::state(request.headers())).unwrap_or_default();
        let mut open = OpenSpan::new(self.clone(), call, trace, parent.map(|parent| parent.span), state)?;
        if let Some(finished) = &mut open.finished {
            finished.peer = peer();
            finished.request_id = request_id.map(|id| String::from_utf8_lossy(id.as_bytes()).into_owned());
        }
        Some(open)
    }
}

impl OpenSpan {
    fn new(
        telemetry: Arc<Telemetry>,
        call: Call,
        trace: TraceId,
        parent: Option<SpanId>,
        state: String,
    ) -> Option<OpenSpan> {
        let span = telemetry.id()?;
        let start = (Instant::now(), SystemTime::now());
        let finished = FinishedSpan {
            call,
            trace,
            span,
            parent,
            state: state.clone(),
            start,
            end: start.0,
            peer: None,
            request_id: None,
            status: None,
            outcome: Outcome::default(),
        };
        let active = ActiveSpan { telemetry, trace, span, state, outcome: Record::default() };
        Some(OpenSpan { active: Arc::new(active), finished: Some(Box::new(finished)) })
    }

    /// Runs a part of the request within the span.
    pub(crate) fn within<T>(&self, part: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(self.active.clone(), || self.active.outcome.within(part))
    }

    /// Records the status of the call. For gRPC this is the status in its own header or trailer, which may
    /// come last.
    pub(crate) fn set_status(&mut self, http: Option<u16>, grpc: Option<u16>) {
        if let Some(finished) = &mut self.finished {
            let said = if matches!(finished.call, Call::Grpc(_)) { grpc } else { http };
            finished.status = said.or(finished.status);
            // A caller without a valid token must not influence what is sampled and recorded.
            let refused = if matches!(finished.call, Call::Grpc(_)) { UNAUTHENTICATED } else { UNAUTHORIZED };
            if finished.status == Some(refused) {
                self.finished = None;
            }
        }
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if let Some(mut finished) = self.finished.take() {
            finished.end = Instant::now();
            finished.outcome = self.active.outcome.take();
            self.active.telemetry.take(finished);
        }
    }
}

/// The span of the current request.
pub(crate) fn current() -> Option<Arc<ActiveSpan>> {
    CURRENT.try_with(Arc::clone).ok()
}

/// Answers a request of a stream in a span of its own, if the stream has one.
pub(crate) fn nested<F: Future>(
    stream: Option<Arc<ActiveSpan>>,
    answering: F,
) -> impl Future<Output = F::Output> + use<F> {
    let open = stream.and_then(|stream| {
        let (telemetry, state) = (stream.telemetry.clone(), stream.state.clone());
        OpenSpan::new(telemetry, Call::InStream, stream.trace, Some(stream.span), state)
    });
    match open {
        Some(open) => Either::Right(async move {
            let record = open.active.outcome.clone();
            CURRENT.scope(open.active.clone(), record.scope(answering)).await
        }),
        None => Either::Left(answering),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_inference_are_known_by_their_paths() {
        let (get, post) = (http::Method::GET, http::Method::POST);
        let of = |path: &str| Call::of(&post, path);
        assert_eq!(of("/inference.GRPCInferenceService/ModelInfer"), Some(Call::Grpc("ModelInfer")));
        assert_eq!(
            of("/inference.GRPCInferenceService/ModelStreamInfer"),
            Some(Call::Grpc("ModelStreamInfer"))
        );
        for (path, versioned) in [
            ("/v2/models/m/infer", false),
            ("/v2/models/m/versions/3/infer", true),
            ("/v2/models/infer/infer", false),
        ] {
            assert_eq!(of(path), Some(Call::Http { path: path.to_owned(), versioned }));
            assert_eq!(Call::of(&get, path), None);
        }
        for path in [
            "",
            "/",
            "/v2",
            "/v2/models/infer",
            "/v2/models/m/ready",
            "/v2/health/ready",
            "/inference.GRPCInferenceService/ModelReady",
            "/inference.GRPCInferenceServiceX/ModelInfer",
            "/grpc.health.v1.Health/Check",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
        let long = format!("/v2/models/{}/infer", "ü".repeat(100_000));
        let Some(Call::Http { path, .. }) = of(&long) else { unreachable!() };
        assert_eq!(path.chars().count(), PATH_MAX);
    }
}
