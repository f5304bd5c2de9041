//! The REST transport: the Open Inference Protocol version 2 in JSON with the binary tensor extension, and
//! the web page at `/`. This module alone maps errors to HTTP statuses.

mod body;
mod compression;
mod control;
pub mod fuzzing;
mod guard;
mod lineage;
mod page;
pub(crate) mod pages;
mod shared_memory;

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde_json::json;

use crate::access;
use crate::bodies::{Bodies, BodyBytesGuard, BodyTimeout, PROGRESS_BYTES};
use crate::connections::Peer;
use crate::control::{Controls, SERVER_NAME, extensions};
use crate::shared_memory::SharedMemory;
use crate::tokens::Guard;
use millrace_serving_core::blocking::{COPIED_BYTES, READ_BYTES, in_place};
use millrace_serving_core::config::{Config, Limits};
use millrace_serving_core::error::{InferError, Result, quote};
use millrace_serving_repository::infer::{self, Inference};
use millrace_serving_repository::repository::VersionSelector;

/// Header with the length of the JSON part of a body with binary tensors.
pub(crate) const HEADER_LENGTH: &str = "inference-header-content-length";

#[derive(Debug, Clone)]
struct App {
    inference: Inference,
    controls: Controls,
    memory: SharedMemory,
    guard: Guard,
    limits: Limits,
    bodies: Bodies,
}

/// The routes. A body above the limit is refused while it is read.
///
/// # Errors
/// [`millrace_serving_core::Error::Config`] when `cors_origins` has an item that is not an origin.
pub(crate) fn router(
    inference: Inference,
    controls: Controls,
    memory: SharedMemory,
    guard: Guard,
    config: &Config,
    bodies: Bodies,
) -> Result<Router> {
    // `Host` need not be checked over TLS, where the certificate exposes a page with another name, nor with
    // tokens, which a page does not have.
    let checks_host = config.http.ip().to_canonical().is_loopback() && config.tls.is_none() && !guard.is_on();
    let pages = pages::Pages::new(&config.cors_origins, checks_host)?;
    let app = App { inference, controls, memory, guard: guard.clone(), limits: config.limits, bodies };
    let version = "/v2/models/{model}/versions/{version}";
    let routes = Router::new()
        .route("/v2", get(server_metadata))
        .route("/v2/", get(server_metadata))
        .route("/v2/health/live", get(server_live))
        .route("/v2/health/ready", get(server_ready))
        .route("/v2/models/{model}", get(model_metadata))
        .route(version, get(model_metadata))
        .route("/v2/models/{model}/ready", get(model_ready))
        .route(&format!("{version}/ready"), get(model_ready))
        .route("/v2/models/{model}/infer", post(infer))
        .route(&format!("{version}/infer"), post(infer))
        .merge(control::routes())
        .merge(lineage::routes())
        .merge(page::routes())
        .merge(shared_memory::routes())
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn(compression::translate))
        .with_state(app);
    let routes = match guard.is_on() {
        true => routes.layer(from_fn_with_state(guard, guard::admit)),
        false => routes,
    };
    // The outermost layer: a browser's CORS preflight carries no token.
    Ok(routes.layer(from_fn_with_state(pages, pages::answer)))
}

/// An error in this protocol: a status and `{"error": …}`.
#[derive(Debug)]
struct Failure {
    status: StatusCode,
    reason: String,
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Failure {
        let status = match &error {
            InferError::NotFound { .. } => StatusCode::NOT_FOUND,
            // Triton's clients expect 400, not 409, for a name that is taken.
            InferError::Invalid { .. } | InferError::Exists { .. } => StatusCode::BAD_REQUEST,
            InferError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            InferError::NotRepresentable { .. } => StatusCode::NOT_ACCEPTABLE,
            InferError::Unauthenticated { .. } => StatusCode::UNAUTHORIZED,
            InferError::Denied { .. } => StatusCode::FORBIDDEN,
            InferError::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            InferError::Overloaded { .. } => StatusCode::TOO_MANY_REQUESTS,
            // Triton answers 503, on which its clients retry although they no longer wait.
            InferError::DeadlineExceeded { .. } => StatusCode::GATEWAY_TIMEOUT,
            InferError::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
            InferError::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Failure { status, reason: error.to_string() }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(json!({ "error": self.reason }))).into_response();
        let said = match self.status {
            StatusCode::UNSUPPORTED_MEDIA_TYPE => (header::ACCEPT_ENCODING, "gzip, deflate, identity"),
            // RFC 6750, section 3.
            StatusCode::UNAUTHORIZED => (header::WWW_AUTHENTICATE, "Bearer"),
            StatusCode::FORBIDDEN => (header::WWW_AUTHENTICATE, "Bearer error=\"insufficient_scope\""),
            _ => return response,
        };
        response.headers_mut().insert(said.0, HeaderValue::from_static(said.1));
        response
    }
}

