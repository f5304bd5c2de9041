//! Errors of serving the driver. Errors of calls are statuses of gRPC.

use std::io;
use std::path::PathBuf;

/// Why the driver cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A socket cannot be listened at.
    #[error("cannot listen at {}: choose another path or its owner", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The folder with the state of published volumes cannot be used.
    #[error("cannot use the state folder {}: choose another one", path.display())]
    State {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The ready file of an earlier driver cannot be removed.
    #[error("cannot remove the ready file {}: choose another path or its owner", path.display())]
    Ready {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The options contradict each other or are out of their bounds.
    #[error("{0}")]
    Invalid(String),
    /// The connection of the services failed.
    #[error("cannot serve at {}", path.display())]
    Serve {
        /// The socket.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: tonic::transport::Error,
    },
}
