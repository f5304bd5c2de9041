//! What answers on the connections of a listener, until it is to stop.

use std::convert::Infallible;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::codegen::{Service, StdError, http};

use super::calls::Calls;
use super::{HEAD_BYTES_MAX, Listener, STREAMS_MAX};
use crate::peer::Peered;

impl Listener {
    /// Answers until `closed` fires and every connection has finished what it was asked. Dropping the call
    /// cuts them.
    pub(crate) async fn answer<S, B>(self, service: S, closed: CancellationToken)
    where
        S: Service<http::Request<Incoming>, Response = http::Response<B>, Error = Infallible>,
        S: Clone + Send + 'static,
        S::Future: Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<StdError>,
    {
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = closed.cancelled() => break,
                Some(_) = connections.join_next() => {}
                connection = self.accept() => {
                    let calls = Calls::new();
                    let protocol = self.protocol(calls.clone());
                    let service = Peered::new(service.clone(), connection.peer);
                    let closed = closed.clone();
                    connections.spawn(async move {
                        let service = TowerToHyperService::new(service);
                        let answering = protocol.serve_connection(TokioIo::new(connection), service);
                        let mut answering = calls.attend(answering);
                        let ended = tokio::select! {
                            ended = &mut answering => ended,
                            () = closed.cancelled() => {
                                answering.connection().graceful_shutdown();
                                answering.await
                            }
                        };
                        if let Err(error) = ended {
                            tracing::debug!(%error, "a connection broke");
                        }
                    });
                }
            }
        }
        drop(self);
        while connections.join_next().await.is_some() {}
    }

    fn protocol(&self, calls: Calls) -> auto::Builder<Calls> {
        let mut protocol = auto::Builder::new(calls);
        if self.is_grpc {
            protocol = protocol.http2_only();
            // Nobody reads it there.
            protocol.http2().auto_date_header(false);
        }
        protocol
            .http1()
            .timer(TokioTimer::new())
            // Runs between requests too, so that it also ends connections that are kept for nothing.
            .header_read_timeout(self.stalled)
            .max_buf_size(HEAD_BYTES_MAX as usize);
        protocol
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS_MAX)
            .max_header_list_size(HEAD_BYTES_MAX)
            .keep_alive_interval(self.stalled)
            .keep_alive_timeout(self.stalled);
        protocol
    }
}
