//! The access log: one line for each call over gRPC and REST, under the target `millrace_serving::access` at
//! level DEBUG. `--log info,millrace_serving::access=debug` shows it. The layer also copies a request's
//! `x-request-id` to its response, logs the trace id of its `traceparent` (W3C Trace Context), and spans
//! sampled requests until their response ends.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use crate::connections::{Peer, PeerService, peer};
use crate::telemetry::{OpenSpan, Parent, TRACE_PARENT, Telemetry};
use millrace_serving_core::error::quote;

/// Header with the client's id of a request, for log searches.
static REQUEST_ID: http::HeaderName = http::HeaderName::from_static("x-request-id");
/// Longest id that is copied, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 256;

fn enabled() -> bool {
    tracing::enabled!(target: "millrace_serving::access", tracing::Level::DEBUG)
}

/// The model that answered; an extension of the response.
#[derive(Debug, Clone)]
struct AnsweredModel {
    model: String,
    version: u64,
}

/// Records in a response the model that answered.
pub(crate) fn record_model(extensions: &mut http::Extensions, model: &str, version: u64) {
    if enabled() {
        extensions.insert(AnsweredModel { model: model.to_owned(), version });
    }
}

/// Slot for the token's name of a logged call; an extension of the request.
#[derive(Debug, Clone, Default)]
struct Signature(Arc<OnceLock<String>>);

/// Records in a request the name of the token that admitted it.
pub(crate) fn sign(extensions: &mut http::Extensions, name: &str) {
    if let Some(Signature(signed)) = extensions.remove() {
        // A request is admitted only once.
        let _ = signed.set(name.to_owned());
    }
}

/// A service whose calls are logged.
#[derive(Debug, Clone)]
pub(crate) struct AccessLogLayer<S> {
    service: S,
    telemetry: Option<Arc<Telemetry>>,
    /// The client's address, if requests do not carry it.
    peer: Option<SocketAddr>,
}

impl<S> AccessLogLayer<S> {
    pub(crate) fn new(service: S) -> AccessLogLayer<S> {
        AccessLogLayer { service, telemetry: None, peer: None }
    }

    /// Spans requests if there is a collector.
    pub(crate) fn traced(self, telemetry: Option<Arc<Telemetry>>) -> AccessLogLayer<S> {
        AccessLogLayer { telemetry, ..self }
    }
}

impl<S: PeerService> PeerService for AccessLogLayer<S> {
    fn for_peer(&self, peer: &Peer) -> AccessLogLayer<S> {
        AccessLogLayer {
            service: self.service.for_peer(peer),
            telemetry: self.telemetry.clone(),
            peer: Some(peer.address),
        }
    }
}

impl<S: NamedService> NamedService for AccessLogLayer<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B, R> Service<http::Request<B>> for AccessLogLayer<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<LoggedBody<R>>;
    type Error = Infallible;
    type Future = Answer<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let id = request.headers().get(&REQUEST_ID).filter(|id| id.len() <= REQUEST_ID_BYTES_MAX).cloned();
        let of_service = self.peer;
        let peer = |request: &http::Request<B>| of_service.or_else(|| peer(request.extensions()));
        let span = self
            .telemetry
            .as_ref()
            .and_then(|telemetry| telemetry.begin(&request, || peer(&request), id.as_ref()));
        let line = enabled().then(|| {
            let peer = peer(&request);
            let signature = Signature::default();
            request.extensions_mut().insert(signature.clone());
            Box::new(AccessLine {
                token: signature.0,
                method: request.method().clone(),
                path: quote(request.uri().path()),
                peer,
                trace_id: request
                    .headers()
                    .get(TRACE_PARENT)
                    .and_then(Parent::parse)
                    .map(|parent| hex::encode(parent.trace)),
                request_id: id.as_ref().map(|id| quote(&String::from_utf8_lossy(id.as_bytes()))),
                answered: None,
                status: None,
                bytes: 0,
                start: Instant::now(),
            })
        });
        Answer { answering: self.service.call(request), id, line, span }
    }
}

pin_project! {
    /// The future response of a logged call.
    pub(crate) struct Answer<F> {
        #[pin]
        answering: F,
        id: Option<http::HeaderValue>,
        line: Option<Box<AccessLine>>,
        span: Option<OpenSpan>,
    }
}

impl<F, R> Future for Answer<F>
where
    F: Future<Output = Result<http::Response<R>, Infallible>>,
{
    type Output = Result<http::Response<LoggedBody<R>>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let answered = match this.span {
            None => this.answering.poll(cx),
            Some(span) => span.within(|| this.answering.poll(cx)),
        };
        let Ok(mut response) = ready!(answered);
        if let Some(id) = this.id.take() {
            response.headers_mut().insert(&REQUEST_ID, id);
        }
        let (mut line, mut span) = (this.line.take(), this.span.take());
        if let Some(span) = &mut span {
            span.set_status(Some(response.status().as_u16()), grpc_status(response.headers()));
        }
        if let Some(line) = &mut line {
            line.answered = response.extensions_mut().remove();
            line.status = Some(grpc_status(response.headers()).unwrap_or(response.status().as_u16()));
        }
        Poll::Ready(Ok(response.map(|body| LoggedBody { body, line, span })))
    }
}

fn grpc_status(headers: &http::HeaderMap) -> Option<u16> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// The log line of one call, written when the body of the response has ended or is dropped.
struct AccessLine {
    /// Name of the token, if the server has tokens and admitted the call.
    token: Arc<OnceLock<String>>,
    method: http::Method,
    path: String,
    peer: Option<SocketAddr>,
    request_id: Option<String>,
    trace_id: Option<String>,
    answered: Option<AnsweredModel>,
    /// The gRPC status, else the HTTP status; `None` if the client disconnected before the answer.
    status: Option<u16>,
    bytes: u64,
    start: Instant,
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        tracing::debug!(
            target: "millrace_serving::access",
            method = %self.method,
            path = self.path,
            model = self.answered.as_ref().map(|answered| answered.model.as_str()),
            version = self.answered.as_ref().map(|answered| answered.version),
            request_id = self.request_id,
            trace_id = self.trace_id,
            token = self.token.get().map(String::as_str),
            status = self.status,
            bytes = self.bytes,
            elapsed_ms = self.start.elapsed().as_secs_f64() * 1000.0,
            peer = self.peer.map(tracing::field::display),
            "call"
        );
    }
}

/// The body of a logged response.
pub(crate) struct LoggedBody<R> {
    body: R,
    line: Option<Box<AccessLine>>,
    /// Ends with the body.
    span: Option<OpenSpan>,
}

impl<R: Body<Data = bytes::Bytes> + Unpin> Body for LoggedBody<R> {
    type Data = bytes::Bytes;
    type Error = R::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, R::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let (Some(span), Some(Ok(frame))) = (&mut self.span, &frame)
            && let Some(status) = frame.trailers_ref().and_then(grpc_status)
        {
            span.set_status(None, Some(status));
        }
        if let (Some(line), Some(Ok(frame))) = (&mut self.line, &frame) {
            if let Some(data) = frame.data_ref() {
                line.bytes += data.len() as u64;
            } else if let Some(status) = frame.trailers_ref().and_then(grpc_status) {
                line.status = Some(status);
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
