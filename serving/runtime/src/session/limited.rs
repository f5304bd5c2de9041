//! Time-limited runs outside of requests, for example for warm-up: a run that takes too long is ended.
//!
//! A version, and each version loaded after it, becomes ready only after these runs. A graph may loop forever on its
//! trial inputs.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use millrace_bundle::TensorSpec;
use ort::session::RunOptions;

use super::Session;
use super::values::run_tensors;
use millrace_serving_core::error::{InferError, one_line};
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::Tensor;

/// Limit for a run: the first run of a model of many gigabytes takes some seconds on one core.
pub(super) const RUN_MAX: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 60 });
/// Limit where the first run compiles the graph, as with TensorRT: that takes minutes.
pub(super) const COMPILATION_MAX: Duration = Duration::from_secs(3600);

/// Reason why a run returned no outputs.
#[derive(Debug)]
pub(super) enum Failure {
    /// The run was ended after this time.
    Endless(Duration),
    /// ONNX Runtime or the graph refused the run.
    Refused(InferError),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Endless(limit) => write!(
                f,
                "a run did not end within {} s and was ended: bound the loops of the graph",
                limit.as_secs_f32()
            ),
            Failure::Refused(error) => error.fmt(f),
        }
    }
}

/// Runs a session on inputs in the signature's order, for at most `limit`. ONNX Runtime checks the termination flag
/// between two nodes, including the nodes of subgraphs.
pub(super) fn run(
    session: &mut Session,
    inputs: &[Tensor],
    outputs: &[TensorSpec],
    limit: Duration,
) -> Result<(Vec<Tensor>, Times), Failure> {
    let internal = |reason: String| Failure::Refused(InferError::internal(reason));
    let options =
        RunOptions::new().map_err(|error| internal(format!("ONNX Runtime: {}", one_line(&error))))?;
    let options = &options;
    thread::scope(|scope| {
        let (running, ended) = mpsc::channel::<()>();
        let watch = move || {
            // The sender is dropped when the run has ended.
            let is_late = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if is_late && let Err(error) = options.terminate() {
                tracing::warn!(%error, "cannot end a run that exceeds its time limit");
            }
            is_late
        };
        let watch = thread::Builder::new()
            .name("run limit".into())
            .spawn_scoped(scope, watch)
            .map_err(|error| internal(format!("no thread for the limit of a run: {error}")))?;
        let result = run_tensors(session, inputs, outputs, Some(options));
        drop(running);
        // A watch thread that panicked has ended no run.
        let is_late = watch.join().unwrap_or(false);
        result.map_err(|error| if is_late { Failure::Endless(limit) } else { Failure::Refused(error) })
    })
}

#[cfg(test)]
mod tests;
