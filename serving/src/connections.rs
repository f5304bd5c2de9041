//! Connections: how many may be open, and how long a client may keep one without sending or taking
//! anything. HTTP/1.1 and HTTP/2 on one port, with TLS or without.

mod answer;
mod answering;
mod calls;
mod quota;
mod taking;

pub(crate) use answer::{Answer, Call};
pub(crate) use quota::{Answers, Held, Quota};

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

use crate::config::Limits;
use crate::metrics::{CONNECTIONS, CONNECTIONS_REFUSED};
use crate::tls::{Securing, Stream};

/// What a client of HTTP/2 sends first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Requests at a time on one connection of HTTP/2 are at least and at most so many, see [`streams_max`].
const STREAMS_MIN: usize = 1024;
const STREAMS_MAX: usize = 64 << 10;
/// Bytes of headers of one request, over HTTP/2 and (with the request line) over HTTP/1.1.
const HEAD_BYTES_MAX: u32 = 64 << 10;
/// Connections at a time that are told why they are refused; more are closed without a word.
const REFUSALS_MAX: usize = 64;
/// How long a refused client may take to read why.
const REFUSAL_MAX: Duration = Duration::from_secs(1);
/// How long accepting rests when the process has no descriptor for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket that keeps to its limits.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: TcpListener,
    service: &'static str,
    /// Nothing but HTTP/2 is spoken.
    is_grpc: bool,
    refusal: Arc<[u8]>,
    open: Arc<Semaphore>,
    refusing: Arc<Semaphore>,
    gauge: IntGauge,
    stalled: Duration,
    unsent_bytes_max: usize,
    answers: Answers,
    streams_max: u32,
    securing: Option<Securing>,
}

impl Listener {
    /// For HTTP; those beyond the limit get status 503.
    pub(crate) fn http(socket: TcpListener, service: &'static str, limits: &Limits) -> Listener {
        let body = format!(r#"{{"error":"{}"}}"#, too_many(limits));
        let answer = format!(
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        Listener::new(socket, service, answer.into_bytes(), limits)
    }

    /// For gRPC; those beyond the limit get a GOAWAY, which clients report as UNAVAILABLE with its text.
    pub(crate) fn grpc(socket: TcpListener, service: &'static str, limits: &Limits) -> Listener {
        let text = too_many(limits);
        // RFC 9113: an empty SETTINGS, then GOAWAY of stream 0 with REFUSED_STREAM, the reason that clients
        // of gRPC take for one to try again on. The text is shorter than 200 bytes.
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
            unsent_bytes_max: limits.unsent_bytes_max,
            answers: Answers::new(limits.answer_bytes_max),
            streams_max: streams_max(limits),
            securing: None,
        }
    }

    /// Answers count together with those of the other listeners that have the same bound.
    pub(crate) fn counted(self, answers: &Answers) -> Listener {
        Listener { answers: answers.clone(), ..self }
    }

    /// Takes connections with TLS alone, if there is something to secure them with.
    pub(crate) fn secured(self, securing: Option<Securing>) -> Listener {
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
                tracing::debug!(%error, "a connection keeps small packets back");
            }
            match self.open.clone().try_acquire_owned() {
                Ok(permit) => return Connection::new(stream, peer, permit, self),
                Err(_) => self.refuse(stream),
            }
        }
    }

    /// Says why and closes, without holding up who comes next.
    fn refuse(&self, mut stream: TcpStream) {
        CONNECTIONS_REFUSED.with_label_values(&[self.service]).inc();
        // A client of TLS would have to be greeted first, which is what there is no room for.
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
                // Closing before the client's own bytes were read would reset the connection, and with
                // it what it was told.
                tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
            };
            // Nobody is there to learn that a refusal did not arrive.
            let _ = tokio::time::timeout(REFUSAL_MAX, say).await;
        });
    }
}

/// Requests at a time on one connection of HTTP/2: twice as many as may wait for a model. Where a client has to keep
/// requests back that the server would refuse, those that come out of its line have no time left, and under an overload
/// that lasts none of a client's requests is answered in time (seen with a quarter of what may wait, and now and then
/// with as many).
fn streams_max(limits: &Limits) -> u32 {
    limits.requests_waiting_max.saturating_mul(2).clamp(STREAMS_MIN, STREAMS_MAX) as u32
}

fn too_many(limits: &Limits) -> String {
    format!(
        "too many connections, the limit is {} (limits.connections_max): close some or try again later",
        limits.connections_max
    )
}

/// Whether an error of `accept` is that of the connection that was to come, not of the listener.
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
    /// Bytes of the preface that came, and when the rest is late; the handshake of TLS has to be done by
    /// then, too. `None` once the bytes are those of HTTP/1 (its own deadline for heads begins) or the
    /// preface is whole (pings begin).
    opening: Option<(usize, Pin<Box<Sleep>>)>,
    /// Runs while the client takes nothing of what waits for it.
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

    /// An error once writing has waited for too long.
    fn patient<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.writing = None;
            return written;
        }
        let writing = self.writing.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.stalled)));
        match writing.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(self.late("took nothing"))),
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
            Poll::Ready(()) => Poll::Ready(Err(self.late("did not begin"))),
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
        // Plain bytes are the kernel's once they are written, and flushing them tells nothing.
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
    fn a_client_can_send_more_at_a_time_than_may_wait() {
        let of = |requests_waiting_max| streams_max(&Limits { requests_waiting_max, ..Limits::default() });
        assert_eq!([0, 1024, 5000, 40_000, usize::MAX].map(of), [1024, 2048, 10_000, 65_536, 65_536]);
    }
}
