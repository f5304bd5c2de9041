//! Protection against web pages that make a visitor's browser call the server, and the CORS headers for pages that
//! may call it.
//!
//! A page of another site can send requests to a server on loopback through its visitor's browser. Browsers
//! mark such requests with `Origin` and `Sec-Fetch-Site`, which scripts cannot set. If the page's own name
//! resolves to 127.0.0.1 (DNS rebinding), the browser treats server and page as one origin. So the server
//! also checks `Host`.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, HOST, ORIGIN, VARY,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::HEADER_LENGTH;
use millrace_serving_core::error::{Error, Result, quote};

/// Seconds for which a browser may cache a preflight response.
const REMEMBERED: HeaderValue = HeaderValue::from_static("600");
/// The browser's header for the relation between page and server (W3C Fetch Metadata).
static SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The content type that libcurl sends by default, and so do control calls of Triton's C++ client. A page can
/// send it, too, but a browser always adds `Origin`.
const FORM: &str = "application/x-www-form-urlencoded";

/// A status and the reason.
type Refusal = (StatusCode, String);

/// The origins whose web pages may call the server.
#[derive(Debug)]
pub(crate) struct Pages {
    /// All origins are allowed.
    all: bool,
    /// Allowed origins, besides the server's own.
    listed: Vec<HeaderValue>,
    /// Whether `Host` must be a local name, an address, or the host of a listed origin.
    checks_host: bool,
}

impl Pages {
    /// # Errors
    /// [`Error::Config`] for an item that is not an origin.
    pub(crate) fn new(origins: &[String], checks_host: bool) -> Result<Arc<Pages>> {
        let all = origins.iter().any(|text| text == "*");
        let named = origins.iter().filter(|text| *text != "*");
        let listed = named.map(|text| origin(text)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Pages { all, listed, checks_host }))
    }

    /// The value of `Access-Control-Allow-Origin`; `None` for an origin that is not listed.
    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        match self.all {
            true => Some(HeaderValue::from_static("*")),
            false => self.listed.iter().find(|listed| *listed == origin).cloned(),
        }
    }

    /// Refuses requests that a web page must not send.
    fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        let hosts =
            headers.get_all(HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
        // In HTTP/2 the URI contains the host.
        let hosts: Vec<String> = uri.authority().map(ToString::to_string).into_iter().chain(hosts).collect();
        if let Some(host) = hosts.iter().find(|host| !self.is_known(host)) {
            let reason = format!(
                "the request is for host {}, and this server is reached as localhost or by an address alone: call it so, or list http://HOST in serving.cors_origins",
                quote(host)
            );
            return Err((StatusCode::MISDIRECTED_REQUEST, reason));
        }
        let marked = headers.contains_key(ORIGIN) || headers.contains_key(&SEC_FETCH_SITE);
        // A link on another page may lead to the page at `/`.
        let link = uri.path() == "/" && method == Method::GET;
        if marked && !link && !self.all && self.allowed(headers).is_none() && !is_own(headers, &hosts) {
            let origin = headers.get(ORIGIN).map_or("another origin".to_owned(), |origin| {
                format!("origin {}", quote(&String::from_utf8_lossy(origin.as_bytes())))
            });
            let reason = format!(
                "a web page of {origin} may not call this server: list its origin in serving.cors_origins"
            );
            return Err((StatusCode::FORBIDDEN, reason));
        }
        if method == Method::POST { check_content_type(headers, marked) } else { Ok(()) }
    }

    /// Whether the server may be called under this host. An IP address is safe: no page can make one resolve
    /// to another address.
    fn is_known(&self, authority: &str) -> bool {
        if !self.checks_host || self.all {
            return true;
        }
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        let host = authority.host().to_ascii_lowercase();
        let host = host.strip_suffix('.').unwrap_or(&host);
        let is_address = host.parse::<Ipv4Addr>().is_ok()
            || host
                .strip_prefix('[')
                .and_then(|host| host.strip_suffix(']')?.parse::<Ipv6Addr>().ok())
                .is_some();
        let of_origin = |listed: &HeaderValue| {
            listed
                .to_str()
                .ok()
                .and_then(|text| text.parse::<Uri>().ok()?.host().map(|listed| listed == host))
        };
        is_address
            || host == "localhost"
            || host.ends_with(".localhost")
            || self.listed.iter().filter_map(of_origin).any(|same| same)
    }
}

/// Whether a browser sent the request for a page of this server, or directly for its user.
fn is_own(headers: &HeaderMap, hosts: &[String]) -> bool {
    if let Some(site) = headers.get(&SEC_FETCH_SITE) {
        return site == "same-origin" || site == "none";
    }
    let authority = headers.get(ORIGIN).and_then(|origin| origin.to_str().ok()?.split_once("://"));
    authority.is_some_and(|(_, authority)| hosts.iter().any(|host| host.eq_ignore_ascii_case(authority)))
}

/// Refuses content types that a browser sends without a preflight. Python clients of Triton send none.
fn check_content_type(headers: &HeaderMap, marked: bool) -> Result<(), Refusal> {
    let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let text = String::from_utf8_lossy(value.as_bytes());
    let name = text.split(';').next().unwrap_or_default().trim();
    let taken = ["application/json", "application/octet-stream"];
    let is = |taken: &str| name.eq_ignore_ascii_case(taken);
    if taken.into_iter().any(is) || (is(FORM) && !marked) {
        return Ok(());
    }
    let reason = format!(
        "content type {} is not accepted: send application/json or application/octet-stream",
        quote(&text)
    );
    Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, reason))
}

/// Middleware: refuses requests that pages must not send, answers preflights, and adds the CORS headers to
/// responses.
pub(crate) async fn answer(State(pages): State<Arc<Pages>>, request: Request, next: Next) -> Response {
    let refused = pages.check(request.method(), request.uri(), request.headers()).err();
    let refused = refused.map(|(status, reason)| (status, Json(json!({ "error": reason }))).into_response());
    if pages.listed.is_empty() && !pages.all {
        return match refused {
            Some(refused) => refused,
            None => next.run(request).await,
        };
    }
    let allowed = pages.allowed(request.headers());
    let asked = request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match refused {
        Some(refused) => refused,
        None if preflight => StatusCode::NO_CONTENT.into_response(),
        None => next.run(request).await,
    };
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

/// An origin as browsers send it: scheme, host and port in lower case, without a path.
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
