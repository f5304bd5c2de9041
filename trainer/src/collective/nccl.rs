//! NVIDIA's NCCL as what sums gradients between GPUs, for `strategy.collective = "nccl"`.
//!
//! A communicator lives for one membership epoch, beside the ring. The ring carries its id (`rendezvous`), and all
//! other sums. A watchdog polls each call, and the communicator is aborted when NCCL does not answer (`watchdog`).
//!
//! Without the feature `cuda`, [`check`] and [`connect`] refuse.

#[cfg(feature = "cuda")]
mod communicator;
#[cfg(any(feature = "cuda", test))]
mod rendezvous;
#[cfg(test)]
mod tests;
#[cfg(any(feature = "cuda", test))]
mod watchdog;

use tokio_util::sync::CancellationToken;

use super::gradients::GradientLinks;
use super::{Error, Options, Ring};

#[cfg(not(feature = "cuda"))]
const NO_CUDA: &str = "this build has no CUDA; build with --features cuda";

/// Checks that NCCL can be used in this process.
///
/// # Errors
/// [`Error::Invalid`]: the key, its value and the remedy.
#[cfg(feature = "cuda")]
pub(crate) fn check() -> Result<(), Error> {
    communicator::check()
}

/// Refuses: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub(crate) fn check() -> Result<(), Error> {
    Err(refused(NO_CUDA))
}

/// Connects the GPU `ordinal` of this rank with those of the other ranks of `ring`. All ranks call it.
///
/// Waits `form_timeout` for the others, and later `exchange_timeout` for each sum; ends early when `abort` is cancelled.
///
/// # Errors
/// [`Error::Invalid`] for what another attempt does not change; an error of the ring; [`Error::Nccl`].
#[cfg(feature = "cuda")]
pub(crate) fn connect(
    ring: &mut Ring<'_>,
    ordinal: usize,
    options: &Options,
    abort: &CancellationToken,
) -> Result<Box<dyn GradientLinks>, Error> {
    Ok(Box::new(communicator::Communicator::connect(ring, ordinal, options, abort)?))
}

/// Refuses: this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub(crate) fn connect(
    _ring: &mut Ring<'_>,
    _ordinal: usize,
    _options: &Options,
    _abort: &CancellationToken,
) -> Result<Box<dyn GradientLinks>, Error> {
    Err(refused(NO_CUDA))
}

/// The refusal of the key, for `reason`.
fn refused(reason: &str) -> Error {
    Error::Invalid {
        reason: format!("strategy.collective = \"nccl\": {reason}, or set collective = \"tcp\""),
    }
}
