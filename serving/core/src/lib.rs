//! Types that all parts of the model server share.
//!
//! What is here: tensors and their conversion to messages of the Open Inference Protocol, the `[serving]` table, errors,
//! metrics, statistics, TLS, and records of topics as rows of tensors.
//!
//! What is not here: models, and anything that runs or serves them.

pub mod blocking;
pub mod config;
pub mod elements;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod metrics;
pub mod parameters;
pub mod record;
pub mod reload;
pub mod statistics;
pub mod tensor;
pub mod tls;
pub mod wire;

pub use config::Config;
pub use error::{Error, InferError, Result};
