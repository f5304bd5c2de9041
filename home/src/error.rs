//! Errors of a home and its configuration: one variant for each exit code.

use std::io;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a home or of its configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Wrong flags or configuration: correct what the message names.
    #[error("{0}")]
    Usage(String),
    /// A file that was named does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Another process holds the home, or a newer program wrote it.
    #[error("{0}")]
    Conflict(String),
    /// The home cannot be read or written by this user.
    #[error("{0}")]
    Unavailable(String),
    /// A file of the home has another format.
    #[error("{0}")]
    Corrupt(String),
    /// The volumes cannot be opened.
    #[error(transparent)]
    Volumes(#[from] millrace_datafs::Error),
    /// The operating system refused a call.
    #[error("{what}")]
    Io {
        /// The attempted operation and its object.
        what: String,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Error {
        Error::Io { what: what.into(), source }
    }
}
