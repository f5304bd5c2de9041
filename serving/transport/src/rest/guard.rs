//! Authentication of REST callers, on servers with tokens.

use std::convert::Infallible;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{App, Failure};
use crate::tokens::{Caller, Guard};

/// Paths that need no token: health checks, and the page, which contains no data of the server and asks its
/// user for a token.
const OPEN: [&str; 3] = ["/", "/v2/health/live", "/v2/health/ready"];

/// Refuses requests without a valid token before their bodies are read.
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
