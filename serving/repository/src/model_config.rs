//! The model configuration in Triton's form, derived from the loaded model, not from its file alone.

use std::collections::HashMap;
use std::time::Duration;

use millrace_bundle::{Datatype, TensorSpec};
use serde_json::{Value, json};

use crate::model::{BACKEND, Model, ensemble};
use millrace_serving_core::config::{Device, Engine, VersionPolicy};
use millrace_serving_core::record;
use millrace_serving_core::wire::inference as pb;
use millrace_serving_runtime::rows;

/// The configuration of a loaded model.
pub fn describe(model: &Model, policy: &VersionPolicy) -> pb::ModelConfig {
    let max_batch_size = model.max_batch_size();
    let signature = model.signature();
    let input = |spec: &TensorSpec| pb::ModelInput {
        name: spec.name.clone(),
        data_type: data_type(spec.datatype).into(),
        dims: dims(spec, max_batch_size),
        ..Default::default()
    };
    let output = |spec: &TensorSpec| pb::ModelOutput {
        name: spec.name.clone(),
        data_type: data_type(spec.datatype).into(),
        dims: dims(spec, max_batch_size),
        ..Default::default()
    };
    let mut config = pb::ModelConfig {
        name: model.name().to_owned(),
        platform: model.platform().to_owned(),
        backend: BACKEND.to_owned(),
        version_policy: Some(pb::ModelVersionPolicy { policy_choice: Some(policy_choice(policy)) }),
        max_batch_size,
        input: signature.inputs.iter().map(input).collect(),
        output: signature.outputs.iter().map(output).collect(),
        instance_group: vec![instances(model)],
        optimization: optimization(model),
        default_model_filename: model.file().to_owned(),
        parameters: parameters(model),
        scheduling_choice: batching(model),
        response_cache: model.answers.as_ref().map(|_| pb::ModelResponseCache { enable: true }),
        ..Default::default()
    };
    if let Some(ensemble) = model.ensemble() {
        // An ensemble has no graph, hence no backend, file or instances.
        config.backend.clear();
        config.default_model_filename.clear();
        config.instance_group.clear();
        let scheduling = pb::model_config::SchedulingChoice::EnsembleScheduling(ensemble.describe());
        config.scheduling_choice = Some(scheduling);
    }
    config
}

fn policy_choice(policy: &VersionPolicy) -> pb::model_version_policy::PolicyChoice {
    use pb::model_version_policy::{All, Latest, PolicyChoice, Specific};
    match policy {
        VersionPolicy::Latest(count) => PolicyChoice::Latest(Latest { num_versions: count.get() }),
        VersionPolicy::All => PolicyChoice::All(All {}),
        VersionPolicy::Specific(versions) => {
            let versions = versions.iter().map(|version| i64::try_from(*version).unwrap_or(i64::MAX));
            PolicyChoice::Specific(Specific { versions: versions.collect() })
        }
    }
}

