//! Triton's control calls over REST, with JSON requests and responses.

use axum::Json;
use axum::Router;
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::body::{nullable, parameters};
use super::{App, Failure, Target, read};
use crate::logging;
use crate::tokens::Caller;
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::statistics;
use millrace_serving_repository::model_config;

/// Largest body of a control call, in bytes; a few names suffice.
pub(super) const BODY_BYTES_MAX: usize = 64 << 10;

/// The routes of the control calls.
pub(super) fn routes() -> Router<App> {
    let version = "/v2/models/{model}/versions/{version}";
    Router::new()
        .route("/v2/models/{model}/config", get(config))
        .route(&format!("{version}/config"), get(config))
        .route("/v2/models/stats", get(all_statistics))
        .route("/v2/models/{model}/stats", get(model_statistics))
        .route(&format!("{version}/stats"), get(model_statistics))
        .route("/v2/repository/index", post(index))
        .route("/v2/repository/models/{model}/load", post(load))
        .route("/v2/repository/models/{model}/unload", post(unload))
        .route("/v2/trace/setting", get(trace_settings).post(set_trace_settings))
        .route("/v2/models/{model}/trace/setting", get(model_trace_settings).post(set_model_trace_settings))
        .route("/v2/logging", get(log_settings).post(set_log_settings))
}

/// The body of an index, load or unload call.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Call {
    #[serde(deserialize_with = "nullable")]
    ready: bool,
    #[serde(deserialize_with = "parameters")]
    parameters: Map<String, Value>,
}

/// A small JSON body; an empty body equals an empty object.
struct SmallJson<T>(T);

impl<T: Default + for<'de> Deserialize<'de>> FromRequest<App> for SmallJson<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &App) -> Result<SmallJson<T>, Failure> {
        let (head, body) = request.into_parts();
        let body =
            read(app, body, &head.headers, BODY_BYTES_MAX).await.map_err(|failure| match failure.status {
                StatusCode::PAYLOAD_TOO_LARGE => Failure {
                    reason: format!("the body of a control call is larger than {BODY_BYTES_MAX} bytes"),
                    ..failure
                },
                _ => failure,
            })?;
        if body.bytes.trim_ascii().is_empty() {
            return Ok(SmallJson(T::default()));
        }
        // Parsed as an object first: serde would accept a list, whose elements it takes for the fields in
        // order.
        serde_json::from_slice(&body.bytes)
            .and_then(|object: Map<String, Value>| T::deserialize(Value::Object(object)))
            .map(SmallJson)
            .map_err(|error| InferError::invalid(format!("the body does not fit this call: {error}")).into())
    }
}

async fn config(State(app): State<App>, caller: Caller, target: Target) -> Result<Response, Failure> {
    target.version_selector()?;
    let version = target.version.as_deref().unwrap_or_default();
    let config = app.controls.model_config(&caller, &target.model, version)?;
    Ok(Json(model_config::to_json(&config)).into_response())
}

async fn all_statistics(State(app): State<App>, caller: Caller) -> Result<Response, Failure> {
    statistics_reply(&app, &caller, "", "")
}

async fn model_statistics(
    State(app): State<App>,
    caller: Caller,
    target: Target,
) -> Result<Response, Failure> {
    target.version_selector()?;
    if target.model.is_empty() {
        return Err(InferError::invalid("the model's name is empty").into());
    }
    statistics_reply(&app, &caller, &target.model, target.version.as_deref().unwrap_or_default())
}

fn statistics_reply(app: &App, caller: &Caller, model: &str, version: &str) -> Result<Response, Failure> {
    let statistics = app.controls.statistics(caller, model, version)?;
    let statistics: Vec<Value> = statistics.iter().map(statistics::to_json).collect();
    Ok(Json(json!({ "model_stats": statistics })).into_response())
}

async fn index(
    State(app): State<App>,
    caller: Caller,
    SmallJson(call): SmallJson<Call>,
) -> Result<Response, Failure> {
    let entries = app.controls.index(&caller, "", call.ready).await?;
    let entries: Vec<Value> = entries
        .into_iter()
        .map(|entry| {
            json!({
                "name": entry.model,
                "version": entry.version.to_string(),
                "state": entry.state,
                "reason": entry.reason,
            })
        })
        .collect();
    Ok(Json(entries).into_response())
}

