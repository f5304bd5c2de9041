//! The access log: a line for each call over gRPC and REST, under the target `millrace_serving::access`
//! at level DEBUG, so `--log info,millrace_serving::access=debug` shows it. Beside it, a request's
//! `x-request-id` comes back on its reply, and the line has the trace that its `traceparent` (W3C Trace
//! Context) is part of.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use http_body::{Body, Frame, SizeHint};
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::server::TcpConnectInfo;

use crate::error::quote;

/// Who calls, among the extensions of requests that do not say it otherwise.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Names a request, for those who look for it in logs.
const REQUEST_ID: &str = "x-request-id";
/// Longest id that is repeated.
const REQUEST_ID_BYTES_MAX: usize = 256;

/// Says which trace a request is part of.
const TRACE_PARENT: &str = "traceparent";

fn enabled() -> bool {
    tracing::enabled!(target: "millrace_serving::access", tracing::Level::DEBUG)
}

/// The model that answered, among the extensions of a reply.
#[derive(Debug, Clone)]
struct Answered {
    model: String,
    version: u64,
}

/// Notes on a reply which model gave it.
pub(crate) fn note(extensions: &mut http::Extensions, model: &str, version: u64) {
    if enabled() {
        extensions.insert(Answered { model: model.to_owned(), version });
    }
}

/// Takes the name of the token of a logged call, among the extensions of the request.
#[derive(Debug, Clone, Default)]
struct Signature(Arc<OnceLock<String>>);

/// Notes on a request by whose token it was let in.
pub(crate) fn sign(extensions: &mut http::Extensions, name: &str) {
    if let Some(Signature(signed)) = extensions.remove() {
        // A request is let in once.
        let _ = signed.set(name.to_owned());
    }
}

/// A service whose calls are logged.
#[derive(Debug, Clone)]
pub(crate) struct Logged<S> {
    service: S,
    peer: Option<SocketAddr>,
}

impl<S> Logged<S> {
    /// `peer` is who calls, where the requests do not say it themselves.
    pub(crate) fn new(service: S, peer: Option<SocketAddr>) -> Logged<S> {
        Logged { service, peer }
    }
}

impl<S: NamedService> NamedService for Logged<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B, R> Service<http::Request<B>> for Logged<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Counted<R>>;
    type Error = Infallible;
    type Future = Answer<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        if let Some(peer) = self.peer {
            request.extensions_mut().insert(Peer(peer));
        }
        let id = request.headers().get(REQUEST_ID).filter(|id| id.len() <= REQUEST_ID_BYTES_MAX).cloned();
        let line = enabled().then(|| {
            let connected =
                request.extensions().get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
            let signature = Signature::default();
            request.extensions_mut().insert(signature.clone());
            Box::new(Line {
                token: signature.0,
                method: request.method().clone(),
                path: quote(request.uri().path()),
                peer: connected.or(self.peer),
                trace_id: request.headers().get(TRACE_PARENT).and_then(trace_id),
                request_id: id.as_ref().map(|id| quote(&String::from_utf8_lossy(id.as_bytes()))),
                answered: None,
                status: None,
                bytes: 0,
                start: Instant::now(),
            })
        });
        Answer { answering: Box::pin(self.service.call(request)), id, line }
    }
}

/// The future reply of a logged call.
pub(crate) struct Answer<F> {
    answering: Pin<Box<F>>,
    id: Option<http::HeaderValue>,
    line: Option<Box<Line>>,
}

impl<F, R> Future for Answer<F>
where
    F: Future<Output = Result<http::Response<R>, Infallible>>,
{
    type Output = Result<http::Response<Counted<R>>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Ok(mut response) = ready!(self.answering.as_mut().poll(cx));
        if let Some(id) = self.id.take() {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        let mut line = self.line.take();
        if let Some(line) = &mut line {
            line.answered = response.extensions_mut().remove();
            line.status = Some(grpc_status(response.headers()).unwrap_or(response.status().as_u16()));
        }
        Poll::Ready(Ok(response.map(|body| Counted { body, line })))
    }
}

fn grpc_status(headers: &http::HeaderMap) -> Option<u16> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// The trace of a `traceparent`: 32 digits behind a version of 2, before a span of 16 and flags of 2, all
/// of them hexadecimal and small. Later versions may append more.
fn trace_id(value: &http::HeaderValue) -> Option<String> {
    let text = value.to_str().ok()?;
    let mut fields = text.split('-');
    let mut digits = |count: usize| {
        let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        fields.next().filter(|field| field.len() == count && field.bytes().all(hex))
    };
    let (version, trace, span, _flags) = (digits(2)?, digits(32)?, digits(16)?, digits(2)?);
    let nothing = |field: &str| field.bytes().all(|byte| byte == b'0');
    let whole = version != "ff" && (version != "00" || fields.next().is_none());
    (whole && !nothing(trace) && !nothing(span)).then(|| trace.to_owned())
}

/// What is logged of one call. It is written when the body of the reply has ended, or nobody takes it.
struct Line {
    /// Name of the token, where the server has tokens and knows it.
    token: Arc<OnceLock<String>>,
    method: http::Method,
    path: String,
    peer: Option<SocketAddr>,
    request_id: Option<String>,
    trace_id: Option<String>,
    answered: Option<Answered>,
    /// Of gRPC, else of HTTP; absent where the caller went before there was an answer.
    status: Option<u16>,
    bytes: u64,
    start: Instant,
}

impl Drop for Line {
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

/// The body of a logged reply.
pub(crate) struct Counted<R> {
    body: R,
    line: Option<Box<Line>>,
}

impl<R: Body<Data = bytes::Bytes> + Unpin> Body for Counted<R> {
    type Data = bytes::Bytes;
    type Error = R::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, R::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_known_by_a_whole_traceparent_alone() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        for (text, whole) in [
            (format!("00-{trace}-00f067aa0ba902b7-01"), true),
            (format!("00-{trace}-00f067aa0ba902b7-00"), true),
            (format!("cc-{trace}-00f067aa0ba902b7-01-what-comes-later"), true),
            (format!("00-{trace}-00f067aa0ba902b7-01-more"), false),
            (format!("ff-{trace}-00f067aa0ba902b7-01"), false),
            (format!("00-{trace}-0000000000000000-01"), false),
            (format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), false),
            (format!("00-{}-00f067aa0ba902b7-01", trace.to_uppercase()), false),
            (format!("00-{trace}-00f067aa0ba902b7"), false),
            (format!("00-{trace}0-00f067aa0ba902b7-01"), false),
            (String::new(), false),
            ("-".repeat(55), false),
        ] {
            let value = http::HeaderValue::try_from(&text).ok();
            let told = value.as_ref().and_then(trace_id);
            assert_eq!(told.as_deref(), whole.then_some(trace), "{text}");
        }
    }
}
