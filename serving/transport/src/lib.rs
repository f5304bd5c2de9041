//! gRPC and REST transports of the model server.
//!
//! It has the server ([`server`]), a host for gRPC services of other crates ([`host`]), and both transports. It also has
//! connections and their limits, tokens, the access log, shared memory of clients, spans, and the scrape of metrics.
//!
//! What is not here: the answers themselves, which `millrace-serving-repository` computes.

mod access;
mod bodies;
mod body_read_limit;
mod classification;
mod compression;
mod connections;
mod control;
mod grpc;
pub mod host;
pub mod logging;
mod output_target;
mod reflection;
mod rest;
mod scrape;
pub mod server;
mod shared_memory;
mod telemetry;
pub mod tokens;
mod trace;

#[doc(hidden)]
pub use rest::fuzzing;
