//! Checked requests, and their execution as steps of ensembles.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::checks::check;
use super::run::perform;
use super::{Model, Unfinished};
use crate::error::InferError;
use crate::statistics::Times;
use crate::tensor::Held;

/// A request that was checked against a version's signature.
#[derive(Debug)]
pub(crate) struct Checked {
    /// The inputs, in the signature's order.
    pub(crate) inputs: Vec<Held>,
    /// The requested outputs, by their indexes in the signature.
    pub(crate) outputs: Vec<usize>,
    /// Whether each of them may stay in device memory, as in [`crate::session::Work`].
    pub(crate) stays: Vec<bool>,
    /// As in [`super::Request`], like the next three fields.
    pub(crate) priority: u64,
    pub(crate) timeout: Option<Duration>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) client: Option<SocketAddr>,
}

/// Runs a step of an ensemble, counted like any request to its model; returns the requested outputs.
///
/// # Errors
/// Those of the run.
pub(crate) async fn step(model: &Model, checked: Checked) -> Result<(Vec<Held>, Times), InferError> {
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
