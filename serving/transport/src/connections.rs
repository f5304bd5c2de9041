//! Connections of the HTTP and gRPC ports: bounds their number, and the time for which a client may keep one
//! without sending or reading. HTTP/1.1 and HTTP/2 share one port, with or without TLS.

mod answer;
mod answer_progress;
mod answering;
mod calls;
pub(crate) mod peer;
mod quota;

pub(crate) use answer::{Answer, Call};
pub(crate) use peer::{Peer, PeerAddrLayer, PeerService, peer};
pub(crate) use quota::{Answers, Quota, UnsentGuard};

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus::IntGauge;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use millrace_serving_core::config::Limits;
use millrace_serving_core::metrics::{CONNECTIONS, CONNECTIONS_REFUSED};
use millrace_serving_core::tls::{ServiceTls, Stream};

/// The first bytes from an HTTP/2 client.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bounds of the concurrent requests on one HTTP/2 connection, see [`streams_max`].
const STREAMS_MIN: usize = 1024;
const STREAMS_MAX: usize = 64 << 10;
/// Most bytes of the headers of one request; over HTTP/1.1 including the request line.
const HEAD_BYTES_MAX: u32 = 64 << 10;
/// Connections that get a refusal message at a time; further ones are closed without a message.
const REFUSALS_MAX: usize = 64;
/// Longest time for a refused client to read the message.
const REFUSAL_MAX: Duration = Duration::from_secs(1);
/// Pause of the accept loop when the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket that enforces the connection limits.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    service: &'static str,
    /// Only HTTP/2 is spoken.
    is_grpc: bool,
    refusal: Arc<[u8]>,
    open: Arc<Semaphore>,
    refusing: Arc<Semaphore>,
    gauge: IntGauge,
    stalled: Duration,
    /// Longest time for which a client may read none of its answers, or nothing of one of them.
    unread: Duration,
    unsent_bytes_max: usize,
    answers: Answers,
    streams_max: u32,
    securing: Option<ServiceTls>,
}

impl Listener {
    /// A listener for HTTP; connections beyond the limit get status 503.
    pub(crate) fn http(socket: TcpListener, service: &'static str, limits: &Limits) -> Listener {
        let body = format!(r#"{{"error":"{}"}}"#, too_many(limits));
        let answer = format!(
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        Listener::new(socket, service, answer.into_bytes(), limits)
    }

    /// A listener for gRPC; connections beyond the limit get a GOAWAY, which clients report as UNAVAILABLE
    /// with its text.
    pub(crate) fn grpc(socket: TcpListener, service: &'static str, limits: &Limits) -> Listener {
        let text = too_many(limits);
        // RFC 9113: an empty SETTINGS frame, then GOAWAY of stream 0 with REFUSED_STREAM, on which gRPC
        // clients retry. The text is shorter than 200 bytes.
        let mut answer = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
        answer.extend_from_slice(&[0, 0, 8 + text.len() as u8, 7, 0, 0, 0, 0, 0]);
        answer.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 7]);
        answer.extend_from_slice(text.as_bytes());
        Listener { is_grpc: true, ..Listener::new(socket, service, answer, limits) }
    }

    fn new(socket: TcpListener, service: &'static str, refusal: Vec<u8>, limits: &Limits) -> Listener {
        Listener {
            socket,
            service,
            is_grpc: false,
            refusal: refusal.into(),
            open: Arc::new(Semaphore::new(limits.connections_max.min(Semaphore::MAX_PERMITS))),
            refusing: Arc::new(Semaphore::new(REFUSALS_MAX)),
            gauge: CONNECTIONS.with_label_values(&[service]),
            stalled: Duration::from_millis(limits.stalled_ms_max),
            unread: Duration::from_millis(limits.stalled_ms_max),
            unsent_bytes_max: limits.unsent_bytes_max,
            answers: Answers::new(limits.answer_bytes_max),
            streams_max: streams_max(limits),
            securing: None,
        }
    }

    /// Shares the quota for unsent answers with other listeners.
    pub(crate) fn counted(self, answers: &Answers) -> Listener {
        Listener { answers: answers.clone(), ..self }
    }

    /// Lets clients leave their answers unread for another time than they may stall a connection.
    pub(crate) fn unread(self, unread: Duration) -> Listener {
        Listener { unread, ..self }
    }

    /// Accepts only TLS connections if `securing` is set.
    pub(crate) fn secured(self, securing: Option<ServiceTls>) -> Listener {
        Listener { securing, ..self }
    }

