//! Plan of an ensemble: its steps and the tensors between them, read from `ensemble_scheduling` of a `config.pbtxt`
//! and checked as far as possible without the models.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use millrace_bundle::TensorSpec;

use millrace_serving_core::error::quote;
use millrace_serving_core::wire::inference as pb;

/// Maximum number of steps of an ensemble.
const STEPS_MAX: usize = 64;
/// Maximum number of mappings between tensors and the inputs and outputs of steps and of the ensemble.
const MAPPINGS_MAX: usize = 1024;
/// Maximum length of a tensor name in bytes.
const NAME_BYTES_MAX: usize = 1024;

/// The steps of an ensemble and the tensors between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(super) steps: Vec<Step>,
    /// The inputs of the ensemble in their order, then the tensors that steps produce.
    pub(super) tensors: Vec<PlanTensor>,
    /// The tensors that are outputs of the ensemble, in their order.
    pub(super) outputs: Vec<usize>,
}

/// A request to a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) model: String,
    /// The newest version if `None`.
    pub(super) version: Option<u64>,
    /// Inputs of the model, and the tensors that they take.
    pub(super) takes: BTreeMap<String, usize>,
    /// Outputs of the model, and the tensors that they become.
    pub(super) makes: BTreeMap<String, usize>,
}

/// A tensor of an ensemble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlanTensor {
    pub(super) name: String,
    /// The step that produces the tensor; `None` for inputs of the ensemble.
    pub(super) maker: Option<usize>,
}

/// A step for messages.
pub(super) struct StepLabel<'a>(pub(super) usize, pub(super) &'a str);

impl fmt::Display for StepLabel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} (model {})", self.0 + 1, quote(self.1))
    }
}

impl Plan {
    /// Reads the steps of an ensemble with these inputs and outputs.
    ///
    /// # Errors
    /// The step, and the problem with it.
    pub(crate) fn read(
        scheduling: &pb::ModelEnsembling,
        inputs: &[TensorSpec],
        outputs: &[TensorSpec],
    ) -> Result<Plan, String> {
        let steps = &scheduling.step;
        if inputs.is_empty() || outputs.is_empty() {
            return Err(
                "an ensemble has to declare its inputs and outputs: add the fields input and output".into()
            );
        }
        if !(1..=STEPS_MAX).contains(&steps.len()) {
            return Err(format!("{} steps, allowed are 1 to {STEPS_MAX}", steps.len()));
        }
        let mappings = steps.iter().map(|step| step.input_map.len() + step.output_map.len());
        let mappings = mappings.sum::<usize>() + inputs.len() + outputs.len();
        if mappings > MAPPINGS_MAX {
            return Err(format!("{mappings} inputs and outputs of steps, the limit is {MAPPINGS_MAX}"));
        }
        let mut plan =
            Plan { steps: Vec::with_capacity(steps.len()), tensors: Vec::new(), outputs: Vec::new() };
        let mut places: HashMap<&str, usize> = HashMap::new();
        for spec in inputs {
            places.insert(spec.name.as_str(), plan.tensors.len());
            plan.tensors.push(PlanTensor { name: spec.name.clone(), maker: None });
        }
        for (number, step) in steps.iter().enumerate() {
            let named = StepLabel(number, &step.model_name);
            let (model, version) = model(step).map_err(|reason| format!("{named}: {reason}"))?;
            let mut makes = BTreeMap::new();
            // Sorted, so that of several mistakes always the same one is reported.
            for (output, tensor) in sorted(&step.output_map) {
                check_names(output, tensor).map_err(|reason| format!("{named}: output_map: {reason}"))?;
                let place = plan.tensors.len();
                if let Some(first) = places.insert(tensor, place) {
                    let tensor = quote(tensor);
                    return Err(match plan.tensors[first].maker {
                        Some(first) => format!(
                            "tensor {tensor} is made twice, by {} and by {named}",
                            StepLabel(first, &steps[first].model_name)
                        ),
                        None => {
                            format!("tensor {tensor} is an input of the ensemble, and {named} makes it, too")
                        }
                    });
                }
                plan.tensors.push(PlanTensor { name: tensor.to_owned(), maker: Some(number) });
                makes.insert(output.to_owned(), place);
            }
            plan.steps.push(Step { model, version, takes: BTreeMap::new(), makes });
        }
        for (number, step) in steps.iter().enumerate() {
            let named = StepLabel(number, &step.model_name);
            for (input, tensor) in sorted(&step.input_map) {
                check_names(input, tensor).map_err(|reason| format!("{named}: input_map: {reason}"))?;
                let Some(place) = places.get(tensor) else {
                    return Err(format!(
                        "{named}: input {} takes tensor {}, which no step makes and which is no input of the ensemble",
                        quote(input),
                        quote(tensor)
                    ));
                };
                plan.steps[number].takes.insert(input.to_owned(), *place);
            }
        }
        for spec in outputs {
            let made = places.get(spec.name.as_str()).filter(|place| plan.tensors[**place].maker.is_some());
            let place = made
                .ok_or_else(|| format!("output {} of the ensemble is made by no step", quote(&spec.name)))?;
            plan.outputs.push(*place);
        }
        plan.check_order()?;
        let needed = plan.needed(&plan.outputs);
        match needed.iter().position(|needed| !needed) {
            Some(idle) => {
                Err(format!("{} makes no tensor that an output needs: remove the step", plan.named(idle)))
            }
            None => Ok(plan),
        }
    }

