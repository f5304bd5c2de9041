//! The coordinator's port for other machines: TLS, and bounds for connections that have not proved the token.
//!
//! A connection that proves nothing in time is closed. Of more than [`UNPROVED_MAX`] of them, the oldest is
//! closed: a worker needs milliseconds for its proof, and a flood would otherwise hold all places.
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use crate::join::ServerTls;
use crate::join::tls::{self, Binding};

/// Deadline for the TLS handshake and the proof of the token.
pub(crate) const PROOF_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that may be without a proof at a time.
const UNPROVED_MAX: usize = 64;
/// Pause after a failed accept: most likely the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What the requests of a connection carry as an extension.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) standing: Standing,
    pub(crate) contact: Contact,
    /// What proofs of the token must cover.
    pub(crate) binding: Binding,
}

/// When a connection was last read, also with its end. The HTTP/2 library ends a connection whose peer does not answer
/// as if the peer had closed it.
#[derive(Debug, Clone)]
pub(crate) struct Contact {
    opened: Instant,
    /// Milliseconds after that.
    last: Arc<AtomicU64>,
}

impl Contact {
    fn new() -> Contact {
        Contact { opened: Instant::now(), last: Arc::default() }
    }

    fn note(&self) {
        self.last.store(millis(self.opened.elapsed()), Ordering::Relaxed);
    }

    /// How long nothing has come.
    pub(crate) fn silence(&self) -> Duration {
        self.opened.elapsed().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Whether a connection has proved the token.
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
    stream: TlsStream<TcpStream>,
    peer: Peer,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.peer.standing.is_proved() && self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        if read.is_ready() {
            self.peer.contact.note();
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
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
    tls: ServerTls,
    limit: Duration,
) -> ReceiverStream<io::Result<Connection>> {
    let (accepted, connections) = mpsc::channel(1);
    let acceptor = TlsAcceptor::from(tls.0);
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
    acceptor: TlsAcceptor,
    (standing, close): (Standing, CancellationToken),
    limit: Duration,
    accepted: mpsc::Sender<io::Result<Connection>>,
) -> io::Result<()> {
    let until = tokio::time::Instant::now() + limit;
    let _close_on_error = close.clone().drop_guard();
    let hand_over = async {
        stream.set_nodelay(true)?;
        let stream = acceptor.accept(stream).await?;
        let binding = tls::binding(stream.get_ref().1)?;
        let peer = Peer { standing, contact: Contact::new(), binding };
        let closed = Box::pin(close.clone().cancelled_owned());
        // Nothing receives the connection once the job has ended.
        let _ = accepted.send(Ok(Connection { stream, peer, closed })).await;
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
    use tokio_rustls::{TlsConnector, client};
    use tokio_stream::StreamExt as _;

    use super::*;
    use crate::join::ClientTls;

    async fn connect(address: std::net::SocketAddr) -> client::TlsStream<TcpStream> {
        let tls = ClientTls::of_token().unwrap();
        let name = tls.server_name("localhost").unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        TlsConnector::from(tls.config).connect(name, stream).await.unwrap()
    }

    #[tokio::test]
    async fn of_too_many_silent_connections_the_oldest_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = accept(listener, ServerTls::own().unwrap(), PROOF_TIMEOUT);
        let mut clients = Vec::new();
        let mut held = Vec::new();
        for index in 0..UNPROVED_MAX + 2 {
            clients.push(connect(address).await);
            held.push(connections.next().await.unwrap().unwrap());
            if index == 0 {
                held[0].peer.standing.prove();
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
        let mut connections = accept(listener, ServerTls::own().unwrap(), Duration::from_millis(500));
        let _client = connect(address).await;
        let mut connection = connections.next().await.unwrap().unwrap();
        let error = connection.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn only_the_two_ends_of_a_connection_have_its_binding() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = accept(listener, ServerTls::own().unwrap(), PROOF_TIMEOUT);
        let mut seen = Vec::new();
        for _ in 0..2 {
            let client = connect(address).await;
            let server = connections.next().await.unwrap().unwrap();
            assert_eq!(tls::binding(client.get_ref().1).unwrap(), server.peer.binding);
            seen.push(server.peer.binding);
        }
        assert_ne!(seen[0], seen[1]);
    }
}
