//! Execution of requests on one model version: checks, the response cache, and the sessions, the sequence or the steps
//! that compute the answer.

use std::time::Instant;

use super::checks::{ordered, requested_outputs};
use super::{CheckedRequest, Model, Request, Response};
use crate::sequence::SequencePosition;
use millrace_serving_core::blocking::in_place;
use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::TensorHandle;
use millrace_serving_runtime::session::Work;

/// Hashing inputs of this size for the response cache takes about 1 ms.
const LONG_BYTES: usize = 1 << 20;

/// Checks a request against one version and runs it, in its place if it belongs to a sequence. Returns the response,
/// the number of inferences, and the timestamps of the stages.
pub(crate) async fn infer_with(
    model: &Model,
    place: Option<&mut SequencePosition>,
    request: Request,
) -> Result<(Response, u64, Times), InferError> {
    let signature = model.signature();
    let checked = CheckedRequest {
        outputs: requested_outputs(&signature.outputs, &request.outputs)?,
        inputs: ordered(&signature.inputs, request.inputs)?,
        stays: Vec::new(),
        priority: request.priority,
        timeout: request.timeout,
        deadline: request.deadline,
        client: request.client,
    };
    let (outputs, inferences, times) = perform(model, place, checked).await?;
    let outputs = outputs.into_iter().map(TensorHandle::into_tensor).collect::<Result<_, _>>()?;
    let response = Response { model: model.name().to_owned(), version: model.version(), outputs };
    Ok((response, inferences, times))
}

/// Runs a request on a version's sessions, in its place if it belongs to a sequence, or through the steps of an
/// ensemble. Returns the requested outputs, the number of inferences, and the timestamps of the stages.
pub(super) async fn perform(
    model: &Model,
    place: Option<&mut SequencePosition>,
    request: CheckedRequest,
) -> Result<(Vec<TensorHandle>, u64, Times), InferError> {
    let CheckedRequest { inputs, outputs, stays, .. } = request;
    let empty = inputs.iter().position(|input| input.view().elements() == 0);
    if let Some(place) = empty.filter(|_| !model.pool.accepts_empty_inputs()) {
        let name = model.signature().inputs.get(place).map_or("", |spec| spec.name.as_str());
        return Err(InferError::invalid(format!(
            "input {name:?} has no elements; the graph has operators that are not known to take that"
        )));
    }
    let extent = inputs.first().and_then(|input| input.view().shape().first()).copied().unwrap_or(1);
    let extent = usize::try_from(extent).unwrap_or(0);
    // A request with empty inputs runs alone: its rows cannot be separated from those of others.
    let has_rows = |input: &TensorHandle| has_rows(input, extent) && input.view().elements() > 0;
    let rows = if model.max_batch_size() > 0 && inputs.iter().all(has_rows) { extent } else { 0 };
    if let Some(rows_max) = model.rows_max()
        && rows > rows_max
    {
        return Err(InferError::invalid(format!(
            "the request has {rows} rows, the model takes at most {rows_max} (max_batch_size of its config.pbtxt)"
        )));
    }
    let queued = Instant::now();
    if let Some(drift) = &model.drift {
        drift.observe(&inputs.iter().map(TensorHandle::read).collect::<Result<Vec<_>, _>>()?, queued);
    }
    let timeout = request.timeout.into_iter().chain(model.pool.timeout()).min();
    // A timeout beyond the range of the clock is no limit.
    let expires = timeout.and_then(|timeout| queued.checked_add(timeout));
    let answer_by = request.deadline;
    let deadline = answer_by.into_iter().chain(expires).min();
    let level = model.pool.level(request.priority);
    let client = request.client;
    let work = Work { inputs, outputs, stays, rows, queued, deadline, answer_by, level, client };
    // A request to a model without batches counts as one inference.
    let inferences = |rows: usize| rows.max(1) as u64;
    let mut missed = None;
    if let Some(answers) = &model.answers {
        let key = in_place(work.bytes() >= LONG_BYTES, || answers.key(&work))?;
        if let Some(outputs) = answers.get(&key) {
            let outputs = outputs.into_iter().map(TensorHandle::Alone).collect();
            let times = Times::from_cache(queued);
            let took = times.end.saturating_duration_since(queued);
            model.statistics.hit(took);
            return Ok((outputs, inferences(rows), times));
        }
        missed = Some((answers, key, queued.elapsed()));
    }
    let ran = match (place, &model.sequences, model.ensemble()) {
        (None, None, None) => model.pool.run(work).await?,
        (None, None, Some(ensemble)) => ensemble.run(model, work).await?,
        // Boxed, so that the futures of other requests stay small.
        (Some(place), ..) => Box::pin(place.run(&model.pool, work)).await?,
        (None, Some(sequences), _) => return Err(sequences.outside()),
    };
    if let Some((answers, key, looked)) = missed {
        let start = Instant::now();
        answers.put(key, &ran.outputs.iter().map(TensorHandle::read).collect::<Result<Vec<_>, _>>()?);
        model.statistics.missed(looked + start.elapsed());
    }
    let times = ran.times;
    model.statistics.gave(extent as u64, ran.run_rows.map(inferences), &times);
    Ok((ran.outputs, inferences(rows), times))
}

fn has_rows(input: &TensorHandle, rows: usize) -> bool {
    input.view().shape().first().is_some_and(|extent| usize::try_from(*extent) == Ok(rows))
}
