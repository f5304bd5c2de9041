//! What can go wrong in a collective operation, with the rank that is to blame.
use std::net::SocketAddr;
use std::time::Duration;

/// A collective operation that did not complete. The ring is finished after any of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank closed its connection or could not be reached: it is dead or has left.
    #[error("rank {rank} ({address}) of membership epoch {epoch} is gone at step {step}: {reason}")]
    PeerLost {
        /// The missing rank.
        rank: usize,
        /// Where it listened.
        address: SocketAddr,
        /// The membership epoch.
        epoch: u64,
        /// The step, 0 while the ring formed.
        step: u64,
        /// How it showed.
        reason: String,
    },
    /// A rank did not take part in time.
    #[error(
        "rank {rank} ({address}) of membership epoch {epoch} did not answer at step {step} within {waited:?}"
    )]
    Timeout {
        /// The missing rank.
        rank: usize,
        /// Where it listens.
        address: SocketAddr,
        /// The membership epoch.
        epoch: u64,
        /// The step, 0 while the ring formed.
        step: u64,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A rank sent something that does not belong here.
    #[error(
        "rank {rank} ({address}) of membership epoch {epoch} broke the protocol at step {step}: {reason}"
    )]
    Protocol {
        /// The offending rank.
        rank: usize,
        /// Where it listens.
        address: SocketAddr,
        /// The membership epoch.
        epoch: u64,
        /// The step.
        step: u64,
        /// What it sent.
        reason: String,
    },
    /// The membership epoch is over; somebody else found out first.
    #[error("membership epoch {epoch} is over")]
    Aborted {
        /// The epoch.
        epoch: u64,
    },
    /// A state is larger than the receiver allows.
    #[error("state of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The call itself makes no sense.
    #[error("{reason}")]
    Invalid {
        /// Why.
        reason: String,
    },
    /// The operating system refused something.
    #[error("{what}")]
    Io {
        /// What.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// The rank that is to blame, when it is known.
    pub fn suspect(&self) -> Option<usize> {
        match self {
            Error::PeerLost { rank, .. } | Error::Timeout { rank, .. } | Error::Protocol { rank, .. } => {
                Some(*rank)
            }
            _ => None,
        }
    }

    /// Whether a new ring can do better.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Error::PeerLost { .. } | Error::Timeout { .. } | Error::Protocol { .. } | Error::Aborted { .. }
        )
    }
}
