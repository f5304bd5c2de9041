//! Ensembles: models that are steps of other models, which a request runs through without coming back to its
//! client in between.
//!
//! A step is a request to its model like any other: it runs together with those of others, within the limits of
//! the model's line, with the priority and the time that the request has left. The models are found when a request
//! begins, all of them at one moment, and it holds them until it is done. So nothing has to be told to an ensemble
//! when one of them is loaded, replaced or unloaded, and whether it can answer is never a thing of the past.
//!
//! Tensors go from step to step as they are: in the memory of the device where the run of one leaves them, if all that
//! take them have theirs there, too. One that several steps take is shared, and so is one that a step takes and the
//! client gets: when the answer is put together, the steps have let it go.
//!
//! There are no ensembles in ensembles: each step of one can be a step of the other.

mod flow;
mod members;
mod plan;

use std::sync::Arc;

use serde_json::{Value, json};

use crate::error::{InferError, quote};
use crate::repository::{Model, WeakRepository};
use crate::rows::{Dependence, Rows};
use crate::wire::inference as pb;
use members::Member;
pub(crate) use plan::Plan;

/// Finds the model of a step, by its name and version.
pub(crate) type Find<'a> = dyn Fn(&str, Option<u64>) -> Result<Arc<Model>, InferError> + 'a;

/// Platform of ensembles, as Triton names it.
pub(crate) const PLATFORM: &str = "ensemble";

/// What a model is made of that has no graph of its own.
#[derive(Debug)]
pub(crate) struct Ensemble {
    plan: Plan,
    /// Has the ensemble itself, too.
    repository: WeakRepository,
}

impl Ensemble {
    /// An ensemble of models of a repository.
    pub(crate) fn new(plan: Plan, repository: WeakRepository) -> Ensemble {
        Ensemble { plan, repository }
    }

    /// The models of the steps.
    pub(crate) fn models(&self) -> impl Iterator<Item = &str> {
        self.plan.models()
    }

    /// What a configuration says of it.
    pub(crate) fn describe(&self) -> pb::ModelEnsembling {
        self.plan.describe()
    }

    /// Whether all steps could run, with the models that `find` tells of.
    ///
    /// # Errors
    /// The first step that could not, and why.
    pub(crate) fn check(&self, ensemble: &Model, find: &Find<'_>) -> Result<(), String> {
        self.members(ensemble, find).map(drop)
    }

    /// The models of the steps for a request that begins now.
    fn resolve(&self, ensemble: &Model) -> Result<Vec<Member>, InferError> {
        let unavailable =
            |reason: String| InferError::Unavailable { reason: format!("{}: {reason}", name(ensemble)) };
        let Some(repository) = self.repository.upgrade() else {
            return Err(unavailable("its repository is closed".into()));
        };
        let find = repository.finder();
        self.members(ensemble, &find).map_err(unavailable)
    }

    /// Whether the rows of an ensemble are independent: those of every step have to be.
    pub(crate) fn rows(&self, ensemble: &Model) -> Rows {
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

    /// A step of the ensemble, as messages name it.
    fn place(&self, ensemble: &Model, step: usize) -> String {
        format!("{}: {}", name(ensemble), self.plan.named(step))
    }
}

/// An ensemble as messages name it.
pub(crate) fn name(ensemble: &Model) -> String {
    format!("ensemble {} version {}", quote(ensemble.name()), ensemble.version())
}

/// The steps in the JSON that Triton's clients read.
pub(crate) fn to_json(scheduling: &pb::ModelEnsembling) -> Value {
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
