//! Elastic membership: the coordinator that keeps a job's workers together, and the worker's session with it.
//!
//! * [`membership`] decides (a pure state machine), [`coordinator`] acts on the decisions (processes,
//!   streams), [`session`] is the worker's end of its stream.
//! * [`listener`] bounds connections from other machines, [`joining`] is a worker's way to join from one.
//! * Membership epochs are numbered; the ring of an epoch never carries data of another one.

pub(crate) mod coordinator;
pub(crate) mod joining;
pub(crate) mod listener;
pub(crate) mod membership;
pub(crate) mod session;

#[cfg(test)]
mod tests;

/// The coordinator's protocol, generated from `proto/coordinator.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub(crate) mod proto {
    tonic::include_proto!("millrace.trainer.v1");
}
