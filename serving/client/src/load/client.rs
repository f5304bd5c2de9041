//! Low-cost gRPC client of the load generator: sends messages framed in advance, and discards responses. It speaks
//! HTTP/2 directly, because it may share the machine with the server: a small request takes a fifth less time than
//! through tonic's channel.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::RecvStream;
use h2::client::{Builder, SendRequest};
use parking_lot::Mutex;
use tonic::codegen::http;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Code, Status};

use super::requests::Requests;
use crate::client::{ClientError, Credentials, Remote};

const PATH: &str = "/inference.GRPCInferenceService/ModelInfer";
/// Flow-control windows of a stream and of a connection, as in hyper's clients.
const WINDOW_BYTES: u32 = 2 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 5 << 20;
/// Largest number in a `grpc-timeout`, which has at most eight digits.
const TIMEOUT_MAX: u128 = 99_999_999;

/// Target of the requests of a load.
pub(super) trait Server: Clone + Send + 'static {
    /// Sends a request; returns when the response has arrived, or `timeout` has passed.
    fn call(
        &mut self,
        number: u64,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<(), Code>> + Send;
}

/// A connection to a server, reopened when it breaks. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Connection {
    shared: Arc<ClientState>,
    requests: Requests,
}

#[derive(Debug)]
struct ClientState {
    remote: Remote,
    /// Address, path and headers of all calls.
    head: http::Request<()>,
    link: Mutex<SendRequest<Bytes>>,
    /// Held by the task that reconnects.
    connecting: tokio::sync::Mutex<()>,
}

impl Connection {
    /// Opens `count` connections to a server.
    pub(super) async fn open(
        address: &str,
        credentials: &Credentials,
        requests: &Requests,
        count: usize,
    ) -> Result<Vec<Connection>, ClientError> {
        let remote = Remote::find(address, credentials).await?;
        let head = head(&remote).ok_or_else(|| ClientError::Address { address: address.to_owned() })?;
        let mut connections = Vec::with_capacity(count);
        for _ in 0..count {
            let shared = ClientState {
                head: head.clone(),
                link: Mutex::new(connect(&remote).await?),
                connecting: tokio::sync::Mutex::new(()),
                remote: remote.clone(),
            };
            connections.push(Connection { shared: Arc::new(shared), requests: requests.clone() });
        }
        Ok(connections)
    }
}

impl Server for Connection {
    async fn call(&mut self, number: u64, timeout: Option<Duration>) -> Result<(), Code> {
        let exchange = self.shared.exchange(self.requests.framed(number), timeout);
        match timeout {
            None => exchange.await,
            // The server gets the timeout as well; the client gives up when it has passed.
            Some(timeout) => {
                tokio::time::timeout(timeout, exchange).await.unwrap_or(Err(Code::DeadlineExceeded))
            }
        }
    }
}

impl ClientState {
    async fn exchange(&self, message: Bytes, timeout: Option<Duration>) -> Result<(), Code> {
        let began = timeout.map(|_| Instant::now());
        let mut link = self.ready().await?;
        let mut head = self.head.clone();
        if let (Some(timeout), Some(began)) = (timeout, began) {
            // The call may have waited for the connection, which the server cannot know.
            head.headers_mut().insert("grpc-timeout", shown(timeout.saturating_sub(began.elapsed())));
        }
        let (answer, mut body) = link.send_request(head, false).map_err(code)?;
        body.send_data(message, true).map_err(code)?;
        let (head, body) = answer.await.map_err(code)?.into_parts();
        match of_headers(&head.headers) {
            Some(code) => outcome(code),
            None if head.status == http::StatusCode::OK => outcome(drain(body).await?),
            None => Err(of_http(head.status)),
        }
    }

    /// Waits until the connection can open a stream; reconnects if it is broken.
    async fn ready(&self) -> Result<SendRequest<Bytes>, Code> {
        let link = self.link.lock().clone();
        if let Ok(ready) = link.ready().await {
            return Ok(ready);
        }
        let _turn = self.connecting.lock().await;
        // Another task may have reconnected meanwhile.
        let link = self.link.lock().clone();
        if let Ok(ready) = link.ready().await {
            return Ok(ready);
        }
        let new = connect(&self.remote).await.map_err(|_| Code::Unavailable)?;
        *self.link.lock() = new.clone();
        new.ready().await.map_err(code)
    }
}

/// The request head of all calls.
fn head(remote: &Remote) -> Option<http::Request<()>> {
    let mut uri = remote.uri().clone().into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(PATH));
    let mut head = http::Request::post(http::Uri::from_parts(uri).ok()?)
        .version(http::Version::HTTP_2)
        .header(http::header::TE, "trailers")
        .header(http::header::CONTENT_TYPE, "application/grpc")
        .body(())
        .ok()?;
    head.headers_mut().extend(remote.metadata().into_headers());
    Some(head)
}

/// Connects. The connection task ends when the last clone of the sender has been dropped.
async fn connect(remote: &Remote) -> Result<SendRequest<Bytes>, ClientError> {
    let (link, connection) = Builder::new()
        .enable_push(false)
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .handshake(remote.stream().await?)
        .await
        .map_err(|error| remote.unreachable(error))?;
    // Calls on a failed connection get its error.
    tokio::spawn(connection);
    Ok(link)
}

/// Receives a response; returns the status in its trailers.
async fn drain(mut body: RecvStream) -> Result<Code, Code> {
    while let Some(data) = body.data().await {
        let bytes = data.map_err(code)?.len();
        body.flow_control().release_capacity(bytes).map_err(code)?;
    }
    let trailers = poll_fn(|cx| body.poll_trailers(cx)).await.map_err(code)?;
    Ok(trailers.and_then(|trailers| of_headers(&trailers)).unwrap_or(Code::Unknown))
}

fn of_headers(headers: &http::HeaderMap) -> Option<Code> {
    headers.get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()))
}

fn outcome(code: Code) -> Result<(), Code> {
    if code == Code::Ok { Ok(()) } else { Err(code) }
}

/// The gRPC status for an HTTP response without one, by gRPC's mapping of HTTP status codes.
fn of_http(status: http::StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

/// The gRPC status for a broken stream or connection.
fn code(error: h2::Error) -> Code {
    let gone = error.is_io() || error.is_go_away();
    if gone { Code::Unavailable } else { Status::from_error(Box::new(error)).code() }
}

/// A timeout in the format of gRPC over HTTP/2, with a precision of 1 %: repeated header values cost both sides less.
fn shown(timeout: Duration) -> http::HeaderValue {
    let text = match timeout.as_micros() {
        micros @ ..100_000 => format!("{micros}u"),
        _ => format!("{}m", timeout.as_millis().min(TIMEOUT_MAX)),
    };
    http::HeaderValue::try_from(text).unwrap_or(http::HeaderValue::from_static("0u"))
}

/// The name of a status in the protocol.
pub(super) fn status(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests;
