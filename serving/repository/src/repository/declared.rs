//! The declaration of a model in `config.pbtxt`: fields that are honored, fields that are refused because
//! ignoring them would change the model's meaning, and fields that are ignored.

mod fields;
mod queue;
mod sequences;
mod warmup;

use millrace_bundle::{Signature, TensorSpec};

use queue::Queue;
use warmup::Warmup;

use crate::model::ensemble::{self, Plan};
use crate::model::{BACKEND, PLATFORM};
use crate::pbtxt::{self, Parsed};
use crate::sequence::{Declaration, Plan as SequencePlan};
use millrace_serving_core::config::{Config, Devices, VersionPolicy};
use millrace_serving_core::error::quote;
use millrace_serving_core::wire::inference as pb;

/// A parsed and checked `config.pbtxt`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Declared {
    /// The version policy.
    pub policy: Option<VersionPolicy>,
    /// The part that decides how a version is loaded.
    pub(crate) loading: LoadSettings,
    /// Names of fields that are set but have no effect here.
    pub(crate) ignored: Vec<String>,
}

/// Load settings of the versions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LoadSettings {
    /// File name of the graph.
    pub file: String,
    /// Most rows of a request; 0 for a model without rows, `None` if the graph decides.
    pub(crate) max_batch_size: Option<i32>,
    /// Shapes include the row dimension, as in the graph; empty if the graph decides.
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
    /// Preferred rows and the delay in microseconds, of `dynamic_batching` or `sequence_batching`.
    batching: Option<(Vec<usize>, u64)>,
    /// Queue policy.
    queue: Queue,
    /// Inputs on which each session runs before the version is ready.
    pub(crate) warmups: Vec<Warmup>,
    /// Controls and states of `sequence_batching`.
    sequences: Option<Declaration>,
    /// 0 if the server decides.
    sessions: usize,
    device: Option<Devices>,
    /// Whether answers go into the response cache.
    pub response_cache: bool,
    /// The steps of an ensemble.
    pub ensemble: Option<Plan>,
}

impl Declared {
    /// Reads the configuration of the model `model`.
    ///
    /// # Errors
    /// The line, the field, and how to fix it.
    pub(super) fn read(model: &str, content: &[u8]) -> Result<Declared, String> {
        let parsed = pbtxt::parse(content)?;
        let config = &parsed.config;
        if !config.name.is_empty() && config.name != model {
            let place = parsed.place("name");
            let name = quote(&config.name);
            return Err(format!(
                "{place}name is {name}, but the folder is {model:?}: use the same name for both"
            ));
        }
        check_kind(&parsed)?;
        let at = |field: &str, reason: String| format!("{}{field}: {reason}", parsed.place(field));
        let policy = fields::policy(config).map_err(|reason| at("version_policy", reason))?;
        let max = config.max_batch_size;
        if max < 0 {
            return Err(at("max_batch_size", format!("{max} is below 0")));
        }
        let inputs = fields::inputs(config).map_err(|reason| at("input", reason))?;
        let outputs = fields::outputs(config).map_err(|reason| at("output", reason))?;
        let ensemble = match &config.scheduling_choice {
            Some(pb::model_config::SchedulingChoice::EnsembleScheduling(scheduling)) => {
                let plan = Plan::read(scheduling, &inputs, &outputs);
                Some(plan.map_err(|reason| at("ensemble_scheduling", reason))?)
            }
            _ => None,
        };
        let sequences = sequences::read(config).map_err(|reason| at("sequence_batching", reason))?;
        // The meaning of a state's `dims`, with or without the row dimension, must not depend on the graph.
        let silent = max == 0 && inputs.is_empty() && outputs.is_empty() && sequences.is_none();
        let scheduling = if sequences.is_some() { "sequence_batching" } else { "dynamic_batching" };
        let (sessions, device) = fields::instances(config).map_err(|reason| at("instance_group", reason))?;
        let loading = LoadSettings {
            file: fields::file(config).map_err(|reason| at("default_model_filename", reason))?,
            max_batch_size: (!silent).then_some(max),
            inputs,
            outputs,
            batching: fields::batching(config).map_err(|reason| at(scheduling, reason))?,
            queue: Queue::read(config).map_err(|reason| at(scheduling, reason))?,
            warmups: warmup::read(config).map_err(|reason| at("model_warmup", reason))?,
            sequences,
            sessions,
            device,
            response_cache: config.response_cache.as_ref().is_some_and(|cache| cache.enable),
            ensemble,
        };
        Ok(Declared { policy, loading, ignored: fields::ignored(config) })
    }
}