    /// The next connection within the limit. Cancel safe.
    async fn accept(&self) -> Connection {
        loop {
            let (stream, peer) = match self.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_connection(&error) => continue,
                Err(error) => {
                    tracing::warn!(service = self.service, %error, "no connection can be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "cannot set TCP_NODELAY on a connection");
            }
            match self.open.clone().try_acquire_owned() {
                Ok(permit) => return Connection::new(stream, peer, permit, self),
                Err(_) => self.refuse(stream),
            }
        }
    }

    /// Sends the refusal and closes the connection in a task, so that accepting goes on.
    fn refuse(&self, mut stream: TcpStream) {
        CONNECTIONS_REFUSED.with_label_values(&[self.service]).inc();
        // With TLS the refusal would need a handshake, for which there is no capacity.
        if self.securing.is_some() {
            return;
        }
        let Ok(permit) = self.refusing.clone().try_acquire_owned() else { return };
        let refusal = self.refusal.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let say = async {
                stream.write_all(&refusal).await?;
                stream.shutdown().await?;
                // Reads the client's bytes before closing: otherwise the kernel resets the connection and the
                // client loses the refusal.
                tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
            };
            // A refusal that does not arrive needs no handling.
            let _ = tokio::time::timeout(REFUSAL_MAX, say).await;
        });
    }
}

/// Most concurrent requests on one HTTP/2 connection: twice the number that may wait for a model. With a
/// lower bound, the client itself queues the requests that the server would refuse, and they have no time
/// left when it sends them. Under a lasting overload none of its requests was then answered in time (seen
/// with a quarter of that number, and occasionally with exactly that number).
fn streams_max(limits: &Limits) -> u32 {
    limits.requests_waiting_max.saturating_mul(2).clamp(STREAMS_MIN, STREAMS_MAX) as u32
}

fn too_many(limits: &Limits) -> String {
    format!(
        "too many connections, the limit is {} (limits.connections_max): close some or try again later",
        limits.connections_max
    )
}

/// Whether an error of `accept` concerns the incoming connection and not the listener.
fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// An accepted connection; counts as open until it is dropped.
#[derive(Debug)]
struct Connection {
    stream: Stream,
    peer: SocketAddr,
    gauge: IntGauge,
    stalled: Duration,
    /// Bytes of the HTTP/2 preface that have arrived, and the deadline for the rest, which includes the TLS
    /// handshake. `None` once the bytes are HTTP/1, which has a deadline for request heads, or the preface is
    /// complete, after which pings detect a dead client.
    opening: Option<(usize, Pin<Box<Sleep>>)>,
    /// Runs while the client reads none of the bytes that wait for it.
    writing: Option<Pin<Box<Sleep>>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn new(
        stream: TcpStream,
        peer: SocketAddr,
        permit: OwnedSemaphorePermit,
        listener: &Listener,
    ) -> Connection {
        listener.gauge.inc();
        Connection {
            peer,
            stream: Stream::new(stream, listener.securing.as_ref()),
            gauge: listener.gauge.clone(),
            stalled: listener.stalled,
            opening: Some((0, Box::pin(tokio::time::sleep(listener.stalled)))),
            writing: None,
            _permit: permit,
        }
    }

    fn late(&self, what: &str) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, format!("the client {what} for {:?}", self.stalled))
    }

    /// Passes `written` on, or an error if writing has been blocked for too long.
    fn patient<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.writing = None;
            return written;
        }
        let writing = self.writing.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.stalled)));
        match writing.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(self.late("read nothing"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let Some((matched, deadline)) = &mut self.opening else { return read };
        if read.is_ready() {
            let came = buffer.filled().get(before..).unwrap_or_default();
            let expected = &PREFACE[*matched..];
            let same = came.iter().zip(expected).take_while(|(a, b)| a == b).count();
            *matched += same;
            if *matched == PREFACE.len() || same < came.len() {
                self.opening = None;
            }
            return read;
        }
        match deadline.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(self.late("sent no request"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.patient(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.patient(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        // Without TLS, flushing shows nothing: the kernel has the bytes as soon as they are written.
        if self.stream.is_buffered() { self.patient(cx, flushed) } else { flushed }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.patient(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_streams_exceed_the_requests_that_may_wait() {
        let of = |requests_waiting_max| streams_max(&Limits { requests_waiting_max, ..Limits::default() });
        assert_eq!([0, 1024, 5000, 40_000, usize::MAX].map(of), [1024, 2048, 10_000, 65_536, 65_536]);
    }
}
