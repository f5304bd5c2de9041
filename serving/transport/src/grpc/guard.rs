//! Checks on gRPC calls before their messages are read: the content type and, on servers with tokens, the
//! token.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use futures::future::Either;
use tonic::Status;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use crate::connections::{Peer, PeerService};
use crate::tokens::Guard;

/// Calls that need no token: health checks.
const OPEN: [&str; 2] =
    ["/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"];

/// Prefix of the content type of every gRPC call. A web page cannot send it without a preflight.
const CONTENT_TYPE: &[u8] = b"application/grpc";

/// gRPC's health service, which needs no token either.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// Whether calls of a path need no token.
pub(super) fn is_open(path: &str) -> bool {
    OPEN.contains(&path) || path.starts_with(HEALTH)
}

/// A service behind these checks.
#[derive(Debug, Clone)]
pub(crate) struct AuthLayer<S> {
    service: S,
    guard: Guard,
}

impl<S> AuthLayer<S> {
    pub(crate) fn new(service: S, guard: Guard) -> AuthLayer<S> {
        AuthLayer { service, guard }
    }
}

impl<S: PeerService> PeerService for AuthLayer<S> {
    fn for_peer(&self, peer: &Peer) -> AuthLayer<S> {
        AuthLayer { service: self.service.for_peer(peer), guard: self.guard.clone() }
    }
}

impl<S: NamedService> NamedService for AuthLayer<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B, R: Default> Service<http::Request<B>> for AuthLayer<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>, Error = Infallible>,
{
    type Response = http::Response<R>;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<http::Response<R>, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let content_type = request.headers().get(http::header::CONTENT_TYPE);
        if !content_type.is_some_and(|value| value.as_bytes().starts_with(CONTENT_TYPE)) {
            let mut refused = http::Response::new(R::default());
            *refused.status_mut() = http::StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Either::Right(ready(Ok(refused)));
        }
        if self.guard.is_on() && !is_open(request.uri().path()) {
            let headers = std::mem::take(request.headers_mut());
            let admitted = self.guard.admit(&headers, request.extensions_mut());
            *request.headers_mut() = headers;
            if let Err(error) = admitted {
                return Either::Right(ready(Ok(Status::from(error).into_http())));
            }
        }
        Either::Left(self.service.call(request))
    }
}