impl LoadSettings {
    /// The graph's signature, restricted to the configuration's.
    ///
    /// # Errors
    /// Where the graph and the configuration disagree.
    pub(super) fn signature(&self, graph: &Signature) -> Result<Signature, String> {
        let sequences = self.sequences.as_ref();
        let filled = |name: &str| sequences.is_some_and(|sequences| sequences.has_input(name));
        let kept = |name: &str| sequences.is_some_and(|sequences| sequences.has_output(name));
        let signature = Signature {
            inputs: check_against_graph("input", &self.inputs, &graph.inputs, filled)?,
            outputs: check_against_graph("output", &self.outputs, &graph.outputs, kept)?,
        };
        if !self.inputs.is_empty()
            && let Some(missing) =
                graph.inputs.iter().find(|spec| signature.inputs.iter().all(|it| it.name != spec.name))
        {
            return Err(format!(
                "the graph has an input {}, which the configuration leaves out",
                quote(&missing.name)
            ));
        }
        if self.max_batch_size.is_some_and(|rows| rows > 0) && !signature.has_rows() {
            return Err(format!(
                "max_batch_size is {}, and the first extent of an input or output of the graph is fixed: export it \
                 with a dynamic one, or leave max_batch_size out",
                self.max_batch_size.unwrap_or_default()
            ));
        }
        Ok(signature)
    }

    /// Inputs and outputs as the configuration declares them.
    pub(super) fn declared(&self) -> Signature {
        Signature { inputs: self.inputs.clone(), outputs: self.outputs.clone() }
    }

    /// The plan for requests of sequences, for the signature that [`LoadSettings::signature`] returned. The states
    /// of a sequence may take `bytes_max` bytes.
    ///
    /// # Errors
    /// Where the signature and the configuration disagree.
    pub(crate) fn plan(
        &self,
        signature: &Signature,
        bytes_max: usize,
    ) -> Result<Option<(SequencePlan, Declaration)>, String> {
        let Some(declaration) = &self.sequences else { return Ok(None) };
        let has_rows = self.max_batch_size.is_some_and(|rows| rows > 0);
        let plan = SequencePlan::new(declaration, signature, &self.outputs, has_rows, bytes_max)?;
        Ok(Some((plan, declaration.clone())))
    }

    /// Whether the configuration asks for batching.
    pub(crate) fn asks_for_batches(&self) -> bool {
        let batches = self.batching.is_some() || self.sequences.is_some();
        batches && self.max_batch_size.is_some_and(|rows| rows > 0)
    }

    /// Applies the model's settings to `config`, the server's configuration.
    pub(super) fn apply(&self, config: &mut Config) {
        let rows_max = self.max_batch_size.map(|rows| usize::try_from(rows).unwrap_or(0));
        if let Some(rows_max) = rows_max {
            // Both bounds hold; a model without rows runs one request at a time.
            config.batching.rows_max = config.batching.rows_max.min(rows_max);
        }
        if let Some((preferred, delay_us)) = &self.batching {
            if let Some(rows_max) = rows_max {
                config.batching.rows_max = rows_max;
            }
            config.batching.preferred_rows.clone_from(preferred);
            config.batching.delay_us_max = *delay_us;
        }
        self.queue.apply(config);
        if self.sessions > 0 {
            config.sessions_max = self.sessions;
        }
        if let Some(device) = &self.device {
            config.device = device.clone();
        }
    }
}

/// Tensors of one side that the graph and the configuration share, and those that the server fills or keeps,
/// in the graph's order. A configuration may name fewer tensors than the graph, and narrower shapes.
fn check_against_graph(
    side: &str,
    declared: &[TensorSpec],
    graph: &[TensorSpec],
    is_the_servers: impl Fn(&str) -> bool,
) -> Result<Vec<TensorSpec>, String> {
    if declared.is_empty() {
        return Ok(graph.to_vec());
    }
    for spec in declared {
        let name = quote(&spec.name);
        let Some(found) = graph.iter().find(|found| found.name == spec.name) else {
            let names: Vec<&str> = graph.iter().take(16).map(|spec| spec.name.as_str()).collect();
            return Err(format!("the graph has no {side} {name}, its {side}s are {names:?}"));
        };
        if found.datatype != spec.datatype {
            return Err(format!(
                "{side} {name} is {} in the configuration and {} in the graph",
                spec.datatype, found.datatype
            ));
        }
        let fits = found.shape.len() == spec.shape.len()
            && found.shape.iter().zip(&spec.shape).all(|(graph, declared)| *graph == -1 || graph == declared);
        if !fits {
            return Err(format!(
                "{side} {name} is {:?} in the configuration (with the rows of max_batch_size) and {:?} in the graph",
                spec.shape, found.shape
            ));
        }
    }
    let kept = graph.iter().filter_map(|found| {
        let declared = declared.iter().find(|spec| spec.name == found.name);
        declared.or_else(|| is_the_servers(&found.name).then_some(found))
    });
    Ok(kept.cloned().collect())
}

