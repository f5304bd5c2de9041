//! ONNX Runtime for the model server.
//!
//! What is here: the library itself, the proof that the rows of a graph are independent ([`rows`]), the graphs that are
//! refused ([`hazards`]), sessions, and the queue, admission, batching and scheduling of their runs ([`session`]).
//!
//! What is not here: the store that graphs come from, versions, and clients.

pub mod comparison;
#[doc(hidden)]
pub mod fuzzing;
pub mod hazards;
pub mod rows;
pub mod runtime;
pub mod session;
