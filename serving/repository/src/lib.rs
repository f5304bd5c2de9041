//! Model versions: loading, routing between them, and inference on them.
//!
//! What is here: the repository that loads versions from a volume or a directory ([`repository`]), a loaded version with
//! its response cache, sequences and ensembles ([`model`]), and the inference service that transports share
//! ([`infer`]).
//!
//! What is not here: transports, tokens, shared memory.

pub mod drift;
#[doc(hidden)]
pub mod fuzzing;
pub mod infer;
pub mod model;
pub mod model_config;
pub mod outcome;
pub mod pbtxt;
pub mod repository;
pub mod response_cache;
pub mod sequence;
pub mod shadow;
