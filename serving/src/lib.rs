//! Model serving: bundles, ONNX Runtime sessions, the Open Inference Protocol, and topic-to-topic pipes.
//!
//! This crate is the face of six others, each of which knows only those before it:
//! - `millrace-serving-core`: tensors, messages of the protocol, configuration, errors, metrics;
//! - `millrace-serving-runtime`: ONNX Runtime, proofs about graphs, sessions, batching and scheduling;
//! - `millrace-serving-repository`: loads model bundles from a volume or a directory, and runs requests on them;
//! - `millrace-serving-client`: a client and a load generator ([`load`]);
//! - `millrace-serving-transport`: gRPC and REST. Open Inference Protocol version 2 for Triton and KServe
//!   clients, Triton's calls for configurations, statistics, the repository, trace settings and the log, system shared
//!   memory, streams, classification, health and reflection, with TLS and bearer tokens; Prometheus metrics and
//!   OpenTelemetry spans;
//! - `millrace-serving-pipe`: the pipe that reads records from one topic and writes predictions to another.
//!
//! What is not here: training (any program may write bundles), Kafka in the inference path (only [`pipe`]
//! knows topics), and model formats other than ONNX (Triton's `config.pbtxt` is read for ONNX models and for
//! ensembles of them).
//!
//! Invariants:
//! - The server serves a version only if its manifest is complete, its digests match and ONNX Runtime agrees
//!   with its signature. Triton's layout has no manifest: there the graph must be stable and agree with its
//!   configuration. A bad version never takes another one down.
//! - The server checks a request against the signature, with checked arithmetic, before ONNX Runtime sees it.
//!   No request can make ONNX Runtime read beyond a buffer.
//! - The server reads and writes shared memory but never maps it. It writes an output there only when the
//!   whole request has succeeded.
//! - The server uses the configured device or refuses the model; only the configuration may allow another
//!   device.
//! - A malformed request never yields INTERNAL or 500, and limits also hold after decompression.
//! - On a server with tokens, a call is authenticated before its message is read, and learns nothing about
//!   models that it may not use.
//! - No request waits for the collector of its spans; a stopping server waits a few seconds at most.
//! - The response cache answers only an equal request to a version with the same content.
//! - Requests are batched only if the graph proves that their rows are independent ([`rows`]), or the
//!   configuration demands it.
//! - The server refuses a graph that would end the process, or answer with uninitialized memory, before it
//!   loads it ([`hazards`]).
//! - A step of an ensemble is an ordinary request to its model. An ensemble is ready while all its models are
//!   ready and fit.
//! - A request never runs if its client has disconnected or its deadline has passed before it could. A run
//!   ends early once all its clients have disconnected. Clients that wait for a model take turns by the rows
//!   that they ask for.
//! - Requests of a sequence run one after another; a failed one leaves the state unchanged.
//! - A stopping server refuses new requests with UNAVAILABLE and finishes the running ones.
//! - A pipe commits its progress after the brokers acknowledged the predictions: every record is predicted or
//!   dead-lettered at least once. After a crash the records of the last uncommitted batch may repeat; a
//!   consumer can drop duplicates by the `source` of a prediction.
//!
//! ```no_run
//! use millrace_serving::{Config, Source, client::Client, serve, tensor::Tensor, wire::Form};
//! use tokio_util::sync::CancellationToken;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let cancel = CancellationToken::new();
//! let source = Source::directory("models".as_ref())?;
//! let serving = serve(&Config::default(), source, cancel.clone()).await?;
//!
//! let mut client = Client::connect(&serving.addresses().grpc.to_string()).await?;
//! let input = Tensor::fp32("input", vec![1, 64], vec![0.0; 64])?;
//! let prediction = client.infer("digits", None, vec![input], Form::Raw).await?;
//! println!("{:?} by version {}", prediction.output("logits"), prediction.version);
//!
//! cancel.cancel();
//! serving.join().await?;
//! # Ok(())
//! # }
//! ```

pub use millrace_serving_client::{client, load};
pub use millrace_serving_core::{config, error, metrics, record, tensor, wire};
pub use millrace_serving_pipe as pipe;
pub use millrace_serving_repository::{infer, repository};
pub use millrace_serving_runtime::{comparison, hazards, rows, runtime};
pub use millrace_serving_transport::logging;

pub use config::{Config, Control, Device, Devices, Limits, ModelOptions, PipeConfig, Telemetry, Tls};
pub use error::{Error, InferError, Result};
pub use infer::Inference;
pub use millrace_serving_runtime::session::{Trial, finish_runs};
pub use millrace_serving_transport::host;
pub use millrace_serving_transport::server::{
    Addresses, Deps, MetricsServer, Serving, metrics_text, serve, serve_with,
};
pub use millrace_serving_transport::tokens::new_token;
pub use repository::{Repository, Source};

#[doc(hidden)]
pub mod fuzzing {
    //! Entry points of the fuzz targets (`fuzz/`). Not part of the interface.
    pub use millrace_serving_core::fuzzing::{infer_request, infer_requests};
    pub use millrace_serving_repository::fuzzing::config_pbtxt;
    pub use millrace_serving_runtime::fuzzing::graph;
    pub use millrace_serving_transport::fuzzing::body;
}
