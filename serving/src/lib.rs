//! Model serving: bundles, ONNX Runtime sessions, Open Inference Protocol, topic to topic.
//!
//! What is here: the repository that loads model bundles from a volume or a directory, the inference
//! core, its faces (gRPC and REST, Open Inference Protocol version 2, as Triton and KServe clients speak
//! it, with Triton's calls for configurations, statistics, the repository, traces and the log, with
//! system shared memory, streams and classification; health; reflection; Prometheus metrics; spans for
//! OpenTelemetry), with TLS and bearer tokens, a client, a generator of load ([`load`]), and the pipe that
//! reads records from one topic and writes predictions to another.
//!
//! What is not here: training (a bundle comes from anywhere), Kafka in the inference path (only
//! [`pipe`] knows topics), and any format of models but ONNX (Triton's
//! `config.pbtxt` is read for those, and for ensembles of them).
//!
//! Invariants:
//! - a version is served only when its manifest is complete, its digests match and ONNX Runtime agrees
//!   with its signature; in Triton's layout, which has no manifest, when its graph stays as it is and agrees
//!   with its configuration; a bad version never takes another one down;
//! - a request is checked against the signature before ONNX Runtime sees it, with checked arithmetic, so
//!   no request can make it read beyond a buffer;
//! - shared memory is read and written, never mapped, and an output goes there only when the whole request
//!   has succeeded;
//! - a device that was asked for is used or refused, never replaced unless the configuration allows it;
//! - a request of a wrong form is never answered as INTERNAL or 500, and limits hold after decompression;
//! - where the server has tokens, a call is known by its own before anything of it is read, and learns
//!   nothing of models that it may not use;
//! - no request waits for the collector of its spans, and neither does a server that stops, but for seconds;
//! - an answer is given again only to a request that asks the same of a version with the same content;
//! - requests run together only where the graph proves that their rows are independent ([`rows`]), or where the
//!   configuration asks for it;
//! - a graph that would end the process, or answer with uninitialized memory, is refused before it is loaded
//!   ([`hazards`]);
//! - a step of an ensemble is a request to its model like any other, and an ensemble is ready while all its models
//!   are and fit;
//! - a request whose caller has gone, or whose deadline has passed, before it could run is never run, a
//!   run ends early when all its callers have gone, and clients that wait for a model take turns by the rows that they
//!   ask for;
//! - requests of a sequence run one after the other, and one that failed has left its state as it was;
//! - a server that was told to stop refuses new requests as UNAVAILABLE and finishes the running ones;
//! - a pipe commits its progress after the predictions were acknowledged: every record is predicted or
//!   dead-lettered at least once. After a crash the records of the last uncommitted batch come again, so
//!   a consumer that minds drops doubles by the `source` of a prediction.
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
mod classification;
pub mod client;
mod codec;
pub mod comparison;
mod compression;
pub mod config;
mod connections;
mod control;
mod delivery;
mod drift;
mod ensemble;
pub mod error;
mod grpc;
pub mod hazards;
pub mod infer;
pub mod load;
pub mod logging;
pub mod metrics;
mod model_config;
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
mod turns;
pub mod wire;

pub use config::{Config, Control, Device, Devices, Limits, ModelOptions, PipeConfig, Telemetry, Tls};
pub use error::{Error, InferError, Result};
pub use infer::Inference;
pub use repository::{Repository, Source};
pub use server::{Addresses, Deps, MetricsServer, Serving, serve, serve_with};
pub use session::{Trial, finish_runs};
pub use tokens::new_token;
