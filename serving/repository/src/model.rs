//! A loaded model version, and the requests that run on it: on its sessions, in its sequences, or through the steps of
//! an ensemble.

mod batch_size;
mod checks;
pub mod ensemble;
mod run;
mod step;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_bundle::{Manifest, Signature};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::drift::Drift;
use crate::response_cache::Answers;
use crate::sequence::Sequences;
pub(crate) use batch_size::max_batch_size;
use ensemble::Ensemble;
use millrace_serving_core::error::InferError;
use millrace_serving_core::metrics::REQUESTS;
use millrace_serving_core::statistics::Statistics;
use millrace_serving_core::tensor::Tensor;
use millrace_serving_core::wire::inference as pb;
use millrace_serving_runtime::rows::Rows;
use millrace_serving_runtime::session::Pool;
pub(crate) use run::infer_with;
pub(crate) use step::CheckedRequest;

/// Backend of every model with a graph, in Triton's terms.
pub(crate) const BACKEND: &str = "onnxruntime";
/// Platform of every model with a graph, in Triton's terms.
pub(crate) const PLATFORM: &str = "onnxruntime_onnx";

/// A request as transports pass it on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Request {
    /// Model name.
    pub model: String,
    /// Version; the latest ready one when absent.
    pub version: Option<u64>,
    /// The inputs, in any order, each exactly once.
    pub inputs: Vec<Tensor>,
    /// Names of the requested outputs; all when empty.
    pub outputs: Vec<String>,
    /// Priority level, 1 the highest; 0 and unknown levels mean the server's default.
    pub priority: u64,
    /// Maximum wait for a session, bounded by the server's limit.
    pub timeout: Option<Duration>,
    /// Time after which the client does not need the response. A waiting request that could not be answered by then
    /// does not run.
    pub deadline: Option<Instant>,
    /// Address of the client, so that clients take turns. Requests without one count as those of a single client.
    pub client: Option<SocketAddr>,
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// Model name.
    pub model: String,
    /// The version that answered.
    pub version: u64,
    /// The outputs, in the requested order, or else in the signature's.
    pub outputs: Vec<Tensor>,
}

impl Response {
    /// Bytes of the outputs.
    pub fn bytes(&self) -> usize {
        self.outputs.iter().map(|output| output.data.raw_len()).sum()
    }
}

/// One model version that is ready. Requests hold it, so it outlives its removal from the repository.
#[derive(Debug)]
pub struct Model {
    pub(crate) manifest: Manifest,
    pub(crate) max_batch_size: i32,
    /// Unused for an ensemble: [`Model::rows`] derives it from the models of the steps.
    pub rows: Rows,
    /// Most rows of a request, if the model's configuration bounds them.
    pub rows_max: Option<usize>,
    /// File name of the graph.
    pub file: String,
    /// True while another version shadows this one; saves other requests the lookup of a shadow.
    pub(crate) shadowed: AtomicBool,
    /// The steps of an ensemble, whose pool has no sessions.
    pub(crate) ensemble: Option<Box<Ensemble>>,
    /// The sessions.
    pub pool: Pool,
    /// The model's part of the response cache, if its answers are cached.
    pub answers: Option<Answers>,
    /// State between requests, for a model with sequences.
    pub sequences: Option<Arc<Sequences>>,
    /// Counts and times of its requests.
    pub statistics: Statistics,
    /// Compares inputs with those of the training, if the bundle has their statistics.
    pub drift: Option<Drift>,
    /// Fires when the last request has released the version.
    pub gone: CancellationToken,
    // Must be the last field: Rust drops the sessions before it fires.
    pub(crate) _leaving: DropGuard,
}

impl Model {
    /// Model name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Version.
    pub fn version(&self) -> u64 {
        self.manifest.version
    }

    /// The manifest: digests, lineage, metrics.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Inputs and outputs that clients see.
    pub fn signature(&self) -> &Signature {
        &self.manifest.signature
    }

    /// Most rows of a request; 0 when the model has no row dimension.
    pub(crate) fn max_batch_size(&self) -> i32 {
        self.max_batch_size
    }

    /// Whether its rows are independent. For an ensemble: whether those of all its steps' models are now.
    pub fn rows(&self) -> Rows {
        self.ensemble().map_or_else(|| self.rows.clone(), |ensemble| ensemble.rows(self))
    }

    /// Most rows of a request, if the model's configuration bounds them.
    pub fn rows_max(&self) -> Option<usize> {
        self.rows_max
    }

    /// Whether another version runs copies of requests to this one.
    pub(crate) fn is_shadowed(&self) -> bool {
        self.shadowed.load(Ordering::Relaxed)
    }

    /// The steps of an ensemble.
    pub fn ensemble(&self) -> Option<&Ensemble> {
        self.ensemble.as_deref()
    }

    /// Platform, in Triton's terms.
    pub fn platform(&self) -> &'static str {
        if self.ensemble.is_some() { ensemble::PLATFORM } else { PLATFORM }
    }

    /// File name of the graph.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The current figures of the version.
    pub fn describe(&self) -> pb::ModelStatistics {
        self.statistics.describe(self.name(), self.version())
    }

    /// Counts a request that arrived at `arrived` and was refused or failed.
    pub fn failed(&self, arrived: Instant, error: &InferError) {
        self.count_failure(arrived, error.label());
    }

    fn count_failure(&self, arrived: Instant, outcome: &str) {
        self.statistics.failed(arrived);
        let version = self.version().to_string();
        REQUESTS.with_label_values(&[self.name(), &version, outcome]).inc();
    }
}

/// Guard for a request without an outcome yet: counts it as cancelled when its caller drops it.
#[derive(Debug)]
pub(crate) struct Unfinished<'a> {
    model: &'a Model,
    arrived: Instant,
}

impl<'a> Unfinished<'a> {
    /// A request to a model that arrived at `arrived`.
    pub(crate) fn new(model: &'a Model, arrived: Instant) -> Unfinished<'a> {
        Unfinished { model, arrived }
    }

    /// The request has an outcome.
    pub(crate) fn end(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.model.count_failure(self.arrived, "cancelled");
    }
}
