//! The REST face: Open Inference Protocol version 2 in JSON, with the binary tensor extension, and the
//! one place where errors become HTTP statuses.

mod body;
mod control;
mod elements;
mod output;

pub(crate) use elements::Elements;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde_json::json;

use crate::control::Controls;
use crate::error::{InferError, quote};
use crate::grpc::{PLATFORM, SERVER_NAME};
use crate::infer::{Inference, parse_version};

/// Header that says how long the JSON part of a body with binary tensors is.
pub(crate) const HEADER_LENGTH: &str = "inference-header-content-length";

#[derive(Debug, Clone)]
struct App {
    inference: Inference,
    controls: Controls,
    message_bytes_max: usize,
}

/// The routes. Bodies above `message_bytes_max` are refused while they are read.
pub(crate) fn router(inference: Inference, controls: Controls, message_bytes_max: usize) -> Router {
    let version = "/v2/models/{model}/versions/{version}";
    Router::new()
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
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(App { inference, controls, message_bytes_max })
}

/// An error as this protocol answers it: a status and `{"error": …}`.
#[derive(Debug)]
struct Failure {
    status: StatusCode,
    reason: String,
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Failure {
        let status = match &error {
            InferError::NotFound { .. } => StatusCode::NOT_FOUND,
            InferError::Invalid { .. } => StatusCode::BAD_REQUEST,
            InferError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            InferError::NotRepresentable { .. } => StatusCode::NOT_ACCEPTABLE,
            InferError::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            InferError::Overloaded { .. } => StatusCode::TOO_MANY_REQUESTS,
            InferError::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
            InferError::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Failure { status, reason: error.to_string() }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": self.reason }))).into_response()
    }
}

/// Model and version of a path; the version is absent in the short form.
#[derive(Debug, serde::Deserialize)]
struct Target {
    model: String,
    #[serde(default)]
    version: Option<String>,
}

impl Target {
    fn version(&self) -> Result<Option<u64>, InferError> {
        match &self.version {
            // An empty version in a path is a broken path, not the latest version.
            Some(version) if version.is_empty() => Err(InferError::invalid("the version is empty")),
            Some(version) => parse_version(version),
            None => Ok(None),
        }
    }
}

async fn unknown_path() -> Failure {
    Failure { status: StatusCode::NOT_FOUND, reason: "there is nothing at this path".into() }
}

async fn wrong_method() -> Failure {
    Failure { status: StatusCode::METHOD_NOT_ALLOWED, reason: "this path does not take this method".into() }
}

async fn server_metadata(State(app): State<App>) -> Response {
    Json(json!({
        "name": SERVER_NAME,
        "version": env!("CARGO_PKG_VERSION"),
        "extensions": app.controls.extensions(),
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

async fn model_ready(State(app): State<App>, Path(target): Path<Target>) -> Result<Response, Failure> {
    let ready = app.inference.is_ready();
    let name = match app.inference.repository().get(&target.model, target.version()?) {
        Ok(model) => model.name().to_owned(),
        Err(error) => return Err(error.into()),
    };
    Ok((status_of(ready), Json(json!({ "name": name, "ready": ready }))).into_response())
}

async fn model_metadata(State(app): State<App>, Path(target): Path<Target>) -> Result<Response, Failure> {
    let model = app.inference.find(&target.model, target.version()?)?;
    let versions = app.inference.repository().versions(model.name()).unwrap_or_default();
    let versions: Vec<String> = versions.iter().map(u64::to_string).collect();
    // The specs serialize with the protocol's own keys: name, datatype, shape.
    Ok(Json(json!({
        "name": model.name(),
        "versions": versions,
        "platform": PLATFORM,
        "inputs": model.signature().inputs,
        "outputs": model.signature().outputs,
    }))
    .into_response())
}

async fn infer(
    State(app): State<App>,
    Path(target): Path<Target>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let _entered = app.inference.enter()?;
    let version = target.version()?;
    check_encoding(&headers)?;
    let header_length = header_length(&headers)?;
    let model = app.inference.find(&target.model, version)?;
    let body = read(body, &headers, app.message_bytes_max).await?;
    let (response, reply) = app.inference.answer(&model, || body::decode(&body, header_length)).await?;
    let (json_length, body) = body::encode(response, &reply)?;
    let mut response = Response::new(Body::from(body));
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

fn check_encoding(headers: &HeaderMap) -> Result<(), Failure> {
    match headers.get(header::CONTENT_ENCODING).map(HeaderValue::to_str) {
        None | Some(Ok("" | "identity")) => Ok(()),
        Some(encoding) => Err(Failure {
            status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
            reason: format!(
                "content encoding {} is not supported: send the body as it is",
                quote(encoding.unwrap_or("that is not text"))
            ),
        }),
    }
}

fn header_length(headers: &HeaderMap) -> Result<Option<usize>, InferError> {
    let Some(value) = headers.get(HEADER_LENGTH) else {
        return Ok(None);
    };
    let length = value.to_str().ok().and_then(|text| text.parse().ok());
    length
        .map(Some)
        .ok_or_else(|| InferError::invalid("Inference-Header-Content-Length is not a number of bytes"))
}

async fn read(body: Body, headers: &HeaderMap, bytes_max: usize) -> Result<Bytes, Failure> {
    let too_large = |bytes: u64| InferError::TooLarge { bytes, bytes_max: bytes_max as u64 };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok())
        .unwrap_or(0);
    if announced > bytes_max as u64 {
        return Err(too_large(announced).into());
    }
    let mut stream = body.into_data_stream();
    let mut content = BytesMut::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk
            .map_err(|error| Failure::from(InferError::invalid(format!("the body broke off: {error}"))))?;
        let bytes = content.len().saturating_add(chunk.len());
        if bytes > bytes_max {
            return Err(too_large(bytes as u64).into());
        }
        if content.is_empty() && announced == chunk.len() as u64 {
            return Ok(chunk);
        }
        content.extend_from_slice(&chunk);
    }
    Ok(content.freeze())
}