/// Model and version of a path, checked to be allowed for the caller; the short form has no version.
#[derive(Debug, serde::Deserialize)]
struct Target {
    model: String,
    #[serde(default)]
    version: Option<String>,
}

impl FromRequestParts<App> for Target {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Target, Failure> {
        match Path::<Target>::from_request_parts(parts, app).await {
            Ok(Path(target)) => {
                app.guard.caller(&parts.extensions).may_use(&target.model)?;
                Ok(target)
            }
            Err(error) => Err(InferError::invalid(format!(
                "the path {} names no model: {}",
                quote(parts.uri.path()),
                error.body_text()
            ))
            .into()),
        }
    }
}

impl Target {
    fn version_selector(&self) -> Result<VersionSelector<'_>, InferError> {
        match &self.version {
            // An empty version is a malformed path, not the latest version.
            Some(version) if version.is_empty() => Err(InferError::invalid("the version is empty")),
            Some(version) => VersionSelector::parse(version),
            None => Ok(VersionSelector::Any),
        }
    }
}

async fn unknown_path(uri: Uri) -> Failure {
    let reason = format!(
        "no resource at {}: paths are /v2, /v2/health/… and /v2/models/MODEL[/versions/VERSION]/…; the page for people is at /",
        quote(uri.path())
    );
    Failure { status: StatusCode::NOT_FOUND, reason }
}

async fn wrong_method(method: Method, uri: Uri) -> Failure {
    let reason = format!(
        "{} does not take {}: the allow header of this reply lists its methods",
        quote(uri.path()),
        quote(method.as_str())
    );
    Failure { status: StatusCode::METHOD_NOT_ALLOWED, reason }
}

async fn server_metadata(State(app): State<App>) -> Response {
    Json(json!({
        "name": SERVER_NAME,
        "version": env!("CARGO_PKG_VERSION"),
        "extensions": extensions(&app.controls, &app.memory),
    }))
    .into_response()
}

async fn server_live() -> Response {
    Json(json!({ "live": true })).into_response()
}

async fn server_ready(State(app): State<App>) -> Response {
    let ready = app.inference.is_ready();
    (status_of(ready), Json(json!({ "ready": ready }))).into_response()
}

fn status_of(ready: bool) -> StatusCode {
    if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn model_ready(State(app): State<App>, target: Target) -> Result<Response, Failure> {
    let ready = !app.inference.is_draining();
    let repository = app.inference.repository();
    let model = repository.find(&target.model, target.version_selector()?)?;
    repository.check_steps(&model)?;
    let name = model.name();
    Ok((status_of(ready), Json(json!({ "name": name, "ready": ready }))).into_response())
}

async fn model_metadata(State(app): State<App>, target: Target) -> Result<Response, Failure> {
    let model = app.inference.find_selected(&target.model, target.version_selector()?)?;
    let versions = app.inference.repository().versions(model.name()).unwrap_or_default();
    let versions: Vec<String> = versions.iter().map(u64::to_string).collect();
    // Serde writes the specs with the protocol's keys: name, datatype, shape.
    Ok(Json(json!({
        "name": model.name(),
        "versions": versions,
        "platform": model.platform(),
        "inputs": model.signature().inputs,
        "outputs": model.signature().outputs,
    }))
    .into_response())
}

async fn infer(
    State(app): State<App>,
    target: Target,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let _entered = app.inference.enter()?;
    let asked = target.version_selector()?;
    let header_length = header_length(&headers)?;
    let (mut model, split) = app.inference.find_split(&target.model, asked)?;
    let mut body = read(&app, body, &headers, app.limits.message_bytes_max).await?;
    let is_long = body.is_long(header_length);
    let decode_limit = app.bodies.read_limit();
    let mut place = None;
    if split || model.sequences.is_some() {
        let head = move || (body::head(&body.bytes, header_length), body);
        let ((id, step), again) = decode_limit.run(is_long, head).await?;
        body = again;
        (model, place) = app.inference.admit(&target.model, asked, &id, step)?;
    }
    let (memory, client) = (app.memory.clone(), peer.map(|Extension(peer)| peer.address));
    // The closure owns the body and drops it after decoding.
    let decode = move || {
        let (mut request, reply) = body::decode(&body.bytes, header_length, &memory)?;
        request.client = client;
        Ok::<_, InferError>((request, reply))
    };
    let decode = async { decode_limit.run(is_long, decode).await? };
    let encode = |response: infer::Response, reply| {
        in_place(response.bytes() >= READ_BYTES, || body::encode(model.signature(), response, reply))
    };
    let (json_length, body) = app.inference.answer_in(place, &model, decode, encode).await?;
    let mut response = Response::new(Body::from(body));
    access::record_model(response.extensions_mut(), model.name(), model.version());
    let content_type = match json_length {
        None => HeaderValue::from_static("application/json"),
        Some(length) => {
            response.headers_mut().insert(HEADER_LENGTH, HeaderValue::from(length));
            HeaderValue::from_static("application/octet-stream")
        }
    };
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    Ok(response)
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, InferError> {
    let mut values = headers.get_all(HEADER_LENGTH).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(InferError::invalid("the header Inference-Header-Content-Length appears twice"));
    }
    let text = String::from_utf8_lossy(value.as_bytes());
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(length) if digits => Ok(Some(length)),
        _ => Err(InferError::invalid(format!(
            "Inference-Header-Content-Length is {}, the number of bytes of the JSON is expected",
            quote(&text)
        ))),
    }
}

