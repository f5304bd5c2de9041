//! Who is at the other end of the connection that a call came on.

use std::net::SocketAddr;
use std::task::{Context, Poll};

use tonic::codegen::{Service, http};

/// Who is at the other end of the connection, among the extensions of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Who calls, where that is known.
pub(crate) fn peer(extensions: &http::Extensions) -> Option<SocketAddr> {
    extensions.get().map(|Peer(address)| *address)
}

/// The service of one connection: its calls are those of who is at the other end.
#[derive(Debug, Clone)]
pub(crate) struct Peered<S> {
    service: S,
    peer: SocketAddr,
}

impl<S> Peered<S> {
    pub(crate) fn new(service: S, peer: SocketAddr) -> Peered<S> {
        Peered { service, peer }
    }
}

impl<S: Service<http::Request<B>>, B> Service<http::Request<B>> for Peered<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> S::Future {
        request.extensions_mut().insert(Peer(self.peer));
        self.service.call(request)
    }
}
