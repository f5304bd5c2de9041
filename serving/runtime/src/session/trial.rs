//! Trial session: one session of a version outside of a server, to compare two versions or to measure a run.

use std::time::Duration;

use millrace_bundle::{Bundle, TensorSpec};

use super::Session;
use super::values::run_tensors;
use crate::hazards::{self, Divisors};
use millrace_serving_core::config::{Config, Devices};
use millrace_serving_core::error::{Error, InferError, Result};
use millrace_serving_core::tensor::Tensor;

/// One session of a version on one thread of the processor; a server runs small models on several of these.
#[derive(Debug)]
pub struct Trial {
    session: Session,
    outputs: Vec<TensorSpec>,
}

impl Trial {
    /// Opens a version as a server would. Blocks while ONNX Runtime optimizes the graph.
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`]; [`Error::Model`] when it cannot be served.
    pub fn open(bundle: &Bundle) -> Result<Trial> {
        let config = Config { threads_max: 1, sessions_max: 1, ..Config::default() };
        let manifest = bundle.manifest();
        hazards::check_bundle(bundle, Divisors::Trusted).map_err(|hazard| Error::Model {
            model: manifest.name.clone(),
            version: manifest.version,
            reason: hazard.to_string(),
        })?;
        let session = super::sessions(bundle, &config, &Devices::CPU)?.pop().ok_or_else(|| Error::Model {
            model: manifest.name.clone(),
            version: manifest.version,
            reason: "it has no session".into(),
        })?;
        Ok(Trial { session, outputs: manifest.signature.outputs.clone() })
    }

    /// Runs the session on inputs in the signature's order. Returns all outputs, and the time from inputs to outputs.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when the graph cannot take the inputs; [`InferError::Internal`].
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<(Vec<Tensor>, Duration), InferError> {
        let (tensors, times) = run_tensors(&mut self.session, inputs, &self.outputs, None)?;
        Ok((tensors, times.end.saturating_duration_since(times.computing)))
    }
}
