//! The client's end of a connection, and the services that know it.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};

use tonic::codegen::{Service, http};

use super::{Answer, Call, Quota};

/// The client's end of a connection; an extension of a request.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// Quota for answers that the client has not read.
    pub(crate) quota: Quota,
}

/// Records the peer in a request.
pub(crate) fn attach(extensions: &mut http::Extensions, peer: Option<&Peer>) {
    if let Some(peer) = peer {
        extensions.insert(peer.clone());
    }
}

/// The client's address, if recorded in the request.
pub(crate) fn peer(extensions: &http::Extensions) -> Option<SocketAddr> {
    extensions.get().map(|peer: &Peer| peer.address)
}

/// A service that is instantiated for each connection with its peer.
pub(crate) trait PeerService: Clone {
    /// The instance for a connection.
    fn for_peer(&self, peer: &Peer) -> Self;
}

/// A service that gets the peer from the extensions of requests. That allocates memory for each request, so
/// services on the fast path implement [`PeerService`] themselves.
#[derive(Debug, Clone)]
pub(crate) struct PeerAddrLayer<S> {
    service: S,
    peer: Option<Peer>,
}

impl<S> PeerAddrLayer<S> {
    pub(crate) fn new(service: S) -> PeerAddrLayer<S> {
        PeerAddrLayer { service, peer: None }
    }
}

impl<S: Clone> PeerService for PeerAddrLayer<S> {
    fn for_peer(&self, peer: &Peer) -> PeerAddrLayer<S> {
        PeerAddrLayer { service: self.service.clone(), peer: Some(peer.clone()) }
    }
}

impl<S: Service<http::Request<B>>, B> Service<http::Request<B>> for PeerAddrLayer<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> S::Future {
        attach(request.extensions_mut(), self.peer.as_ref());
        self.service.call(request)
    }
}

/// The service of one connection, in hyper's form: without a clone for each request, and without waiting for
/// readiness, because the services of this crate are always ready.
#[derive(Debug)]
pub(crate) struct ConnectionService<S> {
    /// Borrowed only while the service is called, and the service does not call this: the connection's task
    /// passes one request at a time.
    service: RefCell<S>,
    quota: Quota,
    is_grpc: bool,
}

impl<S: PeerService> ConnectionService<S> {
    pub(crate) fn new(service: &S, peer: &Peer, is_grpc: bool) -> ConnectionService<S> {
        ConnectionService {
            service: RefCell::new(service.for_peer(peer)),
            quota: peer.quota.clone(),
            is_grpc,
        }
    }
}

impl<S, B, R> hyper::service::Service<http::Request<B>> for ConnectionService<S>
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