    /// A step for messages.
    pub(super) fn named(&self, step: usize) -> StepLabel<'_> {
        StepLabel(step, &self.steps[step].model)
    }

    /// The models of the steps.
    pub(crate) fn models(&self) -> impl Iterator<Item = &str> {
        self.steps.iter().map(|step| step.model.as_str())
    }

    /// For each step, whether the given tensors need it.
    pub(super) fn needed(&self, tensors: &[usize]) -> Vec<bool> {
        let mut needed = vec![false; self.steps.len()];
        let mut wanted: Vec<usize> =
            tensors.iter().filter_map(|tensor| self.tensors[*tensor].maker).collect();
        while let Some(step) = wanted.pop() {
            if !std::mem::replace(&mut needed[step], true) {
                wanted.extend(self.before(step));
            }
        }
        needed
    }

    /// The steps that produce the inputs of a step.
    fn before(&self, step: usize) -> impl Iterator<Item = usize> {
        self.steps[step].takes.values().filter_map(|tensor| self.tensors[*tensor].maker)
    }

    /// Refuses cycles of steps.
    fn check_order(&self) -> Result<(), String> {
        let mut done = vec![false; self.steps.len()];
        let can_run =
            |done: &[bool], step: usize| !done[step] && self.before(step).all(|before| done[before]);
        while let Some(next) = (0..done.len()).find(|step| can_run(&done, *step)) {
            done[next] = true;
        }
        let Some(stuck) = done.iter().position(|done| !done) else { return Ok(()) };
        // Each remaining step waits for a remaining step: going back from any of them leads to a cycle.
        let mut way = vec![stuck];
        let circle = loop {
            let last = way[way.len() - 1];
            let Some(before) = self.before(last).find(|before| !done[*before]) else { break way.as_slice() };
            if let Some(begin) = way.iter().position(|step| *step == before) {
                break &way[begin..];
            }
            way.push(before);
        };
        let mut circle = circle.to_vec();
        circle.sort_unstable();
        let names: Vec<String> = circle.iter().map(|step| self.named(*step).to_string()).collect();
        Err(format!("a cycle of steps that wait for each other's tensors: {}", names.join(", ")))
    }

    /// The configuration of the steps as shown to clients.
    pub(crate) fn describe(&self) -> pb::ModelEnsembling {
        let map = |tensors: &BTreeMap<String, usize>| {
            tensors.iter().map(|(name, place)| (name.clone(), self.tensors[*place].name.clone())).collect()
        };
        let step = |step: &Step| pb::model_ensembling::Step {
            model_name: step.model.clone(),
            model_version: step.version.map_or(-1, |version| i64::try_from(version).unwrap_or(i64::MAX)),
            input_map: map(&step.takes),
            output_map: map(&step.makes),
            model_namespace: String::new(),
        };
        pb::ModelEnsembling { step: self.steps.iter().map(step).collect(), max_inflight_requests: 0 }
    }
}

/// The model of a step, and its version if given.
fn model(step: &pb::model_ensembling::Step) -> Result<(String, Option<u64>), String> {
    millrace_bundle::check_name(&step.model_name).map_err(|error| format!("model_name: {error}"))?;
    if !step.model_namespace.is_empty() {
        return Err("model_namespace is not supported: the server has one repository".into());
    }
    let version =
        match step.model_version {
            -1 | 0 => None,
            version => Some(u64::try_from(version).map_err(|_| {
                format!("model_version is {version}: name a positive one, or -1 for the newest")
            })?),
        };
    Ok((step.model_name.clone(), version))
}

fn sorted(map: &HashMap<String, String>) -> BTreeMap<&str, &str> {
    map.iter().map(|(name, tensor)| (name.as_str(), tensor.as_str())).collect()
}

fn check_names(name: &str, tensor: &str) -> Result<(), String> {
    match [name, tensor].into_iter().find(|name| name.is_empty() || name.len() > NAME_BYTES_MAX) {
        Some(wrong) => Err(format!(
            "the name {} has {} bytes, allowed are 1 to {NAME_BYTES_MAX}",
            quote(wrong),
            wrong.len()
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