/// The scheduling: sequences, or batching if the model batches.
fn batching(model: &Model) -> Option<pb::model_config::SchedulingChoice> {
    if let Some(sequences) = &model.sequences {
        return Some(pb::model_config::SchedulingChoice::SequenceBatching(sequences.shown()));
    }
    model.pool.batch_rows_max()?;
    let preferred = model.pool.preferred_rows();
    Some(pb::model_config::SchedulingChoice::DynamicBatching(pb::ModelDynamicBatching {
        preferred_batch_size: preferred.iter().filter_map(|rows| i32::try_from(*rows).ok()).collect(),
        max_queue_delay_microseconds: model.pool.delay_us(),
        priority_levels: model.pool.priority_levels() as u64,
        default_priority_level: model.pool.level(0) as u64,
        default_queue_policy: Some(pb::ModelQueuePolicy {
            timeout_action: pb::model_queue_policy::TimeoutAction::Reject.into(),
            default_timeout_microseconds: model.pool.timeout().map_or(0, micros),
            allow_timeout_override: true,
            max_queue_size: u32::try_from(model.pool.requests_waiting_max()).unwrap_or(u32::MAX),
        }),
        ..Default::default()
    }))
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The sessions, Triton's instances.
fn instances(model: &Model) -> pb::ModelInstanceGroup {
    use pb::model_instance_group::Kind;
    let placement = model.pool.placement();
    let gpu = |device| match device {
        Device::Cpu => None,
        Device::Cuda(ordinal) | Device::TensorRt(ordinal) => Some(i32::from(ordinal)),
    };
    pb::ModelInstanceGroup {
        name: format!("{}_0", model.name()),
        kind: if placement.on().is_cpu() { Kind::Cpu } else { Kind::Gpu }.into(),
        count: i32::try_from(placement.of_each()).unwrap_or(i32::MAX),
        gpus: placement.on().each().into_iter().filter_map(gpu).collect(),
        ..Default::default()
    }
}

/// The execution accelerator on GPUs, if it is TensorRT.
fn optimization(model: &Model) -> Option<pb::ModelOptimizationPolicy> {
    use pb::model_optimization_policy::{ExecutionAccelerators, execution_accelerators::Accelerator};
    let tensorrt = model.pool.placement().on().engine() == Some(Engine::TensorRt);
    tensorrt.then(|| pb::ModelOptimizationPolicy {
        execution_accelerators: Some(ExecutionAccelerators {
            gpu_execution_accelerator: vec![Accelerator {
                name: Engine::TensorRt.name().to_owned(),
                ..Default::default()
            }],
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// Extra parameters: row independence, the configured devices if other devices run the model, and the fields of its
/// training.
fn parameters(model: &Model) -> HashMap<String, pb::ModelParameter> {
    let instead_of = model.pool.placement().instead_of().map(ToString::to_string);
    let fields = &model.manifest().fields;
    let fields = (!fields.is_empty()).then(|| serde_json::to_string(fields).ok()).flatten();
    let parameters = [
        (rows::PARAMETER, Some(model.rows().to_string())),
        ("runs_instead_of", instead_of),
        (record::PARAMETER, fields),
    ];
    let given = parameters
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), pb::ModelParameter { string_value: value? })));
    given.collect()
}

/// Extents without the row dimension.
fn dims(spec: &TensorSpec, max_batch_size: i32) -> Vec<i64> {
    let rows = usize::from(max_batch_size > 0);
    spec.shape.iter().skip(rows).copied().collect()
}

fn data_type(datatype: Datatype) -> pb::DataType {
    match datatype {
        Datatype::Bool => pb::DataType::TypeBool,
        Datatype::Uint8 => pb::DataType::TypeUint8,
        Datatype::Uint16 => pb::DataType::TypeUint16,
        Datatype::Uint32 => pb::DataType::TypeUint32,
        Datatype::Uint64 => pb::DataType::TypeUint64,
        Datatype::Int8 => pb::DataType::TypeInt8,
        Datatype::Int16 => pb::DataType::TypeInt16,
        Datatype::Int32 => pb::DataType::TypeInt32,
        Datatype::Int64 => pb::DataType::TypeInt64,
        Datatype::Fp16 => pb::DataType::TypeFp16,
        Datatype::Bf16 => pb::DataType::TypeBf16,
        Datatype::Fp32 => pb::DataType::TypeFp32,
        Datatype::Fp64 => pb::DataType::TypeFp64,
        Datatype::Bytes => pb::DataType::TypeString,
    }
}

/// A configuration in the JSON form that Triton's clients read: the protocol's field names, enumerations by
/// name, 64-bit integers as numbers, and every scalar field, set or not.
pub fn to_json(config: &pb::ModelConfig) -> Value {
    use pb::model_version_policy::PolicyChoice;
    let version_policy = config.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref());
    let version_policy = match version_policy {
        Some(PolicyChoice::Latest(latest)) => json!({ "latest": { "num_versions": latest.num_versions } }),
        Some(PolicyChoice::Specific(specific)) => json!({ "specific": { "versions": specific.versions } }),
        Some(PolicyChoice::All(_)) => json!({ "all": {} }),
        None => json!({}),
    };
    let mut json = json!({
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "runtime": config.runtime,
        "version_policy": version_policy,
        "max_batch_size": config.max_batch_size,
        "input": config.input.iter().map(input_json).collect::<Vec<_>>(),
        "output": config.output.iter().map(output_json).collect::<Vec<_>>(),
        "batch_input": [],
        "batch_output": [],
        "instance_group": config.instance_group.iter().map(instances_json).collect::<Vec<_>>(),
        "default_model_filename": config.default_model_filename,
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": parameters_json(config),
        "model_warmup": [],
    });
    if let Some(pb::model_config::SchedulingChoice::SequenceBatching(batching)) = &config.scheduling_choice {
        json["sequence_batching"] = crate::sequence::to_json(batching);
    }
    if let Some(pb::model_config::SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice {
        json["dynamic_batching"] = json!({
            "preferred_batch_size": batching.preferred_batch_size,
            "max_queue_delay_microseconds": batching.max_queue_delay_microseconds,
            "preserve_ordering": batching.preserve_ordering,
            "priority_levels": batching.priority_levels,
            "default_priority_level": batching.default_priority_level,
            "default_queue_policy": batching.default_queue_policy.as_ref().map(queue_policy_json),
            "priority_queue_policy": {},
        });
    }
    if let Some(cache) = &config.response_cache {
        json["response_cache"] = json!({ "enable": cache.enable });
    }
    if let Some(pb::model_config::SchedulingChoice::EnsembleScheduling(steps)) = &config.scheduling_choice {
        json["ensemble_scheduling"] = ensemble::to_json(steps);
    }
    json
}

fn queue_policy_json(policy: &pb::ModelQueuePolicy) -> Value {
    json!({
        "timeout_action": policy.timeout_action().as_str_name(),
        "default_timeout_microseconds": policy.default_timeout_microseconds,
        "allow_timeout_override": policy.allow_timeout_override,
        "max_queue_size": policy.max_queue_size,
    })
}

fn parameters_json(config: &pb::ModelConfig) -> Value {
    let parameter = |(name, value): (&String, &pb::ModelParameter)| {
        (name.clone(), json!({ "string_value": value.string_value }))
    };
    Value::Object(config.parameters.iter().map(parameter).collect())
}

fn input_json(input: &pb::ModelInput) -> Value {
    json!({
        "name": input.name,
        "data_type": input.data_type().as_str_name(),
        "format": input.format().as_str_name(),
        "dims": input.dims,
        "is_shape_tensor": input.is_shape_tensor,
        "allow_ragged_batch": input.allow_ragged_batch,
        "optional": input.optional,
        "is_non_linear_format_io": input.is_non_linear_format_io,
    })
}

fn output_json(output: &pb::ModelOutput) -> Value {
    json!({
        "name": output.name,
        "data_type": output.data_type().as_str_name(),
        "dims": output.dims,
        "label_filename": output.label_filename,
        "is_shape_tensor": output.is_shape_tensor,
        "is_non_linear_format_io": output.is_non_linear_format_io,
    })
}

fn instances_json(group: &pb::ModelInstanceGroup) -> Value {
    json!({
        "name": group.name,
        "kind": group.kind().as_str_name(),
        "count": group.count,
        "gpus": group.gpus,
        "secondary_devices": [],
        "profile": group.profile,
        "passive": group.passive,
        "host_policy": group.host_policy,
    })
}
