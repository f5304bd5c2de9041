//! A dispatcher in front of the gRPC port's router that sends inference calls straight to their service. The
//! router would clone its services for each request and box futures and bodies.

use std::convert::Infallible;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::TryFutureExt;
use futures::future::{Either, MapOk};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use crate::connections::{Peer, PeerAddrLayer, PeerService};

/// The inference service, and the router for all other calls.
#[derive(Debug, Clone)]
pub(crate) struct Front<S, R> {
    service: S,
    routes: PeerAddrLayer<R>,
}

impl<S, R> Front<S, R> {
    pub(crate) fn new(service: S, routes: R) -> Front<S, R> {
        Front { service, routes: PeerAddrLayer::new(routes) }
    }
}

impl<S: PeerService, R: Clone> PeerService for Front<S, R> {
    fn for_peer(&self, peer: &Peer) -> Front<S, R> {
        Front { service: self.service.for_peer(peer), routes: self.routes.for_peer(peer) }
    }
}

impl<S, R, Q, B> Service<http::Request<Q>> for Front<S, R>
where
    S: Service<http::Request<Q>, Response = http::Response<B>, Error = Infallible> + NamedService,
    R: Service<http::Request<Q>, Response = http::Response<Body>, Error = Infallible>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Either<MapOk<S::Future, fn(http::Response<B>) -> http::Response<Body>>, R::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // The inference service is always ready.
        self.routes.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Q>) -> Self::Future {
        let path = request.uri().path().strip_prefix('/').and_then(|path| path.strip_prefix(S::NAME));
        if path.is_some_and(|method| method.starts_with('/')) {
            let body: fn(http::Response<B>) -> http::Response<Body> = |reply| reply.map(Body::new);
            Either::Left(self.service.call(request).map_ok(body))
        } else {
            Either::Right(self.routes.call(request))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Ready, ready};

    use super::*;

    /// A service that answers with its name.
    #[derive(Debug, Clone)]
    struct Named(&'static str);

    impl NamedService for Named {
        const NAME: &'static str = "some.Service";
    }

    impl Service<http::Request<Body>> for Named {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Ready<Result<http::Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            let mut response = http::Response::new(Body::empty());
            response.extensions_mut().insert(self.0);
            ready(Ok(response))
        }
    }

    #[tokio::test]
    async fn only_calls_of_its_service_reach_it() {
        let mut front = Front::new(Named("service"), Named("routes"));
        for (path, expected) in [
            ("/some.Service/Method", "service"),
            ("/some.Service/", "service"),
            ("/some.Service", "routes"),
            ("/some.Services/Method", "routes"),
            ("/other/some.Service/Method", "routes"),
            ("//some.Service/Method", "routes"),
            ("/Some.Service/Method", "routes"),
            ("/", "routes"),
            ("*", "routes"),
        ] {
            let request = http::Request::builder().uri(path).body(Body::empty()).unwrap();
            let response = front.call(request).await.unwrap();
            assert_eq!(response.extensions().get::<&str>(), Some(&expected), "{path}");
        }
    }
}
