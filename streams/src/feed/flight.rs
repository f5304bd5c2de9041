//! The feed as an Arrow Flight service: any Flight client reads the globally shuffled batches of a snapshot.
//!
//! - [`FlightFeeds`]: the service, for a gRPC server that authenticates callers and counts connections.
//! - [`Exposure`]: the datasets that clients may read. [`Permission`]: the volumes that one caller may read.
//! - [`Limits`]: bounds of streams and memory.
//!
//! A request is JSON with the parameters of `millrace.Feed`. `GetFlightInfo` answers with
//! an endpoint for each rank. Its ticket is the request again, with the snapshot by name, the rank, and the id of the
//! plan. The server keeps nothing about a ticket, so every server of the same volumes answers it. Each batch carries the
//! state after it. A client whose server has died puts the last state into its ticket and asks another server.
//!
//! Invariants:
//! - A batch of a stream is the rank's share of one global batch, in one message with the state to go on from.
//! - A stream that ended without an error has delivered all of its batches.
//! - No request reads a file outside of the exposed folders, and none reads a live volume.
//! - Memory for decoded row groups and batches is reserved before it is used, and given back when the stream ends or
//!   its client leaves.

mod exposure;
mod memory;
pub mod metrics;
mod open;
mod permission;
mod request;
mod sending;
mod service;
mod status;
#[cfg(test)]
mod tests;

pub use exposure::Exposure;
pub use permission::{Callers, Permission};
pub use service::{FlightFeeds, Limits, SAME_CONNECTION};
