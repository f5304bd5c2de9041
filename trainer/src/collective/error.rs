//! Errors of a collective operation, with the rank that caused them.
use std::time::Duration;

/// A collective operation that did not complete. The ring is unusable after any of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank closed its connection or could not be reached: it is dead or has left.
    #[error(
        "rank {rank} ({address}) of membership epoch {epoch} was lost at step {step}, during {during}: {reason}"
    )]
    PeerLost {
        /// The missing rank.
        rank: usize,
        /// Its listening address.
        address: String,
        /// The membership epoch.
        epoch: u64,
        /// The step, 0 while the ring formed.
        step: u64,
        /// The operation.
        during: &'static str,
        /// The symptom.
        reason: String,
    },
    /// A rank did not answer before the deadline.
    #[error(
        "rank {rank} ({address}) of membership epoch {epoch} did not answer at step {step} within {waited:?}, during {during}"
    )]
    Timeout {
        /// The missing rank.
        rank: usize,
        /// Its listening address.
        address: String,
        /// The membership epoch.
        epoch: u64,
        /// The step, 0 while the ring formed.
        step: u64,
        /// The operation.
        during: &'static str,
        /// How long this rank waited for it.
        waited: Duration,
    },
    /// A rank sent a frame that violates the protocol.
    #[error(
        "rank {rank} ({address}) of membership epoch {epoch} broke the protocol at step {step}: {reason}"
    )]
    Protocol {
        /// The offending rank.
        rank: usize,
        /// Its listening address.
        address: String,
        /// The membership epoch.
        epoch: u64,
        /// The step.
        step: u64,
        /// The violation.
        reason: String,
    },
    /// NCCL failed, or did not answer in time. It does not tell which rank is missing.
    #[error("NCCL did not {what} in membership epoch {epoch}: {reason}")]
    Nccl {
        /// The membership epoch.
        epoch: u64,
        /// The operation, for a sum with its step and bucket.
        what: String,
        /// NCCL's error, or how long this rank waited.
        reason: String,
    },
    /// The membership epoch is over: it was cancelled, or the ring failed earlier.
    #[error("membership epoch {epoch} is over")]
    Aborted {
        /// The membership epoch.
        epoch: u64,
    },
    /// A state exceeds the receiver's limit.
    #[error("state of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its size in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The arguments of the call are invalid.
    #[error("{reason}")]
    Invalid {
        /// The invalid argument.
        reason: String,
    },
    /// An operating system call failed.
    #[error("{what}")]
    Io {
        /// The operation.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// The rank that caused the error, if it is known.
    pub fn suspect(&self) -> Option<usize> {
        match self {
            Error::PeerLost { rank, .. } | Error::Timeout { rank, .. } | Error::Protocol { rank, .. } => {
                Some(*rank)
            }
            _ => None,
        }
    }

    /// Whether forming a new ring can succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Error::PeerLost { .. }
                | Error::Timeout { .. }
                | Error::Protocol { .. }
                | Error::Nccl { .. }
                | Error::Aborted { .. }
        )
    }
}
