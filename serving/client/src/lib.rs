//! Client and load generator of the Open Inference Protocol.
//!
//! What is here: a gRPC client with TLS and tokens ([`client`]), and the load generator of `millrace serve bench`
//! ([`load`]).

pub mod client;
pub mod load;
