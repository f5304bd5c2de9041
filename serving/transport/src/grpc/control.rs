//! Triton's control calls over gRPC, between messages and [`Controls`].

use crate::control::Controls;
use crate::logging::{self, Value};
use crate::tokens::Caller;
use millrace_serving_core::error::InferError;
use millrace_serving_core::wire::inference as pb;

pub(super) fn model_config(
    controls: &Controls,
    caller: &Caller,
    request: &pb::ModelConfigRequest,
) -> Result<pb::ModelConfigResponse, InferError> {
    let config = controls.model_config(caller, &request.name, &request.version)?;
    Ok(pb::ModelConfigResponse { config: Some(config) })
}

pub(super) fn model_statistics(
    controls: &Controls,
    caller: &Caller,
    request: &pb::ModelStatisticsRequest,
) -> Result<pb::ModelStatisticsResponse, InferError> {
    let model_stats = controls.statistics(caller, &request.name, &request.version)?;
    Ok(pb::ModelStatisticsResponse { model_stats })
}

pub(super) async fn repository_index(
    controls: &Controls,
    caller: &Caller,
    request: &pb::RepositoryIndexRequest,
) -> Result<pb::RepositoryIndexResponse, InferError> {
    let entries = controls.index(caller, &request.repository_name, request.ready).await?;
    let models = entries
        .into_iter()
        .map(|entry| pb::repository_index_response::ModelIndex {
            name: entry.model,
            version: entry.version.to_string(),
            state: entry.state.to_owned(),
            reason: entry.reason,
        })
        .collect();
    Ok(pb::RepositoryIndexResponse { models })
}

pub(super) async fn repository_model_load(
    controls: &Controls,
    caller: &Caller,
    request: pb::RepositoryModelLoadRequest,
) -> Result<pb::RepositoryModelLoadResponse, InferError> {
    let parameters: Vec<&str> = request.parameters.keys().map(String::as_str).collect();
    controls.load(caller, &request.repository_name, request.model_name, &parameters).await?;
    Ok(pb::RepositoryModelLoadResponse {})
}

pub(super) async fn repository_model_unload(
    controls: &Controls,
    caller: &Caller,
    request: pb::RepositoryModelUnloadRequest,
) -> Result<pb::RepositoryModelUnloadResponse, InferError> {
    use pb::model_repository_parameter::ParameterChoice;
    let value = |parameter: &pb::ModelRepositoryParameter| match parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(value)) => Some(value),
        _ => None,
    };
    let parameters: Vec<_> =
        request.parameters.iter().map(|(name, parameter)| (name.as_str(), value(parameter))).collect();
    controls.unload(caller, &request.repository_name, request.model_name, &parameters).await?;
    Ok(pb::RepositoryModelUnloadResponse {})
}

pub(super) fn trace_setting(
    controls: &Controls,
    caller: &Caller,
    request: &pb::TraceSettingRequest,
) -> Result<pb::TraceSettingResponse, InferError> {
    let changes: Vec<(&str, Vec<&str>)> = request
        .settings
        .iter()
        .map(|(name, setting)| (name.as_str(), setting.value.iter().map(String::as_str).collect()))
        .collect();
    let settings = controls.trace_settings(caller, &request.model_name, &changes)?;
    let settings = settings
        .into_iter()
        .map(|(name, value)| (name.to_owned(), pb::trace_setting_response::SettingValue { value }))
        .collect();
    Ok(pb::TraceSettingResponse { settings })
}

pub(super) fn log_settings(
    controls: &Controls,
    caller: &Caller,
    request: pb::LogSettingsRequest,
) -> Result<pb::LogSettingsResponse, InferError> {
    use pb::log_settings_request::setting_value::ParameterChoice as Asked;
    use pb::log_settings_response::SettingValue;
    use pb::log_settings_response::setting_value::ParameterChoice as Told;
    let changes = request.settings.iter().map(|(name, setting)| {
        let value = match &setting.parameter_choice {
            Some(Asked::BoolParam(on)) => Value::Bool(*on),
            Some(Asked::Uint32Param(number)) => Value::Number(u64::from(*number)),
            Some(Asked::StringParam(text)) => Value::Text(text.clone()),
            None => Value::Other,
        };
        (name.as_str(), value)
    });
    let told = |value| match value {
        Value::Bool(on) => Some(Told::BoolParam(on)),
        Value::Number(number) => Some(Told::Uint32Param(u32::try_from(number).unwrap_or(u32::MAX))),
        Value::Text(text) => Some(Told::StringParam(text)),
        Value::Other => None,
    };
    let settings = logging::named(controls.log_settings(caller, changes)?)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), SettingValue { parameter_choice: told(value) }))
        .collect();
    Ok(pb::LogSettingsResponse { settings })
}
