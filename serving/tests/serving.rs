//! The server as its users meet it: every call over real sockets, malformed requests, bad bundles,
//! missing libraries, draining, and topic-to-topic inference.
#![allow(clippy::unwrap_used)]

#[path = "serving/lifecycle.rs"]
mod lifecycle;
#[path = "serving/malformed.rs"]
mod malformed;
#[path = "serving/measure.rs"]
mod measure;
#[path = "serving/pipe.rs"]
mod pipe;
#[path = "serving/protocol.rs"]
mod protocol;
#[path = "serving/support.rs"]
mod support;