/// Refuses models that are not ONNX, and features that this server lacks.
fn check_kind(parsed: &Parsed) -> Result<(), String> {
    const WAY_OUT: &str = "only ONNX models are served here: export it to ONNX (backend: \"onnxruntime\"), or leave it to Triton";
    let config = &parsed.config;
    let refused = |field: &str, reason: &str| Err(format!("{}{field}{reason}", parsed.place(field)));
    let is_ensemble =
        matches!(&config.scheduling_choice, Some(pb::model_config::SchedulingChoice::EnsembleScheduling(_)));
    if config.response_cache.as_ref().is_some_and(|cache| cache.enable)
        && matches!(&config.scheduling_choice, Some(pb::model_config::SchedulingChoice::SequenceBatching(_)))
    {
        return refused(
            "response_cache",
            ": responses of a model with sequences depend on earlier requests and cannot be cached: remove the setting",
        );
    }
    if matches!(&config.scheduling_choice, Some(pb::model_config::SchedulingChoice::SequenceBatching(_)))
        && !config.model_warmup.is_empty()
    {
        return refused("model_warmup", ": a model with sequences has no requests of its own: leave it out");
    }
    if is_ensemble {
        check_ensemble(parsed)?;
    } else if config.platform == ensemble::PLATFORM {
        return refused("platform", ": \"ensemble\" needs ensemble_scheduling, which lists its steps");
    } else {
        if !["", BACKEND].contains(&config.backend.as_str()) {
            return refused("backend", &format!(": {}: {WAY_OUT}", quote(&config.backend)));
        }
        // Triton also accepts the backend's name as the platform.
        if !["", PLATFORM, BACKEND].contains(&config.platform.as_str()) {
            return refused("platform", &format!(": {}: {WAY_OUT}", quote(&config.platform)));
        }
    }
    let foreign = [
        ("batch_input", !config.batch_input.is_empty(), "inputs that the server makes are not supported"),
        ("batch_output", !config.batch_output.is_empty(), "scattered outputs are not supported"),
        (
            "model_operations",
            config.model_operations.as_ref().is_some_and(|it| !it.op_library_filename.is_empty()),
            "libraries of operators are not loaded",
        ),
        (
            "model_transaction_policy",
            config.model_transaction_policy.as_ref().is_some_and(|it| it.decoupled),
            "a request has one answer here, decoupled models are not supported",
        ),
        (
            "model_repository_agents",
            config.model_repository_agents.as_ref().is_some_and(|it| !it.agents.is_empty()),
            "the server has no repository agents, and the model may depend on them",
        ),
    ];
    match foreign.into_iter().find(|(_, is_set, _)| *is_set) {
        Some((field, _, reason)) => refused(field, &format!(": {reason}")),
        None => Ok(()),
    }
}

/// Refuses fields that need a graph, which an ensemble does not have.
fn check_ensemble(parsed: &Parsed) -> Result<(), String> {
    let config = &parsed.config;
    let foreign = [
        ("platform", !["", ensemble::PLATFORM].contains(&config.platform.as_str()), "is not \"ensemble\""),
        ("backend", !config.backend.is_empty(), "belongs to its steps' models"),
        ("instance_group", !config.instance_group.is_empty(), "belongs to its steps' models"),
        ("model_warmup", !config.model_warmup.is_empty(), "belongs to its steps' models"),
        (
            "response_cache",
            config.response_cache.as_ref().is_some_and(|cache| cache.enable),
            "applies to the models of its steps, which may change independently",
        ),
        (
            "default_model_filename",
            !config.default_model_filename.is_empty(),
            "names a graph, and an ensemble has none",
        ),
    ];
    match foreign.into_iter().find(|(_, is_set, _)| *is_set) {
        Some((field, _, reason)) => Err(format!(
            "{}{field} {reason}: leave it out, as the model has ensemble_scheduling",
            parsed.place(field)
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
