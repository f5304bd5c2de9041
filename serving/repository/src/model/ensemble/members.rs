//! Members of an ensemble: the models that its steps run on, and the check that they fit together.

use std::sync::Arc;

use millrace_bundle::TensorSpec;

use super::plan::{Plan, Step};
use super::{Ensemble, ModelLookup};
use crate::model::Model;
use millrace_serving_core::config::Memory;
use millrace_serving_core::error::quote;
use millrace_serving_core::tensor::shown;

/// A step, and the model version that it runs on.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) model: Arc<Model>,
    /// The tensors that the step takes, in the order of the model's inputs.
    pub(super) inputs: Vec<usize>,
    /// Indexes of outputs in the model's signature, and the tensors that they become.
    pub(super) outputs: Vec<(usize, usize)>,
}

impl Member {
    /// The memory in which its runs can leave outputs; `None` if the server must read their elements.
    pub(super) fn leaves_in(&self) -> Option<Memory> {
        if self.model.answers.is_some() { None } else { self.model.pool.memory() }
    }

    /// The memory from which its runs take inputs; `None` if the server must read their elements first.
    pub(super) fn takes_from(&self) -> Option<Memory> {
        if self.model.drift.is_some() { None } else { self.leaves_in() }
    }
}

impl Ensemble {
    /// The models of the steps, as `find` returns them now.
    ///
    /// # Errors
    /// The step whose model is missing or does not fit, and the reason.
    pub(super) fn members(&self, ensemble: &Model, find: &ModelLookup<'_>) -> Result<Vec<Member>, String> {
        let plan = &self.plan;
        let mut members = Vec::with_capacity(plan.steps.len());
        for (number, step) in plan.steps.iter().enumerate() {
            let member = find(&step.model, step.version)
                .map_err(|error| error.to_string())
                .and_then(|model| member(ensemble, step, model))
                .map_err(|reason| format!("{}: {reason}", plan.named(number)))?;
            members.push(member);
        }
        check_tensors(plan, ensemble, &members)?;
        Ok(members)
    }
}

/// Checks a model for a step.
fn member(ensemble: &Model, step: &Step, model: Arc<Model>) -> Result<Member, String> {
    if model.ensemble().is_some() {
        return Err("the model is itself an ensemble: list its steps in this ensemble instead".into());
    }
    if model.sequences.is_some() {
        return Err("it keeps a state for each sequence of requests (sequence_batching), and a step belongs to none: let \
                    clients ask it themselves"
            .into());
    }
    if let Some(rows) = ensemble.rows_max() {
        if model.max_batch_size() == 0 && !model.signature().has_rows() {
            return Err(format!(
                "it takes no rows, and max_batch_size of the ensemble is {rows}: leave that out, and give dims as its \
                 steps have them"
            ));
        }
        if let Some(most) = model.rows_max().filter(|most| *most < rows) {
            return Err(format!(
                "it takes at most {most} rows, and max_batch_size of the ensemble is {rows}"
            ));
        }
    }
    let signature = model.signature();
    if let Some(unknown) =
        step.takes.keys().find(|name| signature.inputs.iter().all(|spec| spec.name != **name))
    {
        return Err(format!(
            "it has no input {}, its inputs are {:?}",
            quote(unknown),
            names(&signature.inputs)
        ));
    }
    let inputs = signature.inputs.iter().map(|spec| {
        let tensor = step.takes.get(&spec.name).copied();
        tensor.ok_or_else(|| format!("its input {} gets no tensor: name it in input_map", quote(&spec.name)))
    });
    let inputs = inputs.collect::<Result<_, _>>()?;
    let outputs = step.makes.iter().map(|(name, tensor)| {
        let place = signature.outputs.iter().position(|spec| spec.name == *name);
        place.map(|place| (place, *tensor)).ok_or_else(|| {
            format!("it has no output {}, its outputs are {:?}", quote(name), names(&signature.outputs))
        })
    });
    let outputs = outputs.collect::<Result<_, _>>()?;
    Ok(Member { model, inputs, outputs })
}

fn names(specs: &[TensorSpec]) -> Vec<&str> {
    specs.iter().take(16).map(|spec| spec.name.as_str()).collect()
}

/// Compares the form in which each tensor is produced with the forms in which it is taken.
fn check_tensors(plan: &Plan, ensemble: &Model, members: &[Member]) -> Result<(), String> {
    let signature = ensemble.signature();
    let mut made: Vec<&TensorSpec> = signature.inputs.iter().collect();
    // The other tensors are in the order of the steps, and of the names in each step.
    for member in members {
        let outputs = &member.model.signature().outputs;
        made.extend(member.outputs.iter().map(|(place, _)| &outputs[*place]));
    }
    let source = |tensor: usize| match plan.tensors[tensor].maker {
        Some(step) => format!("{} makes", plan.named(step)),
        None => "the ensemble has as its input".to_owned(),
    };
    for (number, member) in members.iter().enumerate() {
        for (spec, tensor) in member.model.signature().inputs.iter().zip(&member.inputs) {
            if !agree(spec, made[*tensor]) {
                return Err(format!(
                    "{}: its input {} takes {}, and tensor {}, which {}, is {}",
                    plan.named(number),
                    quote(&spec.name),
                    form(spec),
                    quote(&plan.tensors[*tensor].name),
                    source(*tensor),
                    form(made[*tensor])
                ));
            }
        }
    }
    for (spec, tensor) in signature.outputs.iter().zip(&plan.outputs) {
        if !agree(spec, made[*tensor]) {
            return Err(format!(
                "output {} of the ensemble is {}, and what {} is {}",
                quote(&spec.name),
                form(spec),
                source(*tensor),
                form(made[*tensor])
            ));
        }
    }
    Ok(())
}

/// Whether a tensor may match both specifications.
fn agree(a: &TensorSpec, b: &TensorSpec) -> bool {
    a.datatype == b.datatype && fits(&a.shape, &b.shape)
}

/// Whether a shape may match both; extents of -1 are only known when a request runs.
pub(super) fn fits(a: &[i64], b: &[i64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || *a == -1 || *b == -1)
}

/// Datatype and shape, including the rows.
fn form(spec: &TensorSpec) -> String {
    format!("{} {}", spec.datatype, shown(&spec.shape))
}
