//! Ensembles: models whose steps are other models. A request runs through all steps without returning to its client
//! in between.
//!
//! A step is an ordinary request to its model: it shares batches with other requests, within the limits of the
//! model's queue, with the priority and the remaining time of its request. The ensemble looks up all models when a
//! request begins and holds them until it is done. Therefore it needs no notification when a model is loaded,
//! replaced or unloaded, and its readiness is always current.
//!
//! Tensors pass from step to step without copies. A tensor stays in the memory of the device where a run leaves it,
//! if all steps that take it use that memory. A tensor that several steps take, or a step and the client, is shared.
//! The steps have released it when the response is assembled.
//!
//! An ensemble cannot contain ensembles: the steps of the inner one can be steps of the outer one.

mod flow;
mod members;
mod plan;

use std::sync::Arc;

use serde_json::{Value, json};

use super::Model;
use members::Member;
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::wire::inference as pb;
use millrace_serving_runtime::rows::{Dependence, Rows};
pub(crate) use plan::Plan;

/// Looks up the model of a step by name and version.
pub(crate) type ModelLookup<'a> = dyn Fn(&str, Option<u64>) -> Result<Arc<Model>, InferError> + 'a;

/// The models among which an ensemble finds those of its steps.
pub(crate) trait StepModels: std::fmt::Debug + Send + Sync {
    /// A lookup in one consistent set of models; `None` if the repository is closed.
    fn model_lookup(&self) -> Option<Box<ModelLookup<'static>>>;
}

/// Platform name of ensembles, as in Triton.
pub(crate) const PLATFORM: &str = "ensemble";

/// The steps of a model that has no graph.
#[derive(Debug)]
pub struct Ensemble {
    plan: Plan,
    /// Does not keep the repository alive, which also contains the ensemble.
    models: Box<dyn StepModels>,
}

impl Ensemble {
    /// An ensemble of models of a repository.
    pub(crate) fn new(plan: Plan, models: Box<dyn StepModels>) -> Ensemble {
        Ensemble { plan, models }
    }

    /// The models of the steps.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.plan.models()
    }

    /// Its configuration as shown to clients.
    pub fn describe(&self) -> pb::ModelEnsembling {
        self.plan.describe()
    }

    /// Checks that all steps can run with the models that `find` returns.
    ///
    /// # Errors
    /// The first step that cannot run, and the reason.
    pub fn check(&self, ensemble: &Model, find: &ModelLookup<'_>) -> Result<(), String> {
        self.members(ensemble, find).map(drop)
    }

    /// The models of the steps, for a request that begins now.
    fn resolve(&self, ensemble: &Model) -> Result<Vec<Member>, InferError> {
        let unavailable =
            |reason: String| InferError::Unavailable { reason: format!("{}: {reason}", name(ensemble)) };
        let Some(find) = self.models.model_lookup() else {
            return Err(unavailable("its repository is closed".into()));
        };
        self.members(ensemble, &find).map_err(unavailable)
    }

    /// Row independence of the ensemble: requires that the rows of every step are independent.
    pub fn rows(&self, ensemble: &Model) -> Rows {
        let signature = ensemble.signature();
        let name = signature.inputs.first().map_or("", |input| &input.name);
        let refused = |reason: String| Rows::Dependent(Dependence::of_output(name, &reason));
        if !signature.has_rows() {
            return refused("the first extent of an input or output is fixed".into());
        }
        let members = match self.resolve(ensemble) {
            Ok(members) => members,
            Err(error) => return refused(error.to_string()),
        };
        let rows = members.iter().map(|member| member.model.rows());
        let (mut rows, places): (Vec<Rows>, Vec<usize>) = rows
            .enumerate()
            .filter(|(_, rows)| *rows != Rows::Independent)
            .map(|(step, rows)| (rows, step))
            .unzip();
        match rows.iter().position(|rows| !rows.are_independent()) {
            Some(found) => refused(format!("{}: {}", self.plan.named(places[found]), rows[found])),
            None => rows.pop().unwrap_or(Rows::Independent),
        }
    }

    /// A step of the ensemble for messages.
    fn place(&self, ensemble: &Model, step: usize) -> String {
        format!("{}: {}", name(ensemble), self.plan.named(step))
    }
}

/// An ensemble for messages.
pub fn name(ensemble: &Model) -> String {
    format!("ensemble {} version {}", quote(ensemble.name()), ensemble.version())
}

/// The steps in JSON, as Triton's clients read them.
pub fn to_json(scheduling: &pb::ModelEnsembling) -> Value {
    let step = |step: &pb::model_ensembling::Step| {
        json!({
            "model_name": step.model_name,
            "model_version": step.model_version,
            "input_map": step.input_map,
            "output_map": step.output_map,
            "model_namespace": step.model_namespace,
        })
    };
    json!({ "step": scheduling.step.iter().map(step).collect::<Vec<_>>() })
}
