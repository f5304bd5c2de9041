//! Who is at the other end of the connection that a call came on.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};

use tonic::codegen::{Service, http};

/// Who is at the other end of the connection, among the extensions of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Notes who sent a request.
pub(crate) fn note(extensions: &mut http::Extensions, peer: Option<SocketAddr>) {
    if let Some(peer) = peer {
        extensions.insert(Peer(peer));
    }
}

/// Who sent a request, where that was noted.
pub(crate) fn peer(extensions: &http::Extensions) -> Option<SocketAddr> {
    extensions.get().map(|Peer(address)| *address)
}

/// A service of which each connection has its own, which knows who is at the other end.
pub(crate) trait OfPeer: Clone {
    /// The same, for a connection.
    fn of_peer(&self, peer: SocketAddr) -> Self;
}

/// A service that finds who calls among the extensions of requests. That takes memory for each of them, so a service
/// for which it matters is [`OfPeer`] itself.
#[derive(Debug, Clone)]
pub(crate) struct Noted<S> {
    service: S,
    peer: Option<SocketAddr>,
}

impl<S> Noted<S> {
    pub(crate) fn new(service: S) -> Noted<S> {
        Noted { service, peer: None }
    }
}

impl<S: Clone> OfPeer for Noted<S> {
    fn of_peer(&self, peer: SocketAddr) -> Noted<S> {
        Noted { service: self.service.clone(), peer: Some(peer) }
    }
}

impl<S: Service<http::Request<B>>, B> Service<http::Request<B>> for Noted<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> S::Future {
        note(request.extensions_mut(), self.peer);
        self.service.call(request)
    }
}

/// The service of one connection, as hyper calls it: without a copy for each request, and without waiting until it is
/// ready, which those of this crate are at any time.
#[derive(Debug)]
pub(crate) struct Peered<S> {
    /// Borrowed for a call of the service alone, which does not call this: the task of the connection hands one request
    /// over after the other.
    service: RefCell<S>,
}

impl<S: OfPeer> Peered<S> {
    pub(crate) fn new(service: &S, peer: SocketAddr) -> Peered<S> {
        Peered { service: RefCell::new(service.of_peer(peer)) }
    }
}

impl<S: Service<http::Request<B>>, B> hyper::service::Service<http::Request<B>> for Peered<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, request: http::Request<B>) -> S::Future {
        let mut service = self.service.borrow_mut();
        debug_assert!(service.poll_ready(&mut Context::from_waker(Waker::noop())).is_ready());
        service.call(request)
    }
}
