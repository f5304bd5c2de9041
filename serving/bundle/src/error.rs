//! Errors of bundle operations, distinguished by what the caller can do next.

/// Result of bundle operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of making, finding, reading or writing a bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model name breaks the rules for names.
    #[error(
        "{name:?} is not a model name: use 1 to 128 of A-Z a-z 0-9 . _ - and start with neither '.' nor '-'"
    )]
    InvalidName {
        /// The name as given, shortened to 160 characters.
        name: String,
    },
    /// Versions are positive integers.
    #[error("model version {version} is not a positive integer")]
    InvalidVersion {
        /// The version as given.
        version: String,
    },
    /// The model bytes are not an ONNX graph that can be served.
    #[error("not a servable ONNX model: {reason}")]
    InvalidModel {
        /// The fault.
        reason: String,
    },
    /// A value that the manifest cannot represent.
    #[error("the manifest cannot be written: {reason}")]
    InvalidManifest {
        /// The value, and why.
        reason: String,
    },
    /// The model or version does not exist.
    #[error("no model version exists at {path}")]
    NotFound {
        /// Path of the version in the store.
        path: String,
    },
    /// The version has no manifest (yet): it is being written, or its writer died.
    #[error("{path} is incomplete: {reason}")]
    Incomplete {
        /// Path of the version in the store.
        path: String,
        /// The missing part.
        reason: String,
    },
    /// The version exists but its content does not match its manifest.
    #[error("{path} is corrupt: {reason} (publish the model again, or remove this version)")]
    Corrupt {
        /// Path of the file in the store.
        path: String,
        /// The mismatch.
        reason: String,
    },
    /// The manifest was written by a newer program.
    #[error("{path} has bundle format {found}, this program reads up to {supported}: use a newer millrace")]
    NewerFormat {
        /// Path of the manifest in the store.
        path: String,
        /// Format version in the manifest.
        found: u64,
        /// Newest format version that this program reads.
        supported: u64,
    },
    /// A file is larger than the configured limit.
    #[error("{path} has {bytes} bytes, the limit is {bytes_max}")]
    TooLarge {
        /// Path of the file in the store.
        path: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The version already exists; versions are never replaced.
    #[error("{path} already exists and versions are never replaced: publish the next version")]
    Exists {
        /// Path of the version in the store.
        path: String,
    },
    /// The store failed.
    #[error("cannot access {path} in the model store")]
    Store {
        /// Path in the store.
        path: String,
        /// The failure.
        #[source]
        source: object_store::Error,
    },
}

impl Error {
    /// True if the same call may succeed later without a change of the model: the store failed, or the
    /// version is still being written.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::Store { .. } | Error::Incomplete { .. })
    }
}
