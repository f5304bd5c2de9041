//! The REST calls that register, list and unregister shared memory regions.

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::nullable;
use super::control::BODY_BYTES_MAX;
use super::{App, Failure, read};
use crate::shared_memory::{cuda_refused, cuda_status};
use crate::tokens::Caller;
use millrace_serving_core::error::InferError;

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/v2/systemsharedmemory/status", get(status_of_all))
        .route("/v2/systemsharedmemory/region/{region}/status", get(status))
        .route("/v2/systemsharedmemory/region/{region}/register", post(register))
        .route("/v2/systemsharedmemory/region/{region}/unregister", post(unregister))
        .route("/v2/systemsharedmemory/unregister", post(unregister_all))
        .route("/v2/cudasharedmemory/status", get(cuda_status_of_all))
        .route("/v2/cudasharedmemory/region/{region}/status", get(cuda_status_of))
        .route("/v2/cudasharedmemory/region/{region}/register", post(cuda_register))
        .route("/v2/cudasharedmemory/region/{region}/unregister", post(cuda_unregister))
        .route("/v2/cudasharedmemory/unregister", post(cuda_unregister))
}

#[derive(Debug, Deserialize)]
struct RegisterJson {
    key: String,
    #[serde(default, deserialize_with = "nullable")]
    offset: u64,
    byte_size: u64,
}

fn list(app: &App, caller: &Caller, name: &str) -> Result<Response, Failure> {
    caller.may_control_all()?;
    let regions = app.memory.status(name)?.into_iter().map(|region| {
        json!({
            "name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size,
        })
    });
    Ok(Json(Value::from_iter(regions)).into_response())
}

async fn status_of_all(State(app): State<App>, caller: Caller) -> Result<Response, Failure> {
    list(&app, &caller, "")
}

async fn status(
    State(app): State<App>,
    caller: Caller,
    Path(region): Path<String>,
) -> Result<Response, Failure> {
    list(&app, &caller, named(&region)?)
}

async fn register(
    State(app): State<App>,
    caller: Caller,
    Path(region): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, Failure> {
    caller.may_control_all()?;
    let body = read(&app, body, &headers, BODY_BYTES_MAX).await?;
    let request: RegisterJson = serde_json::from_slice(&body.bytes).map_err(|error| {
        InferError::invalid(format!(
            "the body is not {{\"key\": …, \"offset\": …, \"byte_size\": …}} in JSON: {error}"
        ))
    })?;
    app.memory.register(&region, &request.key, request.offset, request.byte_size)?;
    Ok(StatusCode::OK)
}

async fn unregister(
    State(app): State<App>,
    caller: Caller,
    Path(region): Path<String>,
) -> Result<StatusCode, Failure> {
    caller.may_control_all()?;
    app.memory.unregister(named(&region)?)?;
    Ok(StatusCode::OK)
}

async fn unregister_all(State(app): State<App>, caller: Caller) -> Result<StatusCode, Failure> {
    caller.may_control_all()?;
    app.memory.unregister("")?;
    Ok(StatusCode::OK)
}

/// An empty name is a malformed path and does not mean all regions.
fn named(region: &str) -> Result<&str, InferError> {
    if region.is_empty() {
        return Err(InferError::invalid("the name of the region is empty"));
    }
    Ok(region)
}

async fn cuda_status_of_all() -> Response {
    Json(json!([])).into_response()
}

async fn cuda_status_of(Path(region): Path<String>) -> Result<Response, Failure> {
    cuda_status(&region)?;
    Ok(Json(json!([])).into_response())
}

async fn cuda_register(Path(region): Path<String>) -> Failure {
    cuda_refused(&region).into()
}

async fn cuda_unregister() -> StatusCode {
    StatusCode::OK
}