/// A complete body, decompressed.
struct RequestBody {
    bytes: Bytes,
    _in_body: BodyBytesGuard,
}

impl RequestBody {
    /// Whether decoding it takes long, because of its JSON or its raw bytes.
    fn is_long(&self, header_length: Option<usize>) -> bool {
        let (json, raw) = self
            .bytes
            .split_at(header_length.map_or(self.bytes.len(), |length| length.min(self.bytes.len())));
        // Byte strings are decoded one at a time.
        let has_strings = || json.windows(7).any(|name| name == b"\"BYTES\"");
        json.len() >= READ_BYTES || raw.len() >= COPIED_BYTES || (raw.len() >= READ_BYTES && has_strings())
    }
}

/// Reads a body of at most `bytes_max` bytes and decompresses it; the client must keep sending. Only handlers
/// of calls that may have a body read one, after the token check.
async fn read(app: &App, body: Body, headers: &HeaderMap, bytes_max: usize) -> Result<RequestBody, Failure> {
    let encoding = compression::content_encoding(headers)?;
    let mut in_body = app.bodies.begin();
    let sent = read_sent(app, body, headers, bytes_max, &mut in_body).await?;
    let Some(encoding) = encoding else { return Ok(RequestBody { bytes: sent, _in_body: in_body }) };
    let plain = encoding.decompress_limited(app.bodies.read_limit().clone(), sent, bytes_max).await?;
    in_body.grow(plain.len())?;
    Ok(RequestBody { bytes: plain.into(), _in_body: in_body })
}

/// Reads a body as sent.
async fn read_sent(
    app: &App,
    body: Body,
    headers: &HeaderMap,
    bytes_max: usize,
    in_body: &mut BodyBytesGuard,
) -> Result<Bytes, Failure> {
    let too_large = |bytes: u64| InferError::TooLarge { bytes, bytes_max: bytes_max as u64 };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok())
        .unwrap_or(0);
    if announced > bytes_max as u64 {
        return Err(too_large(announced).into());
    }
    let stalled_ms = app.limits.stalled_ms_max;
    let mut patience = BodyTimeout::new(Duration::from_millis(stalled_ms));
    let mut stream = body.into_data_stream();
    let mut content = BytesMut::new();
    loop {
        let next = tokio::select! {
            biased;
            next = stream.next() => next,
            () = patience.elapsed() => {
                let reason = format!(
                    "the body came too slowly: {} bytes of it, and less than {PROGRESS_BYTES} bytes in the last {stalled_ms} ms (limits.stalled_ms_max)",
                    content.len()
                );
                return Err(Failure { status: StatusCode::REQUEST_TIMEOUT, reason });
            }
        };
        let Some(chunk) = next else { return Ok(content.freeze()) };
        let chunk = chunk.map_err(|error| InferError::invalid(format!("the body ended early: {error}")))?;
        patience.received(chunk.len());
        let bytes = content.len().saturating_add(chunk.len());
        if bytes > bytes_max {
            return Err(too_large(bytes as u64).into());
        }
        in_body.grow(chunk.len())?;
        if content.is_empty() && announced == chunk.len() as u64 {
            return Ok(chunk);
        }
        content.extend_from_slice(&chunk);
    }
}
