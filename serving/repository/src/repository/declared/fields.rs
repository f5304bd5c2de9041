//! The fields of a Triton model configuration (`config.pbtxt`), each checked and turned into a type of the server.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use millrace_bundle::{Datatype, MODEL_FILE, TensorSpec};

use millrace_serving_core::config::{Devices, Engine, VersionPolicy};
use millrace_serving_core::error::quote;
use millrace_serving_core::wire::inference as pb;

/// Most sessions that instance groups may ask for.
const INSTANCES_MAX: i32 = 256;

/// The version policy.
pub(super) fn policy(config: &pb::ModelConfig) -> Result<Option<VersionPolicy>, String> {
    use pb::model_version_policy::PolicyChoice;
    let choice = config.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref());
    Ok(Some(match choice {
        None => return Ok(None),
        Some(PolicyChoice::All(_)) => VersionPolicy::All,
        Some(PolicyChoice::Latest(latest)) => VersionPolicy::Latest(
            NonZeroU32::new(latest.num_versions).ok_or("latest has num_versions 0, which serves none")?,
        ),
        Some(PolicyChoice::Specific(specific)) => {
            let versions: Option<Vec<u64>> =
                specific.versions.iter().map(|version| u64::try_from(*version).ok()).collect();
            let versions = versions.ok_or("specific has a version below 0")?;
            VersionPolicy::specific(&versions).map_err(|error| error.to_string())?
        }
    }))
}

/// The inputs, with the row dimension.
pub(super) fn inputs(config: &pb::ModelConfig) -> Result<Vec<TensorSpec>, String> {
    let specs = config.input.iter().map(|input| {
        let unsupported = [
            ("reshape", input.reshape.is_some()),
            ("is_shape_tensor", input.is_shape_tensor),
            ("allow_ragged_batch", input.allow_ragged_batch),
            ("optional", input.optional),
            ("is_non_linear_format_io", input.is_non_linear_format_io),
        ];
        check_unsupported(&input.name, &unsupported)?;
        spec(&input.name, input.data_type(), &input.dims, config.max_batch_size)
    });
    unique(specs.collect::<Result<_, _>>()?)
}

/// The outputs, with the row dimension.
pub(super) fn outputs(config: &pb::ModelConfig) -> Result<Vec<TensorSpec>, String> {
    let specs = config.output.iter().map(|output| {
        let unsupported = [
            ("reshape", output.reshape.is_some()),
            ("is_shape_tensor", output.is_shape_tensor),
            ("is_non_linear_format_io", output.is_non_linear_format_io),
        ];
        check_unsupported(&output.name, &unsupported)?;
        spec(&output.name, output.data_type(), &output.dims, config.max_batch_size)
    });
    unique(specs.collect::<Result<_, _>>()?)
}

fn check_unsupported(name: &str, fields: &[(&str, bool)]) -> Result<(), String> {
    match fields.iter().find(|(_, is_set)| *is_set) {
        Some((field, _)) => {
            Err(format!("{}: {field} is not supported: use the dims and datatypes of the graph", quote(name)))
        }
        None => Ok(()),
    }
}

/// A tensor with its row dimension, which `dims` leaves out when `max_batch_size` is positive.
fn spec(
    name: &str,
    data_type: pb::DataType,
    dims: &[i64],
    max_batch_size: i32,
) -> Result<TensorSpec, String> {
    if name.is_empty() {
        return Err("an entry has no name".into());
    }
    let datatype =
        datatype(data_type).ok_or_else(|| format!("{}: data_type is missing or unknown", quote(name)))?;
    if let Some(dim) = dims.iter().find(|dim| **dim < 1 && **dim != -1) {
        return Err(format!("{}: dims has {dim}, which is neither -1 nor positive", quote(name)));
    }
    let rows = (max_batch_size > 0).then_some(-1);
    Ok(TensorSpec {
        name: name.to_owned(),
        datatype,
        shape: rows.into_iter().chain(dims.iter().copied()).collect(),
    })
}

fn unique(specs: Vec<TensorSpec>) -> Result<Vec<TensorSpec>, String> {
    let mut names = std::collections::BTreeSet::new();
    match specs.iter().find(|spec| !names.insert(spec.name.as_str())) {
        Some(double) => Err(format!("{} appears twice", quote(&double.name))),
        None => Ok(specs),
    }
}

