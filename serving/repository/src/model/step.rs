//! Checked requests, and their execution as steps of ensembles.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::checks::check;
use super::run::perform;
use super::{Model, Unfinished};
use millrace_serving_core::error::InferError;
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::TensorHandle;

/// A request that was checked against a version's signature.
#[derive(Debug)]
pub(crate) struct CheckedRequest {
    /// The inputs, in the signature's order.
    pub inputs: Vec<TensorHandle>,
    /// The requested outputs, by their indexes in the signature.
    pub outputs: Vec<usize>,
    /// Whether each of them may stay in device memory, as in [`millrace_serving_runtime::session::Work`].
    pub stays: Vec<bool>,
    /// As in [`super::Request`], like the next three fields.
    pub priority: u64,
    pub timeout: Option<Duration>,
    pub deadline: Option<Instant>,
    pub client: Option<SocketAddr>,
}

/// Runs a step of an ensemble, counted like any request to its model; returns the requested outputs.
///
/// # Errors
/// Those of the run.
pub(super) async fn step(
    model: &Model,
    checked: CheckedRequest,
) -> Result<(Vec<TensorHandle>, Times), InferError> {
    let arrived = Instant::now();
    let unfinished = Unfinished::new(model, arrived);
    let specs = &model.signature().inputs;
    let outcome =
        match specs.iter().zip(&checked.inputs).try_for_each(|(spec, input)| check(spec, input.view())) {
            Ok(()) => perform(model, None, checked).await,
            Err(error) => Err(error),
        };
    unfinished.end();
    match outcome {
        Ok((outputs, inferences, times)) => {
            model.statistics.succeeded(inferences, arrived, &times);
            Ok((outputs, times))
        }
        Err(error) => {
            model.failed(arrived, &error);
            Err(error)
        }
    }
}