async fn load(
    State(app): State<App>,
    caller: Caller,
    target: Target,
    SmallJson(call): SmallJson<Call>,
) -> Result<Response, Failure> {
    let parameters: Vec<&str> = call.parameters.keys().map(String::as_str).collect();
    app.controls.load(&caller, "", target.model, &parameters).await?;
    Ok(Json(json!({})).into_response())
}

async fn unload(
    State(app): State<App>,
    caller: Caller,
    target: Target,
    SmallJson(call): SmallJson<Call>,
) -> Result<Response, Failure> {
    let parameters: Vec<_> =
        call.parameters.iter().map(|(name, value)| (name.as_str(), value.as_bool())).collect();
    app.controls.unload(&caller, "", target.model, &parameters).await?;
    Ok(Json(json!({})).into_response())
}

async fn trace_settings(State(app): State<App>, caller: Caller) -> Result<Response, Failure> {
    change_trace_settings(&app, &caller, "", &Map::new())
}

async fn set_trace_settings(
    State(app): State<App>,
    caller: Caller,
    SmallJson(changes): SmallJson<Map<String, Value>>,
) -> Result<Response, Failure> {
    change_trace_settings(&app, &caller, "", &changes)
}

async fn model_trace_settings(
    State(app): State<App>,
    caller: Caller,
    target: Target,
) -> Result<Response, Failure> {
    change_trace_settings(&app, &caller, &target.model, &Map::new())
}

async fn set_model_trace_settings(
    State(app): State<App>,
    caller: Caller,
    target: Target,
    SmallJson(changes): SmallJson<Map<String, Value>>,
) -> Result<Response, Failure> {
    change_trace_settings(&app, &caller, &target.model, &changes)
}

/// Changes trace settings. A value is a string, a number or a list of them; null clears it.
fn change_trace_settings(
    app: &App,
    caller: &Caller,
    model: &str,
    changes: &Map<String, Value>,
) -> Result<Response, Failure> {
    let mut texts: Vec<(&str, Vec<String>)> = Vec::with_capacity(changes.len());
    for (name, value) in changes {
        let one = |value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(number.to_string()),
            _ => Err(InferError::invalid(format!(
                "trace setting {} is neither text nor a number, nor a list of them, nor null",
                quote(name)
            ))),
        };
        let values = match value {
            Value::Null => Vec::new(),
            Value::Array(values) => values.iter().map(one).collect::<Result<_, _>>()?,
            value => vec![one(value)?],
        };
        texts.push((name, values));
    }
    let changes: Vec<(&str, Vec<&str>)> =
        texts.iter().map(|(name, values)| (*name, values.iter().map(String::as_str).collect())).collect();
    let settings: Map<String, Value> = app
        .controls
        .trace_settings(caller, model, &changes)?
        .into_iter()
        .map(|(name, mut values)| {
            // Only the level is a list, as Triton allows several.
            let value = if name == "trace_level" { json!(values) } else { json!(values.pop()) };
            (name.to_owned(), value)
        })
        .collect();
    Ok(Json(settings).into_response())
}

async fn log_settings(State(app): State<App>, caller: Caller) -> Result<Response, Failure> {
    change_log_settings(&app, &caller, &Map::new())
}

async fn set_log_settings(
    State(app): State<App>,
    caller: Caller,
    SmallJson(changes): SmallJson<Map<String, Value>>,
) -> Result<Response, Failure> {
    change_log_settings(&app, &caller, &changes)
}

fn change_log_settings(
    app: &App,
    caller: &Caller,
    changes: &Map<String, Value>,
) -> Result<Response, Failure> {
    let changes = changes.iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| {
        let value = match value {
            Value::Bool(on) => logging::Value::Bool(*on),
            Value::Number(number) => number.as_u64().map_or(logging::Value::Other, logging::Value::Number),
            Value::String(text) => logging::Value::Text(text.clone()),
            _ => logging::Value::Other,
        };
        (name.as_str(), value)
    });
    let changes: Vec<_> = changes.collect();
    let settings: Map<String, Value> =
        logging::named(app.controls.log_settings(caller, changes.into_iter())?)
            .into_iter()
            .map(|(name, value)| {
                let value = match value {
                    logging::Value::Bool(on) => json!(on),
                    logging::Value::Number(number) => json!(number),
                    logging::Value::Text(text) => json!(text),
                    logging::Value::Other => Value::Null,
                };
                (name.to_owned(), value)
            })
            .collect();
    Ok(Json(settings).into_response())
}
