//! The output that a loss reads: the one that the job names, or the only one that suits the loss.

use millrace_bundle::onnx::ModelProto;

use super::{EngineError, Objective, loss};
use crate::graph::Graph;

/// Most outputs that are tried where none is named.
const TRIED_MAX: usize = 64;

/// The part of the model that gives `output`.
pub(super) fn read(
    model: &ModelProto,
    output: Option<&str>,
    objective: &Objective,
) -> Result<Graph, EngineError> {
    let checked = |output: Option<&str>| {
        let graph = Graph::read_output(model, output)?;
        loss::check_output(objective, &graph)?;
        Ok(graph)
    };
    let outputs = model.graph.as_ref().map_or(&[][..], |graph| &graph.output);
    if output.is_some() || outputs.len() < 2 || outputs.len() > TRIED_MAX {
        return checked(output);
    }
    let mut fitting = Vec::new();
    let mut refused: Vec<(&str, EngineError)> = Vec::new();
    for name in outputs.iter().map(|info| info.name()) {
        match checked(Some(name)) {
            Ok(graph) => fitting.push(graph),
            Err(error) => refused.push((name, error)),
        }
    }
    if fitting.len() > 1 {
        let each = fitting.iter().map(|graph| format!("{:?} {}", graph.output_name(), graph.output_form()));
        let reason = format!(
            "loss {} can read {}: name the one in the job, as in loss_output = {:?}",
            objective.kind(),
            each.collect::<Vec<_>>().join(" and "),
            fitting[0].output_name()
        );
        return Err(EngineError::Outputs { reason });
    }
    if let Some(graph) = fitting.pop() {
        return Ok(graph);
    }
    let each: Vec<String> = refused.iter().map(|(name, error)| format!("{name:?} ({error})")).collect();
    let reason = format!("loss {} can read none of them: {}", objective.kind(), each.join("; "));
    let mut errors = refused.into_iter().map(|(_, error)| error);
    match errors.next() {
        // The fault of a node that all of them depend on.
        Some(first) if errors.all(|error| error.to_string() == first.to_string()) => Err(first),
        _ => Err(EngineError::Outputs { reason }),
    }
}
