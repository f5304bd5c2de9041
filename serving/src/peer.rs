//! Who is at the other end of the connection that a call came on.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};

use tonic::codegen::{Service, http};

use crate::connections::{Answer, Call, Quota};

/// The other end of a connection, among the extensions of a request.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// What it may leave unread.
    pub(crate) quota: Quota,
}

/// Notes who sent a request.
pub(crate) fn note(extensions: &mut http::Extensions, peer: Option<&Peer>) {
    if let Some(peer) = peer {
        extensions.insert(peer.clone());
    }
}

/// The address that a request came from, where that was noted.
pub(crate) fn peer(extensions: &http::Extensions) -> Option<SocketAddr> {
    extensions.get().map(|peer: &Peer| peer.address)
}

/// A service of which each connection has its own, which knows who is at the other end.
pub(crate) trait OfPeer: Clone {
    /// The same, for a connection.
    fn of_peer(&self, peer: &Peer) -> Self;
}

/// A service that finds who calls among the extensions of requests. That takes memory for each of them, so a service
/// for which it matters is [`OfPeer`] itself.
#[derive(Debug, Clone)]
pub(crate) struct Noted<S> {
    service: S,
    peer: Option<Peer>,
}

impl<S> Noted<S> {
    pub(crate) fn new(service: S) -> Noted<S> {
        Noted { service, peer: None }
    }
}

impl<S: Clone> OfPeer for Noted<S> {
    fn of_peer(&self, peer: &Peer) -> Noted<S> {
        Noted { service: self.service.clone(), peer: Some(peer.clone()) }
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
        note(request.extensions_mut(), self.peer.as_ref());
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
    quota: Quota,
    is_grpc: bool,
}

impl<S: OfPeer> Peered<S> {
    pub(crate) fn new(service: &S, peer: &Peer, is_grpc: bool) -> Peered<S> {
        Peered { service: RefCell::new(service.of_peer(peer)), quota: peer.quota.clone(), is_grpc }
    }
}

impl<S, B, R> hyper::service::Service<http::Request<B>> for Peered<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>, Error = Infallible>,
    R: http_body::Body,
{
    type Response = http::Response<Answer<R>>;
    type Error = Infallible;
    type Future = Call<S::Future>;

    fn call(&self, request: http::Request<B>) -> Self::Future {
        let mut service = self.service.borrow_mut();
        debug_assert!(service.poll_ready(&mut Context::from_waker(Waker::noop())).is_ready());
        Call::new(service.call(request), &self.quota, self.is_grpc)
    }
}
