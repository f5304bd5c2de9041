//! Model serving: bundles, ONNX Runtime sessions, the Open Inference Protocol, and topic-to-topic pipes.
//!
//! What is here:
//! - the repository that loads model bundles from a volume or a directory, and the inference core;
//! - the gRPC and REST transports: Open Inference Protocol version 2 for Triton and KServe clients, Triton's
//!   calls for configurations, statistics, the repository, traces and the log, system shared memory, streams,
//!   classification, health and reflection, with TLS and bearer tokens;
//! - Prometheus metrics and OpenTelemetry spans;
//! - a client, a load generator ([`load`]), and the pipe that reads records from one topic and writes
//!   predictions to another.
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

mod access;
mod blocking;
mod bodies;
mod body_read_limit;
mod classification;
pub mod client;
mod codec;
pub mod comparison;
mod compression;
pub mod config;
mod connections;
mod control;
mod drift;
mod ensemble;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
mod grpc;
pub mod hazards;
pub mod infer;
pub mod load;
pub mod logging;
pub mod metrics;
mod model_config;
mod output_target;
mod parameters;
mod pbtxt;
mod peer;
pub mod pipe;
pub mod record;
mod reflection;
mod reload;
pub mod repository;
mod response_cache;
mod rest;
pub mod rows;
pub mod runtime;
mod sequence;
mod server;
mod session;
mod shadow;
mod shared_memory;
mod statistics;
mod telemetry;
pub mod tensor;
mod tls;
mod tokens;
mod trace;
pub mod wire;

pub use config::{Config, Control, Device, Devices, Limits, ModelOptions, PipeConfig, Telemetry, Tls};
pub use error::{Error, InferError, Result};
pub use infer::Inference;
pub use repository::{Repository, Source};
pub use server::{Addresses, Deps, MetricsServer, Serving, serve, serve_with};
pub use session::{Trial, finish_runs};
pub use tokens::new_token;
