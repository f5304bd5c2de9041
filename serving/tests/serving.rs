//! End-to-end tests of the server over real sockets: all calls, streams, shared memory, malformed requests,
//! bad bundles, missing libraries, draining, control calls, statistics, and topic-to-topic inference.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

#[path = "serving/access.rs"]
mod access;
#[path = "serving/batching.rs"]
mod batching;
#[path = "serving/classification.rs"]
mod classification;
#[path = "serving/compressed.rs"]
mod compressed;
#[path = "serving/connections.rs"]
mod connections;
#[path = "serving/control.rs"]
mod control;
#[path = "serving/devices.rs"]
mod devices;
#[path = "serving/drift.rs"]
mod drift;
#[path = "serving/ensemble.rs"]
mod ensemble;
#[path = "serving/ensemble_members.rs"]
mod ensemble_members;
#[path = "serving/ensemble_refused.rs"]
mod ensemble_refused;
#[path = "serving/ensemble_tensors.rs"]
mod ensemble_tensors;
#[path = "serving/entries.rs"]
mod entries;
#[path = "serving/fuzz.rs"]
mod fuzz;
#[path = "serving/hazards.rs"]
mod hazards;
#[path = "serving/independence.rs"]
mod independence;
#[path = "serving/lifecycle.rs"]
mod lifecycle;
#[path = "serving/load.rs"]
mod load;
#[path = "serving/logging.rs"]
mod logging;
#[path = "serving/malformed.rs"]
mod malformed;
#[path = "serving/malformed_both.rs"]
mod malformed_both;
#[path = "serving/malformed_grpc.rs"]
mod malformed_grpc;
#[path = "serving/malformed_rest.rs"]
mod malformed_rest;
#[path = "serving/page.rs"]
mod page;
#[path = "serving/pages.rs"]
mod pages;
#[path = "serving/pipe.rs"]
mod pipe;
#[path = "serving/pipe_lives.rs"]
mod pipe_lives;
#[path = "serving/protocol.rs"]
mod protocol;
#[path = "serving/quotas.rs"]
mod quotas;
#[path = "serving/reflection.rs"]
mod reflection;
#[path = "serving/response_cache.rs"]
mod response_cache;
#[path = "serving/response_cache_off.rs"]
mod response_cache_off;
#[path = "serving/rollout.rs"]
mod rollout;
#[path = "serving/scheduling.rs"]
mod scheduling;
#[path = "serving/sequences.rs"]
mod sequences;
#[path = "serving/sequences_refused.rs"]
mod sequences_refused;
#[path = "serving/sequences_waiting.rs"]
mod sequences_waiting;
#[path = "serving/shadow.rs"]
mod shadow;
#[path = "serving/shared_memory.rs"]
mod shared_memory;
#[path = "serving/shared_memory_refused.rs"]
mod shared_memory_refused;
#[path = "serving/statistics.rs"]
mod statistics;
#[path = "serving/stream.rs"]
mod stream;
#[path = "serving/support.rs"]
mod support;
#[path = "serving/telemetry.rs"]
mod telemetry;
#[path = "serving/tls.rs"]
mod tls;
#[path = "serving/tokens.rs"]
mod tokens;
#[path = "serving/trace.rs"]
mod trace;
#[path = "serving/triton_layout.rs"]
mod triton_layout;
#[path = "serving/values.rs"]
mod values;
#[path = "serving/weights.rs"]
mod weights;
