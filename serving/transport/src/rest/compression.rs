//! Compression over HTTP: detects the compression of request bodies, and compresses inference responses and
//! the page as `Accept-Encoding` asks.

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::Failure;
use crate::compression::Encoding;
use millrace_serving_core::error::quote;

/// Compressing smaller responses gains nothing.
const COMPRESSED_BYTES_MIN: u64 = 1024;

/// Middleware that compresses responses.
pub(super) async fn translate(request: Request, next: Next) -> Response {
    let accepted = Accepted::read(request.headers());
    if accepted == Accepted::Nothing {
        let reason = "the reply is wanted in none of the forms gzip, deflate and identity".into();
        return Failure { status: StatusCode::NOT_ACCEPTABLE, reason }.into_response();
    }
    // Triton compresses only inference responses. Its asyncio client, whose HTTP library asks for gzip on
    // every call, expects all other responses uncompressed.
    let path = request.uri().path();
    let accepted = match accepted {
        Accepted::Preferred(_) if path != "/" && !path.ends_with("/infer") => Accepted::Plain,
        accepted => accepted,
    };
    match compressed(accepted, next.run(request).await).await {
        Ok(response) => response,
        Err(failure) => failure.into_response(),
    }
}

/// The compression of a request's body; `None` for `identity`.
pub(super) fn content_encoding(headers: &HeaderMap) -> Result<Option<Encoding>, Failure> {
    let names = names(headers, header::CONTENT_ENCODING);
    let applied: Vec<&String> =
        names.iter().filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("identity")).collect();
    let known = match applied.as_slice() {
        [] => return Ok(None),
        [name] => Encoding::named(name),
        _ => None,
    };
    match known {
        Some(encoding) => Ok(Some(encoding)),
        None => Err(Failure {
            status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
            reason: format!(
                "content encoding {} is not supported: one of gzip and deflate is expected, once",
                quote(&names.join(", "))
            ),
        }),
    }
}

/// The items of a list header, which may occur several times.
fn names(headers: &HeaderMap, name: HeaderName) -> Vec<String> {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let values: Vec<String> = headers.get_all(name).iter().map(text).collect();
    values.iter().flat_map(|value| value.split(',')).map(|item| item.trim().to_owned()).collect()
}

/// The encoding that a client accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Accepted {
    /// Uncompressed responses.
    Plain,
    /// This encoding, except for small responses.
    Preferred(Encoding),
    /// Only this encoding, whatever the size.
    Only(Encoding),
    /// None that the server offers.
    Nothing,
}

impl Accepted {
    /// RFC 9110, section 12.5.3: each encoding has a weight from 0 (refused) to 1, and `*` covers encodings
    /// that are not named. An encoding that neither covers is not wanted, except `identity`, which is
    /// accepted.
    fn read(headers: &HeaderMap) -> Accepted {
        let weights: Vec<(String, f32)> =
            names(headers, header::ACCEPT_ENCODING).iter().filter_map(|item| weight(item)).collect();
        let named = |wanted: &dyn Fn(&str) -> bool| {
            weights.iter().find(|(name, _)| wanted(name)).map(|(_, weight)| *weight)
        };
        let any = named(&|name| name == "*");
        let plain = named(&|name| name.eq_ignore_ascii_case("identity")).or(any.filter(|any| *any == 0.0));
        let mut best: Option<(Encoding, f32)> = None;
        for encoding in Encoding::ALL {
            let weight = named(&|name| Encoding::named(name) == Some(encoding)).or(any).unwrap_or(0.0);
            if weight > best.map_or(0.0, |(_, best)| best) {
                best = Some((encoding, weight));
            }
        }
        match (best, plain) {
            (Some((encoding, _)), Some(0.0)) => Accepted::Only(encoding),
            (Some((encoding, weight)), plain) if plain.is_none_or(|plain| weight >= plain) => {
                Accepted::Preferred(encoding)
            }
            (None, Some(0.0)) => Accepted::Nothing,
            _ => Accepted::Plain,
        }
    }
}

/// Name and weight of an item such as `gzip;q=0.5`; `None` if it is malformed.
fn weight(item: &str) -> Option<(String, f32)> {
    let mut parts = item.split(';').map(str::trim);
    let name = parts.next().filter(|name| !name.is_empty())?.to_owned();
    let weight = match parts.next() {
        None => 1.0,
        Some(parameter) => {
            let (key, value) = parameter.split_once('=')?;
            let value: f32 = value.trim().parse().ok()?;
            (key.trim().eq_ignore_ascii_case("q") && (0.0..=1.0).contains(&value)).then_some(value)?
        }
    };
    Some((name, weight))
}

async fn compressed(accepted: Accepted, response: Response) -> Result<Response, Failure> {
    // Handlers build responses whole, so every response with a body has an exact size.
    let Some(bytes) = response.body().size_hint().exact().filter(|bytes| *bytes > 0) else {
        return Ok(response);
    };
    let encoding = match accepted {
        Accepted::Only(encoding) => encoding,
        Accepted::Preferred(encoding) if bytes >= COMPRESSED_BYTES_MIN => encoding,
        _ => return Ok(response),
    };
    let (mut head, body) = response.into_parts();
    let failed = |error: &dyn std::fmt::Display| Failure {
        status: StatusCode::INTERNAL_SERVER_ERROR,
        reason: format!("the reply cannot be compressed: {error}"),
    };
    let plain = axum::body::to_bytes(body, usize::MAX).await.map_err(|error| failed(&error))?;
    let packed = encoding.compress(&plain).map_err(|error| failed(&error))?;
    head.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(encoding.name()));
    head.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(packed.len()));
    head.headers.append(header::VARY, HeaderValue::from_static("accept-encoding"));
    Ok(Response::from_parts(head, Body::from(packed)))
}

#[cfg(test)]
mod tests;
