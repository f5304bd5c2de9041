//! Calls from web pages of other origins: which ones a browser may make.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::HEADER_LENGTH;
use crate::error::{Error, Result, quote};

/// Seconds that a browser may remember what it was allowed.
const REMEMBERED: HeaderValue = HeaderValue::from_static("600");

/// The origins whose pages may call.
#[derive(Debug)]
pub(super) struct Origins {
    all: bool,
    listed: Vec<HeaderValue>,
}

impl Origins {
    /// `None` when there are none, and with it no word about origins in any reply.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no origin.
    pub(super) fn new(origins: &[String]) -> Result<Option<Arc<Origins>>> {
        let all = origins.iter().any(|text| text == "*");
        let named = origins.iter().filter(|text| *text != "*");
        let listed = named.map(|text| origin(text)).collect::<Result<Vec<_>>>()?;
        Ok((!origins.is_empty()).then(|| Arc::new(Origins { all, listed })))
    }

    /// What a reply to a page says about its origin; `None` for one that may not call.
    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        match self.all {
            true => Some(HeaderValue::from_static("*")),
            false => self.listed.iter().find(|listed| *listed == origin).cloned(),
        }
    }
}

/// Answers preflights, and marks the other replies as ones that a page may read.
pub(super) async fn answer(State(origins): State<Arc<Origins>>, request: Request, next: Next) -> Response {
    let allowed = origins.allowed(request.headers());
    let asked = request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response =
        if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.append(VARY, HeaderValue::from_static("origin"));
    let Some(allowed) = allowed else { return response };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    if preflight {
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        headers.insert(ACCESS_CONTROL_MAX_AGE, REMEMBERED);
        if let Some(asked) = asked {
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked);
        }
    } else {
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(HEADER_LENGTH));
    }
    response
}

/// An origin as browsers send it: scheme, host and port, in small letters, and nothing after them.
fn origin(text: &str) -> Result<HeaderValue> {
    let whole = text.parse::<Uri>().ok().is_some_and(|uri| {
        let parts = uri.scheme_str().zip(uri.authority());
        parts.is_some_and(|(scheme, authority)| {
            ["http", "https"].contains(&scheme)
                && !authority.as_str().contains('@')
                && text == format!("{scheme}://{}", authority.as_str().to_lowercase())
        })
    });
    HeaderValue::from_str(text).ok().filter(|_| whole).ok_or_else(|| Error::Config {
        reason: format!(
            "cors_origins has {}: an origin is http://HOST[:PORT] or https://HOST[:PORT] in small letters, or * for all",
            quote(text)
        ),
    })
}

#[cfg(test)]
mod tests;
