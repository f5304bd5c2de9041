//! Client and load generator of the Open Inference Protocol.
//!
//! What is here: a gRPC client with TLS and tokens ([`client`]), and the load generator of `millrace bench load`
//! ([`load`]).

pub mod client;
pub mod load;
