//! The lineage of a model version from its manifest: `GET /v2/models/MODEL[/versions/VERSION]/lineage`.

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;

use super::{App, Failure, Target};

/// The routes of this call.
pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/v2/models/{model}/lineage", get(lineage))
        .route("/v2/models/{model}/versions/{version}/lineage", get(lineage))
}

async fn lineage(State(app): State<App>, target: Target) -> Result<Response, Failure> {
    let model = app.inference.repository().find(&target.model, target.version_selector()?)?;
    let manifest = model.manifest();
    Ok(Json(json!({
        "name": manifest.name,
        "version": manifest.version.to_string(),
        "created_at": manifest.created_at,
        "lineage": manifest.lineage,
        "metrics": manifest.metrics,
        "files": manifest.files,
    }))
    .into_response())
}
