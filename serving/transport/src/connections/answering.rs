//! The accept loop of a listener: serves its connections until it stops.

use std::convert::Infallible;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::codegen::{Service, StdError, http};

use super::answer_progress::EndableExecutor;
use super::calls::{Calls, WithCalls};
use super::peer::{ConnectionService, Peer, PeerService};
use super::quota::{CANCELLED_PER_SECOND_MAX, Quota};
use super::{HEAD_BYTES_MAX, Listener};
use millrace_serving_core::metrics::CONNECTIONS_CUT;

impl Listener {
    /// Answers until `closed` fires and every connection has finished its requests. Dropping the future cuts
    /// the connections.
    pub(crate) async fn answer<S, B>(self, service: S, closed: CancellationToken)
    where
        S: Service<http::Request<Incoming>, Response = http::Response<B>, Error = Infallible>,
        S: PeerService + Send + 'static,
        S::Future: Send,
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<StdError>,
    {
        let mut connections = JoinSet::new();
        let leaving = CancellationToken::new();
        loop {
            tokio::select! {
                () = closed.cancelled() => break,
                Some(_) = connections.join_next() => {}
                connection = self.accept() => {
                    let calls = Calls::default();
                    let protocol = self.protocol(calls.clone());
                    let (quota, mut watch) = Quota::new(self.unsent_bytes_max, &self.answers);
                    let peer = Peer { address: connection.peer, quota };
                    let service = ConnectionService::new(&service, &peer, self.is_grpc);
                    let (leaving, unread, name) = (leaving.clone(), self.unread, self.service);
                    connections.spawn(async move {
                        let answering = protocol.serve_connection(TokioIo::new(connection), service);
                        let mut answering = WithCalls::new(answering, calls);
                        let ended = async {
                            tokio::select! {
                                ended = &mut answering => ended,
                                () = leaving.cancelled() => {
                                    answering.connection().graceful_shutdown();
                                    answering.await
                                }
                            }
                        };
                        tokio::select! {
                            ended = ended => {
                                if let Err(error) = ended {
                                    tracing::debug!(%error, "a connection broke");
                                }
                            }
                            client = watch.exceeded(unread) => {
                                CONNECTIONS_CUT.with_label_values(&[name]).inc();
                                tracing::debug!(peer = %peer.address, client, "a connection was closed");
                            }
                        }
                    });
                }
            }
        }
        // Closes the socket before clients are told to leave. Otherwise a client could reconnect to a socket
        // that is no longer accepted from, and its requests would fail when the socket closes.
        drop(self);
        leaving.cancel();
        while connections.join_next().await.is_some() {}
    }

    fn protocol(&self, calls: Calls) -> auto::Builder<EndableExecutor<Calls>> {
        let mut protocol = auto::Builder::new(EndableExecutor(calls));
        if self.is_grpc {
            protocol = protocol.http2_only();
            // gRPC clients do not read the date header.
            protocol.http2().auto_date_header(false);
        }
        protocol
            .http1()
            .timer(TokioTimer::new())
            // Also runs between requests, so that it ends idle connections.
            .header_read_timeout(self.stalled)
            .max_buf_size(HEAD_BYTES_MAX as usize);
        protocol
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.streams_max)
            .max_header_list_size(HEAD_BYTES_MAX)
            // Resets for calls that ran out of time before the server accepted them.
            .max_pending_accept_reset_streams(CANCELLED_PER_SECOND_MAX)
            .keep_alive_interval(self.stalled)
            .keep_alive_timeout(self.stalled);
        protocol
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use axum::Router;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::connections::PeerAddrLayer;
    use millrace_serving_core::config::Limits;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn clients_sent_away_at_shutdown_find_the_port_closed() {
        // The wrong order shows only in some rounds.
        for round in 0..100 {
            let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = socket.local_addr().unwrap();
            let closed = CancellationToken::new();
            let routes = Router::new().route("/", get(async || "answer"));
            let listener = Listener::http(socket, "REST", &Limits::default());
            let answering = tokio::spawn(listener.answer(PeerAddrLayer::new(routes), closed.clone()));
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"answer") {
                assert_ne!(client.read_buf(&mut answer).await.unwrap(), 0, "it is kept open");
            }
            closed.cancel();
            assert_eq!(client.read_buf(&mut answer).await.unwrap(), 0, "told to leave");
            let again = TcpStream::connect(address).await.map_err(|error| error.kind());
            assert_eq!(again.err(), Some(ErrorKind::ConnectionRefused), "round {round}");
            answering.await.unwrap();
        }
    }
}