/// File name of the graph.
pub(super) fn file(config: &pb::ModelConfig) -> Result<String, String> {
    let file = config.default_model_filename.as_str();
    let plain = file.len() <= 255
        && !file.starts_with('.')
        && file.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'+' | b'='));
    match file {
        "" => Ok(MODEL_FILE.to_owned()),
        file if plain => Ok(file.to_owned()),
        file => Err(format!("{} is not the plain name of a file in the version's folder", quote(file))),
    }
}

/// Preferred rows and the longest delay in microseconds.
pub(super) fn batching(config: &pb::ModelConfig) -> Result<Option<(Vec<usize>, u64)>, String> {
    use pb::model_config::SchedulingChoice;
    use pb::model_sequence_batching::StrategyChoice;
    let (preferred, delay_us) = match &config.scheduling_choice {
        Some(SchedulingChoice::DynamicBatching(batching)) => {
            (batching.preferred_batch_size.as_slice(), batching.max_queue_delay_microseconds)
        }
        Some(SchedulingChoice::SequenceBatching(batching)) => match &batching.strategy_choice {
            Some(StrategyChoice::Oldest(oldest)) => {
                (oldest.preferred_batch_size.as_slice(), oldest.max_queue_delay_microseconds)
            }
            Some(StrategyChoice::Direct(direct)) => (&[] as &[i32], direct.max_queue_delay_microseconds),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    let max = config.max_batch_size;
    let preferred = preferred.iter().map(|rows| match usize::try_from(*rows) {
        Ok(size) if size > 0 && (*rows <= max || max == 0) => Ok(size),
        _ => Err(format!("preferred_batch_size has {rows}, allowed are 1 to max_batch_size, which is {max}")),
    });
    Ok(Some((preferred.collect::<Result<_, _>>()?, delay_us)))
}

/// Number of inference sessions on each device, 0 if the server decides, and the devices.
pub(super) fn instances(config: &pb::ModelConfig) -> Result<(usize, Option<Devices>), String> {
    use pb::model_instance_group::Kind;
    let mut all = 0;
    // Instances by GPU ordinal; groups on the processor or without a kind add none.
    let mut of_gpus = BTreeMap::<u8, i32>::new();
    let mut kinds = Vec::new();
    for group in &config.instance_group {
        if !(0..=INSTANCES_MAX).contains(&group.count) {
            return Err(format!("count is {}, allowed are 0 to {INSTANCES_MAX}", group.count));
        }
        let gpus = group.gpus.iter().map(|gpu| u8::try_from(*gpu).ok()).collect::<Option<Vec<_>>>();
        let (kind, gpus) = match (group.kind(), gpus) {
            (Kind::Auto | Kind::Model, Some(gpus)) if gpus.is_empty() => (Kind::Auto, gpus),
            (Kind::Cpu, Some(gpus)) if gpus.is_empty() => (Kind::Cpu, gpus),
            (Kind::Gpu, Some(gpus)) if gpus.is_empty() => (Kind::Gpu, vec![0]),
            (Kind::Gpu | Kind::Auto, Some(gpus)) => (Kind::Gpu, gpus),
            _ => {
                let gpus = &group.gpus;
                return Err(format!(
                    "gpus {gpus:?}: a model runs on the processor (KIND_CPU) or on GPUs 0 to 255 (KIND_GPU)"
                ));
            }
        };
        // Triton's default is one instance.
        let count = group.count.max(1);
        let on = i32::try_from(gpus.len().max(1)).unwrap_or(i32::MAX);
        all = count.saturating_mul(on).saturating_add(all);
        if all > INSTANCES_MAX {
            return Err(format!("a model has at most {INSTANCES_MAX} instances"));
        }
        gpus.iter().for_each(|gpu| *of_gpus.entry(*gpu).or_default() += count);
        kinds.push(kind);
    }
    kinds.dedup();
    if kinds.len() > 1 {
        return Err("a model runs on the processor or on GPUs, not on both".into());
    }
    let sessions = match of_gpus.first_key_value() {
        None => all,
        Some((_, first)) if of_gpus.values().all(|count| count == first) => *first,
        Some(_) => return Err(format!("instances by GPU {of_gpus:?}: use the same count for each GPU")),
    };
    let engine = if accelerators(config).any(|name| name == Engine::TensorRt.name()) {
        Engine::TensorRt
    } else {
        Engine::Cuda
    };
    let devices = match kinds.first() {
        Some(Kind::Cpu) => Some(Devices::CPU),
        _ => Devices::gpus(engine, of_gpus.into_keys()),
    };
    Ok((usize::try_from(sessions).unwrap_or(0), devices))
}

/// Execution accelerators requested for the GPU.
fn accelerators(config: &pb::ModelConfig) -> impl Iterator<Item = &str> {
    let accelerators = config.optimization.iter().filter_map(|it| it.execution_accelerators.as_ref());
    accelerators.flat_map(|it| &it.gpu_execution_accelerator).map(|it| it.name.as_str())
}

/// Whether a part of `optimization` has no effect: all but TensorRT for a model on GPUs.
fn ignores_optimization(config: &pb::ModelConfig) -> bool {
    let Some(optimization) = &config.optimization else { return false };
    let is_tensorrt = instances(config)
        .is_ok_and(|(_, devices)| devices.is_some_and(|devices| devices.engine() == Some(Engine::TensorRt)));
    let mut rest = optimization.clone();
    if let (true, Some(accelerators)) = (is_tensorrt, &mut rest.execution_accelerators) {
        accelerators
            .gpu_execution_accelerator
            .retain(|it| it.name != Engine::TensorRt.name() || !it.parameters.is_empty());
    }
    let nothing = pb::model_optimization_policy::ExecutionAccelerators::default();
    rest.execution_accelerators.take_if(|rest| is_tensorrt && *rest == nothing);
    !is_tensorrt || rest != pb::ModelOptimizationPolicy::default()
}

/// Fields that are set but have no effect here.
pub(super) fn ignored(config: &pb::ModelConfig) -> Vec<String> {
    let mut fields = vec![
        ("runtime", !config.runtime.is_empty()),
        ("optimization", ignores_optimization(config)),
        ("cc_model_filenames", !config.cc_model_filenames.is_empty()),
        ("metric_tags", !config.metric_tags.is_empty()),
        ("parameters", !config.parameters.is_empty()),
        ("model_metrics", config.model_metrics.is_some()),
        ("output.label_filename", config.output.iter().any(|output| !output.label_filename.is_empty())),
    ];
    for group in &config.instance_group {
        fields.extend([
            ("instance_group.rate_limiter", group.rate_limiter.is_some()),
            ("instance_group.secondary_devices", !group.secondary_devices.is_empty()),
            ("instance_group.profile", !group.profile.is_empty()),
            ("instance_group.passive", group.passive),
            ("instance_group.host_policy", !group.host_policy.is_empty()),
        ]);
    }
    if let Some(pb::model_config::SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice {
        fields.extend([("dynamic_batching.preserve_ordering", batching.preserve_ordering)]);
    }
    if let Some(pb::model_config::SchedulingChoice::EnsembleScheduling(ensemble)) = &config.scheduling_choice
    {
        fields.push(("ensemble_scheduling.max_inflight_requests", ensemble.max_inflight_requests > 0));
    }
    fields.extend(super::sequences::ignored(config));
    let mut names: Vec<String> =
        fields.into_iter().filter(|(_, is_set)| *is_set).map(|(field, _)| field.to_owned()).collect();
    names.dedup();
    names
}

pub(super) fn datatype(data_type: pb::DataType) -> Option<Datatype> {
    Some(match data_type {
        pb::DataType::TypeBool => Datatype::Bool,
        pb::DataType::TypeUint8 => Datatype::Uint8,
        pb::DataType::TypeUint16 => Datatype::Uint16,
        pb::DataType::TypeUint32 => Datatype::Uint32,
        pb::DataType::TypeUint64 => Datatype::Uint64,
        pb::DataType::TypeInt8 => Datatype::Int8,
        pb::DataType::TypeInt16 => Datatype::Int16,
        pb::DataType::TypeInt32 => Datatype::Int32,
        pb::DataType::TypeInt64 => Datatype::Int64,
        pb::DataType::TypeFp16 => Datatype::Fp16,
        pb::DataType::TypeBf16 => Datatype::Bf16,
        pb::DataType::TypeFp32 => Datatype::Fp32,
        pb::DataType::TypeFp64 => Datatype::Fp64,
        pb::DataType::TypeString => Datatype::Bytes,
        pb::DataType::TypeInvalid => return None,
    })
}
