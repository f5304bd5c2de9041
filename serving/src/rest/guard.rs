//! Who calls over REST, where the server has tokens.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{App, Failure};
use crate::tokens::{Caller, Guard};

/// Paths that take no token, for those that watch whether the server is up, and for the page, which has
/// nothing of the server's in it and asks for one.
const OPEN: [&str; 3] = ["/", "/v2/health/live", "/v2/health/ready"];

/// Refuses requests without a token before their bodies are read.
pub(super) async fn admit(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    if OPEN.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    match guard.admit(&parts.headers, &mut parts.extensions) {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(error) => Failure::from(error).into_response(),
    }
}

impl FromRequestParts<App> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Caller, Infallible> {
        Ok(app.guard.caller(&parts.extensions))
    }
}
