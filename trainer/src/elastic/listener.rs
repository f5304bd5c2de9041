//! The coordinator's port for other machines: bounds connections that have not proved the token, and adds TLS.
//!
//! A connection that proves nothing in time is closed. Of more than [`UNPROVED_MAX`] of them, the oldest is
//! closed: a worker needs milliseconds for its proof, and a flood would otherwise hold all places.
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use crate::join::ServerTls;

/// Deadline for the TLS handshake and the proof of the token.
pub(crate) const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that may be without a proof at a time.
const UNPROVED_MAX: usize = 64;
/// Pause after a failed accept: most likely the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A byte stream, with or without TLS.
trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// The state of a connection, which its requests carry as an extension.
#[derive(Debug, Clone, Default)]
pub(crate) struct Standing(Arc<AtomicBool>);

impl Standing {
    /// Lifts the deadline: the connection has proved the token.
    pub(crate) fn prove(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn is_proved(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A connection that reads as broken once its time for a proof is over.
pub(crate) struct Connection {
    stream: Box<dyn Bytes>,
    standing: Standing,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connected for Connection {
    type ConnectInfo = Standing;

    fn connect_info(&self) -> Standing {
        self.standing.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.standing.is_proved() && self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut *self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(cx)
    }
}

/// The connections without a proof, oldest first.
#[derive(Default)]
struct Unproved(Mutex<VecDeque<(Standing, CancellationToken)>>);

impl Unproved {
    /// Adds a connection; closes the oldest ones beyond the limit.
    fn add(&self, standing: Standing, close: CancellationToken) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|(standing, close)| !standing.is_proved() && !close.is_cancelled());
        waiting.push_back((standing, close));
        while waiting.len() > UNPROVED_MAX {
            if let Some((_, oldest)) = waiting.pop_front() {
                oldest.cancel();
            }
        }
    }
}

/// Accepts connections until the stream that it returns is dropped. Closes each that has not proved the token
/// after `limit`.
pub(crate) fn accept(
    listener: TcpListener,
    tls: Option<ServerTls>,
    limit: Duration,
) -> ReceiverStream<io::Result<Connection>> {
    let (accepted, connections) = mpsc::channel(1);
    let acceptor = tls.map(|tls| TlsAcceptor::from(tls.0));
    tokio::spawn(async move {
        let unproved = Unproved::default();
        loop {
            let stream = tokio::select! {
                () = accepted.closed() => return,
                stream = listener.accept() => stream,
            };
            match stream {
                Ok((stream, peer)) => {
                    let (standing, close) = (Standing::default(), CancellationToken::new());
                    unproved.add(standing.clone(), close.clone());
                    let greeting =
                        greet(stream, acceptor.clone(), (standing, close), limit, accepted.clone());
                    tokio::spawn(async move {
                        if let Err(error) = greeting.await {
                            tracing::debug!(%peer, %error, "connection refused");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the coordinator cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    });
    ReceiverStream::new(connections)
}

/// Finishes the TLS handshake, hands the connection over, and closes it when its time is over.
async fn greet(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    (standing, close): (Standing, CancellationToken),
    limit: Duration,
    accepted: mpsc::Sender<io::Result<Connection>>,
) -> io::Result<()> {
    let until = tokio::time::Instant::now() + limit;
    let _close_on_error = close.clone().drop_guard();
    let hand_over = async {
        stream.set_nodelay(true)?;
        let stream: Box<dyn Bytes> = match acceptor {
            Some(acceptor) => Box::new(acceptor.accept(stream).await?),
            None => Box::new(stream),
        };
        let closed = Box::pin(close.clone().cancelled_owned());
        // Nothing receives the connection once the job has ended.
        let _ = accepted.send(Ok(Connection { stream, standing, closed })).await;
        io::Result::Ok(())
    };
    tokio::select! {
        () = close.cancelled() => return Err(io::Error::other("too many connections without a proof")),
        handed_over = tokio::time::timeout_at(until, hand_over) => handed_over??,
    }
    tokio::select! {
        () = close.cancelled() => {}
        () = tokio::time::sleep_until(until) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio_stream::StreamExt as _;

    use super::*;

    #[tokio::test]
    async fn of_too_many_silent_connections_the_oldest_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = accept(listener, None, PROOF_TIMEOUT);
        let mut clients = Vec::new();
        let mut held = Vec::new();
        for index in 0..UNPROVED_MAX + 2 {
            clients.push(TcpStream::connect(address).await.unwrap());
            held.push(connections.next().await.unwrap().unwrap());
            if index == 0 {
                held[0].standing.prove();
            }
        }
        let mut byte = [0; 1];
        // The first one has proved the token, the second one is the oldest without a proof.
        let error = held[1].read(&mut byte).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        for open in [0, 2, UNPROVED_MAX + 1] {
            let read = tokio::time::timeout(Duration::from_millis(50), held[open].read(&mut byte)).await;
            assert!(read.is_err(), "connection {open} is closed: {read:?}");
        }
    }

    #[tokio::test]
    async fn a_connection_without_a_proof_is_closed_after_its_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = accept(listener, None, Duration::from_millis(50));
        let _client = TcpStream::connect(address).await.unwrap();
        let mut connection = connections.next().await.unwrap().unwrap();
        let error = connection.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
